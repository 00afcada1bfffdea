"""``memprof serve``: wraps the server."""

from __future__ import annotations

import typer

from vllm_memprof.cli import live
from vllm_memprof.cli import run as shared
from vllm_memprof.cli.options import RUN, Options, command_app, of_request

_OPTIONS: Options = {
    **of_request("sample", "trace_allocations", "deployment"),
    "screen": (bool, False),
}


def serve(
    ctx: typer.Context,
    metrics_port: int | None = None,
    metrics_host: str = live.METRICS_HOST,
    **options: object,
) -> None:
    """Run the engine's server (`vllm serve`) and show where memory goes.

    Same arguments, same port, same exit status.

    Prints the report when the server is ready, and writes it again when the server ends. The
    engine's output and memprof's messages go to stderr, the report to stdout. While it serves, a
    line says what it does; `memprof attach RUN` shows the same from another terminal.

    On several hosts: docs/deployments.md.
    """
    if ctx.params["trace_allocations"] is not None:
        ctx.params["sample"] = ctx.params["sample"] or "16"
    request = shared.request("serve", ctx)
    exporter = live.open_exporter(metrics_host, metrics_port, request.device.simulated)
    shared.run(ctx, request, exporter)


app = command_app(serve, {**_OPTIONS, **RUN})
