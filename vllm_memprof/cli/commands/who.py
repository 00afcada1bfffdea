"""``memprof who``: who holds a card, and a wait until enough of it is free."""

from __future__ import annotations

import os
import re

import typer

from vllm_memprof.cli.options import WRITTEN, command_app
from vllm_memprof.cli.show import say, write_result
from vllm_memprof.errors import UsageError
from vllm_memprof.holders.document import waiting_lines, who_document
from vllm_memprof.holders.look import Source, look, simulated_source, wait_until_free
from vllm_memprof.holders.rows import Who
from vllm_memprof.launch.request import parse_device
from vllm_memprof.report.language import language
from vllm_memprof.units import parse_size

#: Exit status when --timeout passed before the memory was free, as of timeout(1).
TIMED_OUT = 124
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def who(
    ctx: typer.Context,
    device: str = "npu",
    only: str | None = None,
    wait: str | None = None,
    timeout: str | None = None,
    as_json: bool = False,
    stack: str | None = None,
    **written: object,
) -> None:
    """Show which processes hold the memory of each device, and what is left behind.

    The driver (DCMI) lists the processes and their bytes; /proc and memprof's run folders below
    reports/ say what they are. In a container the driver lists process numbers of the host. An
    engine's process whose launcher has ended is named as left behind. No process is ended, no
    device opened.

    With --wait, stderr says what the command waits for.

    Exit status 0: shown, or the memory is free. 1: the driver's list cannot be read. 2: a wrong
    argument, or more than a device has. 124: --timeout passed before. 130: Ctrl-C.
    """
    if as_json:
        ctx.params["format_name"] = "json"
    numbers = parse_numbers(only)
    if wait is None and timeout is not None:
        raise UsageError("--timeout means nothing without --wait", hint="--wait FREE=50GiB")
    wanted = None if wait is None else parse_wait(wait)
    limit_s = parse_seconds(timeout or "15m")
    source = source_of(device, stack)

    def looked() -> Who:
        return look(source, numbers)

    said: list[str] = []

    def tell(who: Who) -> None:
        """Print what is waited for when it differs from what was printed last."""
        lines = [*map(language(ctx.params["lang"]), waiting_lines(who, wanted or 0))]
        for line in lines:
            if line not in said:
                say(line)
        said[:] = lines

    found = looked() if wanted is None else wait_until_free(looked, wanted, limit_s, tell)
    write_result(ctx, found, who_document)
    if found.wait is not None and not found.wait.met:
        raise typer.Exit(TIMED_OUT)


def source_of(device: str, stack: str | None) -> Source:
    """Return where the list of the devices is read.

    Raises:
        UsageError: not a kind of device whose driver lists processes, or a stack without one.
        SetupError: the simulated device is not set up.
    """
    choice = parse_device(device)
    if choice.kind == "sim":
        assert choice.profile is not None
        return simulated_source(choice.profile, stack, os.environ)
    if stack is not None:
        hint = "add --device sim:910b, or leave --stack out"
        raise UsageError("--stack names a simulated stack", hint=hint)
    if choice.kind != "npu":
        hint = "npu, sim or sim:PROFILE"
        raise UsageError(f"the processes of --device {choice.kind} are not read", hint=hint)
    return Source("npu", os.environ)


def parse_wait(text: str) -> int:
    """Return the bytes of ``FREE=50GiB``.

    Raises:
        UsageError: anything else.
    """
    name, equals, size = text.partition("=")
    try:
        if name.strip().upper() != "FREE" or not equals:
            raise ValueError(f"not FREE=SIZE: {text!r}")
        return parse_size(size)
    except ValueError as error:
        raise UsageError(f"--wait: {error}", hint="--wait FREE=50GiB") from None


def parse_seconds(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m`` or ``2h``.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None:
        raise UsageError(f"--timeout {text!r} is no time", hint="90s, 15m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def parse_numbers(text: str | None) -> list[int]:
    """Return the numbers of ``0,2``; none of None.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--only {text!r} is no list of numbers", hint="--only 0,1")
    return sorted(set(map(int, parts)))


app = command_app(who, WRITTEN)
