"""SGLang's diffusion runtime without a server, an image or a video per prompt; see engines.driver.

The engine's arguments are those of ``sglang generate`` and go through its own parser. Workers are
processes that SGLang spawns: this module is imported in each of them and does nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vllm_memprof.engines.driver import Options, run_driver
from vllm_memprof.engines.prompts import Request, load_requests, run_all


def main(argv: Sequence[str] | None = None) -> int:
    """Run the prompts; returns the exit status."""
    return run_driver({"offline": run_offline}, argv)


def run_offline(options: Options, engine_args: list[str]) -> int:
    """Generate for each prompt, one after the other, and end the engine."""
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
    generator = DiffGenerator.from_pretrained(server_args=server_args)

    def make(batch: Sequence[Request]) -> list[str]:
        [request] = batch
        given = {**sampling, "prompt": request.content["prompt"]}
        if generator.generate(sampling_params_kwargs=given) is None:
            raise ValueError("the runtime made nothing of it, and says why in its log")
        return ["made"]

    try:
        run_all(make, load_requests(options), options)
    finally:
        generator.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
