"""The audit: the engine's figures, and memprof's own readings of the same memory beside them."""

from __future__ import annotations

from vllm_memprof.accounting.audit import audit_title
from vllm_memprof.accounting.model import MODELLED, AuditRow, RankReport, Report
from vllm_memprof.accounting.quantities import QUANTITIES
from vllm_memprof.report.document import BAD, MUTED, PLAIN, TOTAL, Column, Row, Section
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    fold,
    group_ranks,
    labels_of,
    modelled,
)
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_bytes, format_gib


def audit_sections(report: Report, wide: bool) -> list[Section]:
    """Return a table per group of ranks; none where nothing is compared, as of a log."""
    known = [
        rank
        for rank in report.ranks
        if any(row.difference_bytes is not None for row in rank.budget.audit)
    ]
    groups = group_ranks(known, lambda rank: repr(rank.budget.audit))
    return [_section(members, wide) for members in groups[:SHOWN_GROUPS]]


def recomputed_from(report: Report, rank: RankReport) -> list[str]:
    """Say what the recomputed equation shows, and what it does not; none where it is not."""
    budget = rank.budget
    if budget.balanced is not True or budget.override:
        return []
    terms = {term.name for term in budget.terms if term.subtracted}
    kept = [row for row in budget.audit if row.term in terms and row.engine_bytes is not None]
    if report.run.source == "log":
        note = text(
            "recomputed from the engine's own figures: its arithmetic and release are understood; "
            "no figure is audited, a log holds the engine's figures only"
        )
    elif kept:
        note = text(
            "recomputed from the engine's own figures: its arithmetic and release are understood; "
            "the audit compares the figures"
        )
    else:
        note = text("recomputed from memprof's readings: the engine keeps no figure of its terms")
    return [note]


def audited(report: Report) -> Text | None:
    """Return the outcome in a few words; None where nothing could be compared."""
    rows = [(rank, row) for rank in report.ranks for row in rank.budget.audit]
    if off := [(rank, row) for rank, row in rows if row.agrees is False]:
        labels = list(dict.fromkeys(rank.label for rank, _ in off))
        titles = list(dict.fromkeys(audit_title(row) for _, row in off))
        return text(
            "audit: differs on {labels} in {terms}",
            labels=fold(labels),
            terms=join(", ", titles),
        )
    agreeing = [row for _, row in rows if row.agrees]
    if not agreeing:
        return None
    compared = {row.term for _, row in rows if row.engine_bytes is not None}
    agree = {row.term for row in agreeing} - {row.term for _, row in rows if row.undecided}
    return text(
        "audit: {agree} of {count} figures agree",
        agree=len(agree),
        count=len(compared),
    )


def _section(members: list[RankReport], wide: bool) -> Section:
    rows = members[0].budget.audit
    columns = [
        Column("", right=False),
        Column(text("Engine, GiB")),
        Column(text("Read, GiB")),
        Column(text("Difference")),
        Column(text("Tolerance")),
        *([Column(text("Read from"), right=False)] if wide else []),
    ]
    cells = [_row(row) for row in rows if row.own_bytes is not None or row.engine_bytes is not None]
    for row in cells:
        del row.cells[len(columns) :]
    title = text(
        "Audit: the engine's figures and memprof's readings, {labels}", labels=labels_of(members)
    )
    return Section(title, columns, cells, _notes(rows))


def _row(row: AuditRow) -> Row:
    difference = "-" if row.difference_bytes is None else f"{row.difference_bytes:+,}"
    difference = "0" if row.difference_bytes == 0 else difference
    style, mark = PLAIN, ""
    if row.agrees is False:
        style, mark = BAD, "✗"
    elif row.agrees is None:
        style = MUTED
    elif row.term == "kv_cache":
        style = TOTAL
    if row.undecided:
        mark = "?"
    return Row(
        [
            modelled(audit_title(row), row.how == MODELLED),
            format_gib(row.engine_bytes, 4),
            format_gib(row.own_bytes, 4),
            difference,
            format_bytes(row.tolerance_bytes),
            row.source or "-",
        ],
        style=style,
        mark=mark,
    )


def _notes(rows: list[AuditRow]) -> list[str]:
    """Say why a figure is missing and what a tolerance is for, each reason once."""
    notes: list[str] = []
    reasons = dict.fromkeys(row.reason for row in rows if row.reason is not None)
    for reason in reasons:
        titles = [audit_title(row) for row in rows if row.reason == reason]
        notes.append(text("{titles}: {reason}", titles=join(", ", titles), reason=reason))
    for row in rows:
        if row.tolerance_bytes and row.term != "kv_cache" and row.between is not None:
            notes.append(
                text("tolerance of {title}: {between}", title=audit_title(row), between=row.between)
            )
    if not any(row.engine_bytes is not None for row in rows if row.term in QUANTITIES):
        return notes
    notes.append(
        text(
            "difference and tolerance in bytes; where nothing is said, nothing lies between the "
            "engine's reading and memprof's"
        )
    )
    return notes
