"""The KV cache that fits into requested memory, and the one that fits the device.

The first is the equation's result less all that the run held and it does not subtract; the second
is the device less all memory in use except the KV cache at the serving peak
(``accounting.budget.serving_peak``).

An item that cannot be read makes the figure unknown; one that does not apply to the run is left
out. Beside it, other readings of the same budget, where a log prints absolute figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_memprof.accounting.budget.equations import (
    computed_request,
    counted_per_byte,
    evaluate,
    form_of,
)
from vllm_memprof.accounting.budget.kv import tokens_for_bytes, worth_in_tokens
from vllm_memprof.accounting.budget.serving_peak import serving_peak, suggested, unprofiled
from vllm_memprof.accounting.model import (
    Budget,
    Check,
    ItemPart,
    Kv,
    Oom,
    RankReport,
    Reading,
    Suggestion,
    TermRow,
)
from vllm_memprof.accounting.readings.audit import audit
from vllm_memprof.accounting.readings.quantities import (
    QUANTITIES,
    StartupReadings,
    is_device_wide,
)
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.readings.startup import NON_TORCH
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import WHOLE_PAGES, Equation, Term
from vllm_memprof.options import read_option
from vllm_memprof.record.spans import DERIVED, MEASURED, MODELLED, weakest
from vllm_memprof.text import text
from vllm_memprof.units import Amount, largest, minus, sum_or_none

#: Figures of a log from which the device's budget may be made; each is rounded.
_PRINTED_FOR_DEVICE = (
    "device_total_bytes",
    "requested_bytes",
    "initial_free_bytes",
    "weights_bytes",
    "peak_activation_bytes",
    "non_torch_increase_bytes",
    "profile_after_allocated_peak_bytes",
    "profile_end_reserved_bytes",
    "profile_end_non_torch_bytes",
    "graph_bytes",
    "kv_cache_bytes",
)


def scaled(size: Amount, by: float = 1.0, over: float = 1.0) -> Amount:
    """Return bytes that an engine counts more or fewer times; None where they are unknown."""
    return size if size is None or by == over else int(size * by / over)


def items_not_subtracted(
    names: Sequence[str],
    of: StartupReadings,
    terms: Sequence[TermRow] = (),
) -> list[Reading]:
    """Return the items that an equation does not subtract, in its order.

    Args:
        names: of ``accounting.readings.quantities``.
        of: the readings of one rank.
        terms: of its equation. A term that estimates an item is taken off it; where that estimate
            is unknown, so is the item.
    """
    subtracted = {term.name: term.bytes for term in terms if term.subtracted}
    charged = of.figures.get("graph_estimate_charged") != 0
    # what the equation of an engine without a profile does not subtract comes after the plan
    profiles = of.equation is None or row_of_run(of.equation.engine).profiles
    unread = None if of.not_own is None and profiles else of.nothing_later
    items = []
    for name in names:
        row, item = QUANTITIES[name], of.quantities[name]
        size, formula, reason = item.bytes, item.formula, item.reason
        if size is None:
            reason = unread or reason
        elif row.estimated_by in subtracted or (row.estimated_within in subtracted and charged):
            estimate = subtracted.get(row.estimated_by or "")
            if estimate is None:
                size, reason = None, text("the estimate that the equation subtracts is not known")
            elif estimate:
                size = max(0, size - estimate)
                formula = f"max(0, {formula} - {row.estimated_by})"
        if name == "reserved_not_allocated" and size is not None and of.profile_peak is not None:
            peak = of.figure("profile_after_allocated_peak_bytes")
            beyond = minus(of.profile_peak.reserved, peak)
            if beyond is not None and beyond < size:  # the peak uses these blocks
                size, formula = max(0, beyond), "reserved peak - allocated peak of the profile run"
        # what an estimate has covered already is not known part by part
        parts = item.parts if size == item.bytes else ()
        items.append(replace(item, bytes=size, formula=formula, reason=reason, parts=parts))
    return items


def balance(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the engine's equation of a rank, what fits the request, and what fits the device."""
    budget = _equation_budget(read, rank.kv)
    budget = fit_device(budget, read.startup, rank.kv, oom=read.oom, eager=read.summary.eager)
    return replace(rank, budget=budget)


