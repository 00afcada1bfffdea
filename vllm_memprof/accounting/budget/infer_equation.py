"""The equation that a log's figures fit, where that of the named or assumed release does not close.

The printed figures of all ranks enter; every equation of the engine is evaluated with them. What
leaves is the one that gives the printed KV cache, with how far off the others are. Rounded figures
may fit two: then none is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_memprof.accounting.budget.equations import EQUATIONS, evaluate
from vllm_memprof.accounting.model import Budget, Tried
from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB

#: Totals that a 310P reports: 43.24 and 42.67 GiB are known. No other Ascend device has as much.
_TOTALS_310P = (42 * GIB, 44 * GIB)
ASCEND_310P = "Ascend310P"


@dataclass(frozen=True)
class Printed:
    """The figures of one rank, and half of the last printed digit of each; bytes."""

    figures: Figures
    half_units: Mapping[str, int]


@dataclass(frozen=True)
class Search:
    """What was found."""

    equation: Equation | None  # the only one that closes, else the one that was given
    chosen_by: Text | None = None  # how; None: nothing else was chosen
    tried: list[list[Tried]] = field(
        default_factory=list
    )  # per rank; empty: nothing was looked for


def device_by_total(engine: str | None, ranks: Sequence[Printed]) -> str | None:
    """Return the chip whose memory is as large as the ranks' devices, where one alone is."""
    totals = [rank.figures.get("device_total_bytes") for rank in ranks]
    known = [total for total in totals if total is not None]
    low, high = _TOTALS_310P
    if engine != "vllm-ascend" or not known or not all(low <= total <= high for total in known):
        return None
    return ASCEND_310P


def search(
    engine: str | None, given: Equation | None, release: str | None, ranks: Sequence[Printed]
) -> Search:
    """Try every equation of an engine, where the given one does not give the printed KV cache.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        given: the row of the release, or of the form of the lines; None where there is none.
        release: of the engine, as the log names it.
        ranks: what each of them printed.
    """
    if engine is None:
        return Search(given)
    given_tried = [] if given is None else [_try(given, rank, True) for rank in ranks]
    if given is not None and not any(
        one.closes is False or one.leaves_less_than_nothing for one in given_tried
    ):
        return Search(given)
    device = device_by_total(engine, ranks)
    found: dict[Equation, list[Tried]] = {} if given is None else {given: given_tried}
    for row in reversed(EQUATIONS):  # the newest first
        if row.engine == engine and row is not given and row.only in (None, device):
            found[row] = [_try(row, rank) for rank in ranks]
    tried: list[list[Tried]] = []  # what says something, each arithmetic once
    for each in zip(*found.values(), strict=True):
        kept: dict[object, Tried] = {}
        for one in each:
            if one.residual_bytes is not None or one.missing_bytes is not None:
                said = (one.equation, one.kv_cache_bytes, one.missing, one.missing_bytes)
                kept.setdefault(said, one)
        tried.append(list(kept.values()))
    if not any(one.residual_bytes is not None for each in tried for one in each):
        return Search(given)
    # those that close on every rank on which they can be computed
    closing = [
        row for row, each in found.items() if {one.closes for one in each} - {None} == {True}
    ]
    alike = {
        tuple((one.equation, one.kv_cache_bytes, one.missing) for one in found[row])
        for row in closing
    }
    if len(alike) != 1 or given in closing:
        return Search(given, tried=tried)
    chosen = closing[0]
    if given is None:
        why = text(
            "its result: of the equations of {engine} that the printed figures fill, it alone "
            "gives the printed KV cache",
            engine=engine,
        )
    elif release is None:
        why = text(
            "its result: it gives the printed KV cache, and {given}, whose lines these are, does "
            "not",
            given=given.id,
        )
    else:
        why = text(
            "its result: it gives the printed KV cache, and {given}, the equation of {engine} "
            "{release}, does not",
            given=given.id,
            engine=engine,
            release=release,
        )
    return Search(chosen, why, tried)


def _try(row: Equation, rank: Printed, given: bool = False) -> Tried:
    result = evaluate(row, rank.figures, rank.half_units)
    granted = rank.figures.get("kv_cache_bytes")
    fixed = result.override is not None
    budget = Budget(
        requested=result.requested,
        terms=result.terms,
        override=result.override,
        kv_cache_bytes=None if fixed else result.kv_cache_bytes,
        engine_kv_cache_bytes=None if granted is None else int(granted),
    )
    missing: tuple[str | None, int | None] = (None, None)
    if sum(term.subtracted for term in result.terms) > 1:  # a sole term fits whatever was granted
        missing = budget.implied_term(row.divisor) or missing
    return Tried(
        equation=row.id,
        releases=row.versions,
        kv_cache_bytes=budget.kv_cache_bytes,
        residual_bytes=budget.residual_bytes,
        tolerance_bytes=result.tolerance_bytes,
        given=given,
        missing=missing[0],
        missing_bytes=missing[1],
        missing_tolerance_bytes=result.tolerance_bytes * row.divisor,
    )
