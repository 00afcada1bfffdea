"""``memprof offline``: the engine without a server, for a few prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.cli import run as shared
from vllm_memprof.cli.arguments import EngineCommand
from vllm_memprof.cli.show import Lang, command_app


def offline(
    ctx: typer.Context,
    model: shared.Model,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Prompts, one JSON object per line."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="DIR", help="A folder of images, one request each."),
    ] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Hand all requests to the engine in one batch.")
    ] = False,
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", help="Run all prompts N times.")
    ] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", metavar="N", help="Hand N requests to the engine together, not one."
        ),
    ] = None,
    on_error: Annotated[
        str,
        typer.Option(
            "--on-error",
            metavar="A",
            help="stop or skip, at a prompt or an image that is unreadable or refused.",
        ),
    ] = "stop",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Output tokens per request.")
    ] = None,
    sleep_cycles: Annotated[
        int,
        typer.Option(
            "--sleep-cycles",
            metavar="N",
            help="Sleep and wake up N times after the prompts (sleep mode).",
        ),
    ] = 0,
    empty_cache_at: Annotated[
        str | None,
        typer.Option(
            "--empty-cache-at",
            metavar="P[,P]",
            help="Experiment: call empty_cache at the end of these phases. Changes the run.",
        ),
    ] = None,
    sample: shared.Sample = "1",
    trace_allocations: shared.TraceAllocations = None,
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
    share_device: shared.ShareDevice = False,
) -> None:
    """Run prompts without a server, then report."""
    phases = [] if empty_cache_at is None else empty_cache_at.split(",")
    request = shared.request(
        "offline",
        ctx,
        run_dir=run_dir,
        prompts_file=prompts,
        prompts=prompt or [],
        images_dir=images,
        sample=None if sample == "off" else sample,
        empty_cache_at=[phase.strip() for phase in phases],
    )
    raise typer.Exit(shared.run(request, format_name, lang))


app = command_app(offline, cls=EngineCommand, epilog=shared.EPILOG)
