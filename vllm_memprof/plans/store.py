"""The folders of plans: report and row of one, and the plans that were made before, by content.

A plan's folder with ``plan.json`` is complete: it is written last. A plan of the same key is not
made again. A key contains everything that the figures of a plan depend on: the model's
configuration, the engine's arguments in their normal form, variables that bear on memory, the
engine stack, the device profile, and memprof's own sources. Only plans on a simulated device have
one: other processes change the figures of a real device.

``<cache>/plans/<key>/`` is the run folder; it appears in one step, so that any number of processes
may share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.files import read_json, write_atomically
from vllm_memprof.launch.folder import DIR_MODE
from vllm_memprof.options import normal_form, options
from vllm_memprof.plans.model import TABLES, Plan, PlanRow, Task, plan_row
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.schema import REPORT_JSON, RUN_FILE
from vllm_memprof.redact import redact_data, redact_text, select_env
from vllm_memprof.sim.folders import new_folder
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.profiles import flat_text, load_profile
from vllm_memprof.sim.runtime import PACKAGE_DIR, fingerprint
from vllm_memprof.sim.stacks import cache_dir, load_stack, normalize
from vllm_memprof.units import one_line
from vllm_memprof.version import __version__

#: Beside the run's own files in its folder; written last, so a folder that has it is complete.
PLAN_FILE = "plan.json"
#: Output of the plan's own process, as far as it is not in ``engine.log``.
OUTPUT_FILE = "memprof.log"
#: Reasons outside the plan: another try may end otherwise. (Texts of launch.verdict.)
_CHANCE = re.compile(
    r"^interrupted by|^not ready within|was killed by|vanished|hung|host memory|could not be ended|"
    r"memprof itself failed|\bMemoryError|Cannot allocate memory|No space left|"
    r"(?i:address already in use)|Connection(Reset|Refused)|timed out"
)
_SOURCES = (".py", ".toml", ".json")
#: Files whose content counts, of a model those that decide shapes; of others the sizes do.
_READ = (*_SOURCES, ".jinja", ".txt", ".model")


def report_of(run_dir: Path) -> Report:
    """Return the report of a plan: what its process wrote; else made from the record, and kept.

    Raises:
        MemprofError: its record cannot be read.
    """
    path = run_dir / REPORT_JSON
    try:
        return from_json(Report, read_json(path))
    except (OSError, ValueError):
        report = build_report(load_run(run_dir))
        write_atomically(path, json.dumps(to_json(report)))
        return report


def output_of(run_dir: Path) -> Path:
    """Return where the output of a plan's process goes while it runs: beside its folder."""
    return run_dir.with_name(f"{run_dir.name}.{OUTPUT_FILE}")


def row_of(
    plan: Plan, run_dir: Path, exit_code: int | None = 0, ended: str | None = None
) -> PlanRow:
    """Return the row of a plan whose process has ended.

    Args:
        plan: the request.
        run_dir: where it was to record.
        exit_code: of its process; None where it could not be collected.
        ended: why memprof ended it; None where it ended by itself.
    """
    row = PlanRow(dict(plan.values), "failed", devices=plan.devices, final=False)
    if (run_dir / RUN_FILE).exists():
        try:
            row = plan_row(load_run(run_dir), report_of(run_dir), plan)
            row = replace(row, final=row.ok or not _CHANCE.search(row.reason or ""))
        except MemprofError as error:
            row = replace(row, reason=one_line(error.message))
    else:  # a wrong argument, a missing stack: the last line of the output gives the reason
        path = output_of(run_dir)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        own = [line.removeprefix("memprof: ") for line in lines if line.startswith("memprof: ")]
        silent = f"memprof plan ended with status {exit_code} before it made a run folder"
        reason = one_line(redact_text([silent, *lines[-1:], *own][-1]))
        row = replace(row, reason=reason, final=exit_code == 2)
    if ended is None and row.ok and exit_code != 0:
        ended = f"memprof plan ended with status {exit_code}"
    return row if ended is None else replace(row, status="failed", reason=ended, final=False)


