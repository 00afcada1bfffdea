"""The phases in which an allocation failed, and whether the KV cache was on the device then."""

from __future__ import annotations

from vllm_memprof.accounting.model import Oom, RankReport
from vllm_memprof.record.spans import ancestors, first_of

HELD, BEING_ALLOCATED, NOT_YET = "held", "being_allocated", "not_yet"
_ALLOCATION = "kv_cache_alloc"
_BEFORE = ("device_init", "hccl_init", "weight_load", "mm_profile", "profile_run", "kv_cache_plan")
_AFTER = (
    "graph_capture",
    "warm_up",
    "atb_warm_up",
    "kernel_warm_up",
    "request",
    "sleep",
    "wake_up",
)
#: Of a log: a line of these phases precedes the message.
_AFTER_IN_A_LOG = ("graph_capture", "warm_up")


def phases_of(rank: RankReport, oom: Oom) -> list[str]:
    """Return the phases in which it failed, the innermost first; the message's where none was
    recorded."""
    failure = first_of(rank.phases, "oom")
    around = [] if failure is None else [each.phase for each in ancestors(rank.phases, failure)]
    return around or ([] if oom.phase is None else [oom.phase])


def kv_cache_state(rank: RankReport, oom: Oom) -> str | None:
    """Return `HELD`, `BEING_ALLOCATED` or `NOT_YET` for the KV cache at the failure.

    None: nothing tells.
    """
    phases = phases_of(rank, oom)
    done = any(each.phase == _ALLOCATION and each.error is None for each in rank.phases)
    if (done and _ALLOCATION not in phases) or any(phase in _AFTER for phase in phases):
        return HELD
    if _ALLOCATION in phases or any(each.phase == _ALLOCATION for each in rank.phases):
        return BEING_ALLOCATED
    if oom.last_phase in _AFTER_IN_A_LOG:
        return HELD
    return NOT_YET if any(phase in _BEFORE for phase in phases) else None
