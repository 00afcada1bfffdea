"""Growth while serving, by owner of device memory and by process of host memory.

What processes sampled enters (``record.samples.Served``), rows for ``report.json`` leave. Readings
are put over requests finished and over time; ``trend`` judges each.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import (
    PROCESS_ROLES,
    AllocationSite,
    HostGrowth,
    OwnerGrowth,
    TracedProcess,
)
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.accounting.serving.requests import engine_cores
from vllm_memprof.accounting.serving.trend import GROWING, TOO_SHORT, trend
from vllm_memprof.record.allocations import AliveStack, TraceTotals
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.samples import RUNTIME, Sample
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB, minus

#: Growth over a window below this is none worth speaking of, whatever its interval.
LEAST_RISE_BYTES = 16 * MIB
#: Requests, or seconds where requests are unknown, that a window has at least.
LEAST_REQUESTS, LEAST_SECONDS = 150, 600
HOUR = 3600.0

ALLOCATED, CACHED, ENCODER_CACHE = "allocated", "reserved_not_allocated", "encoder_cache"
KV_BLOCKS, NON_TORCH, HOST = "kv_blocks", "other_non_torch", "host_rss"
#: Owners that the engine gives a fixed room at the start: they fill it, and grow no further.
BOUNDED = (ENCODER_CACHE, KV_BLOCKS)
#: Path fragments of frames that allocate for their caller.
_LIBRARIES = ("/torch/", "/torch_npu/", "/vllm_memprof/capture/", "/functools.py", "/contextlib.py")
_TITLES = {
    ALLOCATED: text("allocated by tensors"),
    CACHED: text("reserved, not allocated"),
    ENCODER_CACHE: text("encoder cache"),
    "npu_workspace": text("operator workspace"),
    "runtime:HCCL": text("communicators"),
    NON_TORCH: text("other non-torch"),
    HOST: text("host memory"),
}
_PROCESSES = {
    "worker": text("worker"),
    "engine_core": text("engine core"),
    "api": text("API server"),
}


@dataclass(frozen=True)
class _Clock:
    """When requests finished, as one process's clock has it; ns, rising."""

    finished: list[int]
    begins: int | None  # readings before it have no position: their requests are in no file

    def requests(self, t_ns: int) -> int:
        return bisect_right(self.finished, t_ns)


_Reading = Callable[[Sample], "int | None"]


def owner_title(owner: str) -> Text:
    """Return the name of an owner in a report."""
    known = _TITLES.get(owner)
    return known or text("runtime: {module}", module=owner.removeprefix("runtime:"))


def process_name(roles: list[str], label: str | None, pid: int | None) -> Text:
    """Return the name of a process in a report: all its roles, its rank, its process id."""
    named = join(" + ", [_PROCESSES[role] for role in roles]) if roles else text("process")
    if label is not None and "worker" in roles:
        return text("{roles} {label}, pid {pid}", roles=named, label=label, pid=pid)
    return text("{roles}, pid {pid}", roles=named, pid=pid)


def process_title(row: HostGrowth) -> Text:
    """Return the name of the process of a row."""
    return process_name(row.roles, row.label, row.pid)


def device_growth(run: Run, process: ProcessRecord) -> list[OwnerGrowth]:
    """Return the growth of each owner that a worker sampled; empty where it sampled nothing."""
    served = process.served
    clock = _clock(run, process)
    cores = _cores_of(run, process)
    blocks = cores[0].served.kv_samples if cores else []
    modules = sorted(
        {
            name
            for sample in served.device_samples
            for name, size in sample.figures.items()
            if name.startswith(RUNTIME) and size is not None and name != f"{RUNTIME}{APP}"
        }
    )
    owners: list[tuple[str, Iterable[Sample], _Reading]] = [
        # without the encoder cache, which has a row of its own
        (ALLOCATED, served.samples, _less("allocated_bytes", "encoder_cache_bytes")),
        (CACHED, served.samples, _less("reserved_bytes", "allocated_bytes", needed=True)),
        (ENCODER_CACHE, served.samples, _named("encoder_cache_bytes")),
        ("npu_workspace", served.device_samples, _named("npu_workspace_bytes")),
        *(
            (f"runtime:{name[len(RUNTIME) :]}", served.device_samples, _named(name))
            for name in modules
        ),
        # other processes count
        (
            NON_TORCH,
            served.device_samples,
            _less("non_torch_bytes", "npu_workspace_bytes", *modules),
        ),
        (KV_BLOCKS, blocks, _named("kv_blocks_used")),
    ]
    found = [_growth(owner, samples, read, clock) for owner, samples, read in owners]
    return [row for row in found if row.readings]


def host_growth(run: Run) -> list[HostGrowth]:
    """Return the growth of each process of a run that sampled its resident memory."""
    found = []
    for process in run.processes:
        who = process.identity
        samples = [*process.served.device_samples, *process.served.kv_samples]
        samples.sort(key=lambda sample: sample.t_ns)
        # files that it has mapped come and go with the page cache, and pages of a simulated device
        # are shared
        own = _less("host_rss_bytes", "host_shared_bytes")
        row = _growth(HOST, samples, own, _clock(run, process))
        if row.readings:
            roles = _roles(process)
            name = roles[0] if roles else "unknown"
            found.append(HostGrowth(name, roles, who.label, who.host, who.pid, row))
    return found


def _roles(process: ProcessRecord) -> list[str]:
    return [role for role in PROCESS_ROLES if role in process.identity.roles]


