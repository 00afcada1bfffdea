"""The run folder of a plan: its report, its row, and how it appears as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.errors import MemprofError
from vllm_memprof.files import write_atomically
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow, plan_row
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.schema import REPORT_JSON, RUN_FILE
from vllm_memprof.redact import redact_data, redact_text
from vllm_memprof.sim.runtime import PACKAGE_DIR
from vllm_memprof.units import one_line

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


def report_of(run_dir: Path) -> Report:
    """Return the report of a plan: what its process wrote; else made from the record, and kept.

    Raises:
        MemprofError: its record cannot be read.
    """
    path = run_dir / REPORT_JSON
    try:
        return from_json(Report, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        report = build_report(load_run(run_dir))
        write_atomically(path, json.dumps(to_json(report)))
        return report


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
    row = PlanRow(dict(plan.values), "failed", final=False)
    if (run_dir / RUN_FILE).exists():
        try:
            row = plan_row(load_run(run_dir), report_of(run_dir), plan.values, plan.lengths)
            row = replace(row, final=row.ok or not _CHANCE.search(row.reason or ""))
        except MemprofError as error:
            row = replace(row, reason=one_line(error.message))
    else:  # a wrong argument, a missing stack: the last line of the output gives the reason
        try:
            output = run_dir.parent / f"{run_dir.name}.{OUTPUT_FILE}"
            lines = output.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        own = [line.removeprefix("memprof: ") for line in lines if line.startswith("memprof: ")]
        silent = f"memprof plan ended with status {exit_code} before it made a run folder"
        reason = one_line(redact_text([silent, *lines[-1:], *own][-1]))
        row = replace(row, reason=reason, final=exit_code == 2)
    if ended is None and row.ok and exit_code != 0:
        ended = f"memprof plan ended with status {exit_code}"
    if ended is not None:
        row = replace(row, status="failed", reason=ended, final=False)
    return replace(row, devices=plan.devices)


def write_row(run_dir: Path, key: str | None, row: PlanRow) -> None:
    """Mark a run folder as complete: write its row, and the key of its content.

    Raises:
        MemprofError: it cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "reader": reader(), "row": redact_data(to_json(row))}
    write_atomically(run_dir / PLAN_FILE, json.dumps(content, indent=1) + "\n")


class KeptRow(NamedTuple):
    """The row of a complete folder."""

    key: str | None  # of its content
    row: PlanRow
    current: bool  # it was made by these very sources of memprof


def read_row(run_dir: Path) -> KeptRow | None:
    """Return the row of a complete folder; None where there is none, or another file."""
    try:
        data = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        return KeptRow(data["key"], from_json(PlanRow, data["row"]), data["reader"] == reader())
    except (OSError, ValueError, KeyError, TypeError):
        return None


@cache
def reader() -> str:
    """Return a digest of memprof's sources: what a row was made by."""
    return digest_of(PACKAGE_DIR.rglob("*.py"))


def digest_of(sources: Iterable[Path]) -> str:
    """Return a digest of files of the package, their names included."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        name = f"{path.relative_to(PACKAGE_DIR)}\0".encode()
        digest.update(name + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder in one step; nothing happens where another process was first.

    Raises:
        OSError: it cannot be copied.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", dir=target.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        temporary.chmod(0o700)
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
