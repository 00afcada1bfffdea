"""Growth while serving: device memory by owner, host memory by process."""

from __future__ import annotations

from vllm_memprof.accounting.model import OwnerGrowth, RankReport, Report
from vllm_memprof.accounting.serving_growth import (
    KV_BLOCKS,
    LEAST_RISE_BYTES,
    owner_title,
    process_title,
)
from vllm_memprof.accounting.trend import GREW, GROWING, STEADY, TOO_SHORT
from vllm_memprof.report.document import BAD, PLAIN, Column, Row, Section
from vllm_memprof.report.sections.base import SHOWN_GROUPS, group_ranks, labels_of, more_groups
from vllm_memprof.text import Text, text
from vllm_memprof.units import format_mib, format_rate

_VERDICTS = {
    GROWING: text("grows"),
    GREW: text("grew"),
    STEADY: text("steady"),
    TOO_SHORT: text("not judged"),
}
_FILLS, _FALLS = text("fills"), text("falls")


def serving_growth_sections(report: Report, wide: bool) -> list[Section]:
    """Return growth over requests and time, MiB; nothing where too little was sampled to judge."""
    judged = [rank for rank in report.ranks if any(map(_judged, rank.growth))]
    groups = group_ranks(judged, lambda rank: repr([_cells(row, True) for row in rank.growth]))
    found = [_of_ranks(members, wide) for members in groups[:SHOWN_GROUPS]]
    if found and (more := more_groups(groups, "report.json")):
        found[-1].notes.extend(more)
    hosts = [row for row in report.growth if _judged(row.growth)]
    if hosts:
        rows = [_row(process_title(row), row.growth, wide) for row in hosts]
        title = text("Growth of host memory while serving")
        found.append(Section(title, _columns(text("Process"), wide), rows, []))
    if found:
        found[-1].notes.append(
            text(
                "interval: 99.8 %; grows: it lies above 0, and growth goes on to the end of the "
                "run; grew: it holds more than at first, but in a few steps or ever more slowly, "
                "as a cache does that fills"
            )
        )
    return found


def _judged(row: OwnerGrowth) -> bool:
    return row.verdict != TOO_SHORT


def _of_ranks(members: list[RankReport], wide: bool) -> Section:
    growth = members[0].growth
    rows = [
        _row(owner_title(row.owner), row, wide)
        for row in growth
        if row.owner != KV_BLOCKS and (row.last_bytes or row.grown_bytes)
    ]
    notes: list[str] = []
    if any(row.verdict == GROWING and row.bounded for row in growth):
        notes.append(text("fills: its room is fixed at the start, growth ends when it is full"))
    title = text("Growth while serving, {labels}", labels=labels_of(members))
    return Section(title, _columns(text("Owner"), wide), rows, notes)


def _columns(first: Text, wide: bool) -> list[Column]:
    return [
        Column(first, right=False),
        *([Column(text("Last,\nMiB"))] if wide else []),
        Column(text("Grown,\nMiB")),
        *([Column(text("Over\nrequests"))] if wide else []),
        Column(text("MiB per\nrequest")),
        Column(text("interval")),
        Column(text("MiB per\nhour")),
        *([Column(text("Full after\nrequests")), Column(text("Hours"))] if wide else []),
        Column(text("Verdict"), right=False),
    ]


def _row(name: str, row: OwnerGrowth, wide: bool) -> Row:
    grows = row.verdict == GROWING and not row.bounded
    return Row([name, *_cells(row, wide)], style=BAD if grows else PLAIN)


def _cells(row: OwnerGrowth, wide: bool) -> list[str]:
    low, high = row.bytes_per_request_low, row.bytes_per_request_high
    known = row.bytes_per_request is not None
    interval = f"{format_rate(low)} … {format_rate(high)}" if known else "-"
    verdict = _FILLS if row.verdict == GROWING and row.bounded else _VERDICTS[row.verdict]
    if row.verdict == STEADY and -(row.grown_bytes or 0) >= LEAST_RISE_BYTES and (high or 0) < 0:
        verdict = _FALLS
    last = "-" if row.last_bytes is None else format_rate(row.last_bytes, 1).removeprefix("+")
    grown = "-" if row.grown_bytes is None else format_mib(row.grown_bytes) or "0"
    return [
        *([last] if wide else []),
        grown,
        *([_count(row.requests)] if wide else []),
        format_rate(row.bytes_per_request),
        interval,
        format_rate(row.bytes_per_hour, 1),
        *([_count(row.requests_until_full), _number(row.hours_until_full)] if wide else []),
        verdict,
    ]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{int(value):,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
