"""The KV-cache equations of all engines, and the one function that evaluates a row.

Figures of the run enter, the KV budget in bytes leaves, rounded exactly as the engine rounds it.
The rows stand in the engines' folders; a new rounding rule costs a word in
``engines.equation.Equation`` and a line in ``evaluate``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_memprof.accounting.model import TermRow
from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.equation import (
    FIXED_SIZE,
    HALF_A_PAGE,
    WHOLE_PAGES,
    Equation,
    Figures,
    Term,
    read_equations,
)
from vllm_memprof.text import text
from vllm_memprof.units import only_known

#: A row with ``versions``, a specifier of PEP 440.
_Row = TypeVar("_Row", bound=Any)

#: ``Budget.override`` of a start whose KV cache an earlier one had measured and kept.
#: (vllm/v1/worker/startup_plan.py, vLLM from 0.27, VLLM_ENABLE_STARTUP_PLAN=1)
STARTUP_PLAN = "startup_plan"
#: The first row that fits a release counts; the last of an id where a log tells the form of its
#: lines alone.
EQUATIONS: tuple[Equation, ...] = tuple(
    each for row in ENGINES.values() for each in read_equations(row.folder)
)


def form_of(equation_id: str | None) -> Equation | None:
    """Return the newest row of an equation's id, for what all of its rows have in common.

    Its divisor, the parts of its terms, whether it subtracts other processes' memory, and whether
    the engine checks what is free are the same in all rows of an id.
    """
    return next((row for row in reversed(EQUATIONS) if row.id == equation_id), None)


def named_equation(equation_id: str | None) -> str:
    """Return an equation's id with the first release that has it; "" of none."""
    rows = [row for row in EQUATIONS if row.id == equation_id]
    limits = [one for row in rows for one in row.versions.split(",")]
    least = min((Version(one[2:]) for one in limits if one.startswith(">=")), default=None)
    if least is None:
        return equation_id or ""
    return f"{equation_id} ({rows[0].engine} {least.major}.{least.minor}+)"


def divisor_of(equation_id: str | None) -> int:
    """Return what an equation divides its result by; 1 where the equation is unknown."""
    row = form_of(equation_id)
    return 1 if row is None else row.divisor


def ignoring_fixed_size(equation_id: str | None) -> str:
    """Return the releases that have an equation and ignore --kv-cache-memory-bytes, "" for none."""
    return "; ".join(
        f"{row.engine} {row.read_in}"
        for row in EQUATIONS
        if row.id == equation_id and not row.takes_fixed_size
    )


@dataclass(frozen=True)
class Evaluation:
    """An equation with the figures of one rank in it."""

    requested: int | float | None  # as the engine holds it
    terms: list[TermRow]
    kv_cache_bytes: int | None  # None: a figure is missing
    tolerance_bytes: int  # half-units of every figure used; 0 from hooks
    #: "kv_cache_memory_bytes", "startup_plan": a fixed size replaced the equation.
    override: str | None = None
    stages: tuple[str, ...] = ()  # names of those that were run


def select(
    engine: str | None,
    version: str | None,
    forms: Sequence[str] = (),
    device: str | None = None,
    known: Collection[str] = (),
) -> tuple[Equation | None, str | None]:
    """Return the row for an engine release, and how it was chosen.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        version: of the engine. It decides where it is known; a release that nobody has read has
            no row.
        forms: ids of the equations whose lines a log holds. They decide where no version is known.
        device: name of the chip; some have an equation of their own.
        known: names of the figures that were read. Of the rows of one form, the one that they fill
            best counts.
    """
    rows = [row for row in EQUATIONS if row.engine == engine]
    if version is None:
        seen = [row for row in rows if row.id in forms]
        if len({row.id for row in seen}) != 1:
            return None, None
        best = min(reversed(seen), key=lambda row: _fill(row, set(known)))
        return best, text("the form of its lines, as {engine} prints them", engine=engine)
    fitting = of_release(rows, version)
    for row in fitting:
        named = row.only is not None and (device or "").lower().startswith(row.only.lower())
        if row.only is not None and (named or row.id in forms):
            why = text("the form of its lines") if row.id in forms else device
            chosen = text("{engine} {version} and {why}", engine=engine, version=version, why=why)
            return row, chosen
    plain = next((row for row in fitting if row.only is None), None)
    return (None, None) if plain is None else (plain, f"{engine} {version}")


def _fill(row: Equation, known: set[str]) -> tuple[int, int]:
    """Return (subtracted terms that the figures say nothing of, - those that they fill)."""
    terms = [term for term in row.terms if term.subtracted and not term.stands_for]
    filled = [
        term
        for term in terms
        if term.figure in known or (term.plus and known.issuperset((*term.plus, *term.minus)))
    ]
    return sum(not term.optional for term in terms if term not in filled), -len(filled)


def of_release(rows: Sequence[_Row], version: str) -> list[_Row]:
    """Return the rows of a release."""
    try:
        release = Version(version)
    except InvalidVersion:
        return []
    return [row for row in rows if SpecifierSet(row.versions).contains(release, prereleases=True)]


