"""Which run a person means: the newest, an abbreviation of a run below ``reports/``, or a path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_memprof.cli import complete
from vllm_memprof.errors import RunRecordError, nearest
from vllm_memprof.files import from_here
from vllm_memprof.launch.folder import DEFAULT_PARENT
from vllm_memprof.record.deployment import run_folders
from vllm_memprof.record.loader import load_info
from vllm_memprof.sources import numbered


def recorded() -> list[Path]:
    """Return the run folders below ``reports/``, the newest first."""
    dated = []
    for folder in run_folders(DEFAULT_PARENT) if DEFAULT_PARENT.is_dir() else []:
        try:
            dated.append((load_info(folder).started or "", folder.name, folder))
        except RunRecordError:
            continue  # not one that could be shown
    return [folder for _, _, folder in sorted(dated, reverse=True)]


#: The argument of commands that read one run; without it the newest.
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or a part of its name in reports/; a report.json, a log, a quoted glob."
        " Default: the newest run in reports/.",
        autocompletion=complete.runs,
        show_default=False,
    ),
]


def find_run(typed: str | None) -> str:
    """Return the path of a run, and say on stderr which one it is if it was not typed.

    Args:
        typed: a path, as ``sources`` reads it; a part of the name of a folder in ``reports/``, of
            which the newest counts; None: the newest of all.

    Raises:
        RunRecordError: there is none.
    """
    if typed is not None and (
        Path(numbered(typed)[0]).exists() or any(mark in typed for mark in "*?[/") or typed == "-"
    ):
        return typed
    runs = recorded()
    found = [run for run in runs if typed is None or typed.lower() in run.name.lower()]
    if not found:
        what = (
            "no run is recorded in reports/"
            if typed is None
            else (
                f"there is no run folder and no file {typed}, and no run in reports/ of that name"
            )
        )
        near = nearest(typed or "", [run.name for run in runs], 3)
        hint = f"nearest: {', '.join(near)}" if near else "memprof serve, offline or plan MODEL"
        raise RunRecordError(what, hint=hint)
    others = f", the newest of {len(found)}" if len(found) > 1 else ""
    print(f"memprof: {from_here(found[0])}{others}", file=sys.stderr)
    return str(found[0])


def run_before(run: str) -> str:
    """Return the newest run before another one in ``reports/``, and say which.

    Raises:
        RunRecordError: it is not one of them, or the first.
    """
    runs = recorded()
    places = [i for i, each in enumerate(runs) if each.resolve() == Path(run).resolve()]
    if not places or places[0] + 1 == len(runs):
        raise RunRecordError(
            f"no run in reports/ is older than {run}", hint="memprof diff RUN_A RUN_B"
        )
    before = runs[places[0] + 1]
    print(f"memprof: compared with {from_here(before)}, the newest before it", file=sys.stderr)
    return str(before)
