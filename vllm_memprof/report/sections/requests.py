"""Requests and multimodal stages while serving; nothing where the run was not sampled."""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport, Report, RequestRow, StageRow
from vllm_memprof.accounting.serving.requests import largest
from vllm_memprof.document import BAD, PLAIN, Section
from vllm_memprof.tables import (
    COUNT,
    GIB,
    GIB3,
    SECONDS,
    Column,
    alike,
    narrow_only,
    number,
    table,
    wide_only,
)
from vllm_memprof.text import text
from vllm_memprof.units import format_mib, minus

#: Up to so many requests, all are shown; of more, the largest by each figure.
SHOWN_REQUESTS = 12
#: What makes a request one of the largest.
RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")
#: Characters of a request's id in a table, by width.
_ID, _WIDE_ID = 14, 26
#: Names of the stages of a step, as the record has them.
STAGE_TITLES = {
    "mm_encoder": text("encoder"),
    "mm_merge": text("merge of embeddings"),
    "mm_cache_insert": text("encoder cache, insert"),
    "mm_cache_evict": text("encoder cache, evict"),
}

#: The same in a table that has many columns.
SHORT_TITLES = {
    "mm_encoder": text("encoder"),
    "mm_merge": text("merge"),
    "mm_cache_insert": text("insert"),
    "mm_cache_evict": text("evict"),
    "step": text("rest"),
}


def request_sections(report: Report, wide: bool = False) -> list[Section]:
    """Return the stages and the requests of the ranks, those that agree in one table."""
    served = [rank for rank in report.ranks if rank.requests or rank.stages]
    found = []
    for draw in (_stage_section, _profile_section, _request_section):
        found += alike(served, lambda rank, labels: draw(rank, labels, wide), every="")  # noqa: B023
    return found


def _titled(title: str, labels: str) -> str:
    return text("{title}: {labels}", title=title, labels=labels) if labels else title


def _passages(stage: StageRow) -> str:
    if not stage.failed:
        return str(stage.passages)
    return text("{count}, {failed} failed", count=stage.passages, failed=stage.failed)


def _size(size: list[int] | None) -> str:
    return "-" if size is None else f"{size[0]}x{size[1]}"


_STAGES = (
    Column("Stage", lambda row: STAGE_TITLES.get(row.stage, row.stage)),
    Column("Passages", _passages, right=True),
    Column("Items", "items", number),
    Column("Handed out", "allocated_total_bytes", GIB3),
    Column("Held", "held_bytes", GIB3),
    Column("Peak", "allocated_peak_bytes", GIB),
    Column("Cache", "cache_bytes", GIB3, wide_only),
    Column("Largest image", "image", _size),
)


def _stage_section(rank: RankReport, labels: str, wide: bool) -> list[Section]:
    if not rank.stages:
        return []
    notes: list[str] = [
        text(
            "handed out: by the allocator during the passage with most of it, whether or not it "
            "was freed again; held: allocated after that passage less before it"
        ),
        text(
            "peak: most that was allocated in any passage, known only where the allocator's own "
            "peak rose in it; memprof resets no peak"
        ),
    ]
    title = _titled(text("Multimodal stages while serving, GiB"), labels)
    failed = {True: BAD, False: PLAIN}
    return [
        table(title, _STAGES, rank.stages, notes, wide, look=lambda row: failed[bool(row.failed)])
    ]


class _MmRow(NamedTuple):
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


def _profile_section(rank: RankReport, labels: str, wide: bool) -> list[Section]:
    """Return what profiling assumed of multimodal items beside what came."""
    profile = rank.mm_profile
    if profile is None:
        return []
    profiled = text("profiled")
    if profile.modality is not None:
        profiled = text("profiled: {modality}", modality=profile.modality)
    size = _size(profile.size) + (f" x {profile.frames}" if profile.frames else "")
    rows = [
        _MmRow(profiled, profile.items, profile.tokens, size, profile.bytes),
        _MmRow(
            text("encoder, largest step"),
            profile.came_items,
            profile.came_tokens,
            _size(profile.came_size),
            profile.came_bytes,
        ),
        _MmRow(
            text("merge, largest step"),
            None,
            profile.merge_tokens,
            _size(profile.merge_size),
            profile.merge_peak_bytes,
        ),
    ]
    merged: dict[bool | None, str] = {
        True: text("the profile run merged embeddings"),
        False: text("the profile run did not merge embeddings"),
        None: text("whether the profile run merged embeddings is unknown"),
    }
    note = text(
        "GiB: most that was allocated in it less what was before, known only where the allocator's "
        "own peak rose in it"
    )
    title = text("Multimodal profile against requests")
    notes: list[str] = [note, merged[profile.merged]]
    if profile.frames:
        notes.append(text("x {frames}: frames of the profiled video", frames=profile.frames))
    return [table(_titled(title, labels), _MULTIMODAL, rows, notes)]


