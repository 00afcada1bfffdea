"""The honest budget: the same request with everything charged that the run really held.

Each kind of memory that an equation may leave out is one function here and one name in ``Equation.not_subtracted``. An
item that cannot be read makes the honest figure unknown; an item that does not apply to the run is left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm_memprof.accounting.equations import EQUATIONS, Equation, Figures
from vllm_memprof.accounting.kv import tokens_for_bytes
from vllm_memprof.accounting.model import (
    INFERRED,
    MEASURED,
    MODELLED,
    Correction,
    Kv,
    NotSubtracted,
)
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of, is_within, last_of
from vllm_memprof.units import GIB, format_gib

#: More than this in use before the engine allocates anything is not a runtime context alone: other processes are on
#: the device. The largest context baseline known from hardware is 0.36 GiB (Ascend A2).
CONTEXT_CEILING_BYTES = 1 * GIB


@dataclass(frozen=True)
class Evidence:
    """What one rank recorded, as far as the honest budget needs it."""

    figures: Figures
    spans: list[Span]
    simulated: bool
    charged_graph_bytes: int = 0  # the estimate of the graph pools that the equation charges

    def profile_end(self) -> tuple[Snapshot | None, Snapshot | None, str]:
        """Around the last ``empty_cache`` of the profile run: where the engine reads its non-torch figure."""
        for span in reversed(self.spans):
            if span.phase == "empty_cache" and is_within(self.spans, span, "profile_run"):
                return span.before, span.after, "the last empty_cache of the profile run"
        last = last_of(self.spans, "profile_run")
        return None, last.after if last else None, "the end of the profile run"


def others_at_start(spans: list[Span], own: Collection[str] = ()) -> int | None:
    """What other processes held on the device when the driver was first asked, bytes; None where it was not.

    Args:
        spans: phases of a rank.
        own: process numbers of the run's other ranks, which are no neighbours.
    """
    held = (others_in(edge.snapshot, own) for _, edge in edges_of(spans))
    return next((others for others in held if others is not None), None)


def others_in(snapshot: Snapshot, own: Collection[str] = ()) -> int | None:
    """What other processes than those of the run held at one moment, bytes."""
    total, by_process = snapshot.other_processes_bytes, snapshot.other_processes or {}
    return (
        None
        if total is None
        else total - sum(size for pid, size in by_process.items() if pid in own)
    )


def items_not_subtracted(names: tuple[str, ...], evidence: Evidence) -> list[NotSubtracted]:
    """The items that an equation leaves out, in its order; bytes None where an ingredient is missing."""
    return [_ITEMS[name](evidence) for name in names]


def honest_budget(kv_cache_bytes: int | None, items: list[NotSubtracted]) -> int | None:
    """The equation's result less every not_subtracted item; None where the result or a required item is unknown."""
    if kv_cache_bytes is None or any(item.required and item.bytes is None for item in items):
        return None
    return kv_cache_bytes - sum(item.bytes for item in items if item.bytes is not None)


def _persistent_torch(evidence: Evidence) -> NotSubtracted:
    """Tensors that live before profiling and are not weights: input buffers, rope tables, the sampler's state."""
    before, weights = (
        evidence.figures.get("profile_before_allocated_peak_bytes"),
        evidence.figures.get("weights_bytes"),
    )
    size = None if before is None or weights is None else int(before) - int(weights)
    return NotSubtracted(
        name="persistent_torch",
        title="torch memory outside the weights",
        bytes=size,
        how=MEASURED,
        formula="profile_before_allocated_peak - weights",
        source="the engine's snapshot before the profile run, right after its peak reset",
        reason=None if size is not None else "no profile run was recorded",
    )