def _equation_budget(read: RankReadings, kv: Kv) -> Budget:
    """Return the engine's equation of a rank with its audit, and what fits the request."""
    of = read.startup
    equation, figures = of.equation, of.figures
    total, share = of.figure("device_total_bytes"), figures.get("gpu_memory_utilization")
    asked = total * share if total and share else None
    budget = Budget(
        device_total_bytes=total,
        gpu_memory_utilization=share,
        engine_kv_cache_bytes=of.figure("kv_cache_bytes"),
        requested=figures.get("requested_bytes", asked),
        chosen_by=read.chosen_by,
        tried=list(read.tried),
    )
    if equation is None:
        return budget
    result = evaluate(equation, figures, of.half_units)
    counted, granted = counted_per_byte(equation, figures), result.kv_cache_bytes
    items = [
        replace(
            item,
            kv_tokens=worth_in_tokens(
                kv, None if item.bytes is None else scaled(item.bytes // equation.divisor, counted)
            ),
        )
        for item in items_not_subtracted(equation.not_subtracted, of, result.terms)
    ]
    fitting = None
    if items and not result.override:
        fitting = fits_request(granted, items, equation.divisor, counted)
    shown = {term.name for term in result.terms}
    formula = equation.formula
    if WHOLE_PAGES in shown:  # it took the place of another term
        terms = [term for term in equation.terms if term.name in shown]
        formula = equation.formula_of([*terms, Term(WHOLE_PAGES)])
    requested = f"requested = {equation.asked}", computed_request(equation, figures)
    compared: list[tuple[str, float | None, str, tuple[str, ...]]]
    compared = [(*requested, "requested_bytes", (equation.base,))]
    for term in equation.terms:
        if term.plus and term.figure is not None:
            name = f"{term.name} = {' + '.join(term.plus)} - {' - '.join(term.minus)}"
            ingredients = (*term.plus, *term.minus)
            compared.append((name, term.derived(figures), term.figure, ingredients))
    checks = []  # the engine's figures beside their parts
    for name, expected, figure, ingredients in compared:
        slack = of.rounding(figure, *ingredients)
        # a printed figure is known to a byte at best
        checks.append(Check.of(name, expected, figures.get(figure), slack + 1 if slack else 0))
    weights = of.quantities["weights"]
    utilization = read_option(read.summary.command, "gpu-memory-utilization", float)
    return replace(
        budget,
        equation=equation.id,
        cite=f"{equation.cite} ({equation.engine} {equation.read_in})",
        override=result.override,
        formula=" x ".join([formula, *result.stages]),
        requested=result.requested,
        terms=[
            replace(term, parts=weights.parts)
            if term.name == "weights" and term.bytes == weights.bytes
            else term
            for term in result.terms
        ],
        kv_cache_bytes=granted,
        tolerance_bytes=result.tolerance_bytes,
        takes_fixed_size=equation.takes_fixed_size,
        checks=checks,
        not_subtracted=items,
        fits_request_bytes=fitting,
        kv_tokens=tokens_for_bytes(kv, granted),
        fits_request_tokens=tokens_for_bytes(kv, fitting),
        corrections=[] if of.not_own is None else _corrections(equation, of, kv, items),
        # by the figures that the engine itself keeps; none that memprof filled in
        audit=audit(equation, read.process.figures, of, utilization),
    )


def fits_request(
    kv_cache_bytes: Amount,
    items: list[Reading],
    divisor: int = 1,
    counted: float = 1.0,
) -> Amount:
    """Return the equation's result less every item; None where it or a required item is unknown.

    An equation that divides what is left grants so many times less for each byte subtracted, and
    one that counts more or fewer bytes than the device holds (``counted`` per byte) accordingly.
    """
    left_out = sum_or_none(item.bytes for item in items if item.required or item.bytes is not None)
    if left_out is None:
        return None
    return minus(kv_cache_bytes, scaled(left_out // divisor, counted))


def fit_device(
    budget: Budget,
    of: StartupReadings,
    kv: Kv,
    *,
    oom: Oom | None,
    eager: bool,
) -> Budget:
    """Return a budget with the KV cache that fits the device, the headroom, and how each is known.

    Args:
        budget: with everything that the equation gives.
        of: the readings of the rank.
        kv: its KV cache.
        oom: an allocation that failed on this rank.
        eager: no graphs are captured.
    """
    granted, equation = budget.engine_kv_cache_bytes, of.equation
    serves_with = granted if kv.planned_bytes is None else kv.planned_bytes
    if granted is None or granted <= 0:
        serves_with = None
    counted = counted_per_byte(equation, of.figures)
    counted_of_fixed = counted_per_byte(equation, of.figures, fixed_size=True)
    serves_with = scaled(serves_with, over=counted)  # bytes of the device
    peak = serving_peak(of, serves_with, oom)
    total = budget.total_bytes
    fits, released = minus(total, peak.held_bytes), minus(total, peak.at_least_bytes)
    headroom = minus(fits, serves_with)
    # a figure of the whole device has a part in what the engine granted
    device_wide = budget.override is None and any(map(is_device_wide, budget.subtracted))
    of_equation = MODELLED if of.simulated and device_wide else DERIVED
    of_device = weakest([DERIVED, peak.how])
    suggestions = [
        Suggestion(
            limit,
            size,
            of_equation,
            tokens_for_bytes(kv, size),
            minus(fits, scaled(size, over=counted_of_fixed)),
        )
        for limit, size in suggested(equation, of, eager).items()
    ]
    how = {
        "kv_cache_bytes": (budget.kv_cache_bytes, of_equation),
        "engine_kv_cache_bytes": (granted, MEASURED if of_equation == DERIVED else of_equation),
        "fits_request_bytes": (
            budget.fits_request_bytes,
            weakest([of_equation, *(each.how for each in budget.not_subtracted if each.bytes)]),
        ),
        "fits_device_bytes": (fits, of_device),
        "headroom_bytes": (headroom, of_device),
        "suggested_bytes": (len(suggestions) or None, of_equation),
    }
    return replace(
        budget,
        held_at_peak=peak.items,
        fits_device_bytes=fits,
        fits_device_tokens=tokens_for_bytes(kv, scaled(fits, counted)),
        fits_device_released_bytes=released,
        headroom_bytes=headroom,
        released_headroom_bytes=minus(released, serves_with),
        unprofiled_bytes=unprofiled(of.quantities["peak_activation"].bytes),
        device_tolerance_bytes=of.rounding(*_PRINTED_FOR_DEVICE),
        suggestions=suggestions,
        how={name: known for name, (size, known) in how.items() if size is not None},
    )


def _corrections(
    equation: Equation,
    of: StartupReadings,
    kv: Kv,
    items: list[Reading],
) -> list[Reading]:
    """Read the budget again from absolute figures, where the equation takes increases.

    Of these fewer are rounded. Both are the request less the allocated peak and all else in use.
    """
    if not {"initial_non_torch", "persistent_torch"} <= set(equation.not_subtracted):
        return []
    e2 = form_of("E2")
    assert e2 is not None
    peak, asked = of.figure("profile_after_allocated_peak_bytes"), of.figures.get("requested_bytes")
    most = largest(of.value(moment, NON_TORCH) for moment in ("profile_end", "profiled"))
    idle = of.quantities["reserved_not_allocated"].bytes
    left = sum_or_none([of.figure("profile_after_non_torch_bytes"), idle])
    rows = (
        (
            "at_the_peaks",
            text("both peaks subtracted whole"),
            most if of.moments["profile_end"].nearest is not None else None,
            text(
                "requested - allocated peak - non-torch before the last empty_cache of the profile "
                "run"
            ),
            ("persistent_torch", "initial_non_torch", "non_torch_cleared"),
        ),
        (
            "as_e2",
            text("as E2 has it (vllm-ascend to 0.14)"),
            left if equation.engine == "vllm-ascend" else None,
            text(
                "requested - allocated peak - (non-torch + reserved - allocated after empty_cache)"
            ),
            tuple(name for name in equation.not_subtracted if name not in e2.not_subtracted),
        ),
    )
    found = []
    for name, title, used, formula, names in rows:
        if asked is not None and peak is not None and used is not None:
            size = int(asked - peak - used)
            parts = (
                ItemPart(item.name, item.title, item.bytes, item.how)
                for item in items
                if item.bytes is not None and item.name in names
            )
            found.append(
                Reading(
                    size,
                    DERIVED,
                    formula=formula,
                    parts=tuple(parts),
                    name=name,
                    title=title,
                    kv_tokens=tokens_for_bytes(kv, size),
                )
            )
    return found
