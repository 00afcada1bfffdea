"""The allocation that failed: where, who held the device, free blocks, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import AT_LEAST, AT_MOST, RankReport, Remedy
from vllm_memprof.accounting.oom.failed_allocation import gib_of, merge_not_profiled
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import GOOD, MUTED, PLAIN, TOTAL, Row, Section
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.record.spans import ESTIMATED, MODELLED
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.tables import Size, modelled
from vllm_memprof.text import Text, join, text

OWNER_TITLES = TITLES["owners_at_failure"]
_ASKED_BY = TITLES["asked_by"]
#: Owners whose sizes the profile of a simulated device sets.
_OF_THE_PROFILE = ("outside_torch", "outside_allocator", "npu_workspace", "other_processes", "free")
#: Requests of a step that are shown.
_SHOWN_REQUESTS = 4
#: Remedies that the engine's own profile run answers to.
_SHRINK_THE_PROFILE = ("image_size", "images_per_prompt", "batched_tokens")


def failed_allocation(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what was asked for, where, and for whom."""
    oom = rank.oom
    if oom is None:
        return
    requests = oom.requests or []

    def gib(size: int | None) -> Text | None:
        return None if size is None else text("{size} GiB", size=gib_of(rank, size))

    asked, largest = gib(oom.requested_bytes), None
    if asked is not None and oom.asked_by is not None:
        asked = text("{asked} by {who}", asked=asked, who=_ASKED_BY[oom.asked_by])
    if (blocks := oom.free_blocks) is not None:
        pool = text("small") if blocks.small else text("large")
        size = gib_of(rank, blocks.largest_bytes)
        largest = text("{size} GiB, of the pool of {pool} blocks", size=size, pool=pool)
    at = None if oom.at_request is None else str(oom.at_request)
    if at is not None and oom.request_count is not None:
        at = text("{at_request} of {request_count}", oom)
    values: list[tuple[Text, str | None]] = [
        (text("asked for"), asked),
        (text("free on the device"), gib(oom.free_bytes)),
        (text("missing"), gib(oom.missing_bytes)),
        (text("largest free block that it could have used"), largest),
        (text("in phase"), oom.phase),
        (text("part of the step"), TITLES["stages"].get(oom.stage or "")),
        (text("called at"), oom.site),
        (text("request in turn"), at),
        (text("input"), oom.input),
    ]
    for request in requests[:_SHOWN_REQUESTS]:
        parts: list[str] = []
        if request.scheduled_tokens is not None:
            parts.append(text("{scheduled_tokens:,} tokens in the step", request))
        if request.prompt_tokens is not None:
            parts.append(text("prompt {prompt_tokens:,} tokens", request))
        for item in request.items:
            what = item.modality or text("item")
            if item.size is not None:
                what = f"{what} {item.size[0]}x{item.size[1]}"
            parts.append(text("{what}, encoded in this step", what=what) if item.encoded else what)
        told = text("request {id}: {parts}", request, parts=join(", ", parts))
        values.append((text("in the step"), told))
    figures = {
        "more": max(0, len(requests) - _SHOWN_REQUESTS) or None,
        "unasked": asked is None,
        "no_phase": oom.phase is None,
    }
    rows = [Row([title, value]) for title, value in values if value is not None]
    yield draw(sheet, "failed_allocation", rows, figures)


def owners(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return who held the device; a log without figures has no table."""
    oom = rank.oom
    if oom is None or sum(row.bytes is not None for row in oom.owners) < 2:
        return
    rows = []
    for owner in oom.owners:
        if owner.bytes or owner.component == "free":
            mark = sheet.report.run.simulated and owner.component in _OF_THE_PROFILE
            title = modelled(OWNER_TITLES[owner.component], mark)
            part = owner.part_of is not None
            title = text("of which {name}", name=title) if part else title
            rows.append(Size(title, owner.bytes, indent=int(part)))
    if oom.device_total_bytes is not None:
        rows.append(Size(text("device total"), oom.device_total_bytes, TOTAL, "="))
    peak = any(each.component == "allocated_peak" and each.bytes for each in oom.owners)
    figures = {
        "peak": peak,
        "recorded": not any(name.startswith("oom_") for name in rank.figures),
    }
    yield draw(
        sheet, "owners_at_failure", rows, figures, printed=lambda row: gib_of(rank, row.bytes)
    )


def free_blocks(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return reserved memory without a tensor, by whether it could have been used."""
    if rank.oom is None or (blocks := rank.oom.free_blocks) is None:
        return
    sizes: dict[str, int | None] = {name: getattr(blocks, name) for name in TITLES["free_blocks"]}
    rows = [
        Size(title, sizes[name])
        for name, title in TITLES["free_blocks"].items()
        if sizes[name] != 0 or name == "fitting_bytes"
    ]
    total = sum(size or 0 for size in sizes.values())
    rows.append(Size(text("reserved, not allocated"), total, TOTAL, "="))
    yield draw(sheet, "free_blocks", rows, vars(blocks) | {"several": blocks.streams > 1})


def readings(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what the parts of a step took, where a log notes it."""
    if rank.oom is not None and rank.oom.readings:
        merge = merge_not_profiled(rank.oom)
        notes = [] if merge is None else [merge]
        yield draw(
            sheet,
            "step",
            rank.oom.readings,
            notes=notes,
            moment_of=lambda row: text("profile") if row.moment == PROFILE else row.moment,
            part=lambda row: TITLES["stages"][row.stage],
        )


def remedies(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what would have let the allocation pass."""
    if rank.oom is None or not rank.oom.remedies:
        return
    rows = rank.oom.remedies
    words = {True: text("yes"), False: text("no"), None: text("not known")}
    styles = {True: GOOD, False: MUTED, None: PLAIN}

    def enough(row: Remedy) -> str:
        return text("yes, if so") if row.enough and row.how == ESTIMATED else words[row.enough]

    def gives(row: Remedy) -> str | None:
        if row.bytes is None:
            return None
        size = modelled(gib_of(rank, row.bytes), row.how == MODELLED)
        if row.bound == AT_MOST:
            return text("at most {size}", size=size)
        return text("at least {size}", size=size) if row.bound == AT_LEAST else size

    granted = rank.budget.engine_kv_cache_bytes
    shrinks = any(row.id in _SHRINK_THE_PROFILE for row in rows)
    figures = {
        "requested_bytes": rank.oom.requested_bytes,
        "shrinks": shrinks,
        "fixed": shrinks and rank.budget.takes_fixed_size,
        "granted": granted,
    }
    yield draw(
        sheet,
        "remedies",
        rows,
        figures,
        look=lambda row: styles[row.enough],
        gives=gives,
        answer=enough,
    )


def counters(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the runtime's counters of a rank that ran out of memory, where they were read."""
    if rank.oom is not None and rank.oom.components:
        rows = [{"name": name, **row} for name, row in rank.oom.components.items()]
        yield draw(sheet, "counters", sorted(rows, key=lambda row: -row["bytes"]))