def _initial_non_torch(evidence: Evidence) -> NotSubtracted:
    """What was in use before the engine's first snapshot: the runtime context, and any other process."""
    value, formula = evidence.figures.get("initial_non_torch_bytes"), "initial_non_torch"
    total, free = (
        evidence.figures.get("device_total_bytes"),
        evidence.figures.get("initial_free_bytes"),
    )
    if value is None and total is not None and free is not None:
        value, formula = total - free, "device_total - initial_free"  # nothing is reserved yet
    size, reason = (
        (None, "no start-up snapshot was recorded") if value is None else (int(value), None)
    )
    others = others_at_start(evidence.spans)
    if size is not None and others:
        size, formula = size - others, f"{formula} - other processes"
    if size is not None and size > CONTEXT_CEILING_BYTES:
        held = format_gib(size)
        size, reason = (
            None,
            f"{held} GiB were in use at the start: other processes' memory cannot be told apart",
        )
    return NotSubtracted(
        name="initial_non_torch",
        title="non-torch, held at the start",
        bytes=size,
        how=MODELLED if evidence.simulated else INFERRED,
        formula=formula,
        source="the engine's first snapshot",
        reason=reason,
    )


def _cached(evidence: Evidence) -> NotSubtracted:
    """Segments that stay reserved after empty_cache because a live tensor keeps a part of each."""
    _, after, where = evidence.profile_end()
    size, how, formula = None, MEASURED, "reserved - allocated"
    before = evidence.figures.get("profile_before_allocated_peak_bytes")
    if after is not None and after.reserved_bytes is not None:
        if after.allocated_bytes is not None:
            size = after.reserved_bytes - after.allocated_bytes
        elif before is not None:
            # right after a peak reset the peak is what is allocated, and a profile run leaves nothing behind
            size, how = after.reserved_bytes - int(before), INFERRED
            formula = "reserved - profile_before_allocated_peak"
    return NotSubtracted(
        name="cached",
        title="reserved but not allocated",
        bytes=size,
        how=how,
        formula=formula,
        source=f"after {where}",
        reason=None if size is not None else "no snapshot after the profile run was recorded",
    )


def _non_torch_cleared(evidence: Evidence) -> NotSubtracted:
    """Operator workspace and the like that empty_cache freed just before the reading, and that serving takes again."""
    before, after, where = evidence.profile_end()
    size = None
    if before is not None and after is not None:
        high, low = before.non_torch_bytes, after.non_torch_bytes
        size = None if high is None or low is None else max(0, high - low)
    return NotSubtracted(
        name="non_torch_cleared",
        title="non-torch, freed just before read",
        bytes=size,
        how=MODELLED if evidence.simulated else MEASURED,
        formula="max(0, non_torch before - non_torch after)",
        source=f"around {where}",
        reason=None if size is not None else "no empty_cache inside the profile run was recorded",
    )


def _graph(evidence: Evidence) -> NotSubtracted:
    """Graph pools, captured after the budget was settled."""
    value = evidence.figures.get("graph_bytes")
    charged = evidence.charged_graph_bytes
    capture = last_of(evidence.spans, "graph_capture")
    reason = (
        "graph_capture failed"
        if capture is not None and capture.error
        else "no graph was captured in this run"
    )
    return NotSubtracted(
        name="graph",
        title="captured graphs",
        bytes=None
        if value is None
        else int(value)
        if not charged
        else max(0, int(value) - charged),
        how=MODELLED
        if evidence.simulated
        else MEASURED,  # a growth of device memory, non-torch included
        formula="graph_bytes" if not charged else "max(0, graph_bytes - graph_estimate)",
        source="the engine's figure for its graph capture",
        reason=reason if value is None else None,
        required=value is not None,
    )