def _growth(owner: str, samples: Iterable[Sample], read: _Reading, clock: _Clock) -> OwnerGrowth:
    begins = clock.begins or 0
    readings = [
        (sample.t_ns, size)
        for sample in samples
        if sample.t_ns >= begins and (size := read(sample)) is not None
    ]
    bounded = owner in BOUNDED
    if not readings:
        return OwnerGrowth(owner, TOO_SHORT, bounded, 0)
    times = [t_ns for t_ns, _ in readings]
    sizes = [size for _, size in readings]
    counts = [clock.requests(t_ns) for t_ns in times]
    seconds = [(t_ns - times[0]) / 1e9 for t_ns in times]
    by_requests = trend(counts, sizes, LEAST_RISE_BYTES, LEAST_REQUESTS)
    long_enough = LEAST_SECONDS if by_requests.verdict == TOO_SHORT else 0
    by_time = trend(seconds, sizes, LEAST_RISE_BYTES, long_enough)
    judged, at = by_requests, list[float](counts)
    if by_requests.verdict == TOO_SHORT or (
        by_time.verdict == GROWING and by_requests.verdict != GROWING
    ):
        judged, at = by_time, seconds
    inside = [place for place, position in enumerate(at) if position >= (judged.first or 0)]
    known = judged.verdict != TOO_SHORT
    slope, low, high = (
        None if rate is None else rate * HOUR for rate in (by_time.slope, by_time.low, by_time.high)
    )
    return OwnerGrowth(
        owner=owner,
        verdict=judged.verdict,
        bounded=bounded,
        readings=len(readings),
        bytes_per_request=by_requests.slope,
        bytes_per_request_low=by_requests.low,
        bytes_per_request_high=by_requests.high,
        bytes_per_hour=slope,
        bytes_per_hour_low=low,
        bytes_per_hour_high=high,
        grown_bytes=None if judged.rise is None else round(judged.rise),
        requests=counts[-1] - counts[inside[0]] if known and clock.finished else None,
        seconds=seconds[-1] - seconds[inside[0]] if known else None,
        last_bytes=sizes[-1],
    )


def with_room(rows: list[OwnerGrowth], headroom_bytes: int | None) -> list[OwnerGrowth]:
    """Return the rows of a rank with what is left until the device is full, of those that grow.

    Args:
        rows: of ``device_growth``.
        headroom_bytes: the headroom at the serving peak before anything grew; None: unknown.
    """
    if headroom_bytes is None:
        return rows
    found = []
    for row in rows:
        if row.verdict == GROWING and not row.bounded:
            room = headroom_bytes - (row.grown_bytes or 0)
            row = replace(
                row,
                requests_until_full=_until(room, row.bytes_per_request),
                hours_until_full=_until(room, row.bytes_per_hour),
            )
        found.append(row)
    return found


def _until(room_bytes: int, rate: float | None) -> float | None:
    return None if rate is None or rate <= 0 else max(room_bytes / rate, 0.0)


def _clock(run: Run, process: ProcessRecord) -> _Clock:
    """Return when requests finished; empty where no process of this host knows it."""
    cores = _cores_of(run, process)
    finished = sorted(
        record.end_ns
        for core in cores
        for record in core.served.requests
        if record.end_ns is not None
    )
    dropped = any(core.served.dropped.get("request") for core in cores)
    return _Clock(finished, finished[0] if dropped and finished else None)


def _cores_of(run: Run, process: ProcessRecord) -> list[ProcessRecord]:
    """Return the engine cores of its host whose requests a process serves: clocks are a host's."""
    host = process.identity.host
    return engine_cores(process, [core for core in run.serving if core.identity.host == host])


def _named(name: str) -> _Reading:
    return lambda sample: sample.figures.get(name)


def _less(name: str, *others: str, needed: bool = False) -> _Reading:
    """Read a figure less others; None where it is unknown, or one that is needed."""

    def read(sample: Sample) -> int | None:
        taken = [sample.figures.get(other) for other in others]
        if needed and None in taken:
            return None
        return minus(sample.figures.get(name), sum(size or 0 for size in taken))

    return read


def traced(run: Run) -> list[TracedProcess]:
    """Return the traced processes of a run; empty without --trace-allocations."""
    found = []
    for process in run.processes:
        who = process.identity
        for trace in process.allocations:
            found.append(
                TracedProcess(
                    **{name: getattr(trace, name) for name in TraceTotals.__dataclass_fields__},
                    roles=_roles(process),
                    label=who.label,
                    host=who.host,
                    pid=who.pid,
                    sites=_sites(trace.stacks, trace.half_requests is not None),
                )
            )
    return found


def _sites(stacks: Iterable[AliveStack], compared: bool) -> list[AllocationSite]:
    """Return one row per line of code, its stacks together."""
    found: dict[tuple[str, str], AllocationSite] = {}
    for stack in sorted(stacks, key=lambda each: -each.bytes):
        frames = [
            (str(path), (line if isinstance(line, int) else 0), str(name))
            for path, line, name in stack.frames
        ]
        if not frames:
            continue
        own = [f for f in frames if not any(part in f[0] for part in _LIBRARIES)] or frames
        path, line, function = own[0]
        site = f"{os.path.basename(path)}:{line}"
        grown = stack.bytes - stack.half_bytes if compared else None
        known = found.get((path, site))
        if known is None:
            callers = [f"{os.path.basename(path)}:{line}" for path, line, _ in own[1:]]
            found[path, site] = AllocationSite(
                site, function, path, stack.bytes, stack.blocks, grown, callers
            )
        else:
            found[path, site] = replace(
                known,
                bytes=known.bytes + stack.bytes,
                blocks=known.blocks + stack.blocks,
                grown_bytes=None if grown is None else (known.grown_bytes or 0) + grown,
            )
    return sorted(found.values(), key=lambda each: (-(each.grown_bytes or 0), -each.bytes))
