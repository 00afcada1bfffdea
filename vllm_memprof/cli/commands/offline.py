"""``memprof offline``: the engine without a server, for a few prompts."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.options import EPILOG, RUN, Options, command_app

#: Its own, by the names of a ``LaunchRequest``.
_OPTIONS: Options = {
    "prompts_file": (Path | None, None),
    "prompts": (list[str], []),
    "images_dir": (Path | None, None),
    "at_once": (bool, False),
    "repeat": (int, 1),
    "concurrency": (int | None, None),
    "on_error": (str, "stop"),
    "max_tokens": (int | None, None),
    "sleep_cycles": (int, 0),
    "empty_cache_at": (str | None, None),
    "sample": (str, "1"),
    "trace_allocations": (int | None, None),
}


def offline(ctx: typer.Context, **options: object) -> None:
    """Run prompts without a server, then report."""
    typed = ctx.params["empty_cache_at"]
    phases = [] if typed is None else [phase.strip() for phase in typed.split(",")]
    shared.run(ctx, shared.request("offline", ctx, empty_cache_at=phases))


app = command_app(offline, {**_OPTIONS, **RUN}, cls=EngineCommand, epilog=EPILOG)
