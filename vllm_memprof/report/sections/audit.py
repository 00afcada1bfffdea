"""The audit: the engine's figures, and memprof's own readings of the same memory beside them."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import RankReport, Reading, Report
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.document import BAD, MUTED, PLAIN, TOTAL, Section
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.tables import Look, modelled
from vllm_memprof.text import Text, fold, join, text
from vllm_memprof.units import only_known


def audit(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the figures of both; nothing where none is compared, as of a log."""
    rows = rank.budget.audit
    if all(row.difference_bytes is None for row in rows):
        return
    known = [row for row in rows if row.bytes is not None or row.engine_bytes is not None]
    compared = any(row.engine_bytes is not None for row in rows if row.name in QUANTITIES)
    notes: list[str] = []
    for reason in dict.fromkeys(only_known(row.reason for row in rows)):
        titles = join(", ", [row.title for row in rows if row.reason == reason])
        notes.append(text("{titles}: {reason}", titles=titles, reason=reason))
    notes += [
        text("tolerance of {title}: {between}", row)
        for row in rows
        if row.tolerance_bytes and row.name != "kv_cache" and row.between is not None
    ]

    def look(row: Reading) -> Look:
        mark = "?" if row.undecided else "✗" if row.agrees is False else ""
        agreeing = TOTAL if row.name == "kv_cache" else PLAIN
        return Look({None: MUTED, False: BAD, True: agreeing}[row.agrees], mark)

    yield draw(
        sheet,
        "audit",
        known,
        {"compared": compared},
        notes,
        look,
        titled=lambda row: modelled(row.title, row.how == MODELLED),
    )


def recomputed_from(sheet: Sheet, rank: RankReport) -> Iterator[str]:
    """Say what the recomputed equation shows, and what it does not; nothing where it is not."""
    budget = rank.budget
    if budget.balanced is not True or budget.override:
        return
    if sheet.evidence.recomputed is not None:
        yield sheet.evidence.recomputed
    elif any(
        row.name in budget.subtracted and row.engine_bytes is not None for row in budget.audit
    ):
        yield text(
            "recomputed from the engine's own values: the equation matches this release; "
            "the cross-check tests its inputs"
        )
    else:
        yield text("recomputed from memprof's readings: the engine keeps no figure of its terms")


def audited(report: Report) -> Text | None:
    """Return the outcome in a few words; None where nothing could be compared."""
    rows = [(rank.label, row) for rank in report.ranks for row in rank.budget.audit]
    if off := [(label, row) for label, row in rows if row.agrees is False]:
        titles = join(", ", dict.fromkeys(row.title for _, row in off))
        labels = fold(list(dict.fromkeys(label for label, _ in off)))
        return text("cross-check: {terms} differ on {labels}", labels=labels, terms=titles)
    agree = {row.name for _, row in rows if row.agrees}
    if not agree:
        return None
    compared = {row.name for _, row in rows if row.engine_bytes is not None}
    agree -= {row.name for _, row in rows if row.undecided}
    return text(
        "{agree} of {count} engine values confirmed",
        agree=len(agree),
        count=len(compared),
    )
