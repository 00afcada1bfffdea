"""Runs that were sampled while they served, by hand: one reading of each process per request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.support.series import MIB
from tests.unit.accounting.builders import gib, process, run_of, snapshot, span
from vllm_memprof.record.allocations import AliveStack, AllocationTrace
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.samples import RequestRecord, Sample, Served

SECOND = 10**9


def sample(t_ns: int, **figures: int | None) -> Sample:
    return Sample(t_ns, t_ns, 1, figures, figures, figures)


def requests(count: int, every_s: float = 1) -> list[RequestRecord]:
    """``count`` requests, one after the other, the first ending at ``every_s``."""
    ends = [int(number * every_s * SECOND) for number in range(1, count + 1)]
    return [
        RequestRecord(id=str(number), output_tokens=1, begin_ns=end - 1, end_ns=end)
        for number, end in enumerate(ends)
    ]


def worker(
    allocated: Sequence[int],
    reserved: Sequence[int] | None = None,
    every_s: float = 1,
    encoder_cache: Sequence[int] | None = None,
    device: Sequence[dict[str, int]] = (),
    **who: object,
) -> ProcessRecord:
    """A worker with a reading after each request, and device readings as often."""
    times = [int(number * every_s * SECOND) for number in range(1, len(allocated) + 1)]
    served = Served(
        samples=[
            sample(
                t_ns,
                allocated_bytes=allocated[at],
                reserved_bytes=gib(30) if reserved is None else reserved[at],
                encoder_cache_bytes=None if encoder_cache is None else encoder_cache[at],
            )
            for at, t_ns in enumerate(times)
        ],
        device_samples=[
            sample(t_ns, **figures) for t_ns, figures in zip(times, device, strict=False)
        ],
    )
    load = span("weight_load", snapshot(allocated_bytes=0), snapshot(allocated_bytes=gib(9)))
    return replace(process([load], **who), served=served)  # type: ignore[arg-type]


def engine_core(
    count: int, rss: Sequence[int] = (), every_s: float = 1, blocks: Sequence[int] = ()
) -> ProcessRecord:
    times = [int(number * every_s * SECOND) for number in range(1, count + 1)]
    core = process([], role="engine_core", roles=frozenset({"engine_core"}), pid=2, label=None,
                   rank=None)  # fmt: skip
    served = Served(
        requests=requests(count, every_s),
        device_samples=[
            sample(t_ns, host_rss_bytes=size) for t_ns, size in zip(times, rss, strict=False)
        ],
        kv_samples=[
            sample(t_ns, kv_blocks_used=used) for t_ns, used in zip(times, blocks, strict=False)
        ],
    )
    return replace(core, file="h-2.jsonl", served=served)


def traced(run: Run) -> Run:
    """The same with both kinds of traced allocations: a leak each, of a line of its own."""
    frames: list[list[object]] = [
        ["/site/torch/_tensor.py", 5, "clone"],
        ["/app/leak.py", 12, "keep"],
    ]
    device = AliveStack(frames, 100, 100 * MIB, 50, 50 * MIB)
    host = AliveStack([["/app/core.py", 7, ""]], 40, 40 * MIB, 0, 0)
    worker, core = run.processes
    of_device = AllocationTrace(
        "device", 100, 100, 50, 5 * MIB, gib(20), "allocations/h-1.pickle",
        stacks=[device],
    )  # fmt: skip
    of_host = AllocationTrace("host", 100, 40, None, stacks=[host])
    worker = replace(worker, allocations=[of_device])
    return replace(run, processes=[worker, replace(core, allocations=[of_host])])


def leaking(count: int = 300, per_request: int = MIB) -> Run:
    """A worker that keeps a tensor of 1 MiB, and an engine core that keeps 512 KiB, per request."""
    rng = random.Random(0)
    allocated = [gib(20) + per_request * at + 512 * rng.randrange(400) for at in range(count)]
    rss = [gib(2) + per_request * at // 2 + 4096 * rng.randrange(100) for at in range(count)]
    core = engine_core(count, rss, blocks=[at % 7 for at in range(count)])
    return run_of(worker(allocated), core)
