"""Rows of ``memprof doctor --device``: who holds each device, and what is left behind."""

from __future__ import annotations

from vllm_memprof.holders.rows import ELSEWHERE, ENDED, DeviceRow, HolderRow, Who
from vllm_memprof.launch.doctor import GOOD, INFO, WARNING, DoctorCheck
from vllm_memprof.units import format_gib

_WHERE = {ENDED: "ended", ELSEWHERE: "not visible here"}


def holder_checks(who: Who) -> list[DoctorCheck]:
    """Return a row per device that somebody holds, one for all others, one per process left."""
    rows = [_device(row) for row in who.devices if row.processes or row.processes is None]
    idle = [str(row.device) for row in who.devices if row.processes == []]
    if idle:
        rows.append(DoctorCheck("devices", GOOD, f"no process holds memory of {', '.join(idle)}"))
    for row in who.left_behind:
        found = f"{row.engine or 'memprof'} {row.role}, process {row.pid}, holds "
        found += f"{_gib(row.bytes)}: {row.why}"
        rows.append(
            DoctorCheck("left behind", WARNING, found, f"kill {row.pid}, if nobody needs it")
        )
    return rows


def _device(row: DeviceRow) -> DoctorCheck:
    found = f"{_gib(row.free_bytes)} of {_gib(row.total_bytes)} free"
    if row.processes is None:
        return DoctorCheck(f"device {row.device}", INFO, "; ".join([found, *row.reasons]))
    return DoctorCheck(
        f"device {row.device}", INFO, f"{found}; {', '.join(map(_named, row.processes))}"
    )


def _named(row: HolderRow) -> str:
    name = _WHERE.get(row.where) or row.role or (row.command or ["?"])[0]
    return f"{row.pid} ({name}) {_gib(row.bytes)}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{format_gib(size)} GiB"
