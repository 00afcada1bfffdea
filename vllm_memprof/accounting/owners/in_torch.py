"""Divide what torch has allocated by the phases of a start-up that have an owner of their own.

Enters: the phases of one process, and what the KV plan gives the drafter's layers. Leaves: parts of
the row ``allocated`` at an edge. They are held by that row already and never added to it. A process
with neither a draft model nor LoRA nor a KV connector has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_memprof.accounting.owners.outside_torch import EdgeTime, Taken
from vllm_memprof.accounting.readings.quantities import LOADED_BESIDE
from vllm_memprof.accounting.readings.startup import end_of_loading
from vllm_memprof.record.spans import (
    AFTER,
    BEFORE,
    DERIVED,
    MEASURED,
    ComponentRow,
    Span,
    is_within,
    last_of,
)
from vllm_memprof.units import Amount, minus, only_known, sum_or_none

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
    "kv_connector": ("kv_connector", "growth of allocated while it is made and registers"),
    "kv_register": ("kv_connector", "growth of allocated while it is made and registers"),
    "weight_load": (
        "target_weights",
        "growth of allocated over weight_load - its other owners",
    ),
}
_DRAFT_KV, _ALIGNMENT = "draft_kv_cache", "kv_alignment"
#: From their beginning on it is not known which of the parts are still allocated.
_REPLACED_FROM = ("sleep", "weight_update", "shutdown")
_ORDER = ("target_weights", "draft_weights", "lora", _DRAFT_KV, _ALIGNMENT, "kv_connector")


class TorchOwners(NamedTuple):
    """The owners of a process; ``inner`` lie in phases that are part of ``load``'s."""

    load: Taken | None = None  # target model and all of ``inner``
    inner: Sequence[Taken] = ()
    others: Sequence[Taken] = ()
    until: EdgeTime | None = None


def torch_owners(
    spans: Sequence[Span], draft_kv_bytes: Amount = None, alignment_bytes: Amount = None
) -> TorchOwners:
    """Return the owners that the phases of a process have.

    Args:
        spans: phases of one process.
        draft_kv_bytes: of the drafter's layers in the KV plan; None: not known, or no drafter.
        alignment_bytes: allocated for the KV cache beyond the plan, for a KV connector.
    """
    load, planned = last_of(spans, "weight_load"), last_of(spans, "kv_cache_alloc")
    inner: list[Taken] = []
    others: list[Taken] = []
    for span in spans:
        owner = None if span.phase == "weight_load" else _owner(span)
        if owner is not None:
            within = load is not None and is_within(spans, span, load.order)
            (inner if within else others).append(owner)
    of_plan = (
        (_DRAFT_KV, draft_kv_bytes, "tensors of the drafter's layers in the KV plan"),
        (_ALIGNMENT, alignment_bytes, "allocated for the KV cache - planned"),
    )
    for name, size, source in of_plan:
        if size is not None and planned and planned.after and planned.error is None:
            end = EdgeTime.of(planned, AFTER)
            others.append(Taken(name, source, end, end, 0, size))
    whole = None if load is None or not inner else _owner(load)
    if load is not None and whole is not None and whole.grown_bytes is not None:
        loaded = end_of_loading(spans, load)
        after = next((span for span in spans if span.before is loaded), None)
        if loaded is not None and after:
            grown = minus(loaded.allocated_bytes, whole.base_bytes)
            whole = replace(whole, ends=EdgeTime.of(after, BEFORE), grown_bytes=grown)
    gone = next((span for span in spans if span.phase in _REPLACED_FROM), None)
    return TorchOwners(whole, inner, others, None if gone is None else EdgeTime.of(gone, BEFORE))


def _owner(span: Span) -> Taken | None:
    if span.phase not in _OWNERS:
        return None
    owner = Taken.over(span, lambda at: at.allocated_bytes, *_OWNERS[span.phase])
    return replace(owner, grown_bytes=None) if owner is not None and span.error else owner


def divide_allocated(owners: TorchOwners, allocated: Amount, at: EdgeTime) -> list[ComponentRow]:
    """Return the parts of ``allocated`` at an edge, bytes: of the phases that have begun by then.

    A part is measured at the end of its own phase. Later it is derived: nothing counts it again.
    All are None where they would be more than what is allocated, and from a phase on that may
    replace or free them.
    """
    rows: dict[str, ComponentRow] = {}
    inner = [each.size(allocated, at) for each in owners.inner if each.is_there(at)]
    for each in (*owners.inner, *owners.others, owners.load):
        if each is None or not each.is_there(at):
            continue
        size, how = each.size(allocated, at), DERIVED
        if each is owners.load:
            size = minus(size, sum_or_none(inner))
        elif each.name in rows:  # of several passages
            size = sum_or_none([size, rows[each.name].bytes])
        elif (
            each.ends is not None
            and at.order == each.ends.order
            and each.name not in (_DRAFT_KV, _ALIGNMENT)
        ):
            how = MEASURED
        rows[each.name] = ComponentRow(each.name, size, how, each.source, "allocated")
    found = [rows[name] for name in _ORDER if name in rows]
    sizes = only_known(row.bytes for row in found)
    replaced = owners.until is not None and at.is_after(owners.until)
    if replaced or allocated is None or sum(sizes) > allocated or min(sizes, default=0) < 0:
        return [replace(row, bytes=None) for row in found]
    return found
