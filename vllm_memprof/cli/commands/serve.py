"""``memprof serve``: wraps the server."""

from __future__ import annotations

import sys

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import ENGINE_ARGS, EngineCommand
from vllm_memprof.cli.show import Lang

app = typer.Typer(**shared.APP_SETTINGS)


@app.command(cls=EngineCommand, epilog=shared.EPILOG)
def serve(
    ctx: typer.Context,
    model: shared.Model,
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    lang: Lang = "en",
    quiet: shared.Quiet = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
) -> None:
    """Run `vllm serve` and show where memory goes.

    Same arguments, same port, same exit status.

    The report is printed when the server is ready, and written again when it ends. The engine's output and memprof's
    messages go to stderr, the report to stdout.
    """
    from vllm_memprof.launch.request import LaunchRequest, parse_device

    request = LaunchRequest(
        mode="serve",
        model=model,
        engine_args=ctx.meta[ENGINE_ARGS],
        device=parse_device(device),
        run_dir=run_dir,
        startup_timeout_s=startup_timeout,
        python=python,
        stack=stack,
        quiet=quiet,
        typed=["memprof", *sys.argv[1:]],
    )
    raise typer.Exit(shared.run(request, format_name, lang))
