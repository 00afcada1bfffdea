"""Hold a report to a budget file: one outcome per limit, with every rank's figure and margin.

A limit on a figure that is not known fails with the reason, and so does a run that did not end
well, whatever its figures are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm_memprof.accounting.findings.table import blind_ranks
from vllm_memprof.accounting.model import Report, RunSummary
from vllm_memprof.check.baseline import differences, remarks
from vllm_memprof.check.budget_file import BudgetFile, Limit
from vllm_memprof.check.limits import (
    AT_LEAST,
    BUDGET,
    FAIL_ON,
    FINDING,
    REGRESSION,
    STATUS,
    LimitReading,
    read_figure,
)
from vllm_memprof.record.codec import computed
from vllm_memprof.record.spans import MEASURED, MODELLED, How
from vllm_memprof.text import join, text
from vllm_memprof.units import minus, sum_or_none

CHECK_SCHEMA = "memprof.check/2"
#: Begins the reason of a forbidden finding that could not have been found in the run.
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Outcome:
    """One limit: what was asked, and what each rank had."""

    table: str  # budget | regression | run
    key: str
    title: str
    unit: str  # bytes | tokens | finding | status
    limit: str  # as the file has it
    readings: list[LimitReading]
    sense: str = ""  # at least | at most; "" where nothing is counted
    line: int | None = None
    how: How = MEASURED

    @property
    @computed
    def ok(self) -> bool:
        return all(row.ok for row in self.readings)

    @property
    @computed
    def unmeasured(self) -> bool:
        """True where it fails for a figure that is not known."""
        if self.unit in (FINDING, STATUS):
            return any((row.reason or "").startswith(NOT_JUDGED) for row in self.readings)
        return any(row.value is None or row.limit is None for row in self.readings)


@dataclass(frozen=True)
class CheckResult:
    """A run under a budget file."""

    run: RunSummary
    budget: str  # name of the file
    limits: list[Outcome]
    baseline: RunSummary | None = None
    notes: list[str] = field(default_factory=list)
    SCHEMA: ClassVar[str] = CHECK_SCHEMA

    @property
    @computed
    def failed(self) -> int:
        """Return the number of limits that do not hold."""
        return len(self.failures)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.limits if not outcome.ok]

    @property
    @computed
    def ok(self) -> bool:
        return not self.failures


def check_report(report: Report, budget: BudgetFile, baseline: Report | None = None) -> CheckResult:
    """Check the run's own end, every limit of a budget file in its order, then its findings.

    Args:
        report: the run that is checked.
        budget: the parsed file.
        baseline: what [regression] compares with; there are no limits in it without one. Whether it
            is comparable is the caller's question (``check.baseline``).
    """
    notes: list[str] = []
    if any(rank.half_units for rank in report.ranks):
        notes.append(text("read from log text: every figure is known to its last printed digit"))
    if baseline is not None:
        notes += [
            text("not comparable, compared all the same: {difference}", difference=apart)
            for apart in differences(baseline, report)
        ]
        notes += remarks(baseline, report)
    run, why_ended = report.run, None
    if run.outcome != "ok":  # a run that failed has no figures of a run that serves
        why = run.exit_reason or None
        if run.status == "running":
            why = text("it is still running, or nobody was left to write its end")
        why_ended = join(": ", (text("status {outcome}", run), why))
    ended = [_stated(why_ended)]
    outcomes = [
        Outcome("run", "status", text("the run ended well"), STATUS, "ok", ended),
        *(_outcome(report, limit, baseline) for limit in budget.limits),
    ]
    for name, line in budget.fail_on.items():
        rows = [
            _stated(join(": ", (row.title, row.evidence or None)), row.rank, row.label)
            for row in report.findings
            if row.id == name
        ]
        rows = rows or [
            _stated(text("not judged: {reason}", reason=reason), rank.rank, rank.label)
            for rank, reason in blind_ranks(report, name)
        ]
        key, title = f"{FAIL_ON} {name}", text("no such finding")
        outcomes.append(
            Outcome(BUDGET, key, title, FINDING, name, rows or [_stated(None)], line=line)
        )
    before = None if baseline is None else baseline.run
    return CheckResult(run, budget.name, outcomes, before, notes)


def _stated(reason: str | None, rank: int | None = None, label: str | None = None) -> LimitReading:
    return LimitReading(rank, label or "", None, ok=reason is None, reason=reason)


def _outcome(report: Report, limit: Limit, baseline: Report | None) -> Outcome:
    key, figure = limit.key, limit.key.figure
    readings, before = read_figure(report, figure), list[LimitReading]()
    if key.table == REGRESSION:
        assert baseline is not None
        before = read_figure(baseline, figure)
    # what a rank is held against: that rank of the baseline, or the worst one
    pick = min if key.sense == AT_LEAST else max
    unknown = [each for each in before if each.value is None]
    worst = pick(unknown or before, key=lambda each: each.value or 0, default=None)
    same = {each.label: each for each in reversed(before)}
    held = []
    for reading in readings:
        against = worst
        if key.same_rank:
            lacking = text("no rank {label} in it", reading)
            none = LimitReading(None, reading.label, None, reason=lacking)
            against = same.get(reading.label, none)
        held.append(_held_to(limit, reading, against))
    return Outcome(
        key.table,
        key.name,
        figure.title,
        figure.unit,
        limit.written,
        held,
        key.sense,
        limit.line,
        MODELLED if report.run.simulated and figure.device_wide else MEASURED,
    )


def _held_to(limit: Limit, reading: LimitReading, before: LimitReading | None) -> LimitReading:
    sign = -1 if limit.key.sense == AT_LEAST else 1
    whole, bound = reading.whole if before is None else before.value, limit.amount
    if limit.percent is not None:  # down to the whole unit
        bound = None if whole is None else int(limit.percent * abs(whole))
    if before is not None:
        half_unit = reading.half_unit + before.half_unit
        reading = replace(reading, baseline=before.value, half_unit=half_unit)
        bound = sum_or_none((before.value, bound and sign * bound))
        if bound is None:
            reason = text("the baseline does not tell: {reason}", before)
            reading = replace(reading, reason=reason)
    margin = minus(bound, reading.value)
    margin = margin and sign * margin
    return replace(reading, limit=bound, margin=margin, ok=margin is not None and margin >= 0)