def _least(row: RequestRow) -> str:
    return "" if row.peak_exact or row.allocated_peak_bytes is None else "≥ "


def _above(row: RequestRow) -> str:
    return _least(row) + GIB3(minus(row.allocated_peak_bytes, row.allocated_before_bytes))


def _seconds(row: RequestRow) -> float | None:
    if row.begin_seconds is None or row.end_seconds is None:
        return None
    return row.end_seconds - row.begin_seconds


def _images(request: RequestRow) -> str:
    if not request.images:
        return "-"
    one = len(request.images) == 1 and request.images[0]
    return _size(one) if one else str(len(request.images))


def _mib(size: int | None) -> str:
    """Return a signed size; unlike in tables of growth, nothing left is a figure."""
    return "0.0" if size == 0 else format_mib(size)


_REQUESTS = (
    Column("Request", "id", lambda name: _short(name, _WIDE_ID), wide_only, right=False),
    Column("Request", "id", lambda name: _short(name, _ID), narrow_only, right=False),
    Column("Prompt", "prompt_tokens", COUNT),
    Column("Output", "output_tokens", COUNT),
    Column("Images", _images, right=True),
    Column("Peak", lambda row: _least(row) + GIB(row.allocated_peak_bytes), right=True),
    Column("Above before", _above, when=wide_only, right=True),
    Column("Left\nalloc.", "left_allocated_bytes", _mib),
    Column("Left\nres.", "left_reserved_bytes", _mib),
    Column("Stage of\npeak", lambda row: SHORT_TITLES.get(row.peak_stage, row.peak_stage)),
    Column("Others", "others", number, wide_only),
    Column("s", _seconds, SECONDS, wide_only),
)


def _request_section(rank: RankReport, labels: str, wide: bool) -> list[Section]:
    rows = _shown(rank)
    if not rows:
        return []
    title = _titled(text("Requests: peak in GiB, left in MiB"), labels)
    ended = {False: BAD}
    return [
        table(
            title,
            _REQUESTS,
            rows,
            _notes(rank),
            wide,
            look=lambda row: ended.get(row.finished, PLAIN),
        )
    ]


def _shown(rank: RankReport) -> list[RequestRow]:
    """Return all requests of a rank, or the largest by each figure, in their order."""
    if len(rank.requests) <= SHOWN_REQUESTS:
        return rank.requests
    chosen = {id(row) for name in RANKED_BY for row in largest(rank.requests, name)}
    return [row for row in rank.requests if id(row) in chosen]


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _notes(rank: RankReport) -> list[str]:
    notes: list[str] = []
    rows = rank.requests
    shown = len(_shown(rank))
    if shown < len(rows):
        notes.append(
            text(
                "{shown} of {count} requests: the ten largest by peak, by what was left allocated "
                "and by what was left reserved; all are in report.json",
                shown=shown,
                count=len(rows),
            )
        )
    if any(row.allocated_peak_bytes is not None and not row.peak_exact for row in rows):
        notes.append(
            text(
                "≥: the allocator's peak did not rise while it ran, so the highest reading is shown"
            )
        )
    notes.append(
        text(
            "left: allocated (reserved) after the request less before it, of all that happened "
            "meanwhile"
        )
    )
    together = sum(bool(row.others) for row in rows)
    if together:
        notes.append(
            text(
                "{count} request(s) ran with others in the batch: their memory is that of all of "
                "them",
                count=together,
            )
        )
    failed = sum(row.finished is False for row in rows)
    if failed:
        notes.append(
            text("{count} request(s) did not end: the engine failed or ended", count=failed)
        )
    gone = rank.dropped.get("request_memory")
    if gone:
        notes.append(
            text(
                "{count:,} older requests are no longer recorded, because the event files are "
                "bounded; the ten largest by each figure were kept",
                count=gone,
            )
        )
    if rank.thinned:
        notes.append(
            text("older samples are thinned to their lowest and highest values: files are bounded")
        )
    return notes
