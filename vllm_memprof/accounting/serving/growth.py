"""Growth while serving, by owner of device memory and by process of host memory.

What processes sampled enters (``record.samples.Served``), rows for ``report.json`` leave. Readings
are put over requests finished and over time; ``trend`` judges each.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm_memprof.accounting.model import (
    PROCESS_ROLES,
    AllocationSite,
    HostGrowth,
    OwnerGrowth,
    Report,
    TracedProcess,
)
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.accounting.serving.requests import engine_cores
from vllm_memprof.accounting.serving.trend import GROWING, TOO_SHORT, trend
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.record.allocations import AliveStack, TraceTotals
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.samples import RUNTIME, Sample
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB, Amount, minus, only_known, sum_or_none

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

#: What reads a figure of a sample; None where it is unknown.
_Reader = Callable[[Sample], "int | None"]


def owner_title(owner: str) -> Text:
    """Return the name of an owner in a report."""
    known = TITLES["owners"].get(owner)
    return known or text("runtime: {module}", module=owner.removeprefix("runtime:"))


def process_title(row: HostGrowth | TracedProcess) -> Text:
    """Return the name of a process in a report: all its roles, its rank, its process id."""
    roles = join(" + ", [TITLES["processes"][role] for role in row.roles] or [text("process")])
    if isinstance(row, HostGrowth) and row.growth.owner != HOST:
        roles = text("{owner}, {roles}", owner=owner_title(row.growth.owner), roles=roles)
    if row.label is not None and "worker" in row.roles:
        return text("{roles} {label}, pid {pid}", row, roles=roles)
    return text("{roles}, pid {pid}", row, roles=roles)


def grown(read: RunReadings, report: Report) -> Report:
    """Add the growth of each owner of the ranks, and of host memory, with the lines of code."""
    ranks = []
    for rank, (_, process) in zip(report.ranks, read.workers, strict=True):
        # the headroom at the serving peak, without what was read above it later
        later = (item.bytes for item in rank.budget.held_at_peak if item.name == "held_later")
        room = sum_or_none([rank.budget.headroom_bytes, *later])
        ranks.append(replace(rank, growth=with_room(device_growth(read.run, process), room)))
    growth = host_growth(read.run)
    return replace(report, ranks=ranks, growth=growth, allocations=traced(read.run))


def device_growth(run: Run, process: ProcessRecord) -> list[OwnerGrowth]:
    """Return the growth of each owner that a worker sampled; empty where it sampled nothing."""
    served, cores = process.served, _cores_of(run, process)
    counted = {name for each in served.device_samples for name, size in each.figures.items()
               if name.startswith(RUNTIME) and size is not None}  # fmt: skip
    modules = sorted(counted - {f"{RUNTIME}{APP}"})
    blocks = cores[0].served.kv_samples if cores else []
    owners: list[tuple[str, Sequence[Sample], _Reader]] = [
        # without the encoder cache, which has a row of its own
        (ALLOCATED, served.samples, _reader("allocated_bytes", "encoder_cache_bytes")),
        (CACHED, served.samples, _reader("reserved_bytes", "allocated_bytes", needed=True)),
        (ENCODER_CACHE, served.samples, _reader("encoder_cache_bytes")),
        ("connector_device", served.device_samples, _reader("connector_device_bytes")),
        ("npu_workspace", served.device_samples, _reader("npu_workspace_bytes")),
        *((f"runtime:{name[len(RUNTIME) :]}", served.device_samples, _reader(name))
          for name in modules),
        # other processes count
        (NON_TORCH, served.device_samples,
         _reader("non_torch_bytes", "npu_workspace_bytes", *modules)),
        (KV_BLOCKS, blocks, _reader("kv_blocks_used")),
    ]  # fmt: skip
    clock = _clock(cores)
    found = [_growth(owner, samples, read, clock) for owner, samples, read in owners]
    return [row for row in found if row.readings]


def host_growth(run: Run) -> list[HostGrowth]:
    """Return the growth of each process of a run that sampled its resident memory."""
    found = []
    for process in run.processes:
        who, served = process.identity, process.served
        samples = sorted([*served.device_samples, *served.kv_samples], key=lambda each: each.t_ns)
        # files that it has mapped come and go with the page cache, and pages of a simulated device
        # are shared
        own = {
            HOST: _reader("host_rss_bytes", "host_shared_bytes"),
            "connector_host": _reader("connector_host_bytes"),
        }
        for owner, figure in own.items():
            row = _growth(owner, samples, figure, _clock(_cores_of(run, process)))
            if row.readings:
                roles = _roles(process)
                name = next(iter(roles), "unknown")
                found.append(HostGrowth(name, roles, who.label, who.host, who.pid, row))
    return found


def _clock(cores: Sequence[ProcessRecord]) -> tuple[list[int], int]:
    """Return when requests finished, and from when on a reading has a position among them; ns.

    Of requests that are in no file any more nothing tells when they finished.
    """
    ends = [record.end_ns for core in cores for record in core.served.requests]
    finished = sorted(only_known(ends))
    dropped = any(core.served.dropped.get("request") for core in cores)
    return finished, finished[0] if dropped and finished else 0


def _roles(process: ProcessRecord) -> list[str]:
    return [role for role in PROCESS_ROLES if role in process.identity.roles]


def _growth(
    owner: str, samples: Sequence[Sample], read: _Reader, clock: tuple[list[int], int]
) -> OwnerGrowth:
    """Return how an owner grew over the requests that finished, and over time."""
    finished, begins = clock
    readings = [
        (sample.t_ns, size)
        for sample in samples
        if sample.t_ns >= begins and (size := read(sample)) is not None
    ]
    bounded = owner in BOUNDED
    if not readings:
        return OwnerGrowth(owner, TOO_SHORT, bounded, 0)
    sizes = [size for _, size in readings]
    counts: list[float] = [bisect_right(finished, t_ns) for t_ns, _ in readings]
    seconds = [(t_ns - readings[0][0]) / 1e9 for t_ns, _ in readings]
    by_requests = trend(counts, sizes, LEAST_RISE_BYTES, LEAST_REQUESTS)
    too_few = by_requests.verdict == TOO_SHORT
    by_time = trend(seconds, sizes, LEAST_RISE_BYTES, LEAST_SECONDS if too_few else 0)
    judged, at = by_requests, counts
    if too_few or (by_time.verdict == GROWING and by_requests.verdict != GROWING):
        judged, at = by_time, seconds
    # the window that was judged
    first = next(place for place, position in enumerate(at) if position >= (judged.first or 0))
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
        requests=int(counts[-1] - counts[first]) if known and finished else None,
        seconds=seconds[-1] - seconds[first] if known else None,
        last_bytes=sizes[-1],
    )


def with_room(rows: list[OwnerGrowth], headroom_bytes: Amount) -> list[OwnerGrowth]:
    """Return the rows of a rank with what is left until the device is full, of those that grow.

    Args:
        rows: of ``device_growth``.
        headroom_bytes: the headroom at the serving peak before anything grew; None: unknown.
    """
    return [
        replace(
            row,
            requests_until_full=_until(headroom_bytes, row, row.bytes_per_request),
            hours_until_full=_until(headroom_bytes, row, row.bytes_per_hour),
        )
        for row in rows
    ]


def _until(headroom_bytes: Amount, row: OwnerGrowth, rate: float | None) -> float | None:
    if headroom_bytes is None or not row.grows or not rate or rate < 0:
        return None
    return max((headroom_bytes - (row.grown_bytes or 0)) / rate, 0.0)


def _cores_of(run: Run, process: ProcessRecord) -> list[ProcessRecord]:
    """Return the engine cores of its host whose requests a process serves: clocks are a host's."""
    host = process.identity.host
    return engine_cores(process, [core for core in run.serving if core.identity.host == host])


