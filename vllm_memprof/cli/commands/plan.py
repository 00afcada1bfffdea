"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

from typing import Any

import typer

from vllm_memprof.cli import plans
from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.show import Lang, command_app
from vllm_memprof.errors import UsageError

#: What was an option -> the command that it is now.
_COMMANDS = {
    "--fit": "memprof fit MODEL --find OPTION",
    "--share": "memprof share MODEL_A [arguments] -- MODEL_B [arguments]",
    "--calibrate": "memprof calibrate MODEL --run RUN_OR_LOG",
}


class PlanCommand(EngineCommand):
    """Options that became commands are refused by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name, command in _COMMANDS.items():
            if name in [token.partition("=")[0] for token in args]:
                raise UsageError(f"plan {name} is a command of its own", hint=command)
        return super().parse_args(ctx, args)


def plan(
    ctx: typer.Context,
    model: shared.Model,
    engine: shared.Engine = "vllm",
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    lang: Lang = "en",
    quiet: shared.Quiet = False,
    keep_secrets: shared.KeepSecrets = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
    ranks: plans.Ranks = "auto",
    rank: plans.Rank = None,
    until: plans.Until = "kv",
    share_device: shared.ShareDevice = False,
) -> None:
    """Size the KV cache, show the budget, stop.

    Starts the engine up to the point where the KV cache is sized, and no further. With --until
    ready it goes on: KV cache, warm-up, graph capture, the largest batch of images where the model
    takes some, a prefill of max-num-batched-tokens and a decode of max-num-seqs requests at full
    length. What is in use beside the KV cache while it serves is then seen.
    """
    sample = "1" if until == "ready" else None
    request = shared.request("plan", ctx, sample=sample)
    raise typer.Exit(shared.run(request, format_name, lang))


app = command_app(plan, cls=PlanCommand, epilog=shared.EPILOG)
