"""The shape of a reading as the event file has it, and a reading completed by a later one.

Worker processes.
"""

from __future__ import annotations

from typing import TypedDict

#: The runtime's counter that torch's own segments are part of (see components.py).
APP = "APP"


class Component(TypedDict):
    """One counter of the runtime, in bytes."""

    bytes: int
    peak_bytes: int


class SnapshotDict(TypedDict, total=False):
    """Keys and units as in ``record.schema``; a dictionary, since it is written as it is."""

    t_ns: int
    device_total_bytes: int | None
    device_free_bytes: int | None
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    allocated_run_peak_bytes: int | None
    reserved_bytes: int | None
    reserved_peak_bytes: int | None
    reserved_run_peak_bytes: int | None
    npu_workspace_bytes: int | None
    graph_pool_bytes: int | None
    non_torch_bytes: int | None
    unmapped_bytes: int | None
    process_bytes: int | None
    other_processes_bytes: int | None
    host_rss_bytes: int | None
    alloc_retries: int | None
    ooms: int | None
    components: dict[str, Component] | None
    npu_workspace_streams: dict[str, int] | None
    other_processes: dict[str, int] | None
    read_again: int  # readings dropped because free memory moved under them; absent for none


def with_later(snapshot: SnapshotDict, later: SnapshotDict) -> SnapshotDict:
    """Return a snapshot with the figures of a later one for memory outside torch.

    Free, the process's own figure and the counter that holds torch's segments follow the reserved
    memory of the snapshot, so that its figures still add up; that counter's peak is the one of the
    snapshot.
    """
    total, reserved = snapshot["device_total_bytes"], snapshot["reserved_bytes"]
    non_torch, reserved_later = later["non_torch_bytes"], later["reserved_bytes"]
    if total is None or reserved is None or non_torch is None or reserved_later is None:
        return snapshot
    since = reserved_later - reserved
    moved: SnapshotDict = {
        **snapshot,
        "non_torch_bytes": non_torch,
        "npu_workspace_bytes": later["npu_workspace_bytes"],
        "npu_workspace_streams": later["npu_workspace_streams"],
        "other_processes_bytes": later["other_processes_bytes"],
        "other_processes": later["other_processes"],
        "device_free_bytes": total - reserved + (snapshot["unmapped_bytes"] or 0) - non_torch,
        "components": later["components"],
    }
    if (process_bytes := later["process_bytes"]) is not None:
        moved["process_bytes"] = process_bytes - since
    if (components := later["components"]) is not None and APP in components:
        size = components[APP]["bytes"] - since
        peak = ((snapshot["components"] or {}).get(APP) or components[APP])["peak_bytes"]
        moved["components"] = {**components, APP: {"bytes": size, "peak_bytes": max(peak, size)}}
    if again := snapshot.get("read_again", 0) + later.get("read_again", 0):
        moved["read_again"] = again
    return moved
