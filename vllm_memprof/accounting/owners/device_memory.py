"""Divide the device by owner at one edge.

The rows and ``unexplained_bytes`` always add up to the device's total. What is left when all else
is taken off (of a counter, of the process, of the device) is no owner: every such remainder is a
part of ``unexplained_bytes``. A difference is known as its weakest part is.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import DERIVED, MEASURED, MODELLED, ComponentRow, DeviceMemory
from vllm_memprof.accounting.owners.in_torch import TorchOwners, divide_allocated
from vllm_memprof.accounting.owners.outside_torch import EdgeTime, Owners, share_communicators
from vllm_memprof.accounting.readings.counters import (
    APP,
    HCCL,
    RUNTIME,
    counted_bytes,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.quantities import NEVER_MODELLED_ROWS
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import UNEXPLAINED, Edge, Span, weakest
from vllm_memprof.units import minus

_NO_OWNERS, _NO_TORCH_OWNERS = Owners(), TorchOwners()
_NEVER_MODELLED = frozenset(NEVER_MODELLED_ROWS)
_OF_ATB = "growth in the phase of ATB's first operation"
#: What is left of a counter, of the process or of the device when all that is known is taken off.
REMAINDERS = ("other", "other_non_torch", "communicators_unnamed", "context_growth")


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
    snapshot = edge.snapshot
    at = _Edge(owners, EdgeTime.of(span, edge.side), simulated)
    allocated, reserved = snapshot.allocated_bytes, snapshot.reserved_bytes
    rows = [
        at.row("allocated", allocated, MEASURED, "torch: blocks handed to tensors"),
        at.row(
            "reserved_not_allocated",
            minus(reserved, allocated),
            MEASURED,
            "torch: the rest of its segments",
        ),
    ]
    if snapshot.unmapped_bytes:
        source = "counted by torch, unmapped by sleep mode"
        rows.append(at.row("unmapped", -snapshot.unmapped_bytes, MEASURED, source))
    workspace = snapshot.npu_workspace_bytes
    rows.append(at.row("npu_workspace", workspace, MEASURED, "the allocator's list of segments"))
    remainders: list[ComponentRow] = []
    named = 0
    for row in _counted(snapshot, at) if owners.counted else _uncounted(snapshot, at):
        if row.component in REMAINDERS:
            remainders.append(row)
            named += row.bytes or 0
        else:
            rows.append(row)
    rows.append(at.row("free", snapshot.device_free_bytes, MEASURED, "the driver"))
    known = sum([row.bytes for row in rows if row.bytes is not None])
    unexplained = minus(snapshot.device_total_bytes, known)
    rest = minus(unexplained, named)
    source = "device total less all of the rows"
    parts = [
        at.row(row.component, row.bytes, row.how, row.source, UNEXPLAINED) for row in remainders
    ]
    parts.append(at.row("rest", rest, DERIVED, source, UNEXPLAINED))
    pools, where = snapshot.graph_pool_bytes, "allocated and reserved_not_allocated"
    if pools is not None:
        parts.append(at.row("graph_pools", pools, MEASURED, "private pools", where))
    streams = sorted((snapshot.npu_workspace_streams or {}).values(), reverse=True)
    for number, size in enumerate(streams, 1):
        stream = f"npu_workspace_stream_{number}"
        parts.append(at.row(stream, size, MEASURED, "largest first", "npu_workspace"))
    parts += divide_allocated(torch, allocated, at.time)
    how = MODELLED if simulated else weakest([DERIVED, *(row.how for row in remainders)])
    return DeviceMemory(rows, unexplained, parts, how)


@dataclass(slots=True)
class _Edge:
    """An edge, with the owners of its process."""

    owners: Owners
    time: EdgeTime
    simulated: bool

    def row(
        self,
        component: str,
        size: int | None,
        how: str,
        source: str = "",
        part_of: str | None = None,
    ) -> ComponentRow:
        """Return a row; of a simulated device it is modelled if the device's profile sets it."""
        if self.simulated and component not in _NEVER_MODELLED:
            how = MODELLED
        return ComponentRow(component, size, how, source, part_of)

    def atb(self) -> int:
        pool = self.owners.atb
        return 0 if pool is None or not self.time.is_after(pool.since) else pool.bytes


def _counted(snapshot: Snapshot, at: _Edge) -> list[ComponentRow]:
    """Return rows from the runtime's counters and the driver's figure of the process."""
    rows = [*_context(snapshot, at), *_named_communicators(counter(snapshot, HCCL), at)]
    rows += _application(snapshot, at)
    runtime, graph = counter(snapshot, RUNTIME), None
    if runtime is not None:
        captured = 0
        for capture in at.owners.captures:
            if capture.ends is not None and at.time.is_after(capture.ends):
                captured += capture.grown_bytes
            elif at.time.is_after(capture.begins):
                captured += max(0, runtime - capture.base_bytes)
        graph = min(captured, runtime)
    source = f"growth of the {RUNTIME} counter in graph_capture"
    rows.append(at.row("graph", graph, DERIVED, source))
    known = DERIVED if graph else MEASURED
    rows.append(at.row("runtime", minus(runtime, graph), known, f"{RUNTIME} counter, less graph"))
    rows += [
        at.row(f"cann_{name.lower()}", counter(snapshot, name), MEASURED, f"{name} counter")
        for name in sorted(snapshot.components or ())
        if name not in (APP, HCCL, RUNTIME)
    ]
    return [*rows, _other_processes(snapshot, at)]


