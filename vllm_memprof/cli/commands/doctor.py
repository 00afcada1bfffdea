"""``memprof doctor``: checks a machine before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vllm_memprof.cli.show import command_app

if TYPE_CHECKING:
    from vllm_memprof.launch.doctor import DoctorCheck

_STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "missing": "red"}


def doctor(
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="Interpreter of the engine.", show_default="auto"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="D", help="Add who holds npu, sim or sim:PROFILE."),
    ] = None,
) -> None:
    """Check what this machine has for a run, what is missing, and what to do about it.

    With --device, a row per device says how much of it is free and which processes hold the rest,
    and one names each engine process that was left behind (memprof who has the whole of it).

    Exit status 0: memprof can run here (a device with vLLM and memprof in the engine's interpreter,
    or a simulated stack that is set up). Exit status 1: it cannot.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_memprof.launch.doctor import diagnose

    held = [] if device is None else _holders(device)
    diagnosis = diagnose(python)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in [*diagnosis.checks, *held]:
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


def _holders(device: str) -> list[DoctorCheck]:
    """Return rows of who holds the devices; one that says why where they cannot be read.

    Raises:
        UsageError: not a kind of device whose driver lists processes.
    """
    from vllm_memprof.cli.commands.who import source_of
    from vllm_memprof.errors import MemprofError, UsageError
    from vllm_memprof.holders.checks import holder_checks
    from vllm_memprof.holders.look import look
    from vllm_memprof.holders.processes import run_parents
    from vllm_memprof.launch.doctor import WARNING, DoctorCheck

    try:
        who = look(source_of(device, None), folders=run_parents())
    except UsageError:
        raise
    except MemprofError as error:
        return [DoctorCheck("who holds it", WARNING, error.message, error.hint or "")]
    return holder_checks(who)


app = command_app(doctor)
