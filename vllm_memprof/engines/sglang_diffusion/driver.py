"""SGLang's diffusion runtime without a server: an image or a video per prompt.

``python -m vllm_memprof.engines.sglang_diffusion.driver offline ...`` runs under the engine's
interpreter. The engine's arguments are those of ``sglang generate`` and go through its own parser.
Workers are processes that SGLang spawns: this module is imported in each of them and does nothing
there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the prompts; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    return run_offline(options, given[cut + 1 :])


def run_offline(options: argparse.Namespace, engine_args: list[str]) -> int:
    """Generate for each prompt, one after the other, and end the engine.

    Returns:
        1 where the runtime made nothing of a prompt, which it says in its log alone.
    """
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

    apply_plugin_hooks()  # before the runtime is imported, as ``sglang generate`` does
    from sglang.multimodal_gen import DiffGenerator
    from sglang.multimodal_gen.runtime.entrypoints.cli import generate
    from sglang.multimodal_gen.runtime.server_args import ServerArgs
    from sglang.multimodal_gen.runtime.utils.argparse import FlexibleArgumentParser

    # what the user has given is told from a default by the command line itself
    sys.argv = ["sglang generate", "--model-path", options.model, *engine_args]
    parser = generate.add_multimodal_gen_generate_args(FlexibleArgumentParser())
    args, unknown = parser.parse_known_args()
    args.request_id = None
    server_args = ServerArgs.from_cli_args(args, unknown)
    sampling = generate._resolve_cli_sampling_params_cls(server_args).get_cli_args(args)
    prompts = options.prompt or ["Hello"]
    generator = DiffGenerator.from_pretrained(server_args=server_args)
    try:
        return _generate(generator, sampling, prompts, options.repeat, options.on_error == "skip")
    finally:
        generator.shutdown()


def _generate(
    generator: Any, sampling: dict[str, Any], prompts: list[str], repeat: int, skip: bool
) -> int:
    """Generate, and say of each how it went, in lines that ``launch.requests`` reads."""
    total, failed, began = len(prompts) * repeat, 0, time.perf_counter()
    print(f"requests to run: {total}", flush=True)
    for number, prompt in enumerate(prompts * repeat, 1):
        started = time.perf_counter()
        made = generator.generate(sampling_params_kwargs={**sampling, "prompt": prompt})
        failed += made is None
        now = time.perf_counter()
        left = (now - began) / number * (total - number)
        said = "made nothing" if made is None else "made"
        print(
            f"request {number}/{total}: {said}, {now - started:.2f} s, {left:.0f} s left",
            flush=True,
        )
        if made is None and not skip:
            break
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_memprof.engines.sglang_diffusion.driver",
        description="Run the engine without a server. Arguments after -- are those of sglang "
        "generate.",
        allow_abbrev=False,
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    offline = modes.add_parser("offline", help="generate for some prompts", allow_abbrev=False)
    offline.add_argument("--model", required=True, help="model folder or hub name")
    offline.add_argument("--prompt", action="append", default=[], help="may be repeated")
    offline.add_argument("--repeat", type=int, default=1, help="run all prompts so often")
    offline.add_argument("--on-error", choices=("stop", "skip"), default="stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
