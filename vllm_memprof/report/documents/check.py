"""The document of a check, and the sentences that GitHub and JUnit reports of it also say."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_memprof.accounting.model import MODELLED, RunSummary
from vllm_memprof.check.limits import AT_LEAST, BYTES, FINDING, REGRESSION, STATUS
from vllm_memprof.check.outcomes import CheckResult, Judged, Outcome
from vllm_memprof.document import (
    BAD,
    GOOD,
    NOT_MEASURED,
    PLAIN,
    Document,
    Head,
    Line,
    Row,
    Section,
)
from vllm_memprof.report.sections.base import device_text, engine_text
from vllm_memprof.tables import SHOWN_GROUPS, WIDE, fold, modelled
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
    count, failed = len(result.outcomes), result.failures
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
    groups = _groups([row for row in outcome.judged if not row.ok])
    return [
        text("{key}: {failure}", key=outcome.key, failure=_failure(outcome, group))
        for group in groups
    ]


def _run(run: RunSummary) -> Text:
    source = text("read from log text") if run.source == "log" else text("read from hooks")
    return join(", ", [run.model, engine_text(run), device_text(run), source])


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
            written=outcome.written,
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


def _limits(result: CheckResult, wide: bool) -> Section:
    """Return every limit: the groups of ranks that fail, else the one with the least margin."""
    columns = [
        Head("", right=False),
        Head(text("Measured")),
        Head(text("Limit")),
        Head(text("Margin")),
        *([Head(text("As written")), Head(text("Baseline"))] if wide else []),
        Head(text("Ranks"), right=False),
    ]
    rows = []
    for outcome in result.outcomes:
        failing = [row for row in outcome.judged if not row.ok]
        groups = _groups(failing or outcome.judged)
        shown = groups[:SHOWN_GROUPS] if failing else groups[:1]
        rows += [_row(outcome, group, wide) for group in shown]
    judged = [row for outcome in result.outcomes for row in outcome.judged]
    notes: list[str] = []
    if any(row.within_digits for row in judged):
        notes.append(
            text(
                "±: the margin is smaller than what the printed digits leave open; the log cannot "
                "decide it"
            )
        )
    if any(outcome.how == MODELLED for outcome in result.outcomes):
        notes.append(text("(m): set by the profile of the simulated device"))
    if any(outcome.table == REGRESSION for outcome in result.outcomes):
        notes.append(text("limits of [regression] are the baseline's figure with what is allowed"))
    return Section(text("Limits; margins in bytes or tokens"), columns, rows, notes)


def _row(outcome: Outcome, group: Sequence[Judged], wide: bool) -> Row:
    row = group[0]
    if outcome.unit == STATUS:
        cells: list[str] = [text("ok") if row.ok else text("not ok"), text("ok"), ""]
    elif outcome.unit == FINDING:
        judged = NOT_MEASURED if outcome.unmeasured else text("found")
        cells = [text("not found") if row.ok else judged, text("none"), ""]
    else:
        cells = [NOT_MEASURED if row.value is None else _figure(outcome, row.value)]
        cells.append("-" if row.limit is None else _figure(outcome, row.limit))
        margin = f"{row.margin:+,}{'±' if row.within_digits else ''}" if row.margin else "0"
        cells.append("-" if row.margin is None else margin)
    if wide:
        cells.append(outcome.written if outcome.unit not in (FINDING, STATUS) else "")
        cells.append("" if row.baseline is None else _figure(outcome, row.baseline))
    return Row(
        [modelled(outcome.key, outcome.how == MODELLED), *cells, _labels(group)],
        style=PLAIN if row.ok else BAD,
        mark="✓" if row.ok else "✗",
    )


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
