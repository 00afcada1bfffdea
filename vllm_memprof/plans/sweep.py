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
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.files import write_atomically
from vllm_memprof.launch.folder import DEFAULT_PARENT, DIR_MODE
from vllm_memprof.options import long_name, normal_form
from vllm_memprof.plans.plan_folder import OUTPUT_FILE, read_row
from vllm_memprof.plans.pool import Interrupted
from vllm_memprof.plans.request import Plan, Task, folder_names
from vllm_memprof.plans.rows import Knob, PlanRow, Sweep
from vllm_memprof.plans.runner import PLANS_DIR, PlanRunner
from vllm_memprof.redact import redact_command, redact_value

REQUEST_FILE = "request.json"
_REQUEST_SCHEMA = "memprof.sweep-request/1"


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
    knobs: list[Knob] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = long_name(name.strip()).removeprefix("--")
        if not equals or not re.fullmatch(r"[a-z][a-zA-Z0-9-]*(\.[a-zA-Z0-9_.-]+)?", name):
            hint = "--over OPTION=VALUE,VALUE, e.g. --over tensor-parallel-size=2,4,8"
            raise UsageError(f"--over {text!r} names no option and its values", hint=hint)
        found = split_values(values)
        if not all(found):
            raise UsageError(f"--over {text!r} has an empty value")
        twice = {value for value in found if found.count(value) > 1}
        if twice or name in (knob.name for knob in knobs):
            what = ", ".join(sorted(twice)) if twice else name
            raise UsageError(f"--over {text!r}: {what} is given twice")
        knobs.append(Knob(name, found))
    if not knobs:
        raise UsageError(
            "--over OPTION=VALUE,VALUE is missing", hint="e.g. --over tensor-parallel-size=2,4,8"
        )
    return knobs


def split_values(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    values, held, depth, quote = list[str](), "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth <= 0:
            values.append(held.strip())
            held = ""
            continue
        held += char
    return [*values, held.strip()]


def default_folder(plan: Plan, knobs: Sequence[Knob]) -> Path:
    """Return ``reports/sweep-<model>-<digest>``, the same for the same sweep."""
    model = plan.model.rstrip("/").rsplit("/", 1)[-1]
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[:60] or "model"
    digest = hashlib.sha256(json.dumps(_request(plan, knobs)).encode()).hexdigest()[:8]
    return DEFAULT_PARENT / f"sweep-{base}-{digest}"


def _request(plan: Plan, knobs: Sequence[Knob]) -> dict[str, object]:
    return {
        "schema": _REQUEST_SCHEMA,
        "model": plan.model,
        "arguments": [redact_command(words) for words in normal_form(plan.engine_args)],
        "own": dict(sorted(plan.own.items())),
        "knobs": [vars(_shown(knob)) for knob in knobs],
    }


def _shown(knob: Knob) -> Knob:
    """Return a knob as it is written, secrets redacted."""
    return Knob(knob.name, [redact_value(knob.name, value) for value in knob.values])


def run_sweep(job: SweepJob, runner: PlanRunner) -> Sweep:
    """Make the plans that are not there yet.

    Returns:
        The sweep with a row for every plan.

    Raises:
        UsageError: the folder holds something else, or another memprof is at it.
        Interrupted: by a signal; what is there so far is in ``sweep`` of the exception.
    """
    started_s = time.monotonic()
    rows, notes = dict[int, PlanRow](), list[str]()
    interrupted: Interrupted | None = None
    with _folder(job, runner.folder):
        try:
            for task, row in _rows(job, runner):
                rows[task.place] = row
        except Interrupted as error:
            interrupted = error
            notes.append(f"{error}: {len(rows)} of {len(job.plans)} plans are made")
    found = Sweep(
        model=job.plan.model,
        command=job.command,
        knobs=[_shown(knob) for knob in job.knobs],
        rows=[rows[place] for place in sorted(rows)],
        seconds=round(time.monotonic() - started_s, 1),
        notes=notes,
    )
    if interrupted is not None:
        interrupted.args, interrupted.sweep = (*notes,), found
        raise interrupted
    return found


def _rows(job: SweepJob, runner: PlanRunner) -> Iterator[tuple[Task, PlanRow]]:
    """Yield the row of every plan, as they come."""
    first, again = dict[str, Task](), list[Task]()
    for place, (plan, name) in enumerate(zip(job.plans, folder_names(job.plans), strict=True)):
        task = runner.task(place, plan, name)
        found = read_row(task.run_dir)
        if found is not None and found.key == task.mark and found.row.final:
            yield task, runner.done(task, found.row, "there already")
            continue
        shutil.rmtree(task.run_dir, ignore_errors=True)
        task.run_dir.with_name(f"{name}.{OUTPUT_FILE}").unlink(missing_ok=True)
        if runner.store is None or task.key is None:
            first[name] = task
        elif first.setdefault(task.key, task) is not task:
            again.append(task)  # the same plan in other words: in the store by then
    yield from runner.make([*first.values()])
    yield from runner.make(again)


@contextlib.contextmanager
def _folder(job: SweepJob, path: Path) -> Iterator[None]:
    """Make the sweep's folder and lock it for this process.

    Raises:
        UsageError: the folder has other content, or another memprof uses it.
        LaunchError: it cannot be made.
    """
    held, request = path / REQUEST_FILE, _request(job.plan, job.knobs)
    try:
        path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
        if not held.exists() and any(path.iterdir()):
            raise UsageError(
                f"{path} is not empty, and holds no sweep", hint="give a new folder with -o DIR"
            )
        (path / PLANS_DIR).mkdir(mode=DIR_MODE, exist_ok=True)
        lock = os.open(path / PLANS_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder {path}: {error.strerror}", hint="-o DIR gives another"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another memprof is making the sweep in {path}") from error
        if held.exists():
            try:
                known = dict(json.loads(held.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                known = {}
            other = [name for name, value in request.items() if known.get(name) != value]
            if other or known.keys() - request.keys():
                hint = "give another folder with -o DIR, or remove this one"
                text = f"{path} holds another sweep: {', '.join(other)} differ"
                raise UsageError(text, hint=hint)
        else:
            write_atomically(held, json.dumps(request, indent=1) + "\n")
        yield
    finally:
        os.close(lock)
