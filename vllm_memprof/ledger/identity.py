"""Divides a device among its owners at one moment. The rows and the remainder always add up to the total."""

from __future__ import annotations

from vllm_memprof.ledger.model import INFERRED, MEASURED, MODELLED, ComponentRow, DeviceMemory
from vllm_memprof.record.loader import PhaseSpan
from vllm_memprof.record.schema import Snapshot


def device_memory(span: PhaseSpan, edge: str, snapshot: Snapshot, simulated: bool) -> DeviceMemory:
    """The device as one rank saw it at an edge of a phase.

    ``cached`` is reserved less allocated. ``other_non_torch`` is what lies outside torch's reserved segments and
    outside the operator workspace: runtime context, communicators, ATB pools and other processes, which no counter
    of this record tells apart. Memory that a simulated device's profile sets is marked modelled.

    Returns:
        Rows for allocated, cached, npu_workspace, other_non_torch and free, bytes, None where unknown;
        ``unaccounted_bytes`` is the total less the known rows, None where the total itself is unknown.
    """
    outside = MODELLED if simulated else MEASURED
    cached = _minus(snapshot.reserved_bytes, snapshot.allocated_bytes)
    rows = [
        ComponentRow("allocated", snapshot.allocated_bytes, MEASURED),
        ComponentRow("cached", cached, MEASURED),
        ComponentRow("npu_workspace", snapshot.npu_workspace_bytes, outside),
        ComponentRow("other_non_torch", _other_non_torch(snapshot), MODELLED if simulated else INFERRED),
        ComponentRow("free", snapshot.device_free_bytes, MEASURED),
    ]
    known = sum(row.bytes for row in rows if row.bytes is not None)
    total = snapshot.device_total_bytes
    return DeviceMemory(span.phase, span.order, edge, rows, None if total is None else total - known)


def _other_non_torch(snapshot: Snapshot) -> int | None:
    """Non-torch memory less the operator workspace, as far as the workspace is known."""
    non_torch = snapshot.non_torch_bytes
    if non_torch is None:
        used = _minus(snapshot.device_total_bytes, snapshot.device_free_bytes)
        non_torch = _minus(used, snapshot.reserved_bytes)
    return None if non_torch is None else non_torch - (snapshot.npu_workspace_bytes or 0)


def _minus(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right
