"""``memprof doctor``: checks a machine before a run."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from vllm_memprof.cli.commands.who import source_of
from vllm_memprof.cli.options import command_app
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.holders.document import holder_checks
from vllm_memprof.holders.look import look
from vllm_memprof.launch.doctor import WARNING, DoctorCheck, diagnose
from vllm_memprof.report.grid import Grid

_STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "missing": "red"}


def doctor(python: str | None = None, device: str | None = None) -> None:
    """Check what this machine has for a run, what is missing, and what to do about it.

    With --device, a row per device says how much of it is free, which processes use the rest, and
    which engine processes were left behind (more: memprof who).

    Exit status 0: memprof can run here (a device with vLLM and memprof in the engine's interpreter,
    or a simulated stack that is set up). 1: it cannot.
    """
    held: list[DoctorCheck] = []
    if device is not None:
        try:
            held = holder_checks(look(source_of(device, None)))
        except UsageError:
            raise  # not a kind of device whose driver lists processes
        except MemprofError as error:
            held = [DoctorCheck("who holds it", WARNING, error.message, error.hint or "")]
    checks, ways = diagnose(python)
    table = Grid.grid(padding=(0, 2, 0, 0))
    for check in [*checks, *held]:
        found = Text(check.found, overflow="fold")
        if check.todo:
            style = "bold" if check.state in ("warning", "missing") else "dim"
            found.append(f"\n-> {check.todo}", style=style)
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, found)
    end = Text.assemble(("memprof can run here: ", "bold green"), ", ".join(ways))
    if not ways:
        advice = (
            "set up a simulated device with `memprof sim setup`, "
            "or give the engine's interpreter with --python PATH"
        )
        end = Text.assemble(("no way to run yet: ", "bold red"), advice)
    Console(highlight=False).print(table, Text(), end, sep="\n")
    if not ways:
        raise typer.Exit(1)


app = command_app(doctor)
