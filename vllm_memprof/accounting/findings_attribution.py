"""Findings from memory outside torch by owner: what was allocated past torch, communicators, other processes.

Listed in ``FINDINGS`` as in ``findings.py``; each looks at the finished ranks and yields nothing where it does not
apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_memprof.accounting.growth import Growth, growth_by_owner
from vllm_memprof.accounting.honest import others_at_start, others_in
from vllm_memprof.accounting.kv import worth_in_tokens
from vllm_memprof.accounting.model import ComponentRow, Finding, RankReport
from vllm_memprof.record.loader import Run
from vllm_memprof.record.spans import AFTER, Span, edges_of, first_of, is_within
from vllm_memprof.units import GIB, MIB, format_bytes, format_gib

#: Less than this outside torch is the small change of libraries.
NOTEWORTHY_BYTES = 16 * MIB
#: Communicators that hold as much together are worth a line, whatever sizes them.
_MANY_BUFFERS_BYTES = 1 * GIB
_DEFAULT_BUFFERS_BYTES = 2 * 200 * MIB
_VARIABLE = "HCCL_BUFFSIZE"


def _outside_torch(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Growth of ``other``: memory that the process asked the device for past torch's allocators, and kept."""
    for rank in ranks:
        last = next((row.bytes for row in _last_rows(rank) if row.component == "other"), None)
        for row, size in _own_growth(rank, "other"):
            if size < NOTEWORTHY_BYTES or last is None or last < NOTEWORTHY_BYTES:
                continue
            charged = not _after_profiling(rank, row)
            yield Finding(
                id="allocation-outside-torch",
                severity="info" if charged else "warning",
                rank=rank.rank,
                label=rank.label,
                bytes=size,
                kv_tokens=worth_in_tokens(rank.kv, size),
                title="Device memory was allocated outside torch, ATB and the communicators"
                + ("" if charged else ", after profiling: no term charges it"),
                evidence=f"other grew by {format_bytes(size)} bytes {_where(row)}; at the last reading it holds "
                f"{format_bytes(last)} (aclrtMalloc of this process, less torch, operator workspace and ATB)",
                action="" if charged else _leave_room(rank, size, ranks),
            )


def _last_rows(rank: RankReport) -> list[ComponentRow]:
    """Rows of the last moment before the shutdown at which the device was divided."""
    shutdown = first_of(rank.phases, "shutdown")
    for span, edge in reversed(list(edges_of(rank.phases))):
        after_end = shutdown is not None and (
            span.order > shutdown.order or (span is shutdown and edge.side == AFTER)
        )
        rows = edge.owners.rows if edge.owners is not None else []
        if not after_end and any(
            row.component == "other" and row.bytes is not None for row in rows
        ):
            return rows
    return []


def _own_growth(rank: RankReport, owner: str) -> Iterator[tuple[Growth, int]]:
    """Growth of an owner by phase, less what the phases inside it account for."""
    table = growth_by_owner(rank)
    parents = {row.order: row.parent for row in rank.phases}
    inside: dict[int | None, int] = {}
    for row in table:
        if row.after is None:
            parent = parents.get(row.order)
            inside[parent] = inside.get(parent, 0) + (row.owners.get(owner) or 0)
    for row in table:
        size = row.owners.get(owner)
        if size is not None:
            yield row, size - (inside.get(row.order, 0) if row.after is None else 0)


def _after_profiling(rank: RankReport, row: Growth) -> bool:
    profile = first_of(rank.phases, "profile_run")
    if profile is None or row.order <= profile.order:
        return False
    span = next(span for span in rank.phases if span.order == row.order)
    return not is_within(rank.phases, span, profile.order)


def _where(row: Growth) -> str:
    return f"in {row.phase}" if row.after is None else row.place


def _leave_room(rank: RankReport, size: int, ranks: list[RankReport]) -> str:
    grants = [other.budget.engine_kv_cache_bytes for other in ranks]
    granted = min((grant for grant in grants if grant is not None), default=None)
    if granted is None or granted <= size or not rank.budget.takes_fixed_size:
        return ""
    return f"--kv-cache-memory-bytes {granted - size} leaves room for it"


@dataclass(frozen=True)
class _Buffers:
    """A communicator's buffers as configured."""

    name: str
    bytes: int
    source: str


def _communicator_buffers(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Buffers larger than HCCL's default by the environment; an environment that sizes none; many communicators."""
    asked = run.info.env.get(_VARIABLE)
    for rank in ranks:
        found = [each for span in rank.phases if (each := _buffers(span)) is not None]
        total = sum(each.bytes for each in found)
        by_variable = [each for each in found if each.source == _VARIABLE]
        over = sum(each.bytes - _DEFAULT_BUFFERS_BYTES for each in by_variable)
        evidence = ", ".join(
            f"{each.name} 2 x {each.bytes // 2 // MIB} MiB by {each.source}" for each in found
        )
        if over >= NOTEWORTHY_BYTES:
            yield _about_buffers(
                rank,
                over,
                "warning" if over >= 8 * NOTEWORTHY_BYTES else "info",
                f"{_VARIABLE} makes communicator buffers larger than HCCL's default",
                evidence,
                f"{_VARIABLE}=200 gives back {format_gib(over, 4)} GiB per rank; larger transfers are then cut",
            )
        elif asked and found and not by_variable:
            title = f"{_VARIABLE}={asked} sizes none of the communicators that this run has used"
            yield _about_buffers(rank, total, "info", title, evidence, "")
        elif total >= _MANY_BUFFERS_BYTES:
            title = f"{len(found)} communicators hold {format_gib(total)} GiB of buffers"
            yield _about_buffers(rank, total, "info", title, evidence, "")


def _about_buffers(
    rank: RankReport, size: int, severity: str, title: str, evidence: str, action: str
) -> Finding:
    tokens = worth_in_tokens(rank.kv, size)
    return Finding(
        "communicator-buffers",
        severity,
        rank.rank,
        rank.label,
        title,
        evidence,
        size,
        tokens,
        action,
    )


def _buffers(span: Span) -> _Buffers | None:
    size, source = span.integer("buffer_bytes"), span.string("buffer_source")
    if span.phase != "communicator" or size is None or source is None:
        return None
    name = str(span.detail.get("group")) + (" p2p" if span.detail.get("p2p") else "")
    return _Buffers(name, size, "HCCL's default" if source == "default" else source)


def _others(rank: RankReport, own: set[str]) -> Iterator[tuple[str, int]]:
    for span, edge in edges_of(rank.phases):
        others = others_in(edge.snapshot, own)
        if others is not None:
            yield span.phase, others


def _came_later(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Another process that took memory of the device while this one was starting up or running."""
    own = {str(rank.pid) for rank in ranks}
    for rank in ranks:
        first = others_at_start(rank.phases, own)
        if first is None:
            continue
        phase, most = max(_others(rank, own), key=lambda entry: entry[1])
        if most - first >= NOTEWORTHY_BYTES:
            yield Finding(
                id="co-tenant",
                severity="warning",
                rank=rank.rank,
                label=rank.label,
                bytes=most - first,
                kv_tokens=worth_in_tokens(rank.kv, most - first),
                title="Another process took device memory while this one ran",
                evidence=f"other processes held {format_gib(first)} GiB at the start and {format_gib(most)} GiB in "
                f"{phase} (the driver's list of processes)",
            )


FINDINGS: tuple[Callable[[Run, list[RankReport]], Iterator[Finding]], ...] = (
    _outside_torch,
    _communicator_buffers,
    _came_later,
)
