"""Holds a report to a budget file: limits enter, one outcome per limit leaves, with every rank's figure and margin.

Nothing passes unseen: a limit on a figure that is not known fails with the reason, and so does a run that did not end
well, whatever its figures are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm_memprof.accounting.findings import blind_ranks
from vllm_memprof.accounting.model import MEASURED, MODELLED, Finding, Report, RunSummary
from vllm_memprof.check.baseline import differences, remarks
from vllm_memprof.check.budget_file import BudgetFile, Limit
from vllm_memprof.check.limits import (
    AT_LEAST,
    AT_MOST,
    BUDGET,
    FAIL_ON,
    FINDING,
    REGRESSION,
    SAME_RANK,
    STATUS,
    Reading,
    figure_of,
    read_figure,
)
from vllm_memprof.record.codec import computed
from vllm_memprof.record.spans import How

CHECK_SCHEMA = "memprof.check/2"
#: Begins the reason of a forbidden finding that was not found because the run lacks what it is made of.
NOT_JUDGED = "not judged"


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
    margin: int | None = None  # room that is left; negative: over the limit by so much

    @property
    @computed
    def within_digits(self) -> bool:
        """Whether the figure before its rounding may lie on the other side of the limit."""
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
    written: str = field(metadata={"json": "limit"})
    line: int | None
    judged: list[Judged] = field(metadata={"json": "readings"})
    how: How = MEASURED

    @property
    @computed
    def ok(self) -> bool:
        return all(row.ok for row in self.judged)

    @property
    @computed
    def unmeasured(self) -> bool:
        """Whether it fails for a figure that is not known."""
        if self.unit in (FINDING, STATUS):
            return any((row.reason or "").startswith(NOT_JUDGED) for row in self.judged)
        return any(row.value is None or row.limit is None for row in self.judged)


@dataclass(frozen=True)
class CheckResult:
    """A run under a budget file."""

    run: RunSummary
    budget: str  # name of the file
    outcomes: list[Outcome] = field(metadata={"json": "limits"})
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
        return [outcome for outcome in self.outcomes if not outcome.ok]

    @property
    @computed
    def ok(self) -> bool:
        return not self.failures


def check_report(report: Report, budget: BudgetFile, baseline: Report | None = None) -> CheckResult:
    """Every limit of a budget file, in its order, after the run's own end.

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
    outcomes = [_ended(report)]
    outcomes += [_outcome(report, limit, baseline) for limit in budget.limits]
    outcomes += [_finding(report, name, line) for name, line in budget.fail_on.items()]
    notes = _notes(report, baseline)
    return CheckResult(
        report.run, budget.name, outcomes, None if baseline is None else baseline.run, notes
    )


def _ended(report: Report) -> Outcome:
    """The run's own end: figures of a run that failed are no figures of a run that serves."""
    status = str(report.run.outcome)
    running = report.run.status == "running"
    text = (
        "it is still running, or nobody was left to write its end"
        if running
        else report.run.exit_reason
    )
    reason = (
        None
        if status == "ok"
        else f"status {report.run.status if running else status}{f': {text}' if text else ''}"
    )
    return Outcome("run", "status", "the run ended well", STATUS, "", "ok", None, [_stated(reason)])


def _stated(reason: str | None) -> Judged:
    return Judged(None, "", None, None, reason is None, reason=reason)


def _finding(report: Report, name: str, line: int | None) -> Outcome:
    found = [finding for finding in report.findings if finding.id == name]
    rows = [_found(finding) for finding in found] or [
        Judged(rank.rank, rank.label, None, None, False, reason=f"{NOT_JUDGED}: {reason}")
        for rank, reason in blind_ranks(report, name)
    ]
    rows = rows or [_stated(None)]
    return Outcome(BUDGET, f"{FAIL_ON} {name}", "no such finding", FINDING, "", name, line, rows)


def _found(finding: Finding) -> Judged:
    text = f"{finding.title}: {finding.evidence}" if finding.evidence else finding.title
    return Judged(finding.rank, finding.label or "", None, None, False, reason=text)


def _outcome(report: Report, limit: Limit, baseline: Report | None) -> Outcome:
    figure = figure_of(limit.key)
    readings = read_figure(report, figure)
    if limit.key.table == REGRESSION:
        assert baseline is not None
        before = _before(
            limit, read_figure(baseline, figure), [reading.label for reading in readings]
        )
        judged = [_regressed(reading, limit, before[reading.label]) for reading in readings]
    else:
        judged = [_held_to(reading, limit, _allowed(limit, reading.whole)) for reading in readings]
    return Outcome(
        table=limit.key.table,
        key=limit.key.name,
        title=figure.title,
        unit=figure.unit,
        sense=limit.key.sense,
        written=limit.written,
        line=limit.line,
        judged=judged,
        how=MODELLED if report.run.simulated and figure.device_wide else MEASURED,
    )


def _allowed(limit: Limit, whole: int | None) -> int | None:
    """The amount that a limit speaks of; a percentage of something, down to the whole unit."""
    if limit.percent is None:
        return limit.amount
    return None if whole is None else int(limit.percent * whole)


def _before(limit: Limit, readings: list[Reading], labels: list[str]) -> Mapping[str, Reading]:
    """What each rank is held against, by its label."""
    if limit.key.against == SAME_RANK:
        same = {reading.label: reading for reading in readings}
        return {label: same.get(label, _no_rank(label)) for label in labels}
    unknown = next((reading for reading in readings if reading.value is None), None)
    pick = min if limit.key.sense == AT_LEAST else max
    worst = unknown or pick(readings, key=lambda reading: reading.value or 0)
    return dict.fromkeys(labels, worst)


def _no_rank(label: str) -> Reading:
    return Reading(None, label, None, reason=f"no rank {label} in it")


def _regressed(reading: Reading, limit: Limit, before: Reading) -> Judged:
    if before.value is None:
        return replace(
            _held_to(reading, limit, None), reason=f"the baseline does not tell: {before.reason}"
        )
    allowed = _allowed(limit, before.value)
    assert allowed is not None
    bound = before.value - allowed if limit.key.sense == AT_LEAST else before.value + allowed
    judged = _held_to(reading, limit, bound)
    return replace(judged, baseline=before.value, half_unit=reading.half_unit + before.half_unit)


def _held_to(reading: Reading, limit: Limit, bound: int | None) -> Judged:
    margin = None
    if reading.value is not None and bound is not None:
        margin = bound - reading.value if limit.key.sense == AT_MOST else reading.value - bound
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


def _notes(report: Report, baseline: Report | None) -> list[str]:
    notes = []
    if report.run.source == "log":
        notes.append("read from log text: every figure is known to its last printed digit")
    if baseline is not None:
        apart = differences(baseline, report)
        notes += [f"not comparable, compared all the same: {change.text}" for change in apart]
        notes += remarks(baseline, report)
    return notes
