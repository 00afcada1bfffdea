"""Requests and multimodal stages while serving; nothing where the run was not sampled."""

from __future__ import annotations

from vllm_memprof.accounting.model import RankReport, Report, RequestRow, StageRow
from vllm_memprof.accounting.requests import largest
from vllm_memprof.document import BAD, PLAIN, Head, Row, Section
from vllm_memprof.report.sections.base import group_ranks, labels_of, number
from vllm_memprof.text import text
from vllm_memprof.units import format_gib, format_mib, minus

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
    found = []
    served = [rank for rank in report.ranks if rank.requests or rank.stages]
    for members in group_ranks(served, lambda rank: repr(_stage_rows(rank.stages, wide))):
        found += _stage_section(members, served, wide)
    for members in group_ranks(served, lambda rank: repr(rank.mm_profile)):
        found += _profile_section(members, served)
    for members in group_ranks(served, lambda rank: repr(_request_rows(rank, wide))):
        found += _request_section(members, served, wide)
    return found


def _titled(title: str, members: list[RankReport], served: list[RankReport]) -> str:
    if len(members) == len(served):
        return title
    return text("{title}: {labels}", title=title, labels=labels_of(members))


def _stage_section(
    members: list[RankReport], served: list[RankReport], wide: bool
) -> list[Section]:
    rows = _stage_rows(members[0].stages, wide)
    if not rows:
        return []
    columns = [
        Head(text("Stage"), right=False),
        Head(text("Passages")),
        Head(text("Items")),
        Head(text("Handed out")),
        Head(text("Held")),
        Head(text("Peak")),
        *([Head(text("Cache"))] if wide else []),
        Head(text("Largest image")),
    ]
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
    title = text("Multimodal stages while serving, GiB")
    return [Section(_titled(title, members, served), columns, rows, notes)]


def _stage_rows(stages: list[StageRow], wide: bool) -> list[Row]:
    return [
        Row(
            [
                STAGE_TITLES.get(stage.stage, stage.stage),
                _passages(stage),
                str(stage.items),
                format_gib(stage.allocated_total_bytes, 3),
                format_gib(stage.held_bytes, 3),
                format_gib(stage.allocated_peak_bytes),
                *([format_gib(stage.cache_bytes, 3)] if wide else []),
                _size(stage.image),
            ],
            style=BAD if stage.failed else PLAIN,
        )
        for stage in stages
    ]


def _passages(stage: StageRow) -> str:
    if not stage.failed:
        return str(stage.passages)
    return text("{count}, {failed} failed", count=stage.passages, failed=stage.failed)


def _size(size: list[int] | None) -> str:
    return "-" if size is None else f"{size[0]}x{size[1]}"


def _profile_section(members: list[RankReport], served: list[RankReport]) -> list[Section]:
    """Return what profiling assumed of multimodal items beside what came."""
    profile = members[0].mm_profile
    if profile is None:
        return []
    titles = (text("Items"), text("Tokens"), text("Largest image"), text("GiB"))
    columns = [Head(text("Multimodal"), right=False), *map(Head, titles)]
    rows = [
        Row(
            [
                text("profiled")
                if profile.modality is None
                else text("profiled: {modality}", modality=profile.modality),
                number(profile.items, ","),
                number(profile.tokens, ","),
                _size(profile.size) + (f" x {profile.frames}" if profile.frames else ""),
                format_gib(profile.bytes, 3),
            ]
        ),
        Row(
            [
                text("encoder, largest step"),
                number(profile.came_items, ","),
                number(profile.came_tokens, ","),
                _size(profile.came_size),
                format_gib(profile.came_bytes, 3),
            ]
        ),
        Row(
            [
                text("merge, largest step"),
                "-",
                number(profile.merge_tokens, ","),
                _size(profile.merge_size),
                format_gib(profile.merge_peak_bytes, 3),
            ]
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
    return [Section(_titled(title, members, served), columns, rows, notes)]


def _request_section(
    members: list[RankReport], served: list[RankReport], wide: bool
) -> list[Section]:
    rank = members[0]
    rows = _request_rows(rank, wide)
    if not rows:
        return []
    columns = [
        Head(text("Request"), right=False),
        Head(text("Prompt")),
        Head(text("Output")),
        Head(text("Images")),
        Head(text("Peak")),
        *([Head(text("Above before"))] if wide else []),
        Head(text("Left\nalloc.")),
        Head(text("Left\nres.")),
        Head(text("Stage of\npeak"), right=False),
        *([Head(text("Others")), Head(text("s"))] if wide else []),
    ]
    title = _titled(text("Requests: peak in GiB, left in MiB"), members, served)
    return [Section(title, columns, rows, _notes(rank))]


def _shown(rank: RankReport) -> list[RequestRow]:
    """Return all requests of a rank, or the largest by each figure, in their order."""
    if len(rank.requests) <= SHOWN_REQUESTS:
        return rank.requests
    chosen = {id(row) for name in RANKED_BY for row in largest(rank.requests, name)}
    return [row for row in rank.requests if id(row) in chosen]


def _request_rows(rank: RankReport, wide: bool) -> list[Row]:
    rows = []
    for request in _shown(rank):
        least = "" if request.peak_exact or request.allocated_peak_bytes is None else "≥ "
        stage = request.peak_stage
        seconds = None
        if request.begin_seconds is not None and request.end_seconds is not None:
            seconds = request.end_seconds - request.begin_seconds
        rows.append(
            Row(
                [
                    _short(request.id, _WIDE_ID if wide else _ID),
                    number(request.prompt_tokens, ","),
                    number(request.output_tokens, ","),
                    _images(request),
                    least + format_gib(request.allocated_peak_bytes),
                    *(
                        [
                            least
                            + format_gib(
                                minus(request.allocated_peak_bytes, request.allocated_before_bytes),
                                3,
                            )
                        ]
                        if wide
                        else []
                    ),
                    _mib(request.left_allocated_bytes),
                    _mib(request.left_reserved_bytes),
                    "-" if stage is None else SHORT_TITLES.get(stage, stage),
                    *([number(request.others), number(seconds, ".2f")] if wide else []),
                ],
                style=BAD if request.finished is False else PLAIN,
            )
        )
    return rows


def _mib(size: int | None) -> str:
    """Return a signed size; unlike in tables of growth, nothing left is a figure."""
    return "0.0" if size == 0 else format_mib(size)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _images(request: RequestRow) -> str:
    known = [size for size in request.images if size is not None]
    if not request.images:
        return "-"
    if len(known) == len(request.images) == 1:
        return _size(known[0])
    return str(len(request.images))


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
