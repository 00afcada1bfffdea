"""Divide the device by owner at one edge.

The rows and ``unexplained_bytes`` always add up to the device's total. What is left when all else
is taken off (of a counter, of the process, of the device) is no owner: every such remainder is a
part of ``unexplained_bytes``. A difference is known as its weakest part is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.owners.in_torch import TorchOwners, divide_allocated, torch_owners
from vllm_memprof.accounting.owners.outside_torch import (
    NON_TORCH,
    EdgeTime,
    Owners,
    owners_of,
    share_communicators,
)
from vllm_memprof.accounting.readings.counters import (
    APP,
    HCCL,
    RUNTIME,
    counted_bytes,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.quantities import NEVER_MODELLED_ROWS
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    DERIVED,
    MEASURED,
    MODELLED,
    UNEXPLAINED,
    ComponentRow,
    DeviceMemory,
    Edge,
    Span,
    weakest,
)
from vllm_memprof.units import Amount, either, minus, smallest

_NO_OWNERS, _NO_TORCH_OWNERS = Owners(), TorchOwners()
#: What is left of a counter, of the process or of the device when all that is known is taken off.
REMAINDERS = ("other", "other_non_torch", "communicators_unnamed", "context_growth")
#: An owner, its bytes, how they are known, and what they were read from.
_Row = tuple[str, Amount, str, str]
#: One object for the rows that are alike, of which a run with many phases has a million.
_row = lru_cache(1 << 16)(ComponentRow)


def divided(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the phases of a rank, with the device by owner at each of their edges."""
    owners, simulated = owners_of(read.process), read.summary.simulated
    torch = torch_owners(read.process.phases, rank.kv.draft_bytes, rank.kv.alignment_bytes)
    return replace(
        rank,
        phases=[
            replace(
                span,
                owners={
                    edge.side: device_memory(span, edge, simulated, owners, torch)
                    for edge in span.edges
                },
            )
            for span in read.process.phases
        ],
    )


def device_memory(
    span: Span,
    edge: Edge,
    simulated: bool,
    owners: Owners = _NO_OWNERS,
    torch: TorchOwners = _NO_TORCH_OWNERS,
) -> DeviceMemory:
    """Divide the device as one rank saw it at an edge of a phase.

    With the runtime's counters every owner outside torch has a row of its own. Without them the
    context and the communicators are derived, and the remainder ``other_non_torch`` is the rest
    outside torch's segments and the operator workspace. Memory that a simulated device's profile
    sets is marked modelled.

    Args:
        span: the phase.
        edge: one of its edges.
        simulated: the device's profile sets what lies outside torch.
        owners: of the process outside torch, see ``owners.owners_of``.
        torch: its owners in torch, see ``torch_owners.torch_owners``.

    Returns:
        Rows in bytes, None where unknown. ``unexplained_bytes`` is the total less the known rows,
        None where the total is unknown. ``parts`` are contained in the rows, or are the remainders
        that add up to ``unexplained_bytes``.
    """

    def row(
        component: str, size: Amount, how: str, source: str, part_of: str | None = None
    ) -> ComponentRow:
        if simulated and component not in NEVER_MODELLED_ROWS:
            how = MODELLED
        return _row(component, size, how, source, part_of)

    read, at = edge.snapshot, EdgeTime.of(span, edge.side)
    outside = _counted(read, owners, at) if owners.counted else _uncounted(read, owners, at)
    idle = minus(read.reserved_bytes, read.allocated_bytes)
    found: list[_Row] = [
        ("allocated", read.allocated_bytes, MEASURED, "torch: blocks handed to tensors"),
        ("reserved_not_allocated", idle, MEASURED, "torch: reserved - allocated"),
    ]
    if read.unmapped_bytes:
        source = "counted by torch, unmapped by sleep mode"
        found.append(("unmapped", -read.unmapped_bytes, MEASURED, source))
    source = "the allocator's list of segments"
    found.append(("npu_workspace", read.npu_workspace_bytes, MEASURED, source))
    found += [*outside, ("free", read.device_free_bytes, MEASURED, "the driver")]
    rows = [row(*each) for each in found if each[0] not in REMAINDERS]
    remainders = [row(*each, UNEXPLAINED) for each in found if each[0] in REMAINDERS]
    known, named = (sum(each.bytes or 0 for each in listed) for listed in (rows, remainders))
    unexplained = minus(read.device_total_bytes, known)
    rest = minus(unexplained, named)
    parts = [row("rest", rest, DERIVED, "device total - all rows", UNEXPLAINED)]
    if read.graph_pool_bytes is not None:
        within = "allocated and reserved_not_allocated"
        parts.append(row("graph_pools", read.graph_pool_bytes, MEASURED, "private pools", within))
    streams = sorted((read.npu_workspace_streams or {}).values(), reverse=True)
    parts += [
        row(f"npu_workspace_stream_{number}", size, MEASURED, "largest first", "npu_workspace")
        for number, size in enumerate(streams, 1)
    ]
    parts += divide_allocated(torch, read.allocated_bytes, at)
    how = MODELLED if simulated else weakest([DERIVED, *(each.how for each in remainders)])
    return DeviceMemory(rows, unexplained, remainders + parts, how)


