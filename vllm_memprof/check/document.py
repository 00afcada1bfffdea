"""The document of a check, and the sentences that GitHub and JUnit reports of it also say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.accounting.summary import device_text, engine_text
from vllm_memprof.check.limits import BYTES, FINDING, STATUS, LimitReading
from vllm_memprof.check.outcomes import CheckResult, Outcome
from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    NOT_MEASURED,
    PLAIN,
    Document,
    Head,
    Line,
    Row,
    Section,
    note_lines,
)
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import SHOWN_GROUPS, WIDE, group_ranks, modelled, signed
from vllm_memprof.text import Text, fold, join, text, titled
from vllm_memprof.units import format_bytes, format_gib

#: Unit of what is not counted -> what a rank has that holds, has that fails, has to have.
_STATED = {
    STATUS: (text("ok"), text("not ok"), text("ok")),
    FINDING: (text("not found"), text("found"), text("none")),
}


def check_document(result: CheckResult, width: int) -> Document:
    """Return the whole check, its table laid out for lines of ``width`` characters."""
    failed: list[str] = [told for outcome in result.failures for told in sentences(outcome)]
    found = [_limits(result, width >= WIDE)]
    if failed:
        found.append(Section(text("Failed: {failed}", result), [], [], failed))
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
    lines = [Line(text("run"), _run(result.run)), Line(text("budget"), result.budget)]
    if result.run.command:
        lines.insert(1, Line(text("command"), " ".join(result.run.command), CODE))
    if result.baseline is not None:
        lines.append(Line(text("baseline"), _run(result.baseline)))
    return [*lines, *note_lines(result.notes)]


def _run(run: RunSummary) -> Text:
    read_from = run.evidence.read_from
    return join(", ", (run.model, engine_text(run), device_text(run), read_from))


def verdict(result: CheckResult) -> Text:
    """Return the result in one sentence."""
    count, keys = len(result.limits), ", ".join(outcome.key for outcome in result.failures)
    if result.ok:
        return text("within budget: {count} of {count} checks passed", count=count)
    return text(
        "over budget: {failed} of {count} checks fail: {keys}", result, count=count, keys=keys
    )


def sentences(outcome: Outcome) -> list[Text]:
    """Return what failed, a sentence per group of ranks: measured, limit, margin, ranks."""
    groups = _groups([row for row in outcome.readings if not row.ok])
    return [join(": ", (outcome.key, *_failure(outcome, group))) for group in groups]


def _failure(outcome: Outcome, group: Sequence[LimitReading]) -> tuple[str | None, ...]:
    row, labels = group[0], _labels(group)
    if outcome.unit in _STATED:
        return labels or None, row.reason
    if row.value is None or row.limit is None:
        where = text("NOT MEASURED on {labels}", labels=labels) if labels else NOT_MEASURED
        return where, row.reason
    limit = _exact(outcome, row.limit)
    if row.baseline is not None:
        limit = text(
            "{limit} (baseline {baseline}, {written})",
            limit=limit,
            baseline=_exact(outcome, row.baseline),
            written=outcome.limit,
        )
    measured = modelled(_exact(outcome, row.value), outcome.how == MODELLED)
    said = text(
        "{measured} on {labels}, allowed is {sense} {limit}",
        measured=measured,
        labels=labels,
        sense=titled(outcome.sense),
        limit=limit,
    )
    missed = text("missed by {missed}", missed=_exact(outcome, -(row.margin or 0)))
    digits = row.within_digits and text("within the printed digits (±{half_unit:,} bytes)", row)
    return said, join(", ", (missed, digits))


def _exact(outcome: Outcome, value: int) -> Text:
    if outcome.unit == BYTES:
        return text("{value:gib4} GiB ({value:,} bytes)", value=value)
    return text("{value:,} tokens", value=value)


def _limits(result: CheckResult, wide: bool) -> Section:
    """Return every limit: the groups of ranks that fail, else the one with the least margin."""
    rows, notes, outcomes = list[Row](), list[str](), result.limits

    def cell(outcome: Outcome, value: int | None, unknown: str) -> str:
        if value is None:
            return unknown
        return f"{format_gib(value, 4)} GiB" if outcome.unit == BYTES else format_bytes(value)

    for outcome in outcomes:
        failing = [row for row in outcome.readings if not row.ok]
        groups = _groups(failing)[:SHOWN_GROUPS] or _groups(outcome.readings)[:1]
        holds, fails, wanted = _STATED.get(outcome.unit, ("", "", "-"))
        failed = NOT_MEASURED if outcome.unmeasured else fails
        title, figure = modelled(outcome.key, outcome.how == MODELLED), partial(cell, outcome)
        for group in groups:
            row = group[0]
            held, limit = figure(row.value, holds if row.ok else failed), figure(row.limit, wanted)
            cells = [title, held, limit, signed(row.margin) + ("±" if row.within_digits else "")]
            cells += [outcome.limit, figure(row.baseline, "")] if wide else []
            cells.append(_labels(group))
            style, mark = (PLAIN, "✓") if row.ok else (BAD, "✗")
            rows.append(Row(cells, style=style, mark=mark))
    if any(row.within_digits for outcome in outcomes for row in outcome.readings):
        notes.append(
            text(
                "±: the margin is smaller than what the printed digits leave open; the log cannot "
                "decide it"
            )
        )
    if any(outcome.how == MODELLED for outcome in outcomes):
        notes.append(text("(m): set by the profile of the simulated device"))
    if result.baseline is not None:
        notes.append(text("limits of [regression] are the baseline's figure with what is allowed"))
    figures = [text("Measured"), text("Limit"), text("Margin")]
    figures += [text("As written"), text("Baseline")] if wide else []
    heads = [Head("", False), *map(Head, figures), Head(text("Ranks"), False)]
    return Section(text("Limits; margins in bytes or tokens"), heads, rows, notes)


def _groups(rows: Sequence[LimitReading]) -> list[list[LimitReading]]:
    """Return rows that differ in nothing but their rank; unmeasured ones first, then by margin."""
    return sorted(
        group_ranks(rows, lambda row: (row.value, row.limit, row.ok, row.reason)),
        key=lambda group: (group[0].margin is not None, group[0].margin or 0),
    )


def _labels(group: Sequence[LimitReading]) -> str:
    return fold([row.label for row in group if row.label])
