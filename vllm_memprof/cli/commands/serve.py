"""``memprof serve``: wraps the server."""

from __future__ import annotations

import typer

from vllm_memprof.cli import live
from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.show import Lang, command_app


def serve(
    ctx: typer.Context,
    model: shared.Model,
    sample: shared.Sample = None,
    trace_allocations: shared.TraceAllocations = None,
    engine: shared.Engine = "vllm",
    device: shared.Device = "auto",
    run_dir: shared.RunDir = None,
    format_name: shared.Format = "table",
    lang: Lang = "en",
    quiet: shared.Quiet = False,
    screen: live.Screen = False,
    metrics_port: live.MetricsPort = None,
    metrics_host: live.MetricsHost = live.DEFAULT_METRICS_HOST,
    keep_secrets: shared.KeepSecrets = False,
    startup_timeout: shared.Timeout = shared.DEFAULT_TIMEOUT_S,
    python: shared.Python = None,
    stack: shared.Stack = None,
    share_device: shared.ShareDevice = False,
    deployment: shared.Deployment = None,
) -> None:
    """Run the engine's server (`vllm serve`) and show where memory goes.

    Same arguments, same port, same exit status.

    Prints the report when the server is ready, and writes it again when the server ends. The
    engine's output and memprof's messages go to stderr, the report to stdout. While it serves, a
    line says what it does; `memprof attach RUN` shows the same from another terminal.

    On several hosts it runs on each of them; see docs/deployments.md.
    """
    if sample is None and trace_allocations is not None:
        sample = "16"
    sampled = None if sample == "off" else sample
    request = shared.request("serve", ctx, run_dir=run_dir, sample=sampled)
    exporter = live.open_exporter(metrics_host, metrics_port, request.device.simulated)
    raise typer.Exit(shared.run(request, format_name, lang, screen, exporter))


app = command_app(serve, cls=EngineCommand, epilog=shared.EPILOG)
