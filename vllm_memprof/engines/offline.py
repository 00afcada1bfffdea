"""Drivers of every engine: their arguments, their modes, and the loop that runs requests.

The lines that it prints are read by ``launch.requests``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_memprof.engines.vllm.prompts import PromptError, Request
from vllm_memprof.engines.vllm.rank_choice import RankError

#: Runs a mode with memprof's own options and the engine's arguments; returns the exit status.
Mode = Callable[[argparse.Namespace, "list[str]"], int]
#: Runs some requests together; returns the prompt's and the output's tokens of each.
Generate = Callable[[Sequence[Request]], "list[tuple[int, int]]"]


def driver_parser(
    module: str, arguments: str, **modes: str
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of a driver, and those of its modes by name, each with ``--model``.

    Args:
        module: of the driver.
        arguments: whose the arguments after ``--`` are.
        modes: name -> help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=f"Run the engine without a server. Arguments after -- are {arguments}.",
        allow_abbrev=False,
    )
    named = parser.add_subparsers(dest="mode", required=True)
    made = {name: named.add_parser(name, help=modes[name], allow_abbrev=False) for name in modes}
    for mode in made.values():
        mode.add_argument("--model", required=True, help="model folder or hub name")
    return parser, made


def run_driver(
    parser: argparse.ArgumentParser, modes: Mapping[str, Mode], argv: Sequence[str] | None
) -> int:
    """Run the mode of a command line; returns the exit status.

    Args:
        parser: of memprof's own options, which stand before ``--``.
        modes: by name.
        argv: None: of this process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    try:
        return modes[options.mode](options, given[cut + 1 :])
    except (PromptError, RankError) as error:  # a wrong argument of the driver itself
        print(f"memprof {options.mode}: error: {error}", file=sys.stderr)
        return 2


def add_prompts(offline: argparse.ArgumentParser) -> None:
    """Add the prompts of a command line, how often they run, and what is done with a bad one."""
    offline.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    offline.add_argument("--repeat", type=int, default=1, help="run all requests so often")
    offline.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a request that cannot be read or that the engine refuses",
    )


def add_arguments(offline: argparse.ArgumentParser) -> None:
    """Add the arguments of an offline run: memprof's own, not the engine's."""
    add_prompts(offline)
    offline.add_argument(
        "--prompts", type=Path, help="JSON lines: {prompt}, {messages} or {text, image}"
    )
    offline.add_argument("--images", type=Path, help="folder of images")
    offline.add_argument(
        "--max-tokens", type=int, default=16, help="output tokens per request (default 16)"
    )
    offline.add_argument(
        "--at-once", action="store_true", help="hand all requests to the engine in one batch"
    )
    offline.add_argument(
        "--concurrency", type=int, default=1, help="requests handed to the engine together"
    )


def run_all(
    generate: Generate, requests: Sequence[Request], options: argparse.Namespace, skip: bool
) -> None:
    """Run the requests, some together, and say of each how it went."""
    together = len(requests) if options.at_once else options.concurrency
    total = len(requests) * options.repeat
    number, began = 0, time.perf_counter()
    print(f"requests to run: {total}", flush=True)
    for _ in range(options.repeat):
        for first in range(0, len(requests), together):
            batch = requests[first : first + together]
            started = time.perf_counter()
            try:
                outputs = generate(batch)
            except (ValueError, PromptError) as error:  # a prompt that is too long, an image gone
                if not skip:
                    raise
                names = ", ".join(request.name for request in batch)
                number += len(batch)
                print(f"request {number}/{total}: skipped ({names}): {error}", flush=True)
                continue
            now = time.perf_counter()
            for prompt_tokens, output_tokens in outputs:
                number += 1
                left = (now - began) / number * (total - number)
                print(
                    f"request {number}/{total}: "
                    f"{prompt_tokens} prompt tokens, "
                    f"{output_tokens} output tokens, {now - started:.2f} s, "
                    f"{left:.0f} s left",
                    flush=True,
                )
