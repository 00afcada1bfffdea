"""Audit the engine's figures: beside each stands memprof's own reading of the same memory.

The equation recomputed from the engine's own figures shows that its arithmetic and its release are
understood, and no more: where a figure of the engine is wrong, so is the result. Here every figure
that an equation takes is read again from memprof's snapshots at its own phase edges
(``Moments.own``), and the equation is evaluated with those readings alone. No reading comes
from a field of the engine; a term that memprof cannot read has None and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_memprof.accounting.budget import equations
from vllm_memprof.accounting.model import Reading
from vllm_memprof.accounting.readings.quantities import QUANTITIES, title_of
from vllm_memprof.accounting.readings.startup import (
    Moments,
    made_of,
    unread,
)
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.engines.equation import Equation, Figures, Term
from vllm_memprof.record.spans import DERIVED, weakest
from vllm_memprof.text import join, text

#: Figures that stand in a term and in the request, and have no row of their own.
_LEAST_OF_RANKS = frozenset({"least_free_before_load_bytes", "least_free_after_load_bytes"})
#: Terms that set memory aside -> the engine's limit of what is taken from it later. No memory is
#: read: it says whether two settings of the engine are the same.
_SET_ASIDE = {"mm_reserved": "mm_cache_limit_bytes"}


def audit(
    equation: Equation,
    engine: Figures,
    readings: Moments,
    asked_utilization: float | None = None,
) -> list[Reading]:
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
    own, share = readings.own, asked_utilization or engine.get(equation.share)
    base = own.get(equation.base, Reading(None))
    figures = {equation.base: base.bytes, equation.share: share}
    size = equations.computed_request(equation, figures)
    request = unread(text("device total or utilization is unknown"))
    if size is not None:
        source, how = text("its share of the size as read"), weakest((DERIVED, base.how))
        request = replace(base, bytes=int(size), how=how, source=source)
    terms = {term.name: _of_term(term, own, engine) for term in equation.terms}
    rows = [("requested", engine.get("requested_bytes"), request)]
    for term in equation.terms:
        passed = equation.pages is not None and term.figure == "half_page_bytes"
        if not passed and not (term.optional and term.value(engine) is None):
            rows.append((term.name, term.value(engine), terms[term.name]))
    of_terms = {term.figure for term in equation.terms} | _LEAST_OF_RANKS
    for name, reading in own.items():
        if engine.get(name) is not None and name not in of_terms:
            rows.append((name.removesuffix("_bytes"), engine[name], reading))
    granted = _granted(equation, engine, share, request, terms, own)
    rows.append(("kv_cache", engine.get("kv_cache_bytes"), granted))
    found = []
    for name, figure, reading in rows:
        read = reading if readings.not_own is None else unread(readings.not_own)
        reason = read.reason
        if read.bytes is not None and figure is None:
            reason = text(
                "the engine keeps no figure of it: memprof's reading stands in the equation"
            )
        elif read.undecided:
            reason = text(
                "it moved by {size:gib} GiB between the readings that enclose the engine's",
                size=read.tolerance_bytes,
            )
        found.append(
            replace(
                read,
                name=name,
                title=TITLES["figures"].get(name) or title_of(name),
                engine_bytes=None if figure is None else int(figure),
                reason=reason,
            )
        )
    return found


def _of_term(term: Term, own: Mapping[str, Reading], engine: Figures) -> Reading:
    """Return memprof's reading of a term: that of its figure, else of the figures it is made of."""
    unknown = QUANTITIES[term.name].unknown
    if term.name == "transient_headroom":
        return unread(unknown)
    if term.figure is not None and term.figure in own:
        return own[term.figure]
    setting = engine.get(_SET_ASIDE.get(term.name, ""))
    if setting is not None:
        source = text("limit of the cache of embeddings that the engine makes later")
        between = text("nothing: two settings of the engine, of memory that is not in use yet")
        return Reading(int(setting), DERIVED, source, tolerance_bytes=0, between=between)
    names = (*term.plus, *term.minus)
    if not names or not set(names) <= set(own):
        return unread(unknown)
    parts = [own[name] for name in names]
    for part in parts:
        if part.bytes is None:
            return unread(part.reason)
    added, taken = (
        join(" + ", [own[name].source or name for name in side]) for side in (term.plus, term.minus)
    )
    size = term.derived({name: own[name].bytes for name in names})
    return made_of(size, parts, text("{added} - {taken}", added=added, taken=taken))


def _granted(
    equation: Equation,
    engine: Figures,
    share: float | None,
    request: Reading,
    terms: Mapping[str, Reading],
    own: Mapping[str, Reading],
) -> Reading:
    """Evaluate the equation with memprof's readings; what it has not read is named."""
    if equations.evaluate(equation, engine).override is not None:
        return unread(text("a fixed size replaced the equation"))
    if request.bytes is None:
        return request
    if any(stage.replaces and stage.factor(engine) is not None for stage in equation.stages):
        return unread(text("the engine's planner of blocks made it of the device's budget"))
    figures = {**engine, **{name: reading.bytes for name, reading in own.items()}}
    figures |= {"requested_bytes": None, equation.share: share}
    used, borrowed = [request], []
    for term in equation.terms:
        reading, size = terms[term.name], term.value(engine)
        if not term.is_subtracted(engine):
            continue
        if reading.bytes is not None and term.name not in _SET_ASIDE:
            used.append(reading)
            size = reading.bytes
        elif size:
            borrowed.append(term.name)
        if term.figure is not None:
            figures[term.figure] = size
    if len(used) == 1:
        return unread(text("no term has a reading"))
    result = equations.evaluate(equation, figures)
    borrowed += result.stages
    source = text("the equation with memprof's readings")
    if borrowed:
        source = text(
            "the equation with memprof's readings, and the engine's {terms}",
            terms=", ".join(borrowed),
        )
    if result.kv_cache_bytes is None:
        return unread(text("a term has neither reading nor figure"), source)
    return made_of(result.kv_cache_bytes, used, source, equation.divisor)
