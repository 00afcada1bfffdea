"""One plan: what is asked for, the command that makes it, and what it left behind."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_memprof.errors import MemprofError
from vllm_memprof.plans.arguments import devices_of, with_option
from vllm_memprof.plans.rows import PlanRow, one_line
from vllm_memprof.record.schema import REPORT_JSON, RUN_FILE

#: Beside the run's own files in its folder; written last, so a folder that has it is whole.
PLAN_FILE = "plan.json"
#: What the plan's own process printed, as far as it is not in ``engine.log``.
OUTPUT_FILE = "memprof.log"
#: Options of memprof that a sweep may vary as well.
OWN_KNOBS = ("device", "stack", "python")

#: Reasons that lie outside the plan: another try may end otherwise. (launch.verdict says these.)
_CHANCE = re.compile(
    r"^interrupted by|^not ready within|was killed by|vanished|hung|host memory|could not be ended|"
    r"memprof itself failed|\bMemoryError|Cannot allocate memory|No space left|(?i:address "
    r"already in use)|"
    r"Connection(Reset|Refused)|timed out"
)


@dataclass(frozen=True)
class Plan:
    """A plan as asked for, before it is made."""

    model: str
    engine_args: list[str]
    values: dict[str, str] = field(default_factory=dict)  # of the knobs, for the row
    own: dict[str, str] = field(
        default_factory=dict
    )  # options of memprof: device, stack, python, ranks...
    timeout_s: float = 600.0  # until the engine must be ready
    lengths: tuple[int, ...] = ()  # tokens of requests whose concurrency is wanted

    def vary(self, name: str, value: str) -> Plan:
        """The same plan with one option set: the engine's, or memprof's own."""
        values = {**self.values, name: value}
        if name in OWN_KNOBS:
            return replace(self, own={**self.own, name: value}, values=values)
        return replace(self, engine_args=with_option(self.engine_args, name, value), values=values)

    @property
    def devices(self) -> int:
        return devices_of(self.engine_args)

    @property
    def shares_nothing(self) -> bool:
        """Whether it has its devices for itself: simulated ones, or none. Real ones are there
        once.
        """
        return self.own.get("device", "auto").partition(":")[0] in ("sim", "cpu")

    @property
    def title(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or self.model

    def command(self, run_dir: Path) -> list[str]:
        """The command of its process: this very memprof."""
        own = [f"--{name}={value}" for name, value in self.own.items()]
        own += [f"--run-dir={run_dir}", "--quiet", f"--startup-timeout={self.timeout_s:g}"]
        return [
            sys.executable,
            "-m",
            "vllm_memprof",
            "plan",
            self.model,
            *own,
            "--",
            *self.engine_args,
        ]


def row_of(
    plan: Plan, run_dir: Path, exit_code: int | None = 0, ended: str | None = None
) -> PlanRow:
    """The row of a plan whose process has ended.

    Args:
        plan: what was asked for.
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
    else:
        row = PlanRow(
            dict(plan.values), "failed", _last_words(run_dir, exit_code), final=exit_code == 2
        )
    if ended is not None:
        row = replace(row, status="failed", reason=ended, final=False)
    elif row.ok and exit_code != 0:
        row = replace(
            row, status="failed", reason=f"memprof plan ended with status {exit_code}", final=False
        )
    return replace(row, devices=plan.devices)


def _last_words(run_dir: Path, exit_code: int | None) -> str:
    """What the process said before it had a run folder: a wrong argument, a missing stack."""
    try:
        lines = (
            (run_dir.parent / f"{run_dir.name}.{OUTPUT_FILE}")
            .read_text(errors="replace")
            .splitlines()
        )
    except OSError:
        lines = []
    told = [
        line.removeprefix("memprof: ") for line in lines if line.startswith("memprof: ")
    ] or lines[-1:]
    return (
        one_line(told[-1])
        if told
        else f"memprof plan ended with status {exit_code} before it made a run folder"
    )


def write_row(run_dir: Path, key: str | None, row: PlanRow) -> None:
    """Marks a run folder as whole: its row, and the key of its content."""
    from vllm_memprof.plans.files import write_private

    run_dir.mkdir(parents=True, exist_ok=True)
    write_private(
        run_dir / PLAN_FILE, json.dumps({"key": key, "row": row.to_json()}, indent=1) + "\n"
    )


def read_row(run_dir: Path) -> tuple[str | None, PlanRow] | None:
    """(key, row) of a folder that is whole; None where it is not, or holds something else."""
    try:
        data: Any = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        return data["key"], PlanRow.from_json(data["row"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_whole(run_dir: Path) -> bool:
    """Whether a run folder has its row and, where the engine was started, its report."""
    return read_row(run_dir) is not None and (
        (run_dir / REPORT_JSON).exists() or not (run_dir / RUN_FILE).exists()
    )


def titles(plans: Sequence[Plan]) -> list[str]:
    """A folder name for each plan: its place and its values, made safe."""
    width = max(2, len(str(len(plans))))
    return [f"{i:0{width}d}-{_safe(plan.title)}" for i, plan in enumerate(plans, start=1)]


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-.")[:100] or "plan"
