"""The device memory that stays free: the total less what all owners held at the worst known moment.

For a plan, which stops before its KV cache is allocated: with the KV cache that it was granted.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, first_of, is_within
from vllm_memprof.units import minus


def spare(spans: list[Span], total: int | None) -> int | None:
    """Return the device total less what all owners held at the worst moment, bytes."""
    worst = max((held for span in spans for held in _held_in(span, total)), default=None)
    return None if worst is None or total is None else total - worst


def profile_peak(spans: list[Span], total: int | None) -> int | None:
    """Return what all owners held at the worst moment of the profile run, bytes.

    The KV cache does not exist yet, so serving holds this and the KV cache together when it does
    what the profile run did.
    """
    run = first_of(spans, "profile_run")
    if run is None:
        return None
    inside = [run, *(span for span in spans if is_within(spans, span, run.order))]
    return max((held for span in inside for held in _held_in(span, total)), default=None)


def spare_with_kv_cache(rank: RankReport) -> tuple[int | None, int | None]:
    """Return, in two ways, the device total less the planned KV cache and all else held, bytes.

    The first takes all else from the request less the KV cache that fits it, the second from the
    worst moment of the profile run, where idle segments count as well. None where it is unknown.
    What comes after the plan (captured graphs, pools first used in the warm-up) is in neither.
    """
    budget = rank.budget
    total = (
        rank.device_total_bytes if budget.device_total_bytes is None else budget.device_total_bytes
    )
    kv_cache = (
        rank.kv.planned_bytes if rank.kv.planned_bytes is not None else budget.engine_kv_cache_bytes
    )
    beside = minus(budget.requested_bytes, budget.fits_request_kv_cache_bytes)
    free = minus(total, kv_cache)
    return minus(free, beside), minus(free, profile_peak(rank.phases, total))


def _held_in(span: Span, total: int | None) -> Iterator[int]:
    """Yield what was in use at both edges, and at a reserved peak that fell between them."""
    for snapshot in (span.before, span.after):
        held = None if snapshot is None else _held(snapshot, total)
        if held is not None:
            yield held
    before, after = span.before, span.after
    if (
        before is None
        or after is None
        or before.non_torch_bytes is None
        or after.non_torch_bytes is None
    ):
        return
    low, high = before.reserved_run_peak_bytes, after.reserved_run_peak_bytes
    if low is not None and high is not None and high > low:
        # non-torch memory at that moment is not known; at least the lesser of both edges was there
        yield high + min(before.non_torch_bytes, after.non_torch_bytes)


def _held(snapshot: Snapshot, total: int | None) -> int | None:
    whole = snapshot.device_total_bytes if snapshot.device_total_bytes is not None else total
    if whole is not None and snapshot.device_free_bytes is not None:
        return whole - snapshot.device_free_bytes
    if snapshot.reserved_bytes is not None and snapshot.non_torch_bytes is not None:
        return snapshot.reserved_bytes + snapshot.non_torch_bytes
    return None
