"""Requests, multimodal stages and memory over time of one rank, from what was sampled.

A request has no memory of its own: its figures are those of the rank while it ran, so a row says
with how many others it was in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Points of a curve in a report at most: what lies between two is in their lowest and highest.
MOST_POINTS = 400
#: Figures of the curve: name -> which samples have them.
WORKER, DEVICE, CORE = "samples", "device_samples", "kv_samples"
CURVES: Mapping[str, str] = {
    "allocated_bytes": WORKER,
    "reserved_bytes": WORKER,
    "encoder_cache_bytes": WORKER,
    "device_free_bytes": DEVICE,
    "non_torch_bytes": DEVICE,
    "host_rss_bytes": DEVICE,
    "kv_blocks_used": CORE,
    "running": CORE,
    "waiting": CORE,
}


@dataclass(frozen=True)
class RequestRow:
    """One request on one rank. Bytes unless the name says otherwise; None is unknown."""

    id: str
    prompt_tokens: int | None
    output_tokens: int | None  # None: it did not end
    #: Width and height in pixels as the encoder got them; None where they were not to be read.
    images: list[list[int] | None]
    allocated_peak_bytes: int | None  # highest that is known of the steps that had it
    left_allocated_bytes: int | None  # allocated after it less before it
    left_reserved_bytes: int | None
    #: mm_encoder, mm_merge, mm_cache_insert, mm_cache_evict, or step for the rest of a step.
    peak_stage: str | None
    #: Whether the peak is exact; else it is the highest reading, and no step of the request was
    #: above ``allocated_peak_at_most_bytes``.
    peak_exact: bool = False
    allocated_peak_at_most_bytes: int | None = None
    #: Most other requests that were in a step with it; the memory is that of all of them.
    others: int | None = None
    image_tokens: int | None = None  # of the language model, all items
    begin_seconds: float | None = None  # since the launch
    end_seconds: float | None = None
    sampled_steps: int | None = None  # steps that had it and were read
    reason: str | None = None  # why it ended, as the engine names it
    finished: bool | None = None  # False: the process failed or ended with it


@dataclass(frozen=True)
class StageRow:
    """A multimodal stage of one rank: all passages through it while serving."""

    stage: str
    passages: int
    failed: int  # left by an exception
    items: int
    #: Of the passage that handed out most.
    allocated_total_bytes: int | None  # handed out during it, whether or not it was freed again
    held_bytes: int | None  # allocated after it less before it
    allocated_peak_bytes: int | None  # None: the allocator's peak did not rise in any passage
    request: str | None  # id, of that passage's first item
    image: list[int] | None  # size of its largest item


@dataclass(frozen=True)
class Point:
    """A stretch of time: the lowest and the highest value of each figure in it."""

    begin_seconds: float  # since the launch
    end_seconds: float
    readings: int  # of the worker; 0 where only other processes were read
    low: dict[str, int]  # CURVES name -> value; a figure that was not read has no key
    high: dict[str, int]
