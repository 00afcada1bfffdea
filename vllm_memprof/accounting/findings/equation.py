"""Findings about an equation that does not give the KV cache, and its terms beside readings."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from vllm_memprof.accounting.findings.needs import AUDITED, RECOMPUTED
from vllm_memprof.accounting.findings.registry import ERROR, WARNING, Found, RankContext, finding
from vllm_memprof.accounting.model import Budget, Tried
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.text import join, text


@finding(
    "equation-unbalanced",
    severity=ERROR,
    title=text("The KV cache differs from what the engine's equation gives"),
    needs=RECOMPUTED,
)
def equation_unbalanced(context: RankContext) -> Iterator[Found]:
    """Find budgets that the recorded figures do not give.

    Meaning:
        memprof recomputes the KV cache from the engine's own figures. A difference means that
        another equation was at work, or that a figure was read at another moment. Of a log it is
        a warning: its lines may come from two runs, or from another release than they say. Then
        every equation of the engine is tried, and the only one that gives the printed KV cache is
        used; where two do, none is.

    Computed:
        KV cache granted by the engine less the KV cache by the equation; more than the rounding of
        the printed figures. `vllm_memprof/accounting/budget/equations.py::EQUATIONS` has the
        equations, `vllm_memprof/accounting/budget/infer_equation.py::search` tries them.

    To do:
        Report it with the run folder: the row of the equation for this release needs a correction.
        Of a log, check that all lines are of one run, and which release printed them.
    """
    budget = context.rank.budget
    if budget.tried:
        yield from _of_a_log(budget)
        return
    if budget.balanced is not False:
        return
    granted, given = budget.engine_kv_cache_bytes, budget.kv_cache_bytes
    evidence = text(
        "engine {granted:bytes}, recomputed {given:bytes} bytes ({cite})",
        granted=granted,
        given=given,
        cite=budget.cite,
    )
    title = text(
        "The engine granted another KV cache than its equation {equation} gives",
        equation=budget.equation,
    )
    yield Found(evidence, budget.residual_bytes, title=title)


def _of_a_log(budget: Budget) -> Iterator[Found]:
    """Yield how far off the release's equation is, and every other one that can be computed."""
    given = next((one for one in budget.tried if one.given), None)
    if given is None or not (given.closes is False or given.leaves_less_than_nothing):
        return
    closing = [one for one in budget.tried if one.closes]
    if not closing:
        title = text(
            "The printed KV cache is not what equation {equation} gives with the printed figures: "
            "the lines are of two runs, or of another release",
            equation=given.equation,
        )
    elif budget.equation == given.equation and budget.balanced is not True:
        title = text(
            "The printed KV cache is not what equation {equation} gives, and rounding does not "
            "tell which of {others} it is: {names}",
            equation=given.equation,
            others=len(closing),
            names=join(", ", [_name(one) for one in closing]),
        )
    else:
        title = text(
            "The printed figures fit equation {found}, not {equation} of the release or the form "
            "of the lines",
            found=_name(closing[0]),
            equation=given.equation,
        )
    said = [  # what each gives, or leaves for the figure that it lacks
        text(
            "{equation}: leaves {size:gib} GiB for {term}, which the log does not give",
            equation=_name(one),
            size=one.missing_bytes,
            term=title_of(one.missing or ""),
        )
        if one.residual_bytes is None
        else text(
            "{equation}: engine {granted:gib} GiB, recomputed {given:gib} +-{slack:gib} GiB, off "
            "by {off:gib4}",
            equation=_name(one),
            granted=budget.engine_kv_cache_bytes,
            given=one.kv_cache_bytes,
            slack=one.tolerance_bytes,
            off=one.residual_bytes,
        )
        for one in budget.tried
    ]
    evidence = join("; ", said)
    size = given.residual_bytes if given.residual_bytes is not None else given.missing_bytes
    yield Found(evidence, size, title=title, severity=WARNING)


def _name(tried: Tried) -> str:
    """Return an equation with the releases that have it."""
    limits = {one.operator: one.version for one in SpecifierSet(tried.releases)}
    return text(
        "{equation} ({low} to before {high})",
        equation=tried.equation,
        low=limits.get(">=", ""),
        high=limits.get("<", ""),
    )


@finding(
    "engine-term-off",
    severity=WARNING,
    title=text("A figure of the engine is not what memprof read of the same memory"),
    needs=AUDITED,
)
def engine_term_off(context: RankContext) -> Iterator[Found]:
    """Find figures of the engine that memprof's own readings contradict.

    Meaning:
        The engine sizes its KV cache by figures that it reads itself. memprof reads the same
        memory at its own phase edges. A difference beyond what can lie between both moments means
        that the KV cache is too large or too small by as much, although the equation, recomputed
        from the engine's figures, is equal.

    Computed:
        The engine's figure less memprof's reading, beyond the tolerance of the row
        (`vllm_memprof/accounting/readings/audit.py::audit`). The bytes are those of the KV cache:
        granted less what the equation gives with memprof's readings; where that is within its
        tolerance, the largest difference of a figure.

    To do:
        Look at the edges that the audit names. Where another process took or released memory
        meanwhile, start again without it. Otherwise report it to the engine, with the run folder.
    """
    off = [row for row in context.rank.budget.audit if row.agrees is False]
    if not off:
        return
    parts = [
        text(
            "{term}: engine {engine:gib4} GiB, read {own:gib4} GiB ({difference:bytes} bytes; "
            "{source})",
            term=row.title,
            engine=row.engine_bytes,
            own=row.bytes,
            difference=row.difference_bytes,
            source=row.source,
        )
        for row in off
    ]
    of_kv_cache = [row for row in off if row.name == "kv_cache"]
    worst = max(of_kv_cache or off, key=lambda row: abs(row.difference_bytes or 0))
    yield Found(join("; ", parts), worst.difference_bytes)
