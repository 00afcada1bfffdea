"""The allocation that failed: where, who held the device, free blocks, and what would help."""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.model import (
    AT_LEAST,
    AT_MOST,
    ESTIMATED,
    MODELLED,
    Oom,
    RankReport,
    Remedy,
    Report,
)
from vllm_memprof.accounting.oom.failed_allocation import STAGE_TITLES, gib_of, merge_not_profiled
from vllm_memprof.document import BAD, GOOD, PLAIN, TOTAL, Section
from vllm_memprof.record.failures import PROFILE, StepRequest
from vllm_memprof.tables import (
    COUNT,
    GIB3,
    GIB4,
    PAIRS,
    SIZES,
    Column,
    Size,
    alike,
    modelled,
    table,
)
from vllm_memprof.text import Text, join, text

_ASKED_BY = {
    "npu_workspace": text("an operator's workspace, outside the caching allocator"),
    "runtime": text("the runtime, for a library outside torch"),
}
OWNER_TITLES = {
    "allocated": text("allocated"),
    "allocated_peak": text("allocated, at its peak"),
    "weights": text("weights"),
    "target_weights": text("target model"),
    "draft_weights": text("draft model"),
    "lora": text("LoRA slots"),
    "kv_cache": text("KV cache"),
    "kv_connector": text("KV connector"),
    "other_tensors": text("other tensors"),
    "reserved_not_allocated": text("reserved, not allocated"),
    "npu_workspace": text("operator workspace"),
    "outside_torch": text("outside torch, this process"),
    "outside_allocator": text("outside this process's allocator"),
    "other_processes": text("other processes"),
    "free": text("free"),
    "context": text("runtime context"),
    "communicator": text("communicator buffers"),
    "atb": text("ATB"),
    "graph": text("graph memory"),
    "runtime": text("runtime"),
    "unexplained": text("unexplained"),
}
#: Owners whose sizes the profile of a simulated device sets.
_OF_THE_PROFILE = ("outside_torch", "outside_allocator", "npu_workspace", "other_processes", "free")
#: Requests of a step that are shown.
_SHOWN_REQUESTS = 4


def oom_sections(report: Report) -> list[Section]:
    """Return what is known of the first failed allocation of each rank, and what would help."""

    def draw(rank: RankReport, labels: str) -> list[Section]:
        oom = rank.oom
        assert oom is not None
        return [
            _failure(rank, oom, labels),
            *_owners(rank, oom, labels, report.run.simulated),
            *_free_blocks(oom, labels),
            *_readings(oom, labels),
            *_remedies(rank, oom, labels),
        ]

    failed = [rank for rank in report.ranks if rank.oom is not None]
    return [*alike(failed, draw, lambda rank: repr(rank.oom)), *_counters(report)]


def _failure(rank: RankReport, oom: Oom, labels: str) -> Section:
    """Return what was asked for, where, and for whom."""

    def gib(size: int | None) -> Text | None:
        return None if size is None else text("{size} GiB", size=gib_of(rank, size))

    blocks = oom.free_blocks
    largest = None
    if blocks is not None:
        size = gib_of(rank, blocks.largest_bytes)
        largest = (
            text("{size} GiB, of the pool of small blocks", size=size)
            if blocks.small
            else text("{size} GiB, of the pool of large blocks", size=size)
        )
    asked = gib(oom.requested_bytes)
    if asked is not None and oom.asked_by is not None:
        asked = text("{asked} by {who}", asked=asked, who=_ASKED_BY[oom.asked_by])
    at = None if oom.at_request is None else str(oom.at_request)
    if at is not None and oom.request_count is not None:
        at = text("{at} of {count}", at=at, count=oom.request_count)
    values: list[tuple[Text, str | None]] = [
        (text("asked for"), asked),
        (text("free on the device"), gib(oom.free_bytes)),
        (text("missing"), gib(oom.missing_bytes)),
        (text("largest free block that it could have used"), largest),
        (text("in phase"), oom.phase),
        (text("part of the step"), STAGE_TITLES.get(oom.stage or "")),
        (text("called at"), oom.site),
        (text("request in turn"), at),
        (text("input"), oom.input),
        *((text("in the step"), _request(each)) for each in (oom.requests or [])[:_SHOWN_REQUESTS]),
    ]
    rows = [pair for pair in values if pair[1] is not None]
    notes: list[str] = []
    more = len(oom.requests or []) - _SHOWN_REQUESTS
    if more > 0:
        notes.append(text("{count} more requests were in the step", count=more))
    if oom.requested_bytes is None:
        notes.append(text("how much was asked for is not known"))
    if oom.phase is None:
        notes.append(text("the phase is not known"))
    title = text("The allocation that failed, {labels}", labels=labels)
    return table(title, PAIRS, rows, notes)