def _reader(name: str, *less: str, needed: bool = False) -> _Reader:
    """Return what reads a figure less others; those that are unknown are 0, or needed."""

    def read(sample: Sample) -> int | None:
        taken = [sample.figures.get(other) for other in less]
        if needed and None in taken:
            return None
        return minus(sample.figures.get(name), sum(size or 0 for size in taken))

    return read


def traced(run: Run) -> list[TracedProcess]:
    """Return the traced processes of a run; empty without --trace-allocations."""
    return [
        TracedProcess(
            **{name: getattr(trace, name) for name in TraceTotals.__dataclass_fields__},
            roles=_roles(process),
            label=process.identity.label,
            host=process.identity.host,
            pid=process.identity.pid,
            sites=_sites(trace.stacks, trace.half_requests is not None),
        )
        for process in run.processes
        for trace in process.allocations
    ]


def _sites(stacks: Iterable[AliveStack], compared: bool) -> list[AllocationSite]:
    """Return one row per line of code, its stacks together."""
    found: dict[tuple[str, str], AllocationSite] = {}
    for stack in sorted(stacks, key=lambda each: -each.bytes):
        frames = [
            (
                str(path),
                f"{os.path.basename(str(path))}:{line if isinstance(line, int) else 0}",
                str(name),
            )
            for path, line, name in stack.frames
        ]
        own = [f for f in frames if not any(part in f[0] for part in _LIBRARIES)] or frames
        for path, site, function in own[:1]:
            callers = [place for _, place, _ in own[1:]]
            known = found.get((path, site)) or AllocationSite(
                site, function, path, 0, 0, 0 if compared else None, callers
            )
            found[path, site] = replace(
                known,
                bytes=known.bytes + stack.bytes,
                blocks=known.blocks + stack.blocks,
                grown_bytes=known.grown_bytes + stack.bytes - stack.half_bytes
                if known.grown_bytes is not None
                else None,
            )
    return sorted(found.values(), key=lambda each: (-(each.grown_bytes or 0), -each.bytes))
