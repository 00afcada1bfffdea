"""The equation of a run: that of its release; of a log, the one that its figures fit.

Where the equation of the named or assumed release does not give the KV cache that a log prints,
every equation of the engine is evaluated with the printed figures of all ranks. What leaves is the
one that gives it, with how far off the others are. Rounded figures may fit two: then none is
chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_memprof.accounting.budget.equations import EQUATIONS, evaluate, of_release, select
from vllm_memprof.accounting.model import Budget, RunSummary, Tried
from vllm_memprof.accounting.readings.startup import engine_figures
from vllm_memprof.engines.base import same_lines
from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.text import text
from vllm_memprof.units import GIB, only_known

#: Totals that a 310P reports: 43.24 and 42.67 GiB are known. No other Ascend device has as much.
_TOTALS_310P = (42 * GIB, 44 * GIB)
ASCEND_310P = "Ascend310P"


class Printed(NamedTuple):
    """The figures of one rank, and half of the last printed digit of each; bytes."""

    figures: Figures
    half_units: Mapping[str, int]


class Choice(NamedTuple):
    """The equation of a run."""

    equation: Equation | None
    chosen_by: str | None = None  # how
    #: Of a log, per rank, what was tried; empty: nothing was looked for.
    tried: Sequence[list[Tried]] = ()


def choose(
    summary: RunSummary, forms: Sequence[str], workers: Sequence[ProcessRecord], partial: bool
) -> Choice:
    """Return the equation of a run.

    Args:
        summary: of the run.
        forms: ids of the equations whose lines a log holds.
        workers: of the run.
        partial: it is a log, which may name another release than the one that wrote it.
    """
    known = {name for each in workers for name, value in each.figures.items() if value is not None}
    engine, release = summary.engine, summary.engine_version
    found, chosen_by = select(engine, release, forms, summary.device, known)
    if not partial:
        return Choice(found, chosen_by)
    printed = []
    for each in workers:
        figures = engine_figures(each, summary.eager, found)
        if summary.eager:
            figures["graph_estimate_bytes"] = figures.get("graph_estimate_bytes") or 0
        printed.append(Printed(figures, each.figures_half_units))
    chip = device_by_total(engine, printed)
    if chip is not None and (found is None or found.only is None):
        rows = [row for row in reversed(EQUATIONS) if row.only == chip]
        special = next(iter(rows if release is None else of_release(rows, release)), None)
        # the form of the lines outranks the device: older releases had no equation of its own
        if special is not None and all(same_lines(special.id, form) for form in forms):
            found, chosen_by = special, text("its device total, which is that of an Ascend 310P")
    better = search(engine, found, printed)
    return better._replace(chosen_by=better.chosen_by or chosen_by)


def device_by_total(engine: str | None, ranks: Sequence[Printed]) -> str | None:
    """Return the chip whose memory is as large as the ranks' devices, where one alone is."""
    known = only_known(rank.figures.get("device_total_bytes") for rank in ranks)
    low, high = _TOTALS_310P
    if engine != "vllm-ascend" or not known or not all(low <= total <= high for total in known):
        return None
    return ASCEND_310P


def search(engine: str | None, given: Equation | None, ranks: Sequence[Printed]) -> Choice:
    """Try every equation of an engine, where the given one does not give the printed KV cache.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        given: the row of the release, or of the form of the lines; None where there is none.
        ranks: what each of them printed.
    """
    found = {} if given is None else {given: [_try(given, rank, True) for rank in ranks]}
    if given is not None and not any(
        one.closes is False or one.leaves_less_than_nothing for one in found[given]
    ):
        return Choice(given)
    device = device_by_total(engine, ranks)
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
        return Choice(given)
    # those that close on every rank on which they can be computed
    closing = [row for row in found if {one.closes for one in found[row]} - {None} == {True}]
    alike = {
        tuple((one.equation, one.kv_cache_bytes, one.missing) for one in found[row])
        for row in closing
    }
    if len(alike) != 1 or given in closing:
        return Choice(given, tried=tried)
    why = text(
        "its result: of the equations of {engine} that the printed figures fill, it alone gives "
        "the printed KV cache",
        engine=engine,
    )
    return Choice(closing[0], why, tried)


def _try(row: Equation, rank: Printed, given: bool = False) -> Tried:
    result = evaluate(row, rank.figures, rank.half_units)
    granted = rank.figures.get("kv_cache_bytes")
    budget = Budget(
        requested=result.requested,
        terms=result.terms,
        override=result.override,
        kv_cache_bytes=None if result.override is not None else result.kv_cache_bytes,
        engine_kv_cache_bytes=None if granted is None else int(granted),
    )
    missing, size = None, None
    if sum(term.subtracted for term in result.terms) > 1:  # a sole term fits whatever was granted
        missing, size = budget.implied_term(row.divisor) or (None, None)
    return Tried(
        equation=row.id,
        releases=row.versions,
        kv_cache_bytes=budget.kv_cache_bytes,
        residual_bytes=budget.residual_bytes,
        tolerance_bytes=result.tolerance_bytes,
        given=given,
        missing=missing,
        missing_bytes=size,
        missing_tolerance_bytes=result.tolerance_bytes * row.divisor,
    )
