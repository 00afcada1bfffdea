"""Findings about memory outside torch's allocators: past all of them, and of communicators."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.advice import leave_room
from vllm_memprof.accounting.findings.needs import HOOKS
from vllm_memprof.accounting.findings.registry import (
    INFO,
    WARNING,
    Found,
    RankContext,
    by_bytes,
    finding,
)
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.owners.growth import Growth, growth_by_owner
from vllm_memprof.record.spans import AFTER, edges_of, first_of, is_within
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, MIB

#: Less than this outside torch is what libraries commonly take.
NOTEWORTHY_BYTES = 16 * MIB
#: Communicators that hold as much together are a finding, whatever sizes them.
_MANY_BUFFERS_BYTES = 1 * GIB
_DEFAULT_BUFFERS_BYTES = 2 * 200 * MIB
_VARIABLE = "HCCL_BUFFSIZE"


@finding(
    "allocation-outside-torch",
    severity=WARNING,
    title=text("Device memory was allocated outside torch, ATB and the communicators"),
    needs=HOOKS,
)
def allocation_outside_torch(context: RankContext) -> Iterator[Found]:
    """Find memory that the process took from the device past torch's allocators, and kept.

    Meaning:
        A library calls aclrtMalloc itself. Info where it happened before the end of the
        profile run, where the equation subtracts it as non-torch memory; a warning afterwards.

    Computed:
        Growth of the remainder `other` in a phase, less that of the phases inside it, or between
        two phases; 16 MiB or more, and still held at the last reading before the shutdown. `other`
        is what the process holds of the device less torch, operator workspace, ATB and
        communicators (`vllm_memprof/accounting/owners/device_memory.py::device_memory`).

    To do:
        Find the library by the phase that the evidence names. Leave room for it with a smaller KV
        cache.
    """
    rank = context.rank
    last = _last_reading(rank)
    if last is None or last < NOTEWORTHY_BYTES:
        return
    profile = first_of(rank.phases, "profile_run")
    for row, size in _own_growth(rank):
        if size < NOTEWORTHY_BYTES:
            continue
        evidence = text(
            "other grew by {size:bytes} bytes {where}; at the last reading it holds {last:bytes} "
            "(aclrtMalloc of this process, less torch, operator workspace and ATB)",
            size=size,
            where=text("in {phase}", phase=row.phase)
            if row.after is None
            else text("between {first} and {second}", first=row.after, second=row.phase),
            last=last,
        )
        if (
            profile is None
            or row.order <= profile.order
            or is_within(rank.phases, rank.phases[row.order], profile.order)
        ):
            yield Found(evidence, size, severity=INFO)
            continue
        title = text(
            "Device memory was allocated outside torch, ATB and the communicators after "
            "profiling: the equation does not subtract it"
        )
        yield Found(
            evidence, size, leave_room(rank, size, context.whole.least_granted_bytes), title
        )


def _last_reading(rank: RankReport) -> int | None:
    """Return ``other`` of the last moment before the shutdown at which the device was divided."""
    shutdown = first_of(rank.phases, "shutdown")
    for span, edge in reversed(list(edges_of(rank.phases))):
        place = (span.order, edge.side == AFTER)
        if shutdown is not None and place > (shutdown.order, False):
            continue
        for row in edge.owners.remainders() if edge.owners is not None else ():
            if row.component == "other" and row.bytes is not None:
                return row.bytes
    return None


def _own_growth(rank: RankReport) -> Iterator[tuple[Growth, int]]:
    """Yield the growth of ``other`` by phase, less that of the phases inside it."""
    table = growth_by_owner(rank)
    parents = {row.order: row.parent for row in rank.phases}
    inside: dict[int | None, int] = {}
    for row in table:
        if row.after is None:
            parent = parents.get(row.order)
            inside[parent] = inside.get(parent, 0) + (row.remainders.get("other") or 0)
    for row in table:
        size = row.remainders.get("other")
        if size is not None:
            yield row, size - (inside.get(row.order, 0) if row.after is None else 0)


@finding(
    "communicator-buffers",
    severity=by_bytes,
    title=text("HCCL_BUFFSIZE makes communicator buffers larger than HCCL's default"),
    needs=HOOKS,
)
def communicator_buffers(context: RankContext) -> Iterator[Found]:
    """Find communicators with large buffers, and a variable that sizes none of them.

    Meaning:
        Every communicator holds two buffers on every rank. `HCCL_BUFFSIZE` sizes those whose
        creator gives no size of its own; vllm-ascend gives one for most groups, so the variable
        may change nothing, or only a communicator that the user did not mean.

    Computed:
        - Larger: the sum over communicators that the variable sizes of their buffers less the
          default of 2 x 200 MiB, 16 MiB or more; a warning from 128 MiB on.
        - The variable is set and sizes no communicator of the run: info.
        - All communicators together hold 1 GiB or more: info.

        Sizes are those with which the communicator was created
        (`vllm_memprof/accounting/owners/outside_torch.py::communicators_of`).

    To do:
        Leave the variable out, or set it to 200; larger transfers are then cut into pieces.
    """
    found = []
    for span in context.rank.phases:
        size, source = span.integer("buffer_bytes"), span.string("buffer_source")
        if span.phase == "communicator" and size is not None and source is not None:
            name = f"{span.detail.get('group')}{' p2p' if span.detail.get('p2p') else ''}"
            found.append((name, size, source))
    total = sum(size for _, size, _ in found)
    by_variable = [size for _, size, source in found if source == _VARIABLE]
    over = sum(size - _DEFAULT_BUFFERS_BYTES for size in by_variable)
    buffers = (
        text(
            "{name} 2 x {size} MiB by {source}",
            name=name,
            size=size // 2 // MIB,
            source=text("HCCL's default") if source == "default" else source,
        )
        for name, size, source in found
    )
    evidence = join(", ", buffers)
    asked = context.run.info.env.get(_VARIABLE)
    if over >= NOTEWORTHY_BYTES:
        action = text(
            "{setting} frees {size:gib4} GiB per rank; larger transfers are then cut",
            setting=f"{_VARIABLE}=200",
            size=over,
        )
        yield Found(evidence, over, action)
    elif asked and found and not by_variable:
        title = text(
            "{setting} sizes none of the communicators that this run has used",
            setting=f"{_VARIABLE}={asked}",
        )
        yield Found(evidence, total, title=title, severity=INFO)
    elif total >= _MANY_BUFFERS_BYTES:
        title = text(
            "{count} communicators hold {size:gib} GiB of buffers", count=len(found), size=total
        )
        yield Found(evidence, total, title=title, severity=INFO)
