"""Hold a report to a budget file: one outcome per limit, with every rank's figure and margin.

A limit on a figure that is not known fails with the reason, and so does a run that did not end
well, whatever its figures are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm_memprof.accounting.findings.table import blind_ranks
from vllm_memprof.accounting.model import MEASURED, MODELLED, Report, RunSummary
from vllm_memprof.check.baseline import differences, remarks
from vllm_memprof.check.budget_file import BudgetFile, Limit
from vllm_memprof.check.limits import (
    AT_LEAST,
    BUDGET,
    FAIL_ON,
    FINDING,
    REGRESSION,
    SAME_RANK,
    STATUS,
    LimitReading,
    figure_of,
    read_figure,
)
from vllm_memprof.record.codec import computed
from vllm_memprof.record.spans import How
from vllm_memprof.text import Text, text
from vllm_memprof.units import minus

CHECK_SCHEMA = "memprof.check/2"
#: Begins the reason of a forbidden finding that could not have been found in the run.
NOT_JUDGED = "not judged"
_WELL, _NO_FINDING = text("the run ended well"), text("no such finding")


@dataclass(frozen=True)
class Judged:
    """One rank under one limit, in the unit of the limit."""

    rank: int | None
    label: str
    value: int | None  # None: not measured
    limit: int | None  # None: not known, as the baseline does not have the figure
    ok: bool
    baseline: int | None = None
    half_unit: int = 0  # of the printed digits: of the figure, and of the baseline's
    reason: str | None = None  # why value or limit is None; of a finding, its title
    margin: int | None = None  # what is left to the limit; negative: over it by so much

    @property
    @computed
    def within_digits(self) -> bool:
        """True where the figure before its rounding may lie on the other side of the limit."""
        return self.margin is not None and (
            0 <= self.margin < self.half_unit or -self.half_unit <= self.margin < 0
        )


@dataclass(frozen=True)
class Outcome:
    """One limit: what was asked, and what each rank had."""

    table: str  # budget | regression | run
    key: str
    title: str
    unit: str  # bytes | tokens | finding | status
    sense: str  # at least | at most; "" where nothing is counted
    #: The limit as the file has it.
    limit: str
    line: int | None
    readings: list[Judged]
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
        baseline: what [regression] compares with. Whether it is comparable is the caller's question
            (``check.baseline``).

    Raises:
        ValueError: [regression] has limits and there is no baseline.
    """
    if budget.needs_baseline and baseline is None:
        raise ValueError("[regression] has limits and there is no baseline")
    notes: list[str] = []
    if any(rank.half_units for rank in report.ranks):
        notes.append(text("read from log text: every figure is known to its last printed digit"))
    if baseline is not None:
        notes += [
            text("not comparable, compared all the same: {difference}", difference=apart.sentence)
            for apart in differences(baseline, report)
        ]
        notes += remarks(baseline, report)
    outcomes = [
        _ended(report),
        *(_outcome(report, limit, baseline) for limit in budget.limits),
        *(_finding(report, name, line) for name, line in budget.fail_on.items()),
    ]
    before = None if baseline is None else baseline.run
    return CheckResult(report.run, budget.name, outcomes, before, notes)


def _ended(report: Report) -> Outcome:
    """Judge the run's own end: a run that failed has no figures of a run that serves."""
    status, why = str(report.run.outcome), report.run.exit_reason
    if report.run.status == "running":
        status, why = "running", text("it is still running, or nobody was left to write its end")
    reason: Text | None = None
    if status != "ok":
        reason = text("status {status}", status=status)
        if why:
            reason = text("{what}: {reason}", what=reason, reason=why)
    return Outcome("run", "status", _WELL, STATUS, "", "ok", None, [_stated(reason)])


def _stated(reason: str | None, rank: int | None = None, label: str | None = None) -> Judged:
    return Judged(rank, label or "", None, None, reason is None, reason=reason)


def _finding(report: Report, name: str, line: int | None) -> Outcome:
    rows = []
    for finding in report.findings:
        if finding.id == name:
            reason: str = finding.title
            if finding.evidence:
                reason = text("{what}: {reason}", what=reason, reason=finding.evidence)
            rows.append(_stated(reason, finding.rank, finding.label))
    rows = rows or [
        _stated(text("not judged: {reason}", reason=reason), rank.rank, rank.label)
        for rank, reason in blind_ranks(report, name)
    ]
    return Outcome(
        BUDGET, f"{FAIL_ON} {name}", _NO_FINDING, FINDING, "", name, line, rows or [_stated(None)]
    )


def _outcome(report: Report, limit: Limit, baseline: Report | None) -> Outcome:
    figure = figure_of(limit.key)
    readings = read_figure(report, figure)
    if limit.key.table == REGRESSION:
        assert baseline is not None
        before = read_figure(baseline, figure)
        judged = [_regressed(reading, limit, before) for reading in readings]
    else:
        judged = [_held_to(reading, limit, _allowed(limit, reading.whole)) for reading in readings]
    return Outcome(
        table=limit.key.table,
        key=limit.key.name,
        title=figure.title,
        unit=figure.unit,
        sense=limit.key.sense,
        limit=limit.written,
        line=limit.line,
        readings=judged,
        how=MODELLED if report.run.simulated and figure.device_wide else MEASURED,
    )


def _allowed(limit: Limit, whole: int | None) -> int | None:
    """Return the amount of a limit; of a percentage of something, down to the whole unit."""
    if limit.percent is None:
        return limit.amount
    return None if whole is None else int(limit.percent * abs(whole))


def _regressed(reading: LimitReading, limit: Limit, readings: list[LimitReading]) -> Judged:
    """Hold a rank against the baseline's readings: that of the same rank, or the worst."""
    if limit.key.against == SAME_RANK:
        lacking = text("no rank {label} in it", label=reading.label)
        same = (one for one in readings if one.label == reading.label)
        before = next(same, LimitReading(None, reading.label, None, reason=lacking))
    else:
        pick = min if limit.key.sense == AT_LEAST else max
        unknown = next((one for one in readings if one.value is None), None)
        before = unknown or pick(readings, key=lambda one: one.value or 0)
    allowed = _allowed(limit, before.value)
    if before.value is None or allowed is None:
        reason = text("the baseline does not tell: {reason}", reason=before.reason)
        return replace(_held_to(reading, limit, None), reason=reason)
    bound = before.value - allowed if limit.key.sense == AT_LEAST else before.value + allowed
    judged = _held_to(reading, limit, bound)
    return replace(judged, baseline=before.value, half_unit=reading.half_unit + before.half_unit)


def _held_to(reading: LimitReading, limit: Limit, bound: int | None) -> Judged:
    margin = minus(bound, reading.value)
    if margin is not None and limit.key.sense == AT_LEAST:
        margin = -margin
    return Judged(
        rank=reading.rank,
        label=reading.label,
        value=reading.value,
        limit=bound,
        ok=margin is not None and margin >= 0,
        half_unit=reading.half_unit,
        reason=reading.reason,
        margin=margin,
    )
