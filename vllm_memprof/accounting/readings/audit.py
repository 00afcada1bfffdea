"""Audit the engine's figures: beside each stands memprof's own reading of the same memory.

The equation recomputed from the engine's own figures shows that its arithmetic and its release are
understood, and no more: where a figure of the engine is wrong, so is the result. Here every figure
that an equation takes is read again from memprof's snapshots at its own phase edges
(``readings.READINGS``), and the equation is evaluated with those readings alone. No reading comes
from a field of the engine; a term that memprof cannot read has None and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_memprof.accounting.budget import equations
from vllm_memprof.accounting.model import DERIVED, AuditRow
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.accounting.readings.startup import (
    CONSTANT,
    Reading,
    StartupReadings,
    made_of,
    unread,
)
from vllm_memprof.engines.equation import FIXED_SIZE, Equation, Figures, Term
from vllm_memprof.record.spans import weakest
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB

#: Where the device moved by more than this between the two readings that enclose the engine's, the
#: row agrees with nothing and contradicts nothing.
MOST_TOLERANCE_BYTES = 64 * MIB
#: Figures that stand in a term and in the request, and have no row of their own.
_LEAST_OF_RANKS = frozenset({"least_free_before_load_bytes", "least_free_after_load_bytes"})
#: Terms that memprof cannot read, and why.
_UNREADABLE: dict[str, Text] = {
    "graph_estimate": text("an estimate of the engine: nothing holds it when it is made"),
    "mm_reserved": text("set aside: nothing holds it when the KV cache is sized"),
    "page_rounding": text("a page of the pool, as the engine makes it"),
    "mm_ipc": text("set aside for the front end: nothing holds it during the start-up"),
    "consumed": text("the engine computes it from the host's memory"),
}
#: Terms that set memory aside -> the engine's limit of what is taken from it later. No memory is
#: read: it says whether two settings of the engine are the same.
_SET_ASIDE: dict[str, tuple[str, Text]] = {
    "mm_reserved": (
        "mm_cache_limit_bytes",
        text("limit of the cache of embeddings that the engine makes later"),
    ),
}
_NOT_HELD = text("nothing: two settings of the engine, of memory that nothing holds yet")
#: Figures beside the terms of equations -> their titles.
TITLES: dict[str, Text] = {
    "device_total": text("device total"),
    "initial_free": text("free at the start"),
    "initial_non_torch": text("non-torch at the start"),
    "profile_before_allocated_peak": text("allocated before profiling"),
    "profile_before_non_torch": text("non-torch before profiling"),
    "profile_after_allocated_peak": text("allocated peak of profiling"),
    "profile_after_non_torch": text("non-torch after profiling"),
    "profile_after_free": text("free after profiling"),
    "kv_cache": text("KV cache"),
}
#: Terms that are differences of which memprof does not know both moments, and why.
_NO_SPAN: dict[str, Text] = {
    "transient_headroom": text("from which allocated memory this release counts it was not read"),
}
_NOT_KEPT = text("the engine keeps no figure of it: memprof's reading stands in the equation")


def audit(
    equation: Equation,
    engine: Figures,
    readings: StartupReadings,
    asked_utilization: float | None = None,
) -> list[AuditRow]:
    """Return a row per term of the equation, and one per other figure of the engine.

    Args:
        equation: of the engine.
        engine: the figures that the engine itself keeps; none that memprof filled in.
        readings: of the rank.
        asked_utilization: ``--gpu-memory-utilization`` of the command, None where it was not given.

    Returns:
        Rows in bytes: the request, the terms, the other figures, and last the KV cache that the
        equation gives with memprof's readings alone.
    """
    own = readings.own
    base = own.get(equation.base, Reading(None))
    request = _request(equation, base, engine, asked_utilization)
    terms = {term.name: _of_term(term, own, engine) for term in equation.terms}
    rows: list[tuple[str, float | int | None, Reading]] = [
        ("requested", engine.get("requested_bytes"), request)
    ]
    for term in equation.terms:
        passed = equation.pages is not None and term.figure == "half_page_bytes"
        if not passed and not (term.optional and term.value(engine) is None):
            rows.append((term.name, term.value(engine), terms[term.name]))
    of_terms = {term.figure for term in equation.terms} | _LEAST_OF_RANKS
    for name, reading in own.items():
        if engine.get(name) is not None and name not in of_terms:
            rows.append((name.removesuffix("_bytes"), engine[name], reading))
    granted = _granted(equation, engine, request, asked_utilization, terms, own)
    rows.append(("kv_cache", engine.get("kv_cache_bytes"), granted))
    found = []
    for name, figure, reading in rows:
        read = reading if readings.not_own is None else unread(readings.not_own)
        known = read.bytes is not None
        undecided = known and read.tolerance > MOST_TOLERANCE_BYTES
        reason = None if known else read.reason or text("memprof does not read it")
        if known and figure is None:
            reason = _NOT_KEPT
        elif undecided:
            reason = text(
                "it moved by {size:gib} GiB between the readings that enclose the engine's",
                size=read.tolerance,
            )
        found.append(
            AuditRow(
                term=name,
                engine_bytes=None if figure is None else int(figure),
                own_bytes=read.bytes,
                tolerance_bytes=read.tolerance if known else None,
                undecided=undecided,
                how=read.how if known else None,
                source=read.source,
                between=read.between if known else None,
                reason=reason,
            )
        )
    return found


def _request(equation: Equation, total: Reading, engine: Figures, asked: float | None) -> Reading:
    utilization = asked or engine.get(equation.share)
    if total.bytes is None or utilization is None:
        return unread(text("device total or utilization is unknown"))
    figures = {equation.base: total.bytes, equation.share: utilization}
    size = int(equations.computed_request(equation, figures) or 0)
    if equation.base != "device_total_bytes":
        source = text("free memory as read x the share as the engine holds it")
        return replace(total, bytes=size, how=weakest((DERIVED, total.how)), source=source)
    source = text("device total as read x utilization of the command")
    if asked is None:
        source = text("device total as read x utilization as the engine holds it")
    return Reading(size, DERIVED, source, between=CONSTANT)


def _of_term(term: Term, own: Mapping[str, Reading], engine: Figures) -> Reading:
    """Return memprof's reading of a term: that of its figure, else of the figures it is made of."""
    if term.name in _NO_SPAN:
        return unread(_NO_SPAN[term.name])
    if term.figure is not None and term.figure in own:
        return own[term.figure]
    limit, source = _SET_ASIDE.get(term.name, ("", None))
    setting = engine.get(limit)
    if setting is not None:
        return Reading(int(setting), DERIVED, source, between=_NOT_HELD)
    parts = [own.get(name) for name in (*term.plus, *term.minus)]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return unread(_UNREADABLE.get(term.name))
    unknown = next((part for part in known if part.bytes is None), None)
    if unknown is not None:
        return unread(unknown.reason)
    added, taken = (
        join(" + ", [own[name].source or name for name in side]) for side in (term.plus, term.minus)
    )
    size = term.derived({name: own[name].bytes for name in (*term.plus, *term.minus)})
    return made_of(size, known, text("{added} less {taken}", added=added, taken=taken))