def computed_request(equation: Equation, figures: Figures) -> int | float | None:
    """Return what the engine asks of the device: total x utilization; None: one is unknown."""
    total, utilization = figures.get(equation.base), figures.get(equation.share)
    if total is None or utilization is None:
        return None
    product = total * utilization
    return {"float": product, "int": int(product), "ceil": math.ceil(product)}[equation.request]


def evaluate(
    equation: Equation, figures: Figures, half_units: Mapping[str, int] | None = None
) -> Evaluation:
    """Recompute one rank's KV budget.

    Args:
        equation: the row that belongs to the run.
        figures: FIGURES of the rank, bytes; None is unknown.
        half_units: half of the last printed digit per figure, bytes, of those read from text.

    Returns:
        The terms and the result; a missing figure makes the result None, never a smaller sum.
    """
    half_units = half_units or {}
    asked = figures.get("requested_bytes")
    if asked is None:
        asked = computed_request(equation, figures)
    in_force = _terms_for(equation, figures)
    terms = [
        TermRow(
            term.name,
            term.value(figures),
            term.is_subtracted(figures),
            term.half_unit(figures, half_units),
        )
        for term in in_force
    ]
    fixed = figures.get(FIXED_SIZE) if equation.takes_fixed_size else None
    if fixed is not None:
        by = STARTUP_PLAN if figures.get("startup_plan_bytes") else "kv_cache_memory_bytes"
        size = int(fixed)
        for stage in equation.stages:
            if stage.replaces and (planned := stage.apply(size, figures)) is not None:
                size = planned
        return Evaluation(asked, terms, size, 0, override=by)
    if equation.limited_by is not None and figures.get(equation.limited_by) is not None:
        return Evaluation(asked, terms, None, 0, override=equation.limit_option)
    subtracted = [row for row in terms if row.subtracted]
    slack = _slack(equation, figures, half_units, subtracted) // equation.divisor
    printed = half_units.get("kv_cache_bytes", 0)
    if asked is None or any(row.bytes is None for row in subtracted):
        return Evaluation(asked, terms, None, slack + printed)
    budget = asked
    for apart in (False, True):
        budget -= sum(
            row.bytes or 0
            for term, row in zip(in_force, terms, strict=True)
            if row.subtracted and term.apart == apart
        )
    if equation.divisor != 1:
        budget = budget // equation.divisor
    run: list[str] = []
    for stage in equation.stages:
        after = stage.apply(budget, figures)
        if after is not None:
            terms.append(TermRow(stage.name, int(budget) - after, True))
            run.append(stage.name)
            slack = math.ceil(slack * (stage.factor(figures) or 1.0))
            if half_units:  # the factor was read from text
                slack += math.ceil(abs(budget) * stage.printed_half_unit)
            budget = after
    result = max(0, int(budget)) if equation.floor_zero else int(budget)
    page = int(figures.get(equation.pages or "") or 0)
    if page:  # the result goes down to whole ones
        terms.append(TermRow(WHOLE_PAGES, result % page, True))
        result -= result % page
    return Evaluation(asked, terms, result, slack + printed, stages=tuple(run))


def counted_per_byte(
    equation: Equation | None, figures: Figures, *, fixed_size: bool = False
) -> float:
    """Return the bytes of KV cache that the engine counts per byte that the device holds of it.

    1 where what it returns are bytes of the device, as in every release without stages.

    Args:
        equation: of the engine.
        figures: of one rank.
        fixed_size: of a size given by --kv-cache-memory-bytes, which the engine takes as what it
            counts: it scales it by no factor, and hands it to its planners as bytes of the device.
    """
    stages = () if equation is None else equation.stages
    factors = [each.factor(figures) for each in stages if not (fixed_size and each.replaces)]
    return math.prod(only_known(factors))


def _terms_for(equation: Equation, figures: Figures) -> list[Term]:
    """Return the terms that a set of figures fills: a printed sum where its parts are unknown."""
    left_out = {HALF_A_PAGE} if figures.get(equation.pages or "") else set()
    for joint in (term for term in equation.terms if term.stands_for):
        parts = [term for term in equation.terms if term.name in joint.stands_for]
        told_apart = all(
            part.is_subtracted(figures) and part.value(figures) is not None for part in parts
        )
        instead = told_apart or joint.value(figures) is None
        left_out.update((joint.name,) if instead else joint.stands_for)
    return [
        term
        for term in equation.terms
        if term.name not in left_out and not (term.optional and term.value(figures) is None)
    ]


def _slack(
    equation: Equation, figures: Figures, half_units: Mapping[str, int], terms: Sequence[TermRow]
) -> int:
    """Return what the rounding of the figures in an equation adds up to, bytes.

    A figure in the request and in a term counts once, with what both make of it.
    """
    base, exact = equation.base, figures.get("requested_bytes") is not None
    half, share = half_units.get(base, 0), figures.get(equation.share)
    joint = 0 if exact else sum(t.figure is None and base in t.plus for t in equation.terms)
    apart = sum(row.half_unit_bytes for row in terms) - joint * half
    if exact:
        return half_units.get("requested_bytes", 0) + apart
    return math.ceil(half * (abs(joint - (share or 0)) if joint else share or 1)) + apart
