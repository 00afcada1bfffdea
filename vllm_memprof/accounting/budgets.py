"""The KV cache that fits the request, and the one that fits the device.

The first is the equation's result less all that the run held and it does not subtract; the second
is the device less all that is held beside the KV cache at the serving peak (``accounting.spare``).

An item that cannot be read makes the figure unknown; one that does not apply to the run is left
out. Beside it, other readings of the same budget, where a log prints absolute figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_memprof.accounting.equations import counted_per_byte, form_of
from vllm_memprof.accounting.kv import tokens_for_bytes
from vllm_memprof.accounting.model import (
    DERIVED,
    MEASURED,
    MODELLED,
    Budget,
    Correction,
    Kv,
    NotSubtracted,
    Oom,
    Suggestion,
    TermRow,
)
from vllm_memprof.accounting.quantities import QUANTITIES, is_device_wide
from vllm_memprof.accounting.readings import StartupReadings, value
from vllm_memprof.accounting.spare import profile_reserved_peak, serving_peak, unprofiled
from vllm_memprof.accounting.suggestions import computed, printed
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation
from vllm_memprof.record.spans import weakest
from vllm_memprof.text import text
from vllm_memprof.units import minus


def items_not_subtracted(
    names: Sequence[str],
    of: StartupReadings,
    terms: Sequence[TermRow] = (),
) -> list[NotSubtracted]:
    """Read the items that an equation does not subtract, in its order.

    Args:
        names: of ``accounting.quantities``.
        of: the readings of one rank.
        terms: of its equation. A term that estimates an item is taken off it; where that estimate
            is unknown, so is the item.
    """
    subtracted = {term.name: term.bytes for term in terms if term.subtracted}
    charged = of.figures.get("graph_estimate_charged") != 0
    # what the equation of an engine without a profile does not subtract comes after the plan
    logged = of.not_own is not None
    profiles = of.equation is None or row_of_run(of.equation.engine).profiles
    unread = of.nothing_later if logged or not profiles else None
    items = []
    for name in names:
        row = QUANTITIES[name]
        found = row.reading(of)
        size, formula, reason = found.bytes, found.formula or "", found.reason
        if size is None:
            reason = unread or reason
        elif row.estimated_by in subtracted or (row.estimated_within in subtracted and charged):
            estimate = subtracted.get(row.estimated_by or "")
            if estimate is None:
                size, reason = None, text("the estimate that the equation subtracts is not known")
            elif estimate:
                size = max(0, size - estimate)
                formula = f"max(0, {formula} - {row.estimated_by})"
        if name == "reserved_not_allocated" and size is not None:
            beyond = minus(
                profile_reserved_peak(of),
                of.figure("profile_after_allocated_peak_bytes"),
            )
            if beyond is not None and beyond < size:  # the peak uses these blocks
                size, formula = max(0, beyond), "reserved peak - allocated peak of the profile run"
        items.append(
            NotSubtracted(
                name=name,
                title=row.title,
                bytes=size,
                how=found.how,
                formula=formula,
                source=found.source or row.source,
                reason=reason,
                required=row.required or found.bytes is not None,
                # what an estimate has covered already is not known part by part
                parts=found.parts if size == found.bytes else (),
            )
        )
    return items


def fits_request(
    kv_cache_bytes: int | None,
    items: list[NotSubtracted],
    divisor: int = 1,
    counted: float = 1.0,
) -> int | None:
    """Return the equation's result less every item; None where it or a required item is unknown.

    An equation that divides what is left grants so many times less for each byte subtracted, and
    one that counts more or fewer bytes than the device holds (``counted`` per byte) accordingly.
    """
    if kv_cache_bytes is None or any(item.required and item.bytes is None for item in items):
        return None
    left_out = sum(item.bytes or 0 for item in items) // divisor
    return kv_cache_bytes - (left_out if counted == 1.0 else int(left_out * counted))


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


def fit_device(
    budget: Budget,
    of: StartupReadings,
    kv: Kv,
    half_units: Mapping[str, int],
    *,
    oom: Oom | None = None,
    eager: bool = False,
) -> Budget:
    """Return a budget with the KV cache that fits the device, what is spare, and how each is known.

    Args:
        budget: with everything that the equation gives.
        of: the readings of the rank.
        kv: its KV cache.
        half_units: half of the last printed digit per figure, bytes.
        oom: an allocation that failed on this rank.
        eager: no graphs are captured.
    """
    granted, equation = budget.engine_kv_cache_bytes, of.equation
    serves_with = granted if kv.planned_bytes is None else kv.planned_bytes
    if granted is None or granted <= 0:
        serves_with = None
    counted = counted_per_byte(equation, of.figures)
    if serves_with is not None and counted != 1.0:
        serves_with = int(serves_with / counted)  # bytes of the device

    def spare_with(suggested: int) -> int | None:
        factor = counted_per_byte(equation, of.figures, fixed_size=True)
        return minus(fits, suggested if factor == 1.0 else int(suggested / factor))

    def tokens_of(size: int) -> int | None:
        return tokens_for_bytes(kv, size if counted == 1.0 else int(size * counted))

    peak = serving_peak(of, serves_with, oom)
    total = of.figure("device_total_bytes")
    if total is None and budget.requested and budget.gpu_memory_utilization:
        total = round(budget.requested / budget.gpu_memory_utilization)  # a log may not print it
    fits, released = minus(total, peak.held_bytes), minus(total, peak.at_least_bytes)
    suggested = printed(of.figures)
    if not suggested and equation is not None and of.last("warm_up") is not None:
        suggested = computed(equation, of.figures, eager)
    of_equation = MODELLED if of.simulated and _is_device_wide(budget) else DERIVED
    how = {
        "kv_cache_bytes": (budget.kv_cache_bytes, of_equation),
        "engine_kv_cache_bytes": (granted, MEASURED if of_equation == DERIVED else of_equation),
        "fits_request_bytes": (
            budget.fits_request_bytes,
            weakest([of_equation, *(each.how for each in budget.not_subtracted if each.bytes)]),
        ),
        "fits_device_bytes": (fits, weakest([DERIVED, peak.how])),
        "spare_bytes": (minus(fits, serves_with), weakest([DERIVED, peak.how])),
        "suggested_bytes": (len(suggested) or None, of_equation),
    }
    return replace(
        budget,
        held_at_peak=peak.items,
        fits_device_bytes=fits,
        fits_device_tokens=None if fits is None else tokens_of(fits),
        fits_device_released_bytes=released,
        spare_bytes=minus(fits, serves_with),
        released_spare_bytes=minus(released, serves_with),
        unprofiled_bytes=unprofiled(QUANTITIES["peak_activation"].reading(of).bytes),
        device_tolerance_bytes=sum(half_units.get(name, 0) for name in _PRINTED_FOR_DEVICE),
        suggestions=[
            Suggestion(limit, size, of_equation, tokens_for_bytes(kv, size), spare_with(size))
            for limit, size in suggested.items()
        ],
        how={name: known for name, (size, known) in how.items() if size is not None},
    )


def _is_device_wide(budget: Budget) -> bool:
    """Whether a figure of the whole device has a part in what the engine granted."""
    if budget.override is not None:
        return False
    return any(term.subtracted and is_device_wide(term.name) for term in budget.terms)


def at_the_peaks(of: StartupReadings) -> int | None:
    """Return the request less the allocated peak and the non-torch peak of the profile run, bytes.

    The same as the equation less what was allocated and in use before profiling, and less what
    empty_cache freed before the engine read its non-torch figure; but from absolute figures, so
    that fewer of them are rounded.
    """
    peak = of.figure("profile_after_allocated_peak_bytes")
    asked = of.figures.get("requested_bytes")
    before, after, _ = of.profile_end
    sizes = [value(moment, "non_torch_bytes") for moment in (before, after)]
    known = [size for size in sizes if size is not None]
    if peak is None or asked is None or before is None or not known:
        return None
    return int(asked - peak - max(known))


def as_absolute(of: StartupReadings) -> int | None:
    """Return the KV cache as E2 has it: the request less the allocated peak and all else in use."""
    peak = of.figure("profile_after_allocated_peak_bytes")
    asked = of.figures.get("requested_bytes")
    non_torch = of.figure("profile_after_non_torch_bytes")
    idle = QUANTITIES["reserved_not_allocated"].reading(of).bytes
    if peak is None or asked is None or non_torch is None or idle is None:
        return None
    return int(asked - peak - non_torch - idle)


def corrections(
    equation: Equation, of: StartupReadings, kv: Kv, items: list[NotSubtracted]
) -> list[Correction]:
    """Read the budget again from absolute figures, where the equation takes increases."""
    if not {"initial_non_torch", "persistent_torch"} <= set(equation.not_subtracted):
        return []
    e2 = form_of("E2")
    assert e2 is not None
    known = [item.name for item in items if item.bytes is not None]
    readings = (
        (
            "at_the_peaks",
            text("both peaks subtracted whole"),
            at_the_peaks(of),
            "requested - allocated peak - non-torch before the last empty_cache of the profile run",
            ("persistent_torch", "initial_non_torch", "non_torch_cleared"),
        ),
        (
            "as_e2",
            text("as E2 has it (vllm-ascend to 0.14)"),
            as_absolute(of) if equation.engine == "vllm-ascend" else None,
            "requested - allocated peak - (non-torch + reserved - allocated after empty_cache)",
            tuple(name for name in equation.not_subtracted if name not in e2.not_subtracted),
        ),
    )
    return [
        Correction(
            name,
            title,
            size,
            tokens_for_bytes(kv, size),
            formula,
            tuple(part for part in parts if part in known),
        )
        for name, title, size, formula, parts in readings
        if size is not None
    ]