def _request(request: StepRequest) -> Text:
    """Return a request of the step: its id, tokens and images."""
    parts: list[str] = []
    if request.scheduled_tokens is not None:
        parts.append(text("{count:,} tokens in the step", count=request.scheduled_tokens))
    if request.prompt_tokens is not None:
        parts.append(text("prompt {count:,} tokens", count=request.prompt_tokens))
    for item in request.items:
        what = item.modality or text("item")
        if item.size is not None:
            what = text(
                "{what} {width}x{height}", what=what, width=item.size[0], height=item.size[1]
            )
        if item.encoded:
            what = text("{what}, encoded in this step", what=what)
        parts.append(what)
    return text("request {id}: {parts}", id=request.id, parts=join(", ", parts))


def _owners(rank: RankReport, oom: Oom, labels: str, simulated: bool) -> list[Section]:
    """Return who held the device; a log without figures has no table."""
    if sum(row.bytes is not None for row in oom.owners) < 2:
        return []
    logged = any(name.startswith("oom_") for name in rank.figures)
    rows = []
    for owner in oom.owners:
        if not owner.bytes and owner.component != "free":
            continue
        mark = simulated and owner.component in _OF_THE_PROFILE
        title = modelled(OWNER_TITLES[owner.component], mark)
        if owner.part_of is not None:
            title = text("of which {name}", name=title)
        rows.append(Size(title, owner.bytes, indent=int(owner.part_of is not None)))
    if (total := oom.device_total_bytes) is not None:
        rows.append(Size(text("device total"), total, TOTAL, "="))
    notes: list[str] = []
    if any(owner.component == "allocated_peak" and owner.bytes for owner in oom.owners):
        notes.append(
            text("allocated is known at its peak only: at least this much was not allocated")
        )
    title = text("The device when the allocation failed, {labels}", labels=labels)
    columns = (
        Column("Owner", "title"),
        Column("GiB", "bytes", lambda size: gib_of(rank, size)),
        Column("bytes", "bytes", COUNT, not logged),
    )
    return [table(title, columns, rows, notes)]


def _free_blocks(oom: Oom, labels: str) -> list[Section]:
    """Return reserved memory without a tensor, by whether it could have been used."""
    blocks = oom.free_blocks
    if blocks is None:
        return []
    parts = [
        (text("in blocks large enough"), blocks.fitting_bytes),
        (text("in blocks too small"), blocks.too_small_bytes),
        (text("of other streams"), blocks.other_streams_bytes),
        (
            text("in the pool of large blocks")
            if blocks.small
            else text("in the pool of small blocks"),
            blocks.other_pools_bytes,
        ),
        (text("in private pools (graphs)"), blocks.graph_pools_bytes),
        (text("freed, awaited by a stream"), blocks.pending_bytes),
    ]
    rows = [
        Size(title, size) for title, size in parts if size or size is None or title == parts[0][0]
    ]
    total = sum(size or 0 for _, size in parts)
    rows.append(Size(text("reserved, not allocated"), total, TOTAL, "="))
    notes: list[str] = []
    if blocks.exact:
        notes.append(text("read after the failure; nothing was allocated or freed between both"))
    elif blocks.freed_bytes is not None:
        notes.append(
            text(
                "read after the failure, when {size:bytes} bytes less were allocated than at it: "
                "blocks may have been smaller then",
                size=blocks.freed_bytes,
            )
        )
    if blocks.streams > 1:
        notes.append(
            text(
                "which of {count} streams asked is not known; taken to be the one with the most "
                "allocated memory",
                count=blocks.streams,
            )
        )
    if blocks.expandable:
        notes.append(text("segments of the pool are expandable"))
    title = text("Reserved memory without a tensor, {labels}", labels=labels)
    return [table(title, (Column("Owner", "title"), *SIZES[1:]), rows, notes)]


