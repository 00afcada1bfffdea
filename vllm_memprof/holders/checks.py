"""Rows of ``memprof doctor --device``: who holds each device, and what is left behind."""

from __future__ import annotations

from vllm_memprof.holders.rows import ELSEWHERE, ENDED, Who
from vllm_memprof.launch.doctor import GOOD, INFO, WARNING, DoctorCheck
from vllm_memprof.units import format_gib

_WHERE = {ENDED: "ended", ELSEWHERE: "not visible here"}


def holder_checks(who: Who) -> list[DoctorCheck]:
    """Return a row per device that somebody holds, one for all others, one per process left."""
    rows, idle = [], []
    for device in who.devices:
        parts = device.reasons
        if device.processes is not None:
            parts = [
                ", ".join(
                    f"{row.pid} ({_WHERE.get(row.where) or row.role or (row.command or ['?'])[0]}) "
                    f"{_gib(row.bytes)}"
                    for row in device.processes
                )
            ]
        if device.processes == []:
            idle.append(str(device.device))
        else:
            found = f"{_gib(device.free_bytes)} of {_gib(device.total_bytes)} free"
            rows.append(DoctorCheck(f"device {device.device}", INFO, "; ".join([found, *parts])))
    if idle:
        rows.append(DoctorCheck("devices", GOOD, f"no process holds memory of {', '.join(idle)}"))
    for row in who.left_behind:
        found = f"{row.engine or 'memprof'} {row.role}, process {row.pid}, holds "
        found += f"{_gib(row.bytes)}: {row.why}"
        rows.append(
            DoctorCheck("left behind", WARNING, found, f"kill {row.pid}, if nobody needs it")
        )
    return rows


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{format_gib(size)} GiB"