def _counted(read: Snapshot, owners: Owners, at: EdgeTime) -> Iterator[_Row]:
    """Yield rows from the runtime's counters and the driver's figure of the process."""
    yield from _context(read, owners, at)
    yield from _named_communicators(counter(read, HCCL), owners, at)
    yield from _application(read, owners, at)
    runtime, graph = counter(read, RUNTIME), None
    if runtime is not None:
        taken = (each.size(runtime, at) for each in owners.captures if each.is_there(at))
        graph = min(runtime, sum(max(0, size or 0) for size in taken))
    yield "graph", graph, DERIVED, f"growth of the {RUNTIME} counter in graph_capture"
    how = DERIVED if graph else MEASURED
    yield "runtime", minus(runtime, graph), how, f"{RUNTIME} counter - graph"
    for name in sorted({*(read.components or ())} - {APP, HCCL, RUNTIME}):
        yield f"cann_{name.lower()}", counter(read, name), MEASURED, f"{name} counter"
    # where the list was not read, what it last gave, and at most what this process leaves of the
    # used memory: one may have ended since. What one has taken since is in the remainder
    listed, last = read.other_processes_bytes, owners.other_processes(at.t_ns)
    left = minus(minus(read.used_bytes, owners.context(at.t_ns)), counted_bytes(read))
    if listed is not None:
        yield "other_processes", listed, MEASURED, "the driver's list of processes"
    else:
        held = None if last is None or left is None else max(0, min(last, left))
        yield "other_processes", held, DERIVED, "as the driver's list of processes last gave it"


def _context(read: Snapshot, owners: Owners, at: EdgeTime) -> Iterator[_Row]:
    """Yield the context as it was first read, and its growth since, which is a remainder.

    The driver's figure of the process less all counters is the context where nothing was allocated
    yet. What it grows by later is memory that no counter counts.
    """
    first = owners.contexts[0][1] if owners.contexts else None
    size = minus(read.process_bytes, counted_bytes(read))
    if size is not None:
        source = "the driver's value of this process - all counters"
        growth = max(0, size - (size if first is None else first))
        yield "context", size - growth, MEASURED, source
        yield "context_growth", growth, MEASURED, f"{source}, since its first reading"
        return
    carried = None if read.components is None else owners.context(at.t_ns)
    if carried is not None and first is not None:
        carried = min(carried, first)
    given = "as the driver's figure last gave it"
    yield "context", carried, DERIVED, given if first is not None else _FIRST_READING


_FIRST_READING = "non-torch at the first reading"


def _named_communicators(held: Amount, owners: Owners, at: EdgeTime) -> Iterator[_Row]:
    known = owners.communicators
    if held is None:
        yield from ((each.name, None, DERIVED, "") for each in known)
        return
    named, rest = share_communicators(owners, held, at)
    # without a rest the counter is that of the only one
    alone, how = len(known) == 1 and not rest, MEASURED
    for each in known:
        source = f"{HCCL} counter, {each.source}" if alone else each.source
        yield each.name, named[each.name], MEASURED if alone else DERIVED, source
        how = DERIVED if named[each.name] and not alone else how
    linked = min(rest, _links(owners, at, HCCL))
    if linked:
        yield "connector_links", linked, DERIVED, f"growth of the {HCCL} counter{_OVER_CONNECTOR}"
    yield "communicators_unnamed", rest - linked, how, f"{HCCL} counter - named"


def _application(read: Snapshot, owners: Owners, at: EdgeTime) -> Iterator[_Row]:
    """Yield ATB's pool and the other allocations of the process besides torch's segments."""
    beside = minus(counter(read, APP), torch_bytes(read))
    if beside is None:
        yield "atb", None, DERIVED, ""
        yield "other", None, MEASURED, ""
        return
    left = beside - (read.npu_workspace_bytes or 0)
    atb = max(0, min(_atb(owners, at), left))
    yield "atb", atb, DERIVED, "growth in the phase of ATB's first operation"
    pool = max(0, min(_links(owners, at, APP), left - atb))
    if pool:
        yield "connector_buffers", pool, DERIVED, f"growth of the {APP} counter{_OVER_CONNECTOR}"
        left -= pool
    name, source = "other", f"{APP} counter - torch - npu_workspace - atb"
    if read.npu_workspace_bytes is None:
        name = "npu_workspace_and_other"
        source = f"{APP} counter - torch - atb: the workspace was not measured here"
    yield name, left - atb, DERIVED if atb else MEASURED, source


def _atb(owners: Owners, at: EdgeTime) -> int:
    if owners.atb is None or not owners.atb.is_there(at):
        return 0
    return owners.atb.grown_bytes or 0


def _links(owners: Owners, at: EdgeTime, counted: str) -> int:
    """Return what KV connectors have taken outside torch by an edge, by one counter, bytes."""
    there = (each for each in owners.links if each.source == counted and each.is_there(at))
    return sum(max(0, each.grown_bytes or 0) for each in there)


_OVER_CONNECTOR = " while a KV connector is made, registers and first transfers"


def _uncounted(read: Snapshot, owners: Owners, at: EdgeTime) -> Iterator[_Row]:
    """Yield, without counters, the owners known from events, and the rest in one row."""
    rest = either(read.non_torch_bytes, minus(read.used_bytes, torch_bytes(read)))
    rest = minus(rest, read.npu_workspace_bytes or 0)
    source = "total - free - reserved, less what is named; no counter divides it"
    if rest is None:
        yield "other_non_torch", None, DERIVED, source
        return
    known: list[tuple[str, Amount, str]] = []
    if owners.first_context is not None:
        known.append(("context", min(owners.first_context, max(0, rest)), _FIRST_READING))
    for each in owners.communicators:
        begun = at.is_after(each.begins)
        size = smallest((each.configured_bytes, each.seen_bytes)) if begun else 0
        known.append((each.name, size, each.source))
    if owners.atb is not None:
        known.append(("atb", _atb(owners, at), owners.atb.source))
    if taken := _links(owners, at, NON_TORCH):
        known.append(("connector_links", taken, f"growth of non-torch{_OVER_CONNECTOR}"))
    for name, size, read_from in known:
        yield name, size, DERIVED, read_from
        rest -= size or 0
    yield "other_non_torch", rest, DERIVED, source
