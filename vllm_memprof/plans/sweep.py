"""A sweep: all combinations of some options' values, each a plan in a folder of its own.

``<folder>/request.json`` is the request, ``<folder>/plans/<number>-<values>/`` are the run folders.
A folder with ``plan.json`` is complete: the same command keeps it, and makes the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch.folder import DEFAULT_PARENT, DIR_MODE, FILE_MODE, model_part
from vllm_memprof.options import long_name, normal_form
from vllm_memprof.plans.model import Knob, Plan, PlanRow, Sweep, folder_name
from vllm_memprof.plans.runner import Interrupted, PlanRunner
from vllm_memprof.redact import redact_command, redact_value

_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))


@dataclass
class SweepJob:
    """A sweep as requested."""

    plan: Plan  # without the knobs
    knobs: list[Knob]
    command: list[str]  # as typed, secrets redacted
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        for values in itertools.product(*(knob.values for knob in self.knobs)):
            plan = self.plan
            for knob, value in zip(self.knobs, values, strict=True):
                plan = plan.vary(knob.name, value)
            _ = plan.devices  # refuses a size that is no number
            self.plans.append(plan)


def parse_over(texts: list[str]) -> list[Knob]:
    """Parse ``--over option=v1,v2``; a comma within brackets or quotes belongs to a value.

    Raises:
        UsageError: no knob, no value, or one of them twice.
    """
    hint = "--over OPTION=VALUE,VALUE, e.g. --over tensor-parallel-size=2,4,8"
    knobs: list[Knob] = []
    for text in texts or [""]:
        name, equals, values = text.partition("=")
        name = long_name(name.strip()).removeprefix("--")
        if not equals or not re.fullmatch(r"[a-z][a-zA-Z0-9-]*(\.[a-zA-Z0-9_.-]+)?", name):
            raise UsageError(f"--over {text!r} names no option and its values", hint)
        found = split_values(values)
        if not all(found):
            raise UsageError(f"--over {text!r} has an empty value")
        if len({*found}) < len(found) or name in (knob.name for knob in knobs):
            raise UsageError(f"--over {text!r}: {name} or a value of it is given twice")
        knobs.append(Knob(name, found))
    return knobs


def split_values(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    values = [""]
    for part in text.split(","):
        held = f"{values.pop()}{part}"
        bare = _QUOTED.sub("", held)
        closed = all(bare.count(a) <= bare.count(b) for a, b in _BRACKETS)
        whole = closed and not {'"', "'"} & {*bare}
        values += [held.strip(), ""] if whole else [f"{held},"]
    return values[:-1]


def default_folder(plan: Plan, knobs: Sequence[Knob]) -> Path:
    """Return ``reports/sweep-<model>-<digest>``, the same for the same sweep."""
    digest = hashlib.sha256(_request(plan, knobs).encode()).hexdigest()[:8]
    return DEFAULT_PARENT / f"sweep-{model_part(plan.model, 60)}-{digest}"


def _request(plan: Plan, knobs: Sequence[Knob]) -> str:
    content = {
        "schema": "memprof.sweep-request/1",
        "model": plan.model,
        "arguments": [redact_command(words) for words in normal_form(plan.engine_args)],
        "own": dict(sorted(plan.own.items())),
        "knobs": {knob.name: knob.values for knob in _shown(knobs)},
    }
    return json.dumps(content, indent=1) + "\n"


def _shown(knobs: Sequence[Knob]) -> list[Knob]:
    """Return knobs as they are written, secrets redacted."""
    return [
        Knob(knob.name, [redact_value(knob.name, value) for value in knob.values]) for knob in knobs
    ]


def run_sweep(job: SweepJob, runner: PlanRunner) -> Sweep:
    """Make the plans that are not there yet.

    Returns:
        The sweep with a row for every plan.

    Raises:
        UsageError: the folder holds something else, or another memprof is at it.
        Interrupted: by a signal; what is there so far is in ``sweep`` of the exception.
    """
    started_s, rows = time.monotonic(), dict[int, PlanRow]()

    def found(*notes: str) -> Sweep:
        return Sweep(
            job.plan.model,
            _shown(job.knobs),
            [rows[place] for place in sorted(rows)],
            command=job.command,
            seconds=round(time.monotonic() - started_s, 1),
            notes=[*notes],
        )

    width = max(2, len(str(len(job.plans))))
    with _folder(job, runner.folder):
        tasks = [
            runner.task(place, plan, folder_name(place + 1, plan, width))
            for place, plan in enumerate(job.plans)
        ]
        try:
            for task, row in runner.make(tasks):
                rows[task.place] = row
        except Interrupted as error:
            error.args = (f"{error}: {len(rows)} of {len(job.plans)} plans are made",)
            error.sweep = found(*error.args)
            raise
    return found()


@contextlib.contextmanager
def _folder(job: SweepJob, path: Path) -> Iterator[None]:
    """Make the sweep's folder and lock its request for this process.

    Raises:
        UsageError: the folder has other content, or another memprof uses it.
        LaunchError: it cannot be made.
    """
    held, request = path / "request.json", _request(job.plan, job.knobs)
    hint = "-o DIR gives another"
    try:
        path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        if not held.exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty, and contains no sweep", hint)
        descriptor = os.open(held, os.O_RDWR | os.O_CREAT, FILE_MODE)
    except OSError as error:
        raise LaunchError(f"cannot make the folder {path}: {error.strerror}", hint) from error
    with open(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another memprof is making the sweep in {path}") from error
        known = file.read()
        if known not in ("", request):
            raise UsageError(f"{path} holds another sweep, by its {held.name}", hint)
        if not known:
            file.write(request)
            file.flush()
        yield
