"""The run folder of a plan: its row, and how folders and files appear as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from vllm_memprof.errors import MemprofError
from vllm_memprof.files import write_atomically
from vllm_memprof.plans.request import Plan
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.record.codec import from_json, to_json
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
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.plans.rows import plan_row
    from vllm_memprof.record.loader import load_run

    if (run_dir / RUN_FILE).exists():
        try:
            run = load_run(run_dir)
            row = plan_row(run, build_report(run), plan.values, plan.lengths)
        except MemprofError as error:
            row = PlanRow(dict(plan.values), "failed", one_line(error.message), final=False)
        else:
            row = replace(row, final=row.status == "ok" or not _CHANCE.search(row.reason or ""))
    else:  # a wrong argument, a missing stack: the last line of the output gives the reason
        try:
            output = run_dir.parent / f"{run_dir.name}.{OUTPUT_FILE}"
            lines = output.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        own = [line.removeprefix("memprof: ") for line in lines if line.startswith("memprof: ")]
        silent = f"memprof plan ended with status {exit_code} before it made a run folder"
        reason = one_line(redact_text([silent, *lines[-1:], *own][-1]))
        row = PlanRow(dict(plan.values), "failed", reason, final=exit_code == 2)
    if ended is not None:
        row = replace(row, status="failed", reason=ended, final=False)
    elif row.ok and exit_code != 0:
        reason = f"memprof plan ended with status {exit_code}"
        row = replace(row, status="failed", reason=reason, final=False)
    return replace(row, devices=plan.devices)


def row_again(plan: Plan, run_dir: Path) -> PlanRow:
    """Return the row of a plan that another one of the same key has made in a complete folder.

    It is the row that lies there, where this memprof has written it, else read from the record.
    """
    found = read_row(run_dir)
    row = None if found is None else found[1]
    if row is None or not _is_of_this_memprof(run_dir) or [*row.concurrency_at] != [*plan.lengths]:
        return row_of(plan, run_dir, 0 if row is None or row.ok else 1)
    return replace(row, values=dict(plan.values), devices=plan.devices, run=None, cached=False)


def write_row(run_dir: Path, key: str | None, row: PlanRow) -> None:
    """Mark a run folder as complete: write its row, and the key of its content.

    Raises:
        MemprofError: it cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "reader": reader(), "row": redact_data(to_json(row))}
    write_atomically(run_dir / PLAN_FILE, json.dumps(content, indent=1) + "\n")


def read_row(run_dir: Path) -> tuple[str | None, PlanRow] | None:
    """Return (key, row) of a complete folder; None where there is none, or another file."""
    try:
        data = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        return data["key"], from_json(PlanRow, data["row"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@cache
def reader() -> str:
    """Return a digest of memprof's sources: what a row was made by."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_DIR.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE_DIR)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _is_of_this_memprof(run_dir: Path) -> bool:
    try:
        data = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(data.get("reader") == reader())


def is_complete(run_dir: Path) -> bool:
    """Return True for a run folder with its row and, where the engine was started, its report."""
    return read_row(run_dir) is not None and (
        (run_dir / REPORT_JSON).exists() or not (run_dir / RUN_FILE).exists()
    )


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