_READINGS = (
    Column("When", lambda row: text("profile") if row.moment == PROFILE else row.moment),
    Column("Part of the step", lambda row: STAGE_TITLES[row.stage]),
    Column("Took, GiB", "bytes", GIB3),
    Column("Allocated then, GiB", "allocated_bytes", GIB3),
)


def _readings(oom: Oom, labels: str) -> list[Section]:
    """Return what the parts of a step took, where a log notes it."""
    if not oom.readings:
        return []
    merge = merge_not_profiled(oom)
    title = text("Parts of a step, as the log notes them, {labels}", labels=labels)
    return [table(title, _READINGS, oom.readings, [] if merge is None else [merge])]


def _remedies(rank: RankReport, oom: Oom, labels: str) -> list[Section]:
    """Return what would have let the allocation pass."""
    if not oom.remedies:
        return []
    words = {True: text("yes"), False: text("no"), None: text("not known")}
    styles = {True: GOOD, False: BAD, None: PLAIN}

    def enough(row: Remedy) -> str:
        return text("yes, if so") if row.enough and row.how == ESTIMATED else words[row.enough]

    columns = (
        Column("Argument", "argument"),
        Column("Gives, GiB", lambda row: _given(rank, row), right=True),
        Column("Enough alone", enough),
        Column("On what grounds", "grounds"),
    )
    notes: list[str] = []
    if oom.requested_bytes is not None:
        notes.append(
            text(
                "enough for this allocation; what came after it would have taken more, by how much "
                "is not known"
            )
        )
    if any(row.id in _SHRINK_THE_PROFILE for row in oom.remedies):
        granted = rank.budget.engine_kv_cache_bytes
        if granted is not None and rank.budget.takes_fixed_size:
            notes.append(
                text(
                    "an argument that makes the profile run smaller makes the KV cache larger: "
                    "keep its size with --kv-cache-memory-bytes {size}",
                    size=granted,
                )
            )
        else:
            notes.append(
                text(
                    "an argument that makes the profile run smaller makes the KV cache larger: "
                    "lower --gpu-memory-utilization with it"
                )
            )
    title = text("What would have let it pass, {labels}", labels=labels)
    return [table(title, columns, oom.remedies, notes, look=lambda row: styles[row.enough])]


#: Remedies that the engine's own profile run answers to.
_SHRINK_THE_PROFILE = ("image_size", "images_per_prompt", "batched_tokens")


def _given(rank: RankReport, row: Remedy) -> str:
    if row.bytes is None:
        return "-"
    size = gib_of(rank, row.bytes)
    if row.how == MODELLED:
        size = text("{title} (m)", title=size)
    if row.bound == AT_MOST:
        return text("at most {size}", size=size)
    return text("at least {size}", size=size) if row.bound == AT_LEAST else size


_COUNTERS = (
    Column("Module", "name"),
    Column("GiB", "bytes", GIB4),
    Column("bytes", "bytes", COUNT),
    Column("peak, GiB", "peak_bytes", GIB4),
)


class _Counter(NamedTuple):
    name: str
    bytes: int
    peak_bytes: int


def _counters(report: Report) -> list[Section]:
    """Return the runtime's counters of each rank that ran out of memory, where they were read."""
    counters = {
        rank.label: [_Counter(name, **row) for name, row in rank.oom.components.items()]
        for rank in report.ranks
        if rank.oom is not None and rank.oom.components
    }
    note = text(
        "APP: torch, operator workspace, ATB and all else that this process asked ACL for; "
        "HCCL: communicators"
    )

    def draw(rank: RankReport, labels: str) -> list[Section]:
        title = text(
            "Device memory when an allocation failed, by the runtime's counters, {labels}",
            labels=labels,
        )
        rows = sorted(counters[rank.label], key=lambda row: -row.bytes)
        return [table(title, _COUNTERS, rows, [note])]

    return alike([rank for rank in report.ranks if rank.label in counters], draw)
