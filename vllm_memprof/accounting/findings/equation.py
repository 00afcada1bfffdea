"""The finding about an equation that does not give the KV cache that the engine granted."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from vllm_memprof.accounting.findings.needs import RECOMPUTED
from vllm_memprof.accounting.findings.registry import ERROR, WARNING, Found, RankContext, finding
from vllm_memprof.accounting.model import Budget, Tried
from vllm_memprof.accounting.quantities import title_of
from vllm_memprof.text import Text, join, text


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
        the printed figures. `vllm_memprof/accounting/equations.py::EQUATIONS` has the equations,
        `vllm_memprof/accounting/infer_equation.py::search` tries them.

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
    evidence = join("; ", [_said(one, budget.engine_kv_cache_bytes) for one in budget.tried])
    size = given.residual_bytes if given.residual_bytes is not None else given.missing_bytes
    yield Found(evidence, size, title=title, severity=WARNING)


def _said(tried: Tried, granted: int | None) -> Text:
    """Return what an equation gives, or leaves for the figure that it lacks."""
    if tried.residual_bytes is not None:
        return text(
            "{equation}: engine {granted:gib} GiB, recomputed {given:gib} +-{slack:gib} GiB, off "
            "by {off:gib4}",
            equation=_name(tried),
            granted=granted,
            given=tried.kv_cache_bytes,
            slack=tried.tolerance_bytes,
            off=tried.residual_bytes,
        )
    return text(
        "{equation}: leaves {size:gib} GiB for {term}, which the log does not give",
        equation=_name(tried),
        size=tried.missing_bytes,
        term=title_of(tried.missing or ""),
    )


def _name(tried: Tried) -> str:
    """Return an equation with the releases that have it."""
    limits = {one.operator: one.version for one in SpecifierSet(tried.releases)}
    return text(
        "{equation} ({low} to before {high})",
        equation=tried.equation,
        low=limits.get(">=", ""),
        high=limits.get("<", ""),
    )