def write_row(run_dir: Path, key: str | None, row: PlanRow) -> None:
    """Mark a run folder as complete: write its row, and the key of its content.

    Raises:
        MemprofError: it cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "row": redact_data(to_json(row))}
    write_atomically(run_dir / PLAN_FILE, json.dumps(content, indent=1) + "\n")


def read_row(run_dir: Path, key: str | None) -> PlanRow | None:
    """Return the row of a complete folder of that content; None where there is none.

    None as well where another try may end otherwise.
    """
    try:
        data = read_json(run_dir / PLAN_FILE)
        row = from_json(PlanRow, data["row"])
        return row if data["key"] == key and row.final else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Store:
    """The plans of one cache directory.

    Args:
        folder: default: ``plans`` in memprof's cache directory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / "plans"

    def take(self, task: Task) -> PlanRow | None:
        """Copy a plan that was made before to the task's folder; return its row, None without."""
        plan, run_dir = task.plan, task.run_dir
        if task.key is None or (row := read_row(self.folder / task.key, task.key)) is None:
            return None
        try:
            _copy_folder(self.folder / task.key, run_dir)
        except OSError:
            shutil.rmtree(run_dir, ignore_errors=True)  # incomplete
            return None
        if [*row.concurrency_at] != [*plan.lengths]:
            row = row_of(plan, run_dir, 0 if row.ok else 1)
        row = replace(row, values=dict(plan.values), devices=plan.devices, run=None, cached=True)
        write_row(run_dir, task.key, row)
        return row

    def keep(self, task: Task, row: PlanRow) -> None:
        """Keep a plan for its key, unless another try may end otherwise."""
        if task.key is None or not row.final or row.run_id is None:
            return
        try:
            _copy_folder(task.run_dir, self.folder / task.key)
        except OSError:
            pass  # a full disk costs the cache, not the plan


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder in one step; nothing happens where another process was first.

    Raises:
        OSError: it cannot be copied.
    """
    with new_folder(target, DIR_MODE) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def key_of(plan: Plan, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key of a plan; None where its figures depend on more than a key can contain.

    Raises:
        UsageError, SetupError: no such profile or stack.
    """
    profile = plan.device.profile
    if profile is None or "python" in plan.own:
        return None
    # only the arguments that count, so that a hub is asked once for a whole sweep
    named = (held for name, held in options(plan.engine_args) if name in TABLES["model_options"])
    model = _model_key(plan.model, tuple(token for held in named for token in held))
    if model is None:
        return None
    env, stack = select_env(os.environ if environ is None else environ), load_stack(plan.stack)
    content = (
        __version__,
        _package(),
        model,
        normal_form(plan.engine_args),
        {name: value for name, value in plan.own.items() if name not in ("device", "stack")},
        {name: value for name, value in env.items() if name not in TABLES["places"]},
        [normalize(stack.name), fingerprint(stack)],
        flat_text(load_profile(profile)),
    )
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _package() -> str:
    """Return a digest of memprof itself, which is read once by a process."""
    return _digest(*(path for path in PACKAGE_DIR.rglob("*") if path.suffix in _SOURCES))


@cache
def _model_key(model: str, engine_args: tuple[str, ...]) -> list[str] | None:
    """Return a model's name, and a digest of its configuration and of the sizes of its weights."""
    try:
        resolved = resolve_model(model, list(engine_args))
    except UsageError:
        return None  # its plan says why
    folder = Path(resolved.path)
    if not folder.is_dir():
        return None
    return [model, _digest(*filter(Path.is_file, folder.iterdir())), *resolved.extra_args]


@cache
def _digest(*paths: Path) -> str:
    """Return a digest of files: their names and contents; of weights size and time."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        about = path.stat()
        content = f"{about.st_size} {about.st_mtime_ns}".encode()
        if path.suffix in _READ:
            content = path.read_bytes()
        digest.update(path.name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def model_config(model: str, engine_args: list[str]) -> dict[str, object] | None:
    """Return ``config.json`` of a model with a preset or a folder; None where there is none."""
    try:
        data = read_json(Path(resolve_model(model, engine_args).path, "config.json"))
    except (UsageError, OSError, ValueError):
        return None  # a real device's engine may find it
    return data if isinstance(data, dict) else None
