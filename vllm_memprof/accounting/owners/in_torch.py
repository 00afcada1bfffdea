"""Divide what torch has allocated by the phases of a start-up that have an owner of their own.

Enters: the phases of one process, and what the KV plan gives the drafter's layers. Leaves: parts of
the row ``allocated`` at an edge. They are held by that row already and never added to it. A process
with neither a draft model nor LoRA nor a KV connector has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import DERIVED, MEASURED, ComponentRow
from vllm_memprof.accounting.owners.outside_torch import EdgeTime
from vllm_memprof.accounting.readings.quantities import LOADED_BESIDE
from vllm_memprof.accounting.readings.startup import end_of_loading, grown_by
from vllm_memprof.record.spans import AFTER, BEFORE, Span, is_within, last_of
from vllm_memprof.units import minus

_ALLOCATED = "allocated"
#: Phase -> the owner of what it leaves allocated, and the row's source.
_OWNERS = {
    "draft_load": (
        LOADED_BESIDE["draft_load"],
        "growth of allocated over draft_load; what it shares with the model is the model's",
    ),
    "lora_load": (
        LOADED_BESIDE["lora_load"],
        "growth of allocated over lora_load: slots that adapters are copied into",
    ),
    "kv_connector": ("kv_connector", "growth of allocated over kv_connector"),
}
_TARGET = "target_weights"
_TARGET_SOURCE = "growth of allocated over weight_load, less the other owners in it"
_DRAFT_KV = "draft_kv_cache"
_DRAFT_KV_SOURCE = "tensors of the drafter's layers in the KV plan"
#: From their beginning on it is not known which of the parts are still allocated.
_REPLACED_FROM = ("sleep", "weight_update", "shutdown")
_ORDER = (_TARGET, "draft_weights", "lora", _DRAFT_KV, "kv_connector")


@dataclass(frozen=True)
class TorchOwner:
    """What one phase leaves allocated; while it lasts, what has been allocated since it began."""

    name: str
    source: str
    begins: EdgeTime
    ends: EdgeTime | None  # None: the process never left the phase
    base_bytes: int  # allocated when it began
    grown_bytes: int | None  # None: it did not come to its end, and what it leaves is not known

    def is_there(self, at: EdgeTime) -> bool:
        """Return whether the phase has begun; one that failed has left nothing that is known."""
        if self.ends is not None and at.is_after(self.ends):
            return self.grown_bytes is not None
        return at.is_after(self.begins)

    def size(self, allocated: int | None, at: EdgeTime) -> int | None:
        """Return what it holds at an edge with so much allocated, bytes."""
        if self.ends is not None and at.is_after(self.ends):
            return self.grown_bytes
        return minus(allocated, self.base_bytes)


@dataclass(frozen=True)
class TorchOwners:
    """The owners of a process; ``inner`` lie in phases that are part of ``load``'s."""

    load: TorchOwner | None = None  # target model and all of ``inner``
    inner: tuple[TorchOwner, ...] = ()
    others: tuple[TorchOwner, ...] = ()
    until: EdgeTime | None = None


def torch_owners(spans: Sequence[Span], draft_kv_bytes: int | None = None) -> TorchOwners:
    """Return the owners that the phases of a process have.

    Args:
        spans: phases of one process.
        draft_kv_bytes: of the drafter's layers in the KV plan; None: not known, or no drafter.
    """
    load = last_of(spans, "weight_load")
    inner: list[TorchOwner] = []
    others: list[TorchOwner] = []
    for span in spans:
        if span.phase not in _OWNERS:
            continue
        owner = _owner(span, *_OWNERS[span.phase])
        if owner is not None:
            within = load is not None and is_within(spans, span, load.order)
            (inner if within else others).append(owner)
    planned = last_of(spans, "kv_cache_alloc")
    if draft_kv_bytes is not None and planned is not None and planned.after is not None:
        end = EdgeTime.of(planned, AFTER)
        if planned.error is None:
            others.append(TorchOwner(_DRAFT_KV, _DRAFT_KV_SOURCE, end, end, 0, draft_kv_bytes))
    gone = next((span for span in spans if span.phase in _REPLACED_FROM), None)
    whole = None if load is None or not inner else _owner(load, _TARGET, _TARGET_SOURCE)
    loaded = None if load is None else end_of_loading(spans, load)
    after = next((span for span in spans if span.before is loaded), None)
    if whole is not None and whole.grown_bytes is not None and loaded is not None and after:
        grown = minus(loaded.allocated_bytes, whole.base_bytes)
        whole = replace(whole, ends=EdgeTime.of(after, BEFORE), grown_bytes=grown)
    until = None if gone is None else EdgeTime.of(gone, BEFORE)
    return TorchOwners(whole, tuple(inner), tuple(others), until)


def _owner(span: Span, name: str, source: str) -> TorchOwner | None:
    if span.before is None or span.before.allocated_bytes is None:
        return None
    ends = None if span.after is None else EdgeTime.of(span, AFTER)
    base, grown = span.before.allocated_bytes, grown_by(span)
    return TorchOwner(name, source, EdgeTime.of(span, BEFORE), ends, base, grown)


def divide_allocated(
    owners: TorchOwners, allocated: int | None, at: EdgeTime
) -> list[ComponentRow]:
    """Return the parts of ``allocated`` at an edge, bytes: of the phases that have begun by then.

    A part is measured at the end of its own phase. Later it is derived: nothing counts it again.
    All are None where they would be more than what is allocated, and from a phase on that may
    replace or free them.
    """
    rows: dict[str, ComponentRow] = {}
    for each in (*owners.inner, *owners.others):
        if not each.is_there(at):
            continue
        size, how = each.size(allocated, at), DERIVED
        if each.ends is not None and at.order == each.ends.order and each.name != _DRAFT_KV:
            how = MEASURED
        if each.name in rows:  # of several passages
            earlier = rows[each.name].bytes
            size, how = None if size is None or earlier is None else size + earlier, DERIVED
        rows[each.name] = ComponentRow(each.name, size, how, each.source, _ALLOCATED)
    load = owners.load
    if load is not None and load.is_there(at):
        rest = load.size(allocated, at)
        for each in owners.inner:
            if each.is_there(at):
                rest = minus(rest, each.size(allocated, at))
        rows[_TARGET] = ComponentRow(_TARGET, rest, DERIVED, load.source, _ALLOCATED)
    found = [rows[name] for name in _ORDER if name in rows]
    sizes = [row.bytes for row in found if row.bytes is not None]
    replaced = owners.until is not None and at.is_after(owners.until)
    if replaced or allocated is None or sum(sizes) > allocated or min(sizes, default=0) < 0:
        return [replace(row, bytes=None) for row in found]
    return found
