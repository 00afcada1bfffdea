"""Findings about an engine that serves: memory that grows, and multimodal requests.

Read in public: 62 GB at the start, 64 GB after two days, then out of memory (vllm-ascend#6478);
host memory that grows (vllm-ascend#5847).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.model import MmProfile, OwnerGrowth, RankReport
from vllm_memprof.accounting.serving.growth import (
    ALLOCATED,
    host_growth,
    owner_title,
    process_title,
    traced,
)
from vllm_memprof.record.loader import Identity
from vllm_memprof.units import format_rate, minus

#: Profiling is said to assume too much where less than this share of its tokens ever came.
OVER_SHARE = 0.5


def growth_while_serving(run: Context) -> Iterator[Found]:
    """Find owners of device memory, and processes on the host, that grow to the end of the run."""
    for rank in run.ranks:
        for row in rank.growth:
            if row.grows:
                owner = owner_title(row.owner)
                figures = {"owner": owner, "name": owner, row.owner: True}
                memory = "device" if row.owner == ALLOCATED else None
                yield _grown(run, row, rank, memory, figures)
    by_pid = {(each.identity.host, each.identity.pid): each.identity for each in run.run.processes}
    for host in host_growth(run.run):
        if host.growth.grows:
            name = process_title(host)
            figures = {"process": name, "name": name, "process_pid": host.pid}
            figures |= dict.fromkeys(host.roles, True)
            yield _grown(run, host.growth, by_pid[host.host, host.pid], "host", figures)


def _grown(
    run: Context,
    row: OwnerGrowth,
    about: RankReport | Identity,
    memory: str | None,
    figures: dict[str, object],
) -> Found:
    """Return growth with the line of code that grew most, where memory of this kind was traced."""
    said = {
        name: format_rate(value, 1 if "hour" in name else 3) if "_per_" in name and value else value
        for name, value in vars(row).items()
    } | figures
    for process in traced(run.run):
        site = next(iter(process.sites), None)
        same = (process.memory, process.host, process.pid) == (memory, about.host, about.pid)
        if same and site is not None and (site.grown_bytes or 0) > 0:
            said |= {"site": site.site, "site_grown": site.grown_bytes}
            said["site_requests"] = process.requests - (process.half_requests or 0)
            break
    return Found(row.grown_bytes, said, about=about)


def mm_profile_under(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find a step whose multimodal items were larger than those that were profiled."""
    for profile in _profiles(rank):
        more_bytes = max(0, minus(profile.came_bytes, profile.bytes) or 0) or None
        if more_bytes or (minus(profile.came_tokens, profile.tokens) or 0) > 0:
            yield Found(more_bytes, _figures(profile))


def mm_profile_over(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find profiled multimodal items of which less than half ever came in one step."""
    for profile in _profiles(rank):
        if profile.came_tokens and profile.came_tokens < OVER_SHARE * (profile.tokens or 0):
            unused = max(0, minus(profile.bytes, profile.came_bytes) or 0)
            yield Found(unused or None, _figures(profile))


def merge_not_profiled(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find a merge of text and multimodal embeddings that took memory and was not profiled."""
    for profile in _profiles(rank):
        if profile.merged is False and profile.merge_bytes:
            yield Found(profile.merge_bytes, _figures(profile))


def _profiles(rank: RankReport) -> list[MmProfile]:
    return [] if rank.mm_profile is None else [rank.mm_profile]


def _figures(profile: MmProfile) -> dict[str, object]:
    """Return what was profiled and what came, a size in pixels as ``4096x4096``."""
    return {
        name: "x".join(map(str, value)) if isinstance(value, list) else value
        for name, value in vars(profile).items()
    } | {"frames": profile.frames or None}
