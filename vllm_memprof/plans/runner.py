"""The one way in which plans of a question are made: from the cache or by a pool, then kept.

A question (a sweep, a search, a division, a calibrated plan) has a folder; ``plans/<name>/`` in it
are the run folders. What differs between questions is which plan they ask for next, and what they
make of rows and reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_memprof.accounting.model import Report
from vllm_memprof.errors import MemprofError
from vllm_memprof.plans.pool import Pool, Progress, Silent, run_here
from vllm_memprof.plans.request import Plan, Task
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.store import Store, key_of, report_of, write_row

PLANS_DIR = "plans"


@dataclass
class PlanRunner:
    """Makes the plans of one question."""

    folder: Path  # of the question
    progress: Progress = field(default_factory=Silent)
    store: Store | None = None  # None: no plan is taken from the cache, or kept there
    pool: Pool = run_here

    def task(
        self, place: int, plan: Plan, name: str, environ: Mapping[str, str] | None = None
    ) -> Task:
        """Return a plan to make in the folder of that name."""
        return Task(place, plan, self.folder / PLANS_DIR / name, key_of(plan, environ), environ)

    def make(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, PlanRow]]:
        """Yield the rows of plans: of those in the cache first, of the others as they are made.

        Raises:
            Interrupted: by a signal; plans that were made are kept.
        """
        rest = []
        for task in tasks:
            row = None if self.store is None else self.store.take(task)
            if row is None:
                rest.append(task)
            else:
                yield task, self.done(task, row, "cached")
        for task, row in self.pool(rest, self.progress) if rest else ():
            yield task, self.done(task, row)

    def make_one(
        self, place: int, plan: Plan, name: str, environ: Mapping[str, str] | None = None
    ) -> PlanRow:
        """Make one plan; the arguments are those of ``task``.

        Raises:
            Interrupted: by a signal.
        """
        ((_, row),) = self.make([self.task(place, plan, name, environ)])
        return row

    def done(self, task: Task, row: PlanRow, how: str = "made") -> PlanRow:
        """Return a row with its place in the folder; mark and keep what was made."""
        run = str(task.run_dir.relative_to(self.folder))
        row = replace(row, values=dict(task.plan.values), run=run)
        if how == "made":
            write_row(task.run_dir, task.key, row)
            if self.store is not None:
                self.store.keep(task, row)
        self.progress.finished(task.place, row, how)
        return row

    def report(self, row: PlanRow) -> Report | None:
        """Return the report of a plan; None where it left nothing that can be read."""
        try:
            return report_of(self.folder / (row.run or ""))
        except MemprofError:
            return None
