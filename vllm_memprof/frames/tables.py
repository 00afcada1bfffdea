"""Turn a ``Report`` into DataFrames: one function per table, each with the shape in its docstring.

Every table begins with the columns of ``WHO``: run (string), host (string), rank (Int64) and label
(string). Bytes are nullable ``Int64``, times ``Float64``, words ``string``, yes or no ``boolean``;
<NA> is unknown. The unit is in the column's name. Rows follow the ranks, and time within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from vllm_memprof.accounting.deployment.clock import host_starts
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.startup import value
from vllm_memprof.files import read_own
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.record.spans import DERIVED, MEASURED, MODELLED, UNEXPLAINED, Edge, edges_of
from vllm_memprof.report.sections.budget import budget_tokens
from vllm_memprof.tables import PHASE_COLUMNS
from vllm_memprof.units import minus, only_known

if TYPE_CHECKING:
    import pandas as pd

#: Table -> its columns -> their pandas types. ``who``: the columns that every table begins with,
#: whose row it is; ``attributes``: what columns show that has another name in a report.
_COLUMNS = read_own(__file__, "columns.toml")
WHO = tuple(_COLUMNS["who"])
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


class RankSource(NamedTuple):
    """A rank with what its rows need of its report."""

    report: Report
    rank: RankReport
    start_t_ns: int  # of the rank's host, that counts as the run's start

    @property
    def who(self) -> tuple[object, ...]:
        return self.report.run.id, self.rank.host, self.rank.rank, self.rank.label

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


#: A table, made of ranks.
Table = Callable[[Iterable[RankSource]], "pd.DataFrame"]
_Rows = Callable[[RankSource], Iterable[object]]


def _frame(kinds: dict[str, str], rows: Iterable[tuple[object, ...]]) -> pd.DataFrame:
    import pandas as pd

    typed: pd.DataFrame = pd.DataFrame(rows, columns=list(kinds), dtype=object).astype(kinds)
    return typed


def _of_ranks(*more: str) -> Callable[[_Rows], Table]:
    """Return what makes the table of the rows of ranks that has the name of their function.

    A row that is a tuple has the values of the columns, any other has them as attributes.

    Args:
        more: columns of integers, after those of ``columns.toml``.
    """

    def table(rows: _Rows) -> Table:
        kinds = {**_COLUMNS[rows.__name__], **dict.fromkeys(more, "Int64")}
        shown = [_COLUMNS["attributes"].get(name, name) for name in kinds]

        def values(row: object) -> tuple[object, ...]:
            return row if isinstance(row, tuple) else tuple(getattr(row, name) for name in shown)

        @wraps(rows)
        def made(ranks: Iterable[RankSource]) -> pd.DataFrame:
            found = [(*rank.who, *values(row)) for rank in ranks for row in rows(rank)]
            return _frame(_COLUMNS["who"] | kinds, found)

        return made

    return table


#: What tables of phases show of a reading, at both ends and in between.
_READINGS = [str(column.value) for column in PHASE_COLUMNS]


@_of_ranks(
    *(
        f"{name.removesuffix('_bytes')}_{edge}_bytes"
        for name in _READINGS
        for edge in ("before", "after", "change")
    )
)
def phases(source: RankSource) -> Iterator[object]:
    """Return one row per rank and passage through a phase.

    Columns after ``WHO``: phase (string), order (Int64, by start within the rank, from 0), parent
    (Int64, order of the enclosing passage, <NA> at the top), depth (Int64), seconds (Float64), open
    (boolean, the rank never left the phase), error (string, the exception that left it); then for
    each of ``PHASE_COLUMNS``: before, after and change, e.g. allocated_before_bytes (Int64).
    """
    for span in source.rank.phases:
        sizes: list[int | None] = []
        for name in _READINGS:
            low, high = value(span.before, name), value(span.after, name)
            sizes += [low, high, minus(high, low)]
        at = (span.phase, span.order, span.parent, span.depth, span.seconds, span.open, span.error)
        yield *at, *sizes


@_of_ranks(*SNAPSHOT_FIELDS)
def snapshots(source: RankSource) -> Iterator[object]:
    """Return one row per rank, phase and edge at which the device was read.

    Columns after ``WHO``: phase (string), order (Int64), edge (string: before, after), time_s
    (Float64, since the start of the run), and every field of a snapshot (Int64, bytes or a count).
    """
    for span, edge in edges_of(source.rank.phases):
        values = (getattr(edge.snapshot, name) for name in SNAPSHOT_FIELDS)
        yield span.phase, span.order, edge.side, source.seconds(edge), *values


@_of_ranks()
def device_memory(source: RankSource) -> Iterator[object]:
    """Return one row per rank, phase, edge and owner of device memory.

    Columns after ``WHO``: phase (string), order (Int64), edge (string), time_s (Float64), component
    (string), bytes (Int64), how (string: measured, derived, modelled), source (string, what it was
    read from), part_of (string). Rows whose part_of is <NA> add up to the total of the device at
    that edge, the row ``unexplained`` included; the others are parts of the row that they name.
    """
    for span, edge in edges_of(source.rank.phases):
        if (owners := edge.owners) is not None:
            at = (span.phase, span.order, edge.side, source.seconds(edge))
            for row in (*owners.rows, *owners.parts):
                yield *at, row.component, row.bytes, row.how, row.source, row.part_of
            rest, how = owners.unexplained_bytes, owners.unexplained_how
            yield *at, UNEXPLAINED, rest, how, "all unexplained memory", None


@_of_ranks()
def host_memory(source: RankSource) -> Iterable[object]:
    """Return one row per rank and owner of the host memory of its process.

    Columns after ``WHO``: owner (string, kind:owner, as pinned:kv_offload), bytes (Int64), how
    (string), tensor_bytes (Int64: what its tensors need, the rest is rounding).
    """
    return source.rank.host_memory.rows


@_of_ranks()
def budget(source: RankSource) -> Iterator[object]:
    """Return one row per rank and figure of the KV-cache equation.

    Columns after ``WHO``: kind (string: budget, term, term_part (of the term above it),
    not_subtracted, held_at_peak), name (string), bytes (Int64), half_unit_bytes (Int64, half of the
    last digit that a log prints, 0 from hooks), subtracted (boolean, of a term), how (string, of
    all but the terms), kv_tokens (Int64, KV cache tokens that the bytes would hold).
    """
    rank, found = source.rank, source.rank.budget
    tokens = budget_tokens(rank)
    for name in ("device_total_bytes", "initial_free_bytes", *_BUDGET):
        size = getattr(found if name in _BUDGET else rank, name)
        half, how = rank.half_units.get(name, 0), found.how.get(name)
        yield "budget", name, size, half, None, how, tokens.get(name)
    for each in found.suggestions:
        name = f"suggested_{each.limit}_bytes"
        yield "budget", name, each.bytes, 0, None, each.how, each.kv_tokens
    for term in found.terms:
        yield "term", term.name, term.bytes, term.half_unit_bytes, term.subtracted, None, None
        for part in term.parts:
            yield "term_part", part.name, part.bytes, 0, None, part.how, None
    for kind in ("not_subtracted", "held_at_peak"):
        for item in getattr(found, kind):
            yield kind, item.name, item.bytes, 0, None, item.how, item.kv_tokens


@_of_ranks()
def audit(source: RankSource) -> Iterable[object]:
    """Return one row per rank and audited figure of the engine.

    Columns after ``WHO``: name (string, a term of the equation, or another figure of the engine),
    engine_bytes, bytes (memprof's reading of the same memory), difference_bytes (engine less it),
    tolerance_bytes (Int64), agrees (boolean, <NA> where nothing is compared), how, source (string,
    of bytes), reason (string, why a figure is <NA>).
    """
    return source.rank.budget.audit


@_of_ranks()
def kv(source: RankSource) -> Iterable[object]:
    """Return one row per rank: the KV cache that the engine serves with.

    Columns after ``WHO``: tokens, blocks, block_size_tokens, bytes_per_token (Float64),
    bytes_per_block, max_model_len_tokens, max_concurrency (Float64, requests of max_model_len),
    available_bytes (granted by the equation), planned_bytes (of the planned tensors),
    draft_bytes (of them, of the drafter's layers), storage_bytes and allocated_bytes (what its
    tensors took), usable_tokens (most that requests can hold at once), usable_why (string, the rule
    that binds), out_of_reach_tokens, out_of_reach_bytes; Int64 where nothing else is said.
    """
    return [source.rank.kv]


@_of_ranks()
def weights(source: RankSource) -> Iterator[object]:
    """Return one row per rank, class and dtype of its weights; all add up to the engine's figure.

    Columns after ``WHO``: class, dtype (string), expected_bytes (the rank's share of the
    checkpoint), loaded_bytes, difference_bytes (Int64), why (string).
    """
    held = source.rank.weights
    for row in held.rows if held else ():
        yield tuple({**row}[name] for name in _COLUMNS["weights"])


@_of_ranks()
def empty_cache(source: RankSource) -> Iterable[object]:
    """Return one row per rank and call of ``empty_cache``.

    Columns after ``WHO``: phase (string, the enclosing one), site (string, file.py:line of the
    caller), function (string), by (string: engine, memprof), seconds (Float64, with the wait for
    the device), while_serving (boolean), requests (Int64, held at the call),
    freed_reserved_bytes, freed_npu_workspace_bytes, freed_other_bytes and refilled_bytes (Int64;
    the last: of what was freed, in use again at the next reading).
    """
    return source.rank.empty_cache


@_of_ranks()
def connectors(source: RankSource) -> Iterable[object]:
    """Return one row per rank and thing that its KV connectors take.

    Columns after ``WHO``: connector (string; <NA>: all of the rank), owner, place (string: device,
    host), bytes (Int64), how, argument, source, part_of (string; the last: what holds it already).
    """
    return source.rank.connectors


@_of_ranks()
def growth(source: RankSource) -> Iterable[object]:
    """Return one row per rank and owner, where the run was sampled: how it grew while it served.

    Columns after ``WHO``: owner, verdict (string), bounded (boolean), readings (Int64),
    bytes_per_request and bytes_per_hour (Float64), each with the interval as _low and _high,
    grown_bytes (Int64), requests (Int64) and seconds (Float64) of what was judged, last_bytes
    (Int64), requests_until_full and hours_until_full (Float64). Of ``kv_blocks`` bytes are blocks.
    """
    return source.rank.growth


@_of_ranks()
def requests(source: RankSource) -> Iterator[object]:
    """Return one row per rank and request, where the run was sampled, in the order of their begin.

    Columns after ``WHO``: id (string), prompt_tokens, output_tokens, images (Int64, how many),
    image_width and image_height (Int64, pixels, of the image with most of them), image_tokens
    (Int64), others (Int64, most other requests in a step with it), begin_s and end_s (Float64,
    since the launch), allocated_before_bytes, allocated_peak_bytes (Int64), peak_exact (boolean;
    else the peak is the highest reading), allocated_peak_at_most_bytes, left_allocated_bytes,
    left_reserved_bytes (Int64), peak_stage, reason (string), finished (boolean).
    """
    for each in source.rank.requests:
        sizes = only_known(each.images)
        width, height = max(sizes, key=prod, default=(None, None))
        own = vars(each) | {
            "images": len(each.images),
            "image_width": width,
            "image_height": height,
            "begin_s": each.begin_seconds,
            "end_s": each.end_seconds,
        }
        yield tuple(own[name] for name in _COLUMNS["requests"])


@_of_ranks()
def samples(source: RankSource) -> Iterator[object]:
    """Return one row per rank, stretch of time and figure, where the run was sampled.

    Columns after ``WHO``: begin_s and end_s (Float64, since the launch), readings (Int64, of the
    worker), figure (string, a name of ``accounting.serving.requests.CURVES``), low and high
    (Int64).
    """
    for point in source.rank.samples:
        at = (point.begin_seconds, point.end_seconds, point.readings)
        for name, low in point.low.items():
            yield *at, name, low, point.high.get(name)


def findings(reports: Iterable[Report]) -> pd.DataFrame:
    """Return one row per finding, the gravest of each run first.

    Columns: run (string), id (string), severity (string: error, warning, info), rank (Int64, <NA>
    for the run as a whole), label (string), bytes (Int64), kv_tokens (Int64), title, evidence and
    action (string).
    """
    kinds: dict[str, str] = _COLUMNS["findings"]
    rows = [
        (report.run.id, *(getattr(finding, name) for name in list(kinds)[1:]))
        for report in reports
        for finding in report.findings
    ]
    return _frame(kinds, rows)


def reading_how(name: str, simulated: bool) -> str:
    """Return how a field of a snapshot is known: measured, derived, or modelled."""
    return MODELLED if simulated and name in _DEVICE_WIDE else _DEVICE_WIDE.get(name, MEASURED)
