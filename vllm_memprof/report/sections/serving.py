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
        yield sheet.table(
            "stages", _STAGES, rank.stages, look=lambda row: BAD if row.failed else PLAIN
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
    figures = {"merged": of.merged, "unmerged": of.merged is False, "frames": of.frames or None}
    yield sheet.table("multimodal", _MULTIMODAL, rows, figures)


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
    figures = {
        "shown": len(shown) if len(shown) < len(rows) else None,
        "count": len(rows),
        "least": any(map(_least, rows)),
        "together": sum(bool(row.others) for row in rows) or None,
        "failed": sum(row.finished is False for row in rows) or None,
        "gone": rank.dropped.get("request_memory"),
        "thinned": rank.thinned,
    }
    ended = {False: BAD}
    yield sheet.table(
        "requests", _REQUESTS, shown, figures, look=lambda row: ended.get(row.finished, PLAIN)
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


def _growth(sheet: Sheet, name: str, first: Column, rows: list[OwnerGrowth]) -> Section:
    filling = any(row.verdict == GROWING and row.bounded for row in rows)

    def look(row: OwnerGrowth) -> str:
        return BAD if row.verdict == GROWING and not row.bounded else PLAIN

    return sheet.table(name, (first, *_GROWTH), rows, {"filling": filling}, look=look)


def device_growth(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return growth of device memory over requests and time; nothing where none was judged."""
    if any(row.verdict != TOO_SHORT for row in rank.growth):
        rows = [
            row
            for row in rank.growth
            if row.owner != KV_BLOCKS and (row.last_bytes or row.grown_bytes)
        ]
        owner = Column("Owner", lambda row: owner_title(row.owner))
        yield _growth(sheet, "device_growth", owner, rows)


def host_growth(sheet: Sheet) -> Iterator[Section]:
    """Return growth of host memory by process."""
    judged = [row for row in sheet.report.growth if row.growth.verdict != TOO_SHORT]
    if judged:
        names = {id(row.growth): process_title(row) for row in judged}
        process = Column("Process", lambda row: names[id(row)])
        yield _growth(sheet, "host_growth", process, [row.growth for row in judged])


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
    figures = {
        kind: True,
        "printed": rows[0].freed_bytes is not None,
        "more": max(0, more) or None,
    }
    yield sheet.table("cycles", _CYCLES, [*rows[:_LISTED_CYCLES], *last], figures)


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
        figures = {
            **vars(traced),
            "process": process_title(traced),
            "host": traced.memory == "host",
            "fewer": traced.requests < traced.asked,
        }
        large = [
            site for site in traced.sites if max(site.grown_bytes or 0, site.bytes) >= _LEAST_BYTES
        ]
        yield sheet.table("allocations", _SITES, large, figures, most=_SHOWN_SITES)