def _late_non_torch(evidence: Evidence) -> NotSubtracted:
    """Non-torch memory that came after profiling, graphs aside: ATB pools, communicators first used in warm-up."""
    warm_up, capture = last_of(evidence.spans, "warm_up"), last_of(evidence.spans, "graph_capture")
    before, after, _ = evidence.profile_end()
    size = None
    last = warm_up.after if warm_up is not None and not warm_up.error else None
    if last is not None and last.non_torch_bytes is not None:
        known = [edge.non_torch_bytes for edge in (before, after) if edge is not None]
        peaks = [value for value in known if value is not None]
        in_graphs = _growth(capture)
        if peaks and in_graphs is not None:
            size = max(0, last.non_torch_bytes - max(peaks) - in_graphs)
    return NotSubtracted(
        name="late_non_torch",
        title="non-torch, after profiling",
        bytes=size,
        how=MODELLED if evidence.simulated else MEASURED,
        formula="max(0, non_torch after warm_up - non_torch peak of the profile run - growth in graph_capture)",
        source="after warm_up",
        reason=None if size is not None else "the run did not get through its warm-up",
        required=size is not None,
    )


def _growth(capture: Span | None) -> int | None:
    """Growth of non-torch memory during graph capture, which the graph figure holds already; 0 without a capture."""
    if capture is None:
        return 0
    if capture.before is None or capture.after is None:
        return None
    low, high = capture.before.non_torch_bytes, capture.after.non_torch_bytes
    return None if low is None or high is None else high - low


_ITEMS: dict[str, Callable[[Evidence], NotSubtracted]] = {
    "persistent_torch": _persistent_torch,
    "initial_non_torch": _initial_non_torch,
    "cached": _cached,
    "non_torch_cleared": _non_torch_cleared,
    "graph": _graph,
    "late_non_torch": _late_non_torch,
}


def at_the_peaks(evidence: Evidence) -> int | None:
    """KV cache of the request less the highest allocated memory and the highest non-torch memory of the profile run.

    The same as the equation less what was allocated and in use before profiling, and less what empty_cache freed
    before the engine read its non-torch figure; but from absolute figures, so that fewer of them are rounded.
    """
    peak, asked = (
        evidence.figures.get("profile_after_allocated_peak_bytes"),
        evidence.figures.get("requested_bytes"),
    )
    before, after, _ = evidence.profile_end()
    known = [
        edge.non_torch_bytes
        for edge in (before, after)
        if edge is not None and edge.non_torch_bytes is not None
    ]
    if peak is None or asked is None or before is None or not known:
        return None
    return int(asked - peak - max(known))


def as_absolute(evidence: Evidence) -> int | None:
    """KV cache as equation E2 has it: the request less the allocated peak and all else in use after empty_cache."""
    peak, asked = (
        evidence.figures.get("profile_after_allocated_peak_bytes"),
        evidence.figures.get("requested_bytes"),
    )
    non_torch, cached = (
        evidence.figures.get("profile_after_non_torch_bytes"),
        _cached(evidence).bytes,
    )
    if peak is None or asked is None or non_torch is None or cached is None:
        return None
    return int(asked - peak - non_torch - cached)


def corrections(
    equation: Equation, evidence: Evidence, kv: Kv, items: list[NotSubtracted]
) -> list[Correction]:
    """The budget read again from absolute figures, where the equation takes increases and the log prints both."""
    if not {"initial_non_torch", "persistent_torch"} <= set(equation.not_subtracted):
        return []
    e2 = next(row for row in EQUATIONS if row.id == "E2")
    known = [item.name for item in items if item.bytes is not None]
    found = [
        (
            "at_the_peaks",
            "both peaks charged whole",
            at_the_peaks(evidence),
            "requested - allocated peak - non-torch before the last empty_cache of the profile run",
            ("persistent_torch", "initial_non_torch", "non_torch_cleared"),
        ),
        (
            "as_e2",
            "as E2 has it (vllm-ascend to 0.14)",
            as_absolute(evidence) if equation.engine == "vllm-ascend" else None,
            "requested - allocated peak - (non-torch + reserved - allocated after empty_cache)",
            tuple(name for name in equation.not_subtracted if name not in e2.not_subtracted),
        ),
    ]
    return [
        Correction(
            name,
            title,
            size,
            tokens_for_bytes(kv, size),
            formula,
            tuple(part for part in parts if part in known),
        )
        for name, title, size, formula, parts in found
        if size is not None
    ]
