"""``memprof plan``: the engine up to its KV plan, and no further."""

from __future__ import annotations

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.options import RANKS, RUN, command_app


def plan(ctx: typer.Context, **options: object) -> None:
    """Size the KV cache, show the budget, stop.

    With --until ready it goes on: KV cache, warm-up, graph capture, the largest batch of images if
    the model takes some, a prefill of max-num-batched-tokens and a decode of max-num-seqs requests
    at full length.
    """
    sample = "1" if ctx.params["until"] == "ready" else None
    shared.run(ctx, shared.request("plan", ctx, sample=sample))


app = command_app(plan, {**RUN, **RANKS})
