"""Turn a ``Report`` into DataFrames: one function per table, each with the shape in its docstring.

Every table begins with the columns of ``WHO``: run (string), host (string), rank (Int64) and label
(string). Bytes are nullable ``Int64``, times ``Float64``, words ``string``, yes or no ``boolean``;
<NA> is unknown. The unit is in the column's name. Rows follow the ranks, and time within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args, get_type_hints

from vllm_memprof.accounting.deployment.clock import host_starts
from vllm_memprof.accounting.model import (
    DERIVED,
    MEASURED,
    MODELLED,
    EmptyCacheCall,
    Kv,
    OwnerGrowth,
    RankReport,
    Reading,
    Report,
)
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.record.spans import UNEXPLAINED, Edge
from vllm_memprof.tables import PHASE_COLUMNS
from vllm_memprof.units import minus

if TYPE_CHECKING:
    import pandas as pd

#: Columns that every table begins with: whose row it is.
WHO = {"run": "string", "host": "string", "rank": "Int64", "label": "string"}
#: Readings of the device, in which the profile of a simulated one has a part.
_DEVICE_WIDE = {
    "device_free_bytes": MEASURED,
    "npu_workspace_bytes": MEASURED,
    "non_torch_bytes": DERIVED,
    "process_bytes": MEASURED,
    "other_processes_bytes": MEASURED,
}
_BUDGET = (
    "requested_bytes",
    "kv_cache_bytes",
    "engine_kv_cache_bytes",
    "fits_request_bytes",
    "fits_device_bytes",
    "headroom_bytes",
    "residual_bytes",
)
#: Annotation -> pandas type; words are the rest.
_DTYPES = {float: "Float64", bool: "boolean", int: "Int64"}

Row = tuple[object, ...]


@dataclass(frozen=True)
class RankSource:
    """A rank with what its rows need of its report."""

    report: Report
    rank: RankReport
    start_t_ns: int  # of the rank's host, that counts as the run's start

    @property
    def who(self) -> Row:
        return (self.report.run.id, self.rank.host, self.rank.rank, self.rank.label)

    def seconds(self, edge: Edge) -> float | None:
        t_ns = edge.snapshot.t_ns
        return (t_ns - self.start_t_ns) / 1e9 if t_ns else None


def rank_sources(reports: Iterable[Report]) -> list[RankSource]:
    """Return all ranks of some reports, in their order: what the tables are made from."""
    found: list[RankSource] = []
    for report in reports:
        starts = host_starts(report)
        found += (RankSource(report, rank, starts.get(rank.host, 0)) for rank in report.ranks)
    return found


def _make(
    ranks: Iterable[RankSource],
    columns: dict[str, str],
    rows: Callable[[RankSource], Iterator[Row]],
) -> pd.DataFrame:
    import pandas as pd

    types = {**WHO, **columns}
    found = [(*rank.who, *row) for rank in ranks for row in rows(rank)]
    typed: pd.DataFrame = pd.DataFrame(found, columns=list(types), dtype=object).astype(types)
    return typed


def _dtype(row: type, name: str) -> str:
    """Return the pandas type of a field or a property, by its annotation."""
    own = getattr(row, name, None)
    hint = (
        get_type_hints(own.fget)["return"]
        if isinstance(own, property)
        else get_type_hints(row)[name]
    )
    kinds = get_args(hint) or (hint,)
    return next((dtype for kind, dtype in _DTYPES.items() if kind in kinds), "string")


def _of_fields(
    ranks: Iterable[RankSource],
    row: type,
    rows: Callable[[RankReport], Iterable[object]],
    *names: str,
    **renamed: str,
) -> pd.DataFrame:
    """Return a table of rows that a report has as they are.

    Args:
        ranks: whose rows.
        row: the type of the rows, whose annotations give the types of the columns.
        rows: those of a rank.
        names: fields, which give columns their names.
        renamed: column -> the field that it shows under this name.
    """
    shown = dict(zip(names, names, strict=True)) | renamed
    columns = {name: _dtype(row, field) for name, field in shown.items()}

    def values(source: RankSource) -> Iterator[Row]:
        for each in rows(source.rank):
            yield tuple(getattr(each, field) for field in shown.values())

    return _make(ranks, columns, values)


def phases(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and passage through a phase.

    Columns after ``WHO``: phase (string), order (Int64, by start within the rank, from 0), parent
    (Int64, order of the enclosing passage, <NA> at the top), depth (Int64), seconds (Float64), open
    (boolean, the rank never left the phase), error (string, the exception that left it); then for
    each of ``PHASE_COLUMNS``: before, after and change, e.g. allocated_before_bytes (Int64).
    """
    columns = {
        "phase": "string",
        "order": "Int64",
        "parent": "Int64",
        "depth": "Int64",
        "seconds": "Float64",
        "open": "boolean",
        "error": "string",
    }
    names = [str(column.value) for column in PHASE_COLUMNS]
    for name in names:
        of = name.removesuffix("_bytes")
        columns |= {f"{of}_{edge}_bytes": "Int64" for edge in ("before", "after", "change")}

    def rows(source: RankSource) -> Iterator[Row]:
        for span in source.rank.phases:
            sizes: list[int | None] = []
            for name in names:
                ends: list[int | None] = [
                    None if at is None else getattr(at, name) for at in (span.before, span.after)
                ]
                sizes += [*ends, minus(ends[1], ends[0])]
            head = (span.phase, span.order, span.parent, span.depth, span.seconds)
            yield (*head, span.open, span.error, *sizes)

    return _make(ranks, columns, rows)


