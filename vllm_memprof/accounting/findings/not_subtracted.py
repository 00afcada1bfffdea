"""Findings about memory that a rank holds and that its equation does not subtract."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.findings.advice import device_total, leave_room
from vllm_memprof.accounting.findings.needs import item_known
from vllm_memprof.accounting.findings.registry import INFO, Found, RankContext, by_bytes, finding
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.quantities import HOW_TITLES
from vllm_memprof.text import text


def _item(context: RankContext, name: str) -> Iterator[Found]:
    """Yield an item that the equation does not subtract, where it takes a KV block at least."""
    rank = context.rank
    item = next((item for item in rank.budget.not_subtracted if item.name == name), None)
    if item is None or item.bytes is None or item.bytes <= 0 or item.kv_tokens == 0:
        return
    evidence = text(
        "{formula} = {size:bytes} bytes, {source} ({how})",
        formula=item.formula,
        size=item.bytes,
        source=item.source,
        how=HOW_TITLES.get(item.how, item.how),
    )
    granted = context.whole.least_granted_bytes
    action = leave_room(rank, item.bytes, granted, by_utilization=True)
    severity = INFO if _only_exceeds_request(rank, item.bytes) else by_bytes(item.bytes)
    yield Found(evidence, item.bytes, action, severity=severity, kv_tokens=item.kv_tokens)


def _only_exceeds_request(rank: RankReport, size: int) -> bool:
    """Whether the device holds an item beside the KV cache, so that only the request is exceeded.

    Where the KV cache that fits the device is unknown: whether the share of the device that was
    never requested holds it.
    """
    if rank.budget.device_verdict is not None:
        return rank.budget.device_verdict in ("fits", "narrow")
    total, asked = share_of(rank).base_bytes or device_total(rank), rank.budget.requested_bytes
    return total is not None and asked is not None and size <= total - asked


@finding(
    "uncharged-persistent-torch",
    severity=by_bytes,
    title=text("The equation does not subtract torch memory outside the weights"),
    needs=item_known("persistent_torch"),
)
def uncharged_persistent_torch(context: RankContext) -> Iterator[Found]:
    """Find tensors that live before the profile run and are not weights.

    Meaning:
        Input buffers, rope tables and the sampler's state exist before profiling. The activation
        peak is an increase over them and the weights are measured apart, so no term contains them.
        The granted KV cache is too large by as much.

    Computed:
        Allocated before the profile run (its peak, right after the engine resets it) less weights
        (`vllm_memprof/accounting/readings/quantities.py::QUANTITIES`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, or lower the utilization.
    """
    yield from _item(context, "persistent_torch")


@finding(
    "graph-not-charged",
    severity=by_bytes,
    title=text("The equation does not subtract graph memory"),
    needs=item_known("graph"),
)
def graph_not_charged(context: RankContext) -> Iterator[Found]:
    """Find graph pools that were captured after the KV cache had been sized.

    Meaning:
        Graphs are captured when the KV cache already exists. Unless the equation subtracts an
        estimate, their pools come on top of the request.

    Computed:
        The engine's figure for its graph capture, less the estimate that its equation subtracts
        (`vllm_memprof/accounting/readings/quantities.py::_graph`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, capture fewer batch sizes
        (`--compilation-config`), or capture none (`--enforce-eager`).
    """
    yield from _item(context, "graph")


@finding(
    "non-torch-read-after-empty-cache",
    severity=by_bytes,
    title=text("Non-torch memory was read after empty_cache had freed a part of it"),
    needs=item_known("non_torch_cleared"),
)
def non_torch_read_after_empty_cache(context: RankContext) -> Iterator[Found]:
    """Find operator workspace that was freed before the engine read its non-torch memory.

    Meaning:
        The engine calls empty_cache at the end of the profile run and reads its non-torch memory
        afterwards. What the call freed is allocated again while serving, and no term contains it.

    Computed:
        Non-torch memory before the last empty_cache of the profile run less the same after it, not
        below zero (`vllm_memprof/accounting/readings/quantities.py::_non_torch_cleared`).

    To do:
        Give the KV cache a fixed size that is smaller by as much, or lower the utilization.
    """
    yield from _item(context, "non_torch_cleared")
