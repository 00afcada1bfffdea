"""The finding about memory that grows while an engine serves.

Read in public: 62 GB at the start, 64 GB after two days, then out of memory (vllm-ascend#6478);
host memory that grows (vllm-ascend#5847).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import GROWTH_JUDGED
from vllm_memprof.accounting.findings.registry import WARNING, Context, Found, finding_of_run
from vllm_memprof.accounting.model import OwnerGrowth, RankReport
from vllm_memprof.accounting.serving.growth import (
    ALLOCATED,
    CACHED,
    NON_TORCH,
    host_growth,
    owner_title,
    process_title,
    traced,
)
from vllm_memprof.accounting.serving.trend import GROWING
from vllm_memprof.record.loader import Identity
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
        of the run alone (`vllm_memprof/accounting/serving/trend.py`). 150 requests at least, or ten
        minutes where requests are unknown. The bytes are the growth over that window. Until the
        device is full: the headroom at the serving peak, less what has grown, at this rate.
        What the engine gave a fixed room (KV blocks, the encoder cache) is left out.

    To do:
        Tensors: `--trace-allocations N` names the lines of code whose tensors stay. Reserved and
        not allocated: fragmentation, `expandable_segments`. Host memory: the process is named.
    """
    for rank in context.ranks:
        for row in rank.growth:
            if row.verdict == GROWING and not row.bounded:
                owner = owner_title(row.owner)
                title = text("Grows while the engine serves: {owner}", owner=owner)
                memory = "device" if row.owner == ALLOCATED else None
                yield _found(context, memory, owner, row, _action(row), title, rank)
    by_pid = {(each.identity.host, each.identity.pid): each for each in context.run.processes}
    for host in host_growth(context.run):
        if host.growth.verdict == GROWING:
            name, about = process_title(host), by_pid[host.host, host.pid].identity
            title = text("Grows while the engine serves: host memory of {process}", process=name)
            action = text("a heap profiler on process {pid} names what allocates it", pid=host.pid)
            if "engine_core" in host.roles:
                action = text(
                    "--trace-allocations {requests} names the lines of Python code of the engine "
                    "core whose objects stay",
                    requests=200,
                )
            yield _found(context, "host", name, host.growth, action, title, about)


def _found(
    context: Context,
    memory: str | None,
    name: str,
    row: OwnerGrowth,
    action: Text,
    title: Text,
    about: RankReport | Identity,
) -> Found:
    """Return growth with the line of code that grew most, where memory of this kind was traced."""
    told = [_evidence(name, row)]
    if row.requests_until_full is not None and row.hours_until_full is not None:
        told.append(
            text(
                "at this rate the device is full after {requests:,} more requests, {hours:,.1f} "
                "hours at this load",
                requests=int(row.requests_until_full),
                hours=row.hours_until_full,
            )
        )
    elif row.hours_until_full is not None:
        told.append(
            text(
                "at this rate the device is full after {hours:,.1f} more hours",
                hours=row.hours_until_full,
            )
        )
    for process in traced(context.run):
        site = next(iter(process.sites), None)
        if (process.memory, process.host, process.pid) != (memory, about.host, about.pid):
            continue
        if site is not None and (site.grown_bytes or 0) > 0:
            told.append(
                text(
                    "grew most while traced: {site}, {grown:mib} MiB in {requests:,} requests",
                    site=site.site,
                    grown=site.grown_bytes,
                    requests=process.requests - (process.half_requests or 0),
                )
            )
            action = text(
                "what keeps a reference to what {site} makes? Its callers are in report.json, "
                "allocations",
                site=site.site,
            )
            break
    return Found(join("; ", told), row.grown_bytes, action, title, about=about)


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
