"""``memprof offline``: the engine without a server, for a few prompts."""

from __future__ import annotations

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.options import RUN, Options, command_app, of_request

_OPTIONS: Options = {
    **of_request("prompts_file", "prompts", "images_dir", "at_once", "repeat", "concurrency"),
    **of_request("on_error", "max_tokens", "sleep_cycles", "trace_allocations"),
    "empty_cache_at": (str | None, None),
    "sample": (str, "1"),
}


def offline(ctx: typer.Context, **options: object) -> None:
    """Run prompts without a server, then report."""
    typed = ctx.params["empty_cache_at"]
    phases = [] if typed is None else [phase.strip() for phase in typed.split(",")]
    shared.run(ctx, shared.request("offline", ctx, empty_cache_at=phases))


app = command_app(offline, {**_OPTIONS, **RUN})
