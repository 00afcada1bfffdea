"""What happened while the engine served: requests, stages, growth, cycles, allocations that stayed.

Nothing where the run was not sampled or traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from vllm_memprof.accounting.model import Cycle, OwnerGrowth, RankReport, RequestRow, StageRow
from vllm_memprof.accounting.serving.growth import (
    KV_BLOCKS,
    LEAST_RISE_BYTES,
    owner_title,
    process_title,
)
from vllm_memprof.accounting.serving.requests import largest
from vllm_memprof.accounting.serving.trend import GROWING, STEADY, TOO_SHORT
from vllm_memprof.document import BAD, PLAIN, Section
from vllm_memprof.report.language import titles
from vllm_memprof.report.sections.base import Sheet
from vllm_memprof.tables import (
    COUNT,
    GIB,
    GIB3,
    GIB4,
    MIB,
    RATE,
    SECONDS,
    Column,
    Notes,
    narrow_only,
    number,
    where_known,
    wide_only,
)
from vllm_memprof.text import text
from vllm_memprof.units import MIB as MIB_BYTES
from vllm_memprof.units import minus

#: Up to so many requests, all are shown; of more, the largest by each figure.
SHOWN_REQUESTS = 12
#: What makes a request one of the largest.
RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")
#: Characters of a request's id in a table, by width.
_ID, _WIDE_ID = 14, 26
#: Cycles that are listed from the first on; of the rest the last alone.
_LISTED_CYCLES = 8
#: Lines of code that a table has; a site that holds and grew by less is in report.json alone.
_SHOWN_SITES = 8
_LEAST_BYTES = MIB_BYTES // 16


def _size(size: list[int] | None) -> str:
    return "-" if size is None else f"{size[0]}x{size[1]}"


# Stages


def _passages(stage: StageRow) -> str:
    return text("{passages}, {failed} failed", stage) if stage.failed else str(stage.passages)


_STAGES = (
    Column("Stage", lambda row: titles("stages").get(row.stage, row.stage)),
    Column("Passages", _passages, right=True),
    Column("Items", "items", number),
    Column("Handed out", "allocated_total_bytes", GIB3),
    Column("Held", "held_bytes", GIB3),
    Column("Peak", "allocated_peak_bytes", GIB),
    Column("Cache", "cache_bytes", GIB3, wide_only),
    Column("Largest image", "image", _size),
)


def stages(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the multimodal stages."""
    if rank.stages:
        notes = (
            text(
                "handed out: by the allocator during the passage with most of it, whether or not "
                "it was freed again; held: allocated after that passage less before it"
            ),
            text(
                "peak: most that was allocated in any passage, known only where the allocator's "
                "own peak rose in it; memprof resets no peak"
            ),
        )
        title = text("Multimodal stages while serving, GiB")
        yield sheet.table(
            title, _STAGES, rank.stages, notes, lambda row: BAD if row.failed else PLAIN
        )


class _Multimodal(NamedTuple):
    """What was profiled, or what came at most."""

    title: str
    items: int | None
    tokens: int | None
    size: str
    bytes: int | None


_MULTIMODAL = (
    Column("Multimodal", "title"),
    Column("Items", "items", COUNT),
    Column("Tokens", "tokens", COUNT),
    Column("Largest image", "size", right=True),
    Column("GiB", "bytes", GIB3),
)
_MERGED = {
    True: text("the profile run merged embeddings"),
    False: text("the profile run did not merge embeddings"),
    None: text("whether the profile run merged embeddings is unknown"),
}


