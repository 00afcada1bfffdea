"""``memprof doctor``: checks a machine before a run."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "missing": "red"}


@app.command()
def doctor(
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="Interpreter of the engine.", show_default="auto"
        ),
    ] = None,
) -> None:
    """Check what this machine has for a run, what is missing, and what to do about it.

    Exit status 0: memprof can run here (a device with vLLM and memprof in the engine's interpreter,
    or a simulated stack that is set up). Exit status 1: it cannot.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_memprof.launch.doctor import diagnose

    diagnosis = diagnose(python)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in diagnosis.checks:
        found = Text(check.found)
        if check.todo:
            found.append(
                f"\n-> {check.todo}",
                style="bold" if check.state in ("warning", "missing") else "dim",
            )
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, found)
    console = Console(highlight=False)
    console.print(table)
    console.print()
    if diagnosis.can_run:
        console.print(
            Text.assemble(("memprof can run here: ", "bold green"), ", ".join(diagnosis.ways))
        )
        return
    advice = (
        "set up a simulated device with `memprof sim setup`, "
        "or give the engine's interpreter with --python PATH"
    )
    console.print(Text.assemble(("no way to run yet: ", "bold red"), advice))
    raise typer.Exit(1)
