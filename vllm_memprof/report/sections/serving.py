"""What happened while the engine served: requests, stages, growth, cycles, allocations that stayed.

Nothing where the run was not sampled or traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm_memprof.accounting.model import OwnerGrowth, RankReport, RequestRow
from vllm_memprof.accounting.serving.growth import (
    KV_BLOCKS,
    LEAST_RISE_BYTES,
    owner_title,
    process_title,
)
from vllm_memprof.accounting.serving.requests import largest_rows
from vllm_memprof.accounting.serving.trend import GROWING, STEADY, TOO_SHORT
from vllm_memprof.accounting.titles import TITLES, title_in
from vllm_memprof.document import BAD, PLAIN, Section
from vllm_memprof.record.schema import RANKED_BY
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.tables import (
    GIB,
    MIB,
    number,
)
from vllm_memprof.text import text
from vllm_memprof.units import MIB as MIB_BYTES
from vllm_memprof.units import format_gib, format_rate, minus

#: Up to so many requests, all are shown; of more, the largest by each figure.
SHOWN_REQUESTS = 12
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


def stages(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the multimodal stages."""
    if rank.stages:
        look = {True: BAD, False: PLAIN}
        yield draw(
            sheet,
            "stages",
            rank.stages,
            look=lambda row: look[row.failed > 0],
            title=lambda row: title_in("stages", row.stage),
            passed=lambda row: (
                text("{passages}, {failed} failed", row) if row.failed else str(row.passages)
            ),
            size=lambda row: _size(row.image),
        )


class _Multimodal(NamedTuple):
    """What was profiled, or what came at most."""

    title: str
    items: int | None
    tokens: int | None
    size: str
    bytes: int | None


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
    yield draw(sheet, "multimodal", rows, figures)


# Requests


def _least(row: RequestRow) -> str:
    return "" if row.peak_exact or row.allocated_peak_bytes is None else "≥ "


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def requests(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return all requests, or the largest by each figure, in their order."""
    rows = shown = rank.requests
    if not rows:
        return
    if len(rows) > SHOWN_REQUESTS:
        chosen = {id(row) for name in RANKED_BY for row in largest_rows(rows, name)}
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

    def size(row: RequestRow) -> str | None:
        if len(row.images) == 1 and row.images[0]:
            return _size(row.images[0])
        return str(len(row.images)) if row.images else None

    def above(row: RequestRow) -> str:
        return _least(row) + format_gib(
            minus(row.allocated_peak_bytes, row.allocated_before_bytes), 3
        )

    yield draw(
        sheet,
        "requests",
        shown,
        figures,
        look=lambda row: ended.get(row.finished, PLAIN),
        name=lambda row: _short(row.id, _WIDE_ID),
        short_name=lambda row: _short(row.id, _ID),
        size=size,
        peak=lambda row: _least(row) + GIB(row.allocated_peak_bytes),
        above=above,
        stage=lambda row: title_in("stages_short", row.peak_stage),
        seconds=lambda row: minus(row.end_seconds, row.begin_seconds),
    )


# Growth


def _growth(
    sheet: Sheet, name: str, rows: list[OwnerGrowth], title: Callable[[OwnerGrowth], str]
) -> Section:
    filling = any(row.verdict == GROWING and row.bounded for row in rows)

    def look(row: OwnerGrowth) -> str:
        return BAD if row.grows else PLAIN

    def interval(row: OwnerGrowth) -> str | None:
        if row.bytes_per_request is None:
            return None
        return (
            f"{format_rate(row.bytes_per_request_low)} … {format_rate(row.bytes_per_request_high)}"
        )

    def judged(row: OwnerGrowth) -> str:
        fallen = -(row.grown_bytes or 0) >= LEAST_RISE_BYTES
        if row.verdict == STEADY and fallen and (row.bytes_per_request_high or 0) < 0:
            return text("falls")
        fills = row.verdict == GROWING and row.bounded
        return text("fills") if fills else TITLES["growth_verdicts"][row.verdict]

    return draw(
        sheet,
        name,
        rows,
        {"filling": filling},
        look=look,
        title=title,
        last=lambda row: MIB(row.last_bytes).removeprefix("+"),
        interval=interval,
        until_full=lambda row: row.requests_until_full and int(row.requests_until_full),
        hours=lambda row: number(row.hours_until_full, ",.1f"),
        judged=judged,
    )


def device_growth(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return growth of device memory over requests and time; nothing where none was judged."""
    if any(row.verdict != TOO_SHORT for row in rank.growth):
        rows = [
            row
            for row in rank.growth
            if row.owner != KV_BLOCKS and (row.last_bytes or row.grown_bytes)
        ]
        yield _growth(sheet, "device_growth", rows, lambda row: owner_title(row.owner))


def host_growth(sheet: Sheet) -> Iterator[Section]:
    """Return growth of host memory by process."""
    judged = [row for row in sheet.report.growth if row.growth.verdict != TOO_SHORT]
    if judged:
        names = {id(row.growth): process_title(row) for row in judged}
        rows = [row.growth for row in judged]
        yield _growth(sheet, "host_growth", rows, lambda row: names[id(row)])


# Cycles of sleep mode, pauses and weight updates


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
    emptied = {True: text("yes"), False: text("no")}
    yield draw(
        sheet,
        "cycles",
        [*rows[:_LISTED_CYCLES], *last],
        figures,
        # a log, which tells what was freed, does not say whether empty_cache was called
        called=lambda row: emptied[bool(row.emptied)] if row.freed_bytes is None else None,
    )


# Lines of code whose memory stayed (--trace-allocations)


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
        yield draw(
            sheet,
            "allocations",
            large,
            figures,
            most=_SHOWN_SITES,
            grown=lambda site: format_rate(site.grown_bytes, 2),
            alive=lambda site: format_rate(site.bytes, 2).removeprefix("+"),
            place=lambda site: f"{site.site} {site.function}".strip(),
        )
