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

from vllm_memprof.engines.offline import add_prompts, driver_parser, run_driver


def main(argv: Sequence[str] | None = None) -> int:
    """Run the prompts; returns the exit status."""
    parser, modes = driver_parser(
        "vllm_memprof.engines.sglang_diffusion.driver", "those of sglang generate",
        offline="generate for some prompts",
    )  # fmt: skip
    add_prompts(modes["offline"])
    return run_driver(parser, {"offline": run_offline}, argv)


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


if __name__ == "__main__":
    sys.exit(main())
