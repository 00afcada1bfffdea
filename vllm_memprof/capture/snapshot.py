"""The shape of a reading as the event file has it, and a reading completed by a later one.

Worker processes.
"""

from __future__ import annotations

from typing import Any

#: The runtime's counter that torch's own segments are part of (see components.py).
APP = "APP"


_OUTSIDE_TORCH = (
    "non_torch_bytes",
    "npu_workspace_bytes",
    "npu_workspace_streams",
    "other_processes_bytes",
    "other_processes",
    "components",
)
#: A reading as it is written: keys and units of ``record.schema``, and ``read_again``, the readings
#: that were dropped because free memory moved under them (absent for none). Values are bytes or
#: None; ``components`` has bytes and peak_bytes by counter of the runtime,
#: ``npu_workspace_streams`` and ``other_processes`` bytes by stream and by process.
SnapshotDict = dict[str, Any]


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
    moved = {
        **snapshot,
        **{name: later[name] for name in _OUTSIDE_TORCH},
        "device_free_bytes": total - reserved + (snapshot["unmapped_bytes"] or 0) - non_torch,
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
