"""Figures that a log prints and that no term of the budget equation shows."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import Row, Section
from vllm_memprof.report.sections.base import CONTENT, Sheet, draw
from vllm_memprof.tables import COUNT, GIB4, Size
from vllm_memprof.text import text

#: ``shown_by``: figure -> the term of an equation that shows it where the equation is known.
#: ``rounded``: where the engine prints the bytes of a suggestion on another part of the line, which
#: may be cut.
_SHOWN_BY, _ROUNDED = (CONTENT["printed"][name] for name in ("shown_by", "rounded"))


def printed(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what a log prints besides; nothing of other runs."""
    if not sheet.evidence.partial:
        return
    rows: list[Row | Size] = []
    terms = {term.name: term.bytes for term in rank.budget.terms if term.bytes is not None}
    if rank.budget.override:  # the equation shows none then
        beside = {name: size for name, size in terms.items() if name not in _SHOWN_BY.values()}
        rows += [Size(title_of(name), size) for name, size in beside.items()]
        terms = beside
    named = {name: title_of(term) for name, term in _SHOWN_BY.items() if term not in terms}
    for name, title in {**named, **TITLES["printed"]}.items():
        of = name if name in rank.figures else _ROUNDED.get(name, name)
        value = rank.figures.get(of)
        if value is None:
            continue
        if name.endswith("_bytes"):
            half = rank.half_units.get(of, 0)
            size = COUNT(int(value)) + (f" ±{half:,}" if half else "")
            rows.append(Row([title, GIB4(value), size]))
        elif name.endswith(("_utilization", "_fraction")):
            rows.append(Row([title, f"{value:.4f}", ""]))
        elif name.endswith("_requests"):
            rows.append(Row([title, "", COUNT(int(value))]))
        else:
            rows.append(Row([title, "", text("{tokens} tokens", tokens=COUNT(int(value)))]))
    charged = rank.figures.get("graph_estimate_charged")
    if rank.budget.equation is not None:  # its terms say so
        charged = None
    if rows or charged is not None:
        asked, equivalent = (
            rank.figures.get(f"{name}_utilization") for name in ("gpu_memory", "equivalent")
        )
        unknown = None in (asked, equivalent) or rank.figures.get("device_total_bytes") is not None
        figures = {
            "charged": charged == 1,
            "not_charged": charged == 0,
            "asked": asked,
            "equivalent": equivalent,
            "share": None if unknown else (asked or 0) - (equivalent or 0),
        }
        yield draw(sheet, "printed", rows, figures)
