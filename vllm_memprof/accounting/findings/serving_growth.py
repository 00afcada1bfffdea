"""The finding about memory that grows while an engine serves.

Read in public: 62 GB at the start, 64 GB after two days, then out of memory (vllm-ascend#6478);
host memory that grows (vllm-ascend#5847).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_memprof.accounting.findings.needs import GROWTH_JUDGED
from vllm_memprof.accounting.findings.registry import WARNING, Context, Found, finding_of_run
from vllm_memprof.accounting.model import HostGrowth, OwnerGrowth
from vllm_memprof.accounting.serving_growth import (
    ALLOCATED,
    CACHED,
    NON_TORCH,
    host_growth,
    owner_title,
    process_title,
    traced,
)
from vllm_memprof.accounting.trend import GROWING
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_rate


@finding_of_run(
    "growth-while-serving",
    severity=WARNING,
    title=text("Memory grows while the engine serves, and does not stop"),
    needs=GROWTH_JUDGED,
)
def growth_while_serving(context: Context) -> Iterator[Found]:
    """Find owners of device memory, and processes on the host, that grow to the end of the run.

    Meaning:
        What this owner holds becomes more with the requests, beyond the noise of its readings, and
        growth goes on in the last part of the run: a leak, or a cache that is not full yet. A
        cache that has reached its plateau is no finding, nor is one whose growth slows down.

    Computed:
        Of each owner the Theil-Sen slope over requests finished and over time, after the first
        tenth of the run, with an interval of 99.8 % that has to lie above 0; growth of 16 MiB or
        more that persists in the last third and the last fifth; or all of that in the second half
        of the run alone (`vllm_memprof/accounting/trend.py`). 150 requests at least, or ten
        minutes where requests are unknown. The bytes are the growth over that window. Until the
        device is full: what was spare at the serving peak, less what has grown, at this rate.
        What the engine gave a fixed room (KV blocks, the encoder cache) is left out.

    To do:
        Tensors: `--trace-allocations N` names the lines of code whose tensors stay. Reserved and
        not allocated: fragmentation, `expandable_segments`. Host memory: the process is named.
    """
    for rank in context.ranks:
        for row in rank.growth:
            if row.verdict != GROWING or row.bounded:
                continue
            told = [_evidence(owner_title(row.owner), row), *_until_full(row)]
            action = _action(row)
            site = None
            if row.owner == ALLOCATED:
                site = _most_grown(context, "device", rank.host, rank.pid)
            if site is not None:
                told.append(site.said)
                action = site.action
            evidence = join("; ", told)
            title = text("Grows while the engine serves: {owner}", owner=owner_title(row.owner))
            yield Found(evidence, row.grown_bytes, action, title, about=rank)
    by_pid = {(each.identity.host, each.identity.pid): each for each in context.run.processes}
    for host in host_growth(context.run):
        if host.growth.verdict == GROWING:
            name = process_title(host)
            title = text("Grows while the engine serves: host memory of {process}", process=name)
            told, action = [_evidence(name, host.growth)], _host_action(host)
            site = _most_grown(context, "host", host.host, host.pid)
            if site is not None:
                told.append(site.said)
                action = site.action
            yield Found(
                join("; ", told),
                host.growth.grown_bytes,
                action,
                title,
                about=by_pid[host.host, host.pid].identity,
            )


class _Site(NamedTuple):
    said: Text
    action: Text


def _most_grown(context: Context, memory: str, host: str | None, pid: int | None) -> _Site | None:
    """Return the line of code whose memory grew most while it was traced; None without one."""
    for process in traced(context.run):
        if (process.memory, process.host, process.pid) != (memory, host, pid):
            continue
        site = next(iter(process.sites), None)
        if site is not None and (site.grown_bytes or 0) > 0:
            said = text(
                "grew most while traced: {site}, {grown:mib} MiB in {requests:,} requests",
                site=site.site,
                grown=site.grown_bytes,
                requests=process.requests - (process.half_requests or 0),
            )
            action = text(
                "what keeps a reference to what {site} makes? Its callers are in report.json, "
                "allocations",
                site=site.site,
            )
            return _Site(said, action)
    return None


def _evidence(name: str, row: OwnerGrowth) -> Text:
    parts: list[Text] = []
    if row.bytes_per_request is not None:
        parts.append(
            text(
                "{rate} MiB per request ({low} to {high})",
                rate=format_rate(row.bytes_per_request),
                low=format_rate(row.bytes_per_request_low),
                high=format_rate(row.bytes_per_request_high),
            )
        )
    if row.bytes_per_hour is not None:
        parts.append(
            text(
                "{rate} MiB per hour ({low} to {high})",
                rate=format_rate(row.bytes_per_hour, 1),
                low=format_rate(row.bytes_per_hour_low, 1),
                high=format_rate(row.bytes_per_hour_high, 1),
            )
        )
    grown = text("{name}: {size:mib} MiB", name=name, size=row.grown_bytes)
    if row.requests is not None:
        grown = text(
            "{name}: {size:mib} MiB over {requests:,} requests",
            name=name,
            size=row.grown_bytes,
            requests=row.requests,
        )
    return join("; ", [grown, *parts])


def _until_full(row: OwnerGrowth) -> list[Text]:
    if row.requests_until_full is not None and row.hours_until_full is not None:
        return [
            text(
                "at this rate the device is full after {requests:,} more requests, {hours:,.1f} "
                "hours at this load",
                requests=int(row.requests_until_full),
                hours=row.hours_until_full,
            )
        ]
    if row.hours_until_full is not None:
        return [
            text(
                "at this rate the device is full after {hours:,.1f} more hours",
                hours=row.hours_until_full,
            )
        ]
    return []


def _action(row: OwnerGrowth) -> Text:
    if row.owner == ALLOCATED:
        return text(
            "tensors stay alive: --trace-allocations {requests} names the lines of code whose "
            "tensors are still there after as many requests",
            requests=200,
        )
    if row.owner == CACHED:
        return text(
            "blocks that no tensor fits into pile up: {setting} where it is not set",
            setting="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        )
    if row.owner == NON_TORCH:
        return text(
            "memory outside torch, or another process on the device: npu-smi info lists those"
        )
    return text("memory outside torch, held by the runtime for this process")


def _host_action(row: HostGrowth) -> Text:
    if "engine_core" in row.roles:
        return text(
            "--trace-allocations {requests} names the lines of Python code of the engine core "
            "whose objects stay",
            requests=200,
        )
    return text("a heap profiler on process {pid} names what allocates it", pid=row.pid)
