"""Memory that is returned and allocated again: calls of empty_cache, cycles of sleep mode.

Plain data, part of the report model. Bytes are integers, None is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_memprof.record.codec import computed

ENGINE, MEMPROF = "engine", "memprof"


@dataclass(frozen=True)
class EmptyCacheCall:
    """One call of the allocator's ``empty_cache`` and what it gave back to the device."""

    phase: str | None  # the enclosing phase
    site: str | None  # file.py:line of the caller, the first frame outside torch
    seconds: float | None  # with the synchronisation of the device that it contains
    freed_cached_bytes: int | None
    freed_npu_workspace_bytes: int | None  # None where it was not read apart, as while requests run
    freed_other_bytes: (
        int | None
    )  # the rest of non-torch; with the workspace where that was not read apart
    while_serving: (
        bool  # requests ran; in records that do not know, the call came after the engine was ready
    )
    order: int | None = None  # of its passage, as in phases
    function: str | None = None
    thread: str | None = None
    requests: int | None = None  # that the model runner held
    in_step: bool | None = None  # called from inside a step of the model
    by: str = ENGINE  # engine | memprof (the experiment of --empty-cache-at)
    at: str | None = None  # memprof's own: the phase that had just ended
    after_ready: bool = False  # and before the shutdown
    at_end: bool = False  # in the shutdown or after it
    alloc_retries: int | None = (
        None  # failed allocations that made the allocator flush itself, since the last call
    )
    refilled_bytes: int | None = None  # of what was freed, taken again by the next reading
    refilled_by: str | None = None  # which reading that was
    chain: tuple[str, ...] = ()  # module:function, the innermost first
    freed_by_module: dict[str, int] | None = (
        None  # CANN module -> bytes, by the runtime's counters; None: not read
    )

    @property
    @computed
    def freed_bytes(self) -> int | None:
        """Everything that came back, None where a part is unknown."""
        cached, other = self.freed_cached_bytes, self.freed_other_bytes
        return (
            None
            if cached is None or other is None
            else cached + other + (self.freed_npu_workspace_bytes or 0)
        )


@dataclass(frozen=True)
class Cycle:
    """One sleep and wake-up, one weight update, or one pause with updates in it and its continue,
    with the growth since the one before.

    The first is compared with the moment before it. Residues are signed.
    """

    kind: str  # sleep | pause | weight_update
    number: int  # from 1
    order: int  # of its first passage
    seconds: float | None  # of its passages
    asleep_used_bytes: int | None  # device memory in use while asleep; None for the others
    used_bytes: int | None  # device total - free, after it; other processes on the device count
    free_bytes: int | None  # of the device, after it
    reserved_bytes: int | None
    residue_bytes: int | None  # growth of used
    allocated_residue_bytes: int | None
    cached_residue_bytes: int | None  # reserved less allocated
    non_torch_residue_bytes: int | None
    emptied: bool  # empty_cache was called in it, or between it and the one before
    emptied_inside: bool  # in it: what is cached after it is what the call left


@dataclass(frozen=True)
class OwnCall:
    """One of memprof's own calls of empty_cache (``--empty-cache-at``)."""

    at: str | None  # the phase that had just ended
    seconds: float | None
    freed_bytes: int | None
    kept_bytes: int | None  # of those, still free at the time of kept_until
    kept_until: str | None  # the end of the start-up; for calls after it, the next reading


@dataclass(frozen=True)
class ReclaimSummary:
    """The engine's calls until its shutdown added up, and what is left to free after start-up."""

    calls: int
    calls_at_end: int  # in the shutdown or after it: in no other figure
    calls_while_serving: int
    seconds: float | None
    freed_cached_bytes: int | None
    freed_npu_workspace_bytes: int | None  # of the calls around which it was read
    freed_other_bytes: int | None
    refilled_bytes: int | None  # of all that was freed
    serving_seconds: float | None
    serving_freed_bytes: int | None
    serving_refilled_bytes: int | None
    left_after: str | None  # the end of the start-up: the phase after which the next two were read
    left_cached_bytes: int | None  # the most that a call there returns from the caching allocator
    left_npu_workspace_bytes: int | None
    left_kv_tokens: int | None = None  # what both are worth
    freed_by_module: dict[str, int] | None = None  # of all calls; None where one was not read
    own: list[OwnCall] = field(default_factory=list)
