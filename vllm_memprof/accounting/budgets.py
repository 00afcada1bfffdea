"""The KV cache that fits the request: the equation's result less all that it does not subtract.

An item that cannot be read makes the figure unknown; one that does not apply to the run is left
out. Beside it, other readings of the same budget, where a log prints absolute figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_memprof.accounting.equations import Equation, form_of
from vllm_memprof.accounting.kv import tokens_for_bytes
from vllm_memprof.accounting.model import Correction, Kv, NotSubtracted, TermRow
from vllm_memprof.accounting.quantities import QUANTITIES, Evidence
from vllm_memprof.text import Text, text


def items_not_subtracted(
    names: Sequence[str],
    evidence: Evidence,
    terms: Sequence[TermRow] = (),
    unread: Text | None = None,
) -> list[NotSubtracted]:
    """Read the items that an equation does not subtract, in its order.

    Args:
        names: of ``accounting.quantities``.
        evidence: of one rank.
        terms: of its equation. A term that estimates an item is taken off it; where that estimate
            is unknown, so is the item.
        unread: the reason of an item that was not read, where the source as a whole is that.
    """
    subtracted = {term.name: term.bytes for term in terms if term.subtracted}
    charged = evidence.figures.get("graph_estimate_charged") != 0
    items = []
    for name in names:
        row = QUANTITIES[name]
        found = row.reading(evidence)
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
        items.append(
            NotSubtracted(
                name=name,
                title=row.title,
                bytes=size,
                how=found.how or row.how,
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
    kv_cache_bytes: int | None, items: list[NotSubtracted], divisor: int = 1
) -> int | None:
    """Return the equation's result less every item; None where it or a required item is unknown.

    An equation that divides what is left grants so many times less for each byte subtracted.
    """
    if kv_cache_bytes is None or any(item.required and item.bytes is None for item in items):
        return None
    return kv_cache_bytes - sum(item.bytes or 0 for item in items) // divisor


def at_the_peaks(evidence: Evidence) -> int | None:
    """Return the request less the allocated peak and the non-torch peak of the profile run, bytes.

    The same as the equation less what was allocated and in use before profiling, and less what
    empty_cache freed before the engine read its non-torch figure; but from absolute figures, so
    that fewer of them are rounded.
    """
    peak = evidence.figure("profile_after_allocated_peak_bytes")
    asked = evidence.figures.get("requested_bytes")
    before, after, _ = evidence.profile_end()
    known = [edge.non_torch_bytes for edge in (before, after) if edge is not None]
    sizes = [size for size in known if size is not None]
    if peak is None or asked is None or before is None or not sizes:
        return None
    return int(asked - peak - max(sizes))


def as_absolute(evidence: Evidence) -> int | None:
    """Return the KV cache as E2 has it: the request less the allocated peak and all else in use."""
    peak = evidence.figure("profile_after_allocated_peak_bytes")
    asked = evidence.figures.get("requested_bytes")
    non_torch = evidence.figure("profile_after_non_torch_bytes")
    idle = QUANTITIES["reserved_not_allocated"].reading(evidence).bytes
    if peak is None or asked is None or non_torch is None or idle is None:
        return None
    return int(asked - peak - non_torch - idle)


def corrections(
    equation: Equation, evidence: Evidence, kv: Kv, items: list[NotSubtracted]
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
            at_the_peaks(evidence),
            "requested - allocated peak - non-torch before the last empty_cache of the profile run",
            ("persistent_torch", "initial_non_torch", "non_torch_cleared"),
        ),
        (
            "as_e2",
            text("as E2 has it (vllm-ascend to 0.14)"),
            as_absolute(evidence) if equation.engine == "vllm-ascend" else None,
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