def multimodal(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what profiling assumed of multimodal items beside what came."""
    of = rank.mm_profile
    if of is None:
        return
    title = text("profiled")
    if of.modality is not None:
        title = text("profiled: {modality}", of)
    size = _size(of.size) + (f" x {of.frames}" if of.frames else "")
    came, merged = _size(of.came_size), _size(of.merge_size)
    encoder, merge = text("encoder, largest step"), text("merge, largest step")
    rows = [
        _Multimodal(title, of.items, of.tokens, size, of.bytes),
        _Multimodal(encoder, of.came_items, of.came_tokens, came, of.came_bytes),
        _Multimodal(merge, None, of.merge_tokens, merged, of.merge_peak_bytes),
    ]
    notes = (
        text(
            "GiB: most that was allocated in it less what was before, known only where the "
            "allocator's own peak rose in it"
        ),
        _MERGED[of.merged],
        bool(of.frames) and text("x {frames}: frames of the profiled video", of),
    )
    yield sheet.table(text("Multimodal profile against requests"), _MULTIMODAL, rows, notes)


# Requests


def _least(row: RequestRow) -> str:
    return "" if row.peak_exact or row.allocated_peak_bytes is None else "≥ "


def _above(row: RequestRow) -> str:
    return _least(row) + GIB3(minus(row.allocated_peak_bytes, row.allocated_before_bytes))


def _seconds(row: RequestRow) -> float | None:
    if row.begin_seconds is None or row.end_seconds is None:
        return None
    return row.end_seconds - row.begin_seconds


def _images(request: RequestRow) -> str | None:
    images = request.images
    if len(images) == 1 and images[0]:
        return _size(images[0])
    return str(len(images)) if images else None


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _stage(request: RequestRow) -> str | None:
    return titles("stages_short").get(request.peak_stage or "", request.peak_stage)


_REQUESTS = (
    Column("Request", "id", partial(_short, length=_WIDE_ID), wide_only, right=False),
    Column("Request", "id", partial(_short, length=_ID), narrow_only, right=False),
    Column("Prompt", "prompt_tokens", COUNT),
    Column("Output", "output_tokens", COUNT),
    Column("Images", _images, right=True),
    Column("Peak", lambda row: _least(row) + GIB(row.allocated_peak_bytes), right=True),
    Column("Above before", _above, when=wide_only, right=True),
    Column("Left\nalloc.", "left_allocated_bytes", MIB),
    Column("Left\nres.", "left_reserved_bytes", MIB),
    Column("Stage of\npeak", _stage),
    Column("Others", "others", number, wide_only),
    Column("s", _seconds, SECONDS, wide_only),
)


def requests(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return all requests, or the largest by each figure, in their order."""
    rows = shown = rank.requests
    if not rows:
        return
    if len(rows) > SHOWN_REQUESTS:
        chosen = {id(row) for name in RANKED_BY for row in largest(rows, name)}
        shown = [row for row in rows if id(row) in chosen]
    together = sum(bool(row.others) for row in rows)
    failed = sum(row.finished is False for row in rows)
    gone = rank.dropped.get("request_memory")
    notes = (
        len(shown) < len(rows)
        and text(
            "{shown} of {count} requests: the ten largest by peak, by what was left allocated and "
            "by what was left reserved; all are in report.json",
            shown=len(shown),
            count=len(rows),
        ),
        any(map(_least, rows))
        and text(
            "≥: the allocator's peak did not rise while it ran, so the highest reading is shown"
        ),
        text(
            "left: allocated (reserved) after the request less before it, of all that happened "
            "meanwhile"
        ),
        together > 0
        and text(
            "{count} request(s) ran with others in the batch: their memory is that of all of them",
            count=together,
        ),
        failed > 0
        and text("{count} request(s) did not end: the engine failed or ended", count=failed),
        gone is not None
        and text(
            "{count:,} older requests are no longer recorded, because the event files are "
            "bounded; the ten largest by each figure were kept",
            count=gone,
        ),
        rank.thinned
        and text("older samples are thinned to their lowest and highest values: files are bounded"),
    )
    title = text("Requests: peak in GiB, left in MiB")
    yield sheet.table(
        title, _REQUESTS, shown, notes, lambda row: BAD if row.finished is False else PLAIN
    )


# Growth


def _interval(row: OwnerGrowth) -> str | None:
    if row.bytes_per_request is None:
        return None
    return f"{RATE(row.bytes_per_request_low)} … {RATE(row.bytes_per_request_high)}"


def _verdict(row: OwnerGrowth) -> str:
    fallen = -(row.grown_bytes or 0) >= LEAST_RISE_BYTES
    if row.verdict == STEADY and fallen and (row.bytes_per_request_high or 0) < 0:
        return text("falls")
    filling = row.verdict == GROWING and row.bounded
    return text("fills") if filling else titles("growth_verdicts")[row.verdict]


def _whole(value: float | None) -> str:
    return number(value and int(value), ",")


def _unsigned(size: int | None, digits: int = 1) -> str:
    return RATE(size, digits).removeprefix("+")


_GROWTH = (
    Column("Last,\nMiB", "last_bytes", _unsigned, wide_only),
    Column("Grown,\nMiB", "grown_bytes", MIB),
    Column("Over\nrequests", "requests", _whole, wide_only),
    Column("MiB per\nrequest", "bytes_per_request", RATE),
    Column("interval", _interval, right=True),
    Column("MiB per\nhour", "bytes_per_hour", MIB),
    Column("Full after\nrequests", "requests_until_full", _whole, wide_only),
    Column("Hours", "hours_until_full", partial(number, spec=",.1f"), wide_only),
    Column("Verdict", _verdict),
)


def _growth(sheet: Sheet, title: str, first: Column, rows: list[OwnerGrowth]) -> Section:
    filling = any(row.verdict == GROWING and row.bounded for row in rows)
    notes = (
        filling and text("fills: its room is fixed at the start, growth ends when it is full"),
        text(
            "interval: 99.8 %; grows: it lies above 0, and growth goes on to the end of the run; "
            "grew: it holds more than at first, but in a few steps or ever more slowly, as a cache "
            "does that fills"
        ),
    )
    return sheet.table(
        title,
        (first, *_GROWTH),
        rows,
        notes,
        lambda row: BAD if row.verdict == GROWING and not row.bounded else PLAIN,
    )


def device_growth(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return growth of device memory over requests and time; nothing where none was judged."""
    if any(row.verdict != TOO_SHORT for row in rank.growth):
        rows = [
            row
            for row in rank.growth
            if row.owner != KV_BLOCKS and (row.last_bytes or row.grown_bytes)
        ]
        owner = Column("Owner", lambda row: owner_title(row.owner))
        yield _growth(sheet, text("Growth while serving"), owner, rows)


def host_growth(sheet: Sheet) -> Iterator[Section]:
    """Return growth of host memory by process."""
    judged = [row for row in sheet.report.growth if row.growth.verdict != TOO_SHORT]
    if judged:
        names = {id(row.growth): process_title(row) for row in judged}
        process = Column("Process", lambda row: names[id(row)])
        title = text("Growth of host memory while serving")
        yield _growth(sheet, title, process, [row.growth for row in judged])


# Cycles of sleep mode, pauses and weight updates


def _emptied(cycle: Cycle) -> str | None:
    """Return whether empty_cache was called; None: a log does not say."""
    if cycle.freed_bytes is not None:
        return None
    return text("yes") if cycle.emptied else text("no")


_CYCLES = (
    Column("Cycle", "number", number),
    Column("s", "seconds", SECONDS, where_known, compared=False),
    Column("Freed,\nGiB", "freed_bytes", GIB4, where_known),
    Column("Asleep,\nGiB", "asleep_used_bytes", GIB4, where_known),
    Column("Grown,\nMiB", "asleep_residue_bytes", MIB, where_known),
    Column("After,\nGiB", "used_bytes", GIB4, where_known),
    Column("Left,\nMiB", "residue_bytes", MIB, where_known),
    Column("Allocated", "allocated_residue_bytes", MIB, where_known),
    Column("Reserved, not\nallocated", "cached_residue_bytes", MIB, where_known),
    Column("Non-torch", "non_torch_residue_bytes", MIB, where_known, marked=True),
    Column("empty_cache", _emptied, when=where_known),
)


def cycles(kind: str, sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the cycles of a kind, and what each of them left on the device."""
    rows = [cycle for cycle in rank.cycles if cycle.kind == kind]
    if not rows:
        return
    last = rows[-1:] if len(rows) > _LISTED_CYCLES + 1 else rows[_LISTED_CYCLES:]
    more = len(rows) - _LISTED_CYCLES - len(last)
    notes: Notes = (
        text("as the log prints them; grown: in use while asleep − in the sleep before")
        if rows[0].freed_bytes is not None
        else text(
            "left: device memory in use after the cycle less that after the cycle before, by owner "
            "in the columns behind it; the first cycle is compared with the moment before it"
        ),
        more > 0 and text("{count} more in report.json", count=more),
    )
    shown = [*rows[:_LISTED_CYCLES], *last]
    yield sheet.table(titles("cycles")[kind], _CYCLES, shown, notes)


# Lines of code whose memory stayed (--trace-allocations)

_SITES = (
    Column("Grown,\nMiB", "grown_bytes", partial(RATE, digits=2)),
    Column("Alive,\nMiB", "bytes", partial(_unsigned, digits=2)),
    Column("Blocks", "blocks", COUNT),
    Column("Allocated at", lambda site: f"{site.site} {site.function}".strip()),
)


def allocations(sheet: Sheet) -> Iterator[Section]:
    """Return a table per traced process."""
    for traced in sheet.report.allocations:
        process = process_title(traced)
        title = text(
            "{memory} that stayed after {requests:,} requests, by line of code, {process}",
            traced,
            memory=titles("traced")[traced.memory],
            process=process,
        )
        large = [
            site for site in traced.sites if max(site.grown_bytes or 0, site.bytes) >= _LEAST_BYTES
        ]
        notes = (
            traced.reason is not None and text("nothing was traced: {reason}", traced),
            traced.half_requests is not None
            and text(
                "grown: alive at the end less alive after {half_requests:,} of the requests; what "
                "a line holds once, and does not hold more of, is no leak",
                traced,
            ),
            traced.requests < traced.asked
            and text("the process ended after {requests:,} of {asked:,} requests", traced),
            traced.untraced_bytes is not None
            and text("allocated before tracing began, alive: {untraced_bytes:gib} GiB", traced),
            traced.memory == "host" and text("what C++ code allocates is not in it"),
            traced.snapshot is not None
            and text(
                "{snapshot} in the run folder: for PyTorch's memory viewer "
                "(pytorch.org/memory_viz)",
                traced,
            ),
        )
        yield sheet.table(title, _SITES, large, notes, most=_SHOWN_SITES)