def _granted(
    equation: Equation,
    engine: Figures,
    request: Reading,
    asked: float | None,
    terms: Mapping[str, Reading],
    own: Mapping[str, Reading],
) -> Reading:
    """Evaluate the equation with memprof's readings; an estimate is the engine's, and named."""
    replaced = text("a fixed size replaced the equation")
    if equation.takes_fixed_size and engine.get(FIXED_SIZE) is not None:
        return unread(replaced)
    if request.bytes is None:
        return request
    if equation.limited_by and engine.get(equation.limited_by) is not None:
        return unread(replaced)
    figures: dict[str, int | float | None] = {
        equation.base: own[equation.base].bytes,
        equation.share: asked or engine.get(equation.share),
        "graph_estimate_charged": engine.get("graph_estimate_charged"),
    }
    used: list[Reading] = [request]
    borrowed: list[str] = []
    if equation.pages is not None:
        figures[equation.pages] = engine.get(equation.pages)
    for stage in equation.stages:
        if stage.factor(engine) is not None:
            if stage.replaces:
                reason = text("the engine's planner of blocks made it of the device's budget")
                return unread(reason)
            figures |= {name: engine.get(name) for name in stage.figures}
            borrowed.append(stage.name)
    for term in equation.terms:
        if not term.is_subtracted(engine):
            continue
        if term.figure is None:
            figures |= {name: own[name].bytes for name in (*term.plus, *term.minus) if name in own}
            used.append(terms[term.name])
            continue
        if equation.pages is not None and (term.optional or term.figure == "half_page_bytes"):
            figures[term.figure] = term.value(engine)  # of the engine's own set-up
            continue
        size = terms[term.name].bytes
        if size is not None:
            used.append(terms[term.name])
        elif term.name in _UNREADABLE:
            size = term.value(engine)
            borrowed += [term.name] if size else []
        else:
            return unread(text("{term} has no reading", term=term.name))
        figures[term.figure] = size
    if len(used) == 1:
        return unread(text("no term has a reading"))
    source = text("the equation with memprof's readings")
    if borrowed:
        source = text(
            "the equation with memprof's readings, and the engine's {terms}",
            terms=", ".join(borrowed),
        )
    size = equations.evaluate(equation, figures).kv_cache_bytes
    if size is None:
        return unread(text("a term has neither reading nor figure"), source)
    return made_of(size, used, source, equation.divisor)


def audit_title(row: AuditRow) -> str:
    """Return the title of a row: that of its quantity, or of its moment."""
    return TITLES.get(row.term) or title_of(row.term)
