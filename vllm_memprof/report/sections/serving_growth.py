"""Growth while serving: device memory by owner, host memory by process."""

from __future__ import annotations

from vllm_memprof.accounting.model import OwnerGrowth, RankReport, Report
from vllm_memprof.accounting.serving.growth import (
    KV_BLOCKS,
    LEAST_RISE_BYTES,
    owner_title,
    process_title,
)
from vllm_memprof.accounting.serving.trend import GREW, GROWING, STEADY, TOO_SHORT
from vllm_memprof.document import BAD, PLAIN, Section
from vllm_memprof.tables import COUNT, RATE, Column, alike, grown_mib, number, table, wide_only
from vllm_memprof.text import text

_VERDICTS = {
    GROWING: text("grows"),
    GREW: text("grew"),
    STEADY: text("steady"),
    TOO_SHORT: text("not judged"),
}


def _interval(row: OwnerGrowth) -> str:
    if row.bytes_per_request is None:
        return "-"
    return f"{RATE(row.bytes_per_request_low)} … {RATE(row.bytes_per_request_high)}"


def _verdict(row: OwnerGrowth) -> str:
    fallen = -(row.grown_bytes or 0) >= LEAST_RISE_BYTES
    if row.verdict == STEADY and fallen and (row.bytes_per_request_high or 0) < 0:
        return text("falls")
    return text("fills") if row.verdict == GROWING and row.bounded else _VERDICTS[row.verdict]


def _count(value: float | None) -> str:
    return COUNT(None if value is None else int(value))


_GROWTH = (
    Column("Last,\nMiB", "last_bytes", lambda size: RATE(size, 1).removeprefix("+"), wide_only),
    Column("Grown,\nMiB", "grown_bytes", lambda size: "-" if size is None else grown_mib(size)),
    Column("Over\nrequests", "requests", _count, wide_only),
    Column("MiB per\nrequest", "bytes_per_request", RATE),
    Column("interval", _interval, right=True),
    Column("MiB per\nhour", "bytes_per_hour", lambda size: RATE(size, 1)),
    Column("Full after\nrequests", "requests_until_full", _count, wide_only),
    Column("Hours", "hours_until_full", lambda hours: number(hours, ",.1f"), wide_only),
    Column("Verdict", _verdict),
)


def serving_growth_sections(report: Report, wide: bool) -> list[Section]:
    """Return growth over requests and time, MiB; nothing where too little was sampled to judge."""

    def draw(rank: RankReport, labels: str) -> list[Section]:
        rows = [
            row
            for row in rank.growth
            if row.owner != KV_BLOCKS and (row.last_bytes or row.grown_bytes)
        ]
        notes: list[str] = []
        if any(row.verdict == GROWING and row.bounded for row in rank.growth):
            notes.append(text("fills: its room is fixed at the start, growth ends when it is full"))
        owner = Column("Owner", lambda row: owner_title(row.owner))
        title = text("Growth while serving, {labels}", labels=labels)
        return [table(title, (owner, *_GROWTH), rows, notes, wide, look=_style)]

    def judged(row: OwnerGrowth) -> bool:
        return row.verdict != TOO_SHORT

    found = alike(
        [rank for rank in report.ranks if any(map(judged, rank.growth))],
        draw,
        lambda rank: repr([[column.cell(row) for column in _GROWTH] for row in rank.growth]),
    )
    hosts = {id(row.growth): process_title(row) for row in report.growth if judged(row.growth)}
    if hosts:
        process = Column("Process", lambda row: hosts[id(row)])
        rows = [row.growth for row in report.growth if judged(row.growth)]
        title = text("Growth of host memory while serving")
        found.append(table(title, (process, *_GROWTH), rows, (), wide, look=_style))
    if found:
        found[-1].notes.append(
            text(
                "interval: 99.8 %; grows: it lies above 0, and growth goes on to the end of the "
                "run; grew: it holds more than at first, but in a few steps or ever more slowly, "
                "as a cache does that fills"
            )
        )
    return found


def _style(row: OwnerGrowth) -> str:
    return BAD if row.verdict == GROWING and not row.bounded else PLAIN
