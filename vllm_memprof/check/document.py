"""The document of a check, and the sentences that GitHub and JUnit reports of it also say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import MODELLED, RunSummary
from vllm_memprof.accounting.summary import device_text, engine_text
from vllm_memprof.check.limits import AT_LEAST, BYTES, FINDING, REGRESSION, STATUS
from vllm_memprof.check.outcomes import CheckResult, Judged, Outcome
from vllm_memprof.document import (
    BAD,
    GOOD,
    NOT_MEASURED,
    PLAIN,
    Document,
    Line,
    Section,
)
from vllm_memprof.tables import (
    SHOWN_GROUPS,
    WIDE,
    Column,
    Look,
    fold,
    modelled,
    signed,
    table,
    wide_only,
)
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_bytes, format_gib

_UNITS = {"bytes": text("bytes"), "tokens": text("tokens")}


def check_document(result: CheckResult, width: int) -> Document:
    """Return the whole check, its table laid out for lines of ``width`` characters."""
    failed: list[str] = [told for outcome in result.failures for told in sentences(outcome)]
    found = [_limits(result, width >= WIDE)]
    if failed:
        found.append(Section(text("Failed: {count}", count=len(result.failures)), [], [], failed))
    said = verdict(result)
    return Document(
        kind="check",
        title=said,
        head=head(result),
        sections=found,
        verdict=said,
        verdict_style=GOOD if result.ok else BAD,
        whole=text("the JSON"),
        simulated=result.run.simulated,
    )


def head(result: CheckResult) -> list[Line]:
    """Return the lines that name the run and what it is held to."""
    lines = [
        Line(text("run"), _run(result.run)),
        Line(text("budget"), result.budget),
    ]
    if result.baseline is not None:
        lines.append(Line(text("baseline"), _run(result.baseline)))
    return [*lines, *(Line(text("note"), note) for note in result.notes)]


def verdict(result: CheckResult) -> Text:
    """Return the result in one sentence."""
    count, failed = len(result.limits), result.failures
    if not failed:
        return text("within budget: {count} of {count} checks hold", count=count)
    return text(
        "over budget: {failed} of {count} checks fail: {keys}",
        failed=len(failed),
        count=count,
        keys=", ".join(outcome.key for outcome in failed),
    )


def sentences(outcome: Outcome) -> list[Text]:
    """Return what failed, a sentence per group of ranks: measured, limit, margin, ranks."""
    groups = _groups([row for row in outcome.readings if not row.ok])
    return [
        text("{key}: {failure}", key=outcome.key, failure=_failure(outcome, group))
        for group in groups
    ]


def _run(run: RunSummary) -> Text:
    return join(
        ", ", [run.model, engine_text(run), device_text(run), EVIDENCE[run.source].read_from]
    )


def _failure(outcome: Outcome, group: Sequence[Judged]) -> str:
    row, where = group[0], _labels(group)
    if outcome.unit in (FINDING, STATUS):
        reason = row.reason or "-"
        return text("{labels}: {reason}", labels=where, reason=reason) if where else reason
    if row.value is None or row.limit is None:
        return (
            text("NOT MEASURED on {labels}: {reason}", labels=where, reason=row.reason)
            if where
            else text("NOT MEASURED: {reason}", reason=row.reason)
        )
    measured = modelled(_exact(outcome, row.value), outcome.how == MODELLED)
    if where:
        measured = text("{figure} on {labels}", figure=measured, labels=where)
    limit = _exact(outcome, row.limit)
    if row.baseline is not None:
        limit = text(
            "{limit} (baseline {baseline}, {written})",
            limit=limit,
            baseline=_exact(outcome, row.baseline),
            written=outcome.limit,
        )
    parts = {
        "measured": measured,
        "limit": limit,
        "count": -(row.margin or 0),
        "unit": _UNITS.get(outcome.unit, outcome.unit),
    }
    failure = (
        text("{measured}, allowed is at least {limit}: {count:bytes} {unit} too little", **parts)
        if outcome.sense == AT_LEAST
        else text("{measured}, allowed is at most {limit}: {count:bytes} {unit} too much", **parts)
    )
    if not row.within_digits:
        return failure
    digits = text("within the printed digits (±{half_unit:,} bytes)", half_unit=row.half_unit)
    return join(", ", [failure, digits])


def _exact(outcome: Outcome, value: int) -> Text:
    if outcome.unit == BYTES:
        return text("{value:gib4} GiB ({value:,} bytes)", value=value)
    unit = _UNITS.get(outcome.unit, outcome.unit)
    return text("{value:,} {unit}", value=value, unit=unit)


class _JudgedGroup(NamedTuple):
    """A limit and ranks that it judges alike."""

    outcome: Outcome
    readings: list[Judged]

    @property
    def first(self) -> Judged:
        return self.readings[0]


def _measured(row: _JudgedGroup) -> str:
    if row.outcome.unit == STATUS:
        return text("ok") if row.first.ok else text("not ok")
    if row.outcome.unit == FINDING:
        failed = NOT_MEASURED if row.outcome.unmeasured else text("found")
        return text("not found") if row.first.ok else failed
    return NOT_MEASURED if row.first.value is None else _figure(row.outcome, row.first.value)


def _limit(row: _JudgedGroup) -> str:
    words = {STATUS: text("ok"), FINDING: text("none")}
    if row.outcome.unit in words:
        return words[row.outcome.unit]
    return "-" if row.first.limit is None else _figure(row.outcome, row.first.limit)


def _margin(row: _JudgedGroup) -> str:
    if row.outcome.unit in (FINDING, STATUS):
        return ""
    within = "±" if row.first.margin and row.first.within_digits else ""
    return signed(row.first.margin) + within


_LIMITS = (
    Column("", lambda row: modelled(row.outcome.key, row.outcome.how == MODELLED)),
    Column("Measured", _measured, right=True),
    Column("Limit", _limit, right=True),
    Column("Margin", _margin, right=True),
    Column(
        "As written",
        lambda row: row.outcome.limit if row.outcome.unit not in (FINDING, STATUS) else "",
        when=wide_only,
        right=True,
    ),
    Column(
        "Baseline",
        lambda row: "" if row.first.baseline is None else _figure(row.outcome, row.first.baseline),
        when=wide_only,
        right=True,
    ),
    Column("Ranks", lambda row: _labels(row.readings)),
)


def _limits(result: CheckResult, wide: bool) -> Section:
    """Return every limit: the groups of ranks that fail, else the one with the least margin."""
    rows = []
    for outcome in result.limits:
        failing = [row for row in outcome.readings if not row.ok]
        groups = _groups(failing or outcome.readings)
        rows += [_JudgedGroup(outcome, group) for group in groups[: SHOWN_GROUPS if failing else 1]]
    readings = [row for outcome in result.limits for row in outcome.readings]
    notes: list[str] = []
    if any(row.within_digits for row in readings):
        notes.append(
            text(
                "±: the margin is smaller than what the printed digits leave open; the log cannot "
                "decide it"
            )
        )
    if any(outcome.how == MODELLED for outcome in result.limits):
        notes.append(text("(m): set by the profile of the simulated device"))
    if any(outcome.table == REGRESSION for outcome in result.limits):
        notes.append(text("limits of [regression] are the baseline's figure with what is allowed"))

    def look(row: _JudgedGroup) -> Look:
        return Look(PLAIN, "✓") if row.first.ok else Look(BAD, "✗")

    return table(text("Limits; margins in bytes or tokens"), _LIMITS, rows, notes, wide, look=look)


def _figure(outcome: Outcome, value: int) -> str:
    return f"{format_gib(value, 4)} GiB" if outcome.unit == BYTES else format_bytes(value)


def _groups(rows: Sequence[Judged]) -> list[list[Judged]]:
    """Return rows that differ in nothing but their rank; unmeasured ones first, then by margin."""
    found: dict[tuple[object, ...], list[Judged]] = {}
    for row in rows:
        found.setdefault((row.value, row.limit, row.ok, row.reason), []).append(row)
    return sorted(
        found.values(), key=lambda group: (group[0].margin is not None, group[0].margin or 0)
    )


def _labels(group: Sequence[Judged]) -> str:
    return fold([row.label for row in group if row.label])
