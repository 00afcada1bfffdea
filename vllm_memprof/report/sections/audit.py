"""The audit: the engine's figures, and memprof's own readings of the same memory beside them."""

from __future__ import annotations

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import MODELLED, RankReport, Reading, Report
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.document import BAD, MUTED, PLAIN, TOTAL, Section
from vllm_memprof.tables import (
    COUNT,
    GIB4,
    Column,
    Look,
    alike,
    fold,
    modelled,
    signed,
    table,
    wide_only,
)
from vllm_memprof.text import Text, join, text

_AUDIT = (
    Column("", lambda row: modelled(row.title, row.how == MODELLED)),
    Column("Engine, GiB", "engine_bytes", GIB4),
    Column("Read, GiB", "bytes", GIB4),
    Column("Difference", "difference_bytes", signed),
    Column("Tolerance", "tolerance_bytes", COUNT),
    Column("Read from", "source", when=wide_only),
)


def audit_sections(report: Report, wide: bool) -> list[Section]:
    """Return a table per group of ranks; none where nothing is compared, as of a log."""

    def draw(rank: RankReport, labels: str) -> list[Section]:
        rows = rank.budget.audit
        title = text("Audit: the engine's figures and memprof's readings, {labels}", labels=labels)
        known = [row for row in rows if row.bytes is not None or row.engine_bytes is not None]
        return [table(title, _AUDIT, known, _notes(rows), wide, look=_look)]

    known = [
        rank
        for rank in report.ranks
        if any(row.difference_bytes is not None for row in rank.budget.audit)
    ]
    return alike(known, draw, lambda rank: repr(rank.budget.audit))


def _look(row: Reading) -> Look:
    mark = "?" if row.undecided else "✗" if row.agrees is False else ""
    if row.agrees is None:
        return Look(MUTED, mark)
    if not row.agrees:
        return Look(BAD, mark)
    return Look(TOTAL if row.name == "kv_cache" else PLAIN, mark)


def recomputed_from(report: Report, rank: RankReport) -> list[str]:
    """Say what the recomputed equation shows, and what it does not; none where it is not."""
    budget = rank.budget
    if budget.balanced is not True or budget.override:
        return []
    terms = {term.name for term in budget.terms if term.subtracted}
    kept = [row for row in budget.audit if row.name in terms and row.engine_bytes is not None]
    if (note := EVIDENCE[report.run.source].recomputed) is not None:
        return [note]
    if kept:
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
        titles = list(dict.fromkeys(row.title for _, row in off))
        return text(
            "cross-check: {terms} differ on {labels}",
            labels=fold(labels),
            terms=join(", ", titles),
        )
    agreeing = [row for _, row in rows if row.agrees]
    if not agreeing:
        return None
    compared = {row.name for _, row in rows if row.engine_bytes is not None}
    agree = {row.name for row in agreeing} - {row.name for _, row in rows if row.undecided}
    return text(
        "{agree} of {count} values match",
        agree=len(agree),
        count=len(compared),
    )


def _notes(rows: list[Reading]) -> list[str]:
    """Say why a figure is missing and what a tolerance is for, each reason once."""
    notes: list[str] = []
    reasons = dict.fromkeys(row.reason for row in rows if row.reason is not None)
    for reason in reasons:
        titles = [row.title for row in rows if row.reason == reason]
        notes.append(text("{titles}: {reason}", titles=join(", ", titles), reason=reason))
    for row in rows:
        if row.tolerance_bytes and row.name != "kv_cache" and row.between is not None:
            notes.append(
                text("tolerance of {title}: {between}", title=row.title, between=row.between)
            )
    if not any(row.engine_bytes is not None for row in rows if row.name in QUANTITIES):
        return notes
    notes.append(
        text(
            "difference and tolerance in bytes; where nothing is said, nothing lies between the "
            "engine's reading and memprof's"
        )
    )
    return notes