def _context(snapshot: Snapshot, at: _Edge) -> list[ComponentRow]:
    """Return the context as it was first read, and its growth since, which is a remainder.

    The driver's figure of the process less all counters is the context where nothing was allocated
    yet. What it grows by later is memory that no counter counts.
    """
    read = at.owners.contexts
    size = minus(snapshot.process_bytes, counted_bytes(snapshot))
    if size is not None:
        source = "the driver's figure of this process, less all counters"
        growth = max(0, size - (read[0][1] if read else size))
        return [
            at.row("context", size - growth, MEASURED, source),
            at.row("context_growth", growth, MEASURED, f"{source}, since its first reading"),
        ]
    carried = None if snapshot.components is None else at.owners.context(at.time.t_ns)
    if carried is not None and read:
        carried = min(carried, read[0][1])
    source = "as the driver's figure last gave it" if read else "non-torch at the first reading"
    return [at.row("context", carried, DERIVED, source)]


def _other_processes(snapshot: Snapshot, at: _Edge) -> ComponentRow:
    """Return the other processes on the device; where the list was not read, as it last was.

    Then they hold at most what this process leaves of the used memory: one may have ended since.
    What one has taken since is in the remainder.
    """
    size = snapshot.other_processes_bytes
    if size is not None:
        return at.row("other_processes", size, MEASURED, "the driver's list of processes")
    source = "as the driver's list of processes last gave it"
    carried, context = (
        known(at.time.t_ns) for known in (at.owners.other_processes, at.owners.context)
    )
    left = minus(minus(snapshot.used_bytes, context), counted_bytes(snapshot))
    held = None if carried is None or left is None else max(0, min(carried, left))
    return at.row("other_processes", held, DERIVED, source)


def _named_communicators(held: int | None, at: _Edge) -> list[ComponentRow]:
    known = at.owners.communicators
    if held is None:
        return [at.row(each.name, None, DERIVED) for each in known]
    shares = share_communicators(at.owners, held, at.time)
    rows = [at.row(each.name, shares.named[each.name], DERIVED, each.source) for each in known]
    if len(rows) == 1 and not shares.rest:  # then the counter is this one's alone
        only = rows[0]
        rows = [at.row(only.component, only.bytes, MEASURED, f"{HCCL} counter, {only.source}")]
    known_as = weakest([MEASURED, *[row.how for row in rows if row.bytes]])
    rest = f"{HCCL} counter, less the named"
    return [*rows, at.row("communicators_unnamed", shares.rest, known_as, rest)]


def _application(snapshot: Snapshot, at: _Edge) -> list[ComponentRow]:
    """Return ATB's pool and the other allocations of the process besides torch's segments."""
    workspace = snapshot.npu_workspace_bytes
    beside = minus(counter(snapshot, APP), torch_bytes(snapshot))
    if beside is None:
        return [at.row("atb", None, DERIVED), at.row("other", None, MEASURED)]
    atb = max(0, min(at.atb(), beside - (workspace or 0)))
    how = DERIVED if atb else MEASURED
    name, source = "other", f"{APP} counter, less torch, npu_workspace and atb"
    if workspace is None:
        name = "npu_workspace_and_other"
        source = f"{APP} counter, less torch and atb: the workspace was not read here"
    rest = beside - (workspace or 0) - atb
    return [at.row("atb", atb, DERIVED, _OF_ATB), at.row(name, rest, how, source)]


def _uncounted(snapshot: Snapshot, at: _Edge) -> list[ComponentRow]:
    """Return, without counters, the owners known from events, and the rest in one row."""
    rest = snapshot.non_torch_bytes
    if rest is None:
        rest = minus(snapshot.used_bytes, torch_bytes(snapshot))
    rest = minus(rest, snapshot.npu_workspace_bytes or 0)
    source = "total - free - reserved, less what is named; no counter divides it"
    if rest is None:
        return [at.row("other_non_torch", None, DERIVED, source)]
    derived: list[ComponentRow] = []
    context = at.owners.first_context
    if context is not None:
        held = min(context, max(0, rest))
        derived.append(at.row("context", held, DERIVED, "non-torch at the first reading"))
    for each in at.owners.communicators:
        sizes = [size for size in (each.configured_bytes, each.seen_bytes) if size is not None]
        present = at.time.is_after(each.begins)
        size = min(sizes, default=None) if present else 0
        derived.append(at.row(each.name, size, DERIVED, each.source))
    if at.owners.atb is not None:
        derived.append(at.row("atb", at.atb(), DERIVED, _OF_ATB))
    left = rest - sum(row.bytes for row in derived if row.bytes is not None)
    return [*derived, at.row("other_non_torch", left, DERIVED, source)]