def snapshots(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank, phase and edge at which the device was read.

    Columns after ``WHO``: phase (string), order (Int64), edge (string: before, after), time_s
    (Float64, since the start of the run), and every field of a snapshot (Int64, bytes or a count).
    """
    columns = {"phase": "string", "order": "Int64", "edge": "string", "time_s": "Float64"}
    columns |= dict.fromkeys(SNAPSHOT_FIELDS, "Int64")

    def rows(source: RankSource) -> Iterator[Row]:
        for span in source.rank.phases:
            for edge in span.edges:
                values = (getattr(edge.snapshot, name) for name in SNAPSHOT_FIELDS)
                yield (span.phase, span.order, edge.side, source.seconds(edge), *values)

    return _make(ranks, columns, rows)


def device_memory(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank, phase, edge and owner of device memory.

    Columns after ``WHO``: phase (string), order (Int64), edge (string), time_s (Float64), component
    (string), bytes (Int64), how (string: measured, derived, modelled), source (string, what it was
    read from), part_of (string). Rows whose part_of is <NA> add up to the total of the device at
    that edge, the row ``unexplained`` included; the others are parts of the row that they name.
    """
    columns = {
        "phase": "string",
        "order": "Int64",
        "edge": "string",
        "time_s": "Float64",
        "component": "string",
        "bytes": "Int64",
        "how": "string",
        "source": "string",
        "part_of": "string",
    }

    def rows(source: RankSource) -> Iterator[Row]:
        for span in source.rank.phases:
            for edge in span.edges:
                if edge.owners is None:
                    continue
                at = (span.phase, span.order, edge.side, source.seconds(edge))
                for row in (*edge.owners.rows, *edge.owners.parts):
                    yield (*at, row.component, row.bytes, row.how, row.source, row.part_of)
                rest, how = edge.owners.unexplained_bytes, edge.owners.unexplained_how
                yield (*at, UNEXPLAINED, rest, how, "every remainder together", None)

    return _make(ranks, columns, rows)


def budget(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and figure of the KV-cache equation.

    Columns after ``WHO``: kind (string: budget, term, term_part (of the
    term above it), not_subtracted, held_at_peak), name (string),
    bytes (Int64), half_unit_bytes (Int64, half of the last digit that a log prints, 0 from hooks),
    subtracted (boolean, of a term), how (string, of all but the terms), kv_tokens (Int64, KV cache
    tokens that the bytes would hold).
    """
    columns = {
        "kind": "string",
        "name": "string",
        "bytes": "Int64",
        "half_unit_bytes": "Int64",
        "subtracted": "boolean",
        "how": "string",
        "kv_tokens": "Int64",
    }

    def rows(source: RankSource) -> Iterator[Row]:
        rank, found = source.rank, source.rank.budget
        tokens = {
            "kv_cache_bytes": found.kv_tokens,
            "fits_request_bytes": found.fits_request_tokens,
            "fits_device_bytes": found.fits_device_tokens,
        }
        sizes = {
            "device_total_bytes": rank.device_total_bytes,
            "initial_free_bytes": rank.initial_free_bytes,
            **{name: getattr(found, name) for name in _BUDGET},
        }
        for name, size in sizes.items():
            half = rank.half_units.get(name, 0)
            known = found.how.get(name)
            yield ("budget", name, size, half, None, known, tokens.get(name))
        for each in found.suggestions:
            name = f"suggested_{each.limit}_bytes"
            yield ("budget", name, each.bytes, 0, None, each.how, each.kv_tokens)
        for term in found.terms:
            yield ("term", term.name, term.bytes, term.half_unit_bytes, term.subtracted, None, None)
            for part in term.parts:
                yield ("term_part", part.name, part.bytes, 0, None, part.how, None)
        for item in found.not_subtracted:
            yield ("not_subtracted", item.name, item.bytes, 0, None, item.how, item.kv_tokens)
        for held in found.held_at_peak:
            yield ("held_at_peak", held.name, held.bytes, 0, None, held.how, None)

    return _make(ranks, columns, rows)


def audit(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and audited figure of the engine.

    Columns after ``WHO``: name (string, a term of the equation, or another figure of the engine),
    engine_bytes, bytes (memprof's reading of the same memory), difference_bytes (engine less it),
    tolerance_bytes (Int64), agrees (boolean, <NA> where nothing is compared), how, source (string,
    of bytes), reason (string, why a figure is <NA>).
    """
    return _of_fields(
        ranks,
        Reading,
        lambda rank: rank.budget.audit,
        "name",
        "engine_bytes",
        "bytes",
        "difference_bytes",
        "tolerance_bytes",
        "agrees",
        "how",
        "source",
        "reason",
    )


def kv(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank: the KV cache that the engine serves with.

    Columns after ``WHO``: tokens, blocks, block_size_tokens, bytes_per_token (Float64),
    bytes_per_block, max_model_len_tokens, max_concurrency (Float64, requests of max_model_len),
    available_bytes (granted by the equation), planned_bytes (of the planned tensors),
    draft_bytes (of them, of the drafter's layers); Int64 where nothing else is said.
    """
    return _of_fields(
        ranks,
        Kv,
        lambda rank: [rank.kv],
        "tokens",
        "blocks",
        block_size_tokens="block_size",
        bytes_per_token="bytes_per_token",
        bytes_per_block="bytes_per_block",
        max_model_len_tokens="max_model_len",
        max_concurrency="max_concurrency",
        available_bytes="available_bytes",
        planned_bytes="planned_bytes",
        draft_bytes="draft_bytes",
    )


def empty_cache(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and call of ``empty_cache``.

    Columns after ``WHO``: phase (string, the enclosing one), site (string, file.py:line of the
    caller), function (string), by (string: engine, memprof), seconds (Float64, with the wait for
    the device), while_serving (boolean), requests (Int64, held at the call),
    freed_reserved_bytes, freed_npu_workspace_bytes, freed_other_bytes and refilled_bytes (Int64;
    the last: of what was freed, in use again at the next reading).
    """
    return _of_fields(
        ranks,
        EmptyCacheCall,
        lambda rank: rank.empty_cache,
        "phase",
        "site",
        "function",
        "by",
        "seconds",
        "while_serving",
        "requests",
        freed_reserved_bytes="freed_cached_bytes",
        freed_npu_workspace_bytes="freed_npu_workspace_bytes",
        freed_other_bytes="freed_other_bytes",
        refilled_bytes="refilled_bytes",
    )


def growth(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and owner, where the run was sampled: how it grew while it served.

    Columns after ``WHO``: owner, verdict (string), bounded (boolean), readings (Int64),
    bytes_per_request and bytes_per_hour (Float64), each with the interval as _low and _high,
    grown_bytes (Int64), requests (Int64) and seconds (Float64) of what was judged, last_bytes
    (Int64), requests_until_full and hours_until_full (Float64). Of ``kv_blocks`` bytes are blocks.
    """
    names = [each.name for each in fields(OwnerGrowth)]
    return _of_fields(ranks, OwnerGrowth, lambda rank: rank.growth, *names)


def requests(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank and request, where the run was sampled, in the order of their begin.

    Columns after ``WHO``: id (string), prompt_tokens, output_tokens, images (Int64, how many),
    image_width and image_height (Int64, pixels, of the image with most of them), image_tokens
    (Int64), others (Int64, most other requests in a step with it), begin_s and end_s (Float64,
    since the launch), allocated_before_bytes, allocated_peak_bytes (Int64), peak_exact (boolean;
    else the peak is the highest reading), allocated_peak_at_most_bytes, left_allocated_bytes,
    left_reserved_bytes (Int64), peak_stage, reason (string), finished (boolean).
    """
    columns = {
        "id": "string",
        "prompt_tokens": "Int64",
        "output_tokens": "Int64",
        "images": "Int64",
        "image_width": "Int64",
        "image_height": "Int64",
        "image_tokens": "Int64",
        "others": "Int64",
        "begin_s": "Float64",
        "end_s": "Float64",
        "allocated_before_bytes": "Int64",
        "allocated_peak_bytes": "Int64",
        "peak_exact": "boolean",
        "allocated_peak_at_most_bytes": "Int64",
        "left_allocated_bytes": "Int64",
        "left_reserved_bytes": "Int64",
        "peak_stage": "string",
        "reason": "string",
        "finished": "boolean",
    }

    def rows(source: RankSource) -> Iterator[Row]:
        for each in source.rank.requests:
            sizes = [size for size in each.images if size is not None]
            width, height = max(sizes, key=lambda size: size[0] * size[1], default=(None, None))
            own: dict[str, object] = {
                **vars(each),
                "images": len(each.images),
                "image_width": width,
                "image_height": height,
                "begin_s": each.begin_seconds,
                "end_s": each.end_seconds,
            }
            yield tuple(own[name] for name in columns)

    return _make(ranks, columns, rows)


def samples(ranks: Iterable[RankSource]) -> pd.DataFrame:
    """Return one row per rank, stretch of time and figure, where the run was sampled.

    Columns after ``WHO``: begin_s and end_s (Float64, since the launch), readings (Int64, of the
    worker), figure (string, a name of ``accounting.serving.requests.CURVES``), low and high
    (Int64).
    """
    columns = {
        "begin_s": "Float64",
        "end_s": "Float64",
        "readings": "Int64",
        "figure": "string",
        "low": "Int64",
        "high": "Int64",
    }

    def rows(source: RankSource) -> Iterator[Row]:
        for point in source.rank.samples:
            for name, low in point.low.items():
                yield (
                    point.begin_seconds,
                    point.end_seconds,
                    point.readings,
                    name,
                    low,
                    point.high.get(name),
                )

    return _make(ranks, columns, rows)


def findings(reports: Iterable[Report]) -> pd.DataFrame:
    """Return one row per finding, the gravest of each run first.

    Columns: run (string), id (string), severity (string: error, warning, info), rank (Int64, <NA>
    for the run as a whole), label (string), bytes (Int64), kv_tokens (Int64), title, evidence and
    action (string).
    """
    import pandas as pd

    columns = {
        "run": "string",
        "id": "string",
        "severity": "string",
        "rank": "Int64",
        "label": "string",
        "bytes": "Int64",
        "kv_tokens": "Int64",
        "title": "string",
        "evidence": "string",
        "action": "string",
    }
    names = [name for name in columns if name != "run"]
    rows = [
        (report.run.id, *(getattr(finding, name) for name in names))
        for report in reports
        for finding in report.findings
    ]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=list(columns), dtype=object).astype(columns)
    return frame


def reading_how(name: str, simulated: bool) -> str:
    """Return how a field of a snapshot is known: measured, derived, or modelled."""
    if name not in _DEVICE_WIDE:
        return MEASURED
    return MODELLED if simulated else _DEVICE_WIDE[name]
