"""The device by owner at the moment that decides: the rows of the first screen.

A rank enters, rows in bytes leave; those of a device whose total is known add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.model import DERIVED, ESTIMATED, MEASURED, RankReport
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.record.spans import DeviceMemory, Edge, Span, edges_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import minus

#: Moments at which the device is divided.
SERVING_PEAK, FAILURE, LAST_READING, LOG = "serving_peak", "failure", "last_reading", "log"
FREE, HEADROOM, OVER = "free", "headroom", "over"


@dataclass(frozen=True)
class DeviceOwner:
    """An owner of device memory at one moment."""

    name: str
    title: str
    bytes: int
    how: str


@dataclass(frozen=True)
class DividedDevice:
    """A device by owner."""

    moment: str  # SERVING_PEAK, FAILURE, LAST_READING, LOG
    phase: str | None  # of LAST_READING
    total_bytes: int | None
    owners: list[DeviceOwner]
    #: The device as it was read after the start-up, which tells what non-torch memory is.
    memory: DeviceMemory | None = None


def divided_device(rank: RankReport) -> DividedDevice | None:
    """Return the device by owner: at the failure, at the serving peak, or as far as is known."""
    total = device_total(rank)
    at = _last_divided(rank)
    memory = None if at is None else at[1].owners
    if rank.oom is not None and sum(row.bytes is not None for row in rank.oom.owners) >= 2:
        owners = _at_the_failure(rank)
        return DividedDevice(FAILURE, None, rank.oom.device_total_bytes or total, owners, memory)
    if rank.budget.held_at_peak and rank.budget.headroom_bytes is not None:
        return DividedDevice(SERVING_PEAK, None, total, _at_the_peak(rank), memory)
    if at is not None and memory is not None:
        return DividedDevice(LAST_READING, at[0].phase, total, _as_read(memory), memory)
    owners = _as_printed(rank, total)
    return DividedDevice(LOG, None, total, owners) if len(owners) > 1 else None


def _last_divided(rank: RankReport) -> tuple[Span, Edge] | None:
    """Return the last reading before the shutdown that is divided by owner."""
    read = [
        (span, edge)
        for span, edge in edges_of(rank.phases)
        if span.phase != "shutdown"
        and edge.owners is not None
        and edge.owners.unexplained_bytes is not None
    ]
    return max(read, key=lambda each: each[1].snapshot.t_ns or 0, default=None)


def _at_the_failure(rank: RankReport) -> list[DeviceOwner]:
    """Return the owners at a failed allocation; a row whose parts are known as these."""
    assert rank.oom is not None
    rows = rank.oom.owners
    divided = {row.part_of for row in rows if row.part_of is not None and row.bytes}
    return [
        DeviceOwner(row.component, row.component, row.bytes, row.how)
        for row in rows
        if row.bytes is not None and row.component not in divided
    ]


def _at_the_peak(rank: RankReport) -> list[DeviceOwner]:
    """Return what is in use at the serving peak: items of ``held_at_peak``, torch's divided.

    Reserved memory at the peak is weights, activations, other tensors, and what was reserved
    without a tensor (``accounting.budget.serving_peak.serving_peak``).
    """
    budget = rank.budget
    held = {item.name: item for item in budget.held_at_peak if item.bytes is not None}
    sizes = {name: item.bytes or 0 for name, item in held.items()}
    weights: int | float | None = budget.term("weights")
    weights = rank.figures.get("weights_bytes") if weights is None else weights
    activation = budget.term("peak_activation")
    rows: list[tuple[str, str, int | None, str]] = []

    def row(name: str, title: str, size: int | None, how: str = DERIVED) -> None:
        rows.append((name, title, size, how))

    in_use = minus(budget.fits_device_bytes, budget.headroom_bytes)  # what all ranks serve with
    row("kv_cache", text("KV cache"), in_use, MEASURED)
    row("weights", text("weights"), None if weights is None else int(weights), MEASURED)
    known = int(weights or 0)
    if "reserved_peak" in held:
        peak = rank.figures.get("profile_after_allocated_peak_bytes")
        tensors = sizes["reserved_peak"] if peak is None else int(peak)
        row("activation", text("activation, profile run"), activation, MEASURED)
        other = tensors - known - (activation or 0)
        other += sizes.get("late_torch", 0)
        if activation is None:
            row("profile_tensors", text("other tensors, profile run"), other)
        else:
            row("other_tensors", text("other tensors"), other)
        row("reserved", text("reserved, not allocated"), sizes["reserved_peak"] - tensors)
        outside = sizes.get("non_torch_peak", 0) + sizes.get("late_device", 0)
        hows = [held[name].how for name in ("non_torch_peak", "late_device") if name in held]
        row("non_torch", text("non-torch"), outside, max(hows, default=MEASURED))
        row("graph", text("graph memory"), sizes.get("graph"))
        row("held_later", text("more at a later moment"), sizes.get("held_later"))
    else:
        row("rest", text("all else in use"), sizes.get("held_at_worst", 0) - known, ESTIMATED)
    headroom = budget.headroom_bytes or 0
    how = budget.how.get("headroom_bytes", DERIVED)
    row(HEADROOM if headroom >= 0 else OVER, text("headroom"), headroom, how)
    return [DeviceOwner(name, title, size, how) for name, title, size, how in rows if size]


def _as_read(memory: DeviceMemory) -> list[DeviceOwner]:
    rows = [
        DeviceOwner(row.component, row.component, row.bytes, row.how)
        for row in memory.rows
        if row.bytes is not None
    ]
    rest = memory.unexplained_bytes or 0
    return [*rows, DeviceOwner("unexplained", text("unexplained"), rest, memory.unexplained_how)]


def _as_printed(rank: RankReport, total: int | None) -> list[DeviceOwner]:
    """Return the terms that a log prints, and what it leaves of the device."""
    budget = rank.budget
    names: list[tuple[str, str | Text, int | None]] = [
        ("kv_cache", text("KV cache"), budget.engine_kv_cache_bytes),
        *((row.name, title_of(row.name), row.bytes) for row in budget.terms if row.subtracted),
        *((row.name, row.title, row.bytes) for row in budget.not_subtracted),
    ]
    if not any(name == "graph" for name, _, _ in names):
        graph = rank.figures.get("graph_bytes")
        names.append(("graph", text("graph memory"), None if graph is None else int(graph)))
    if not budget.terms:
        weights = rank.figures.get("weights_bytes")
        names.insert(1, ("weights", text("weights"), None if weights is None else int(weights)))
    free = rank.figures.get("free_ready_bytes")
    used = total is not None and budget.engine_kv_cache_bytes is None and rank.initial_free_bytes
    if used:  # refused at its start
        held = minus(total, rank.initial_free_bytes)
        names.append(("in_use", text("in use before the start"), held))
        free = rank.initial_free_bytes
    if free is not None:
        title = text("free") if used else text("free at the end of the start-up")
        names.append((FREE, title, int(free)))
    rows = [
        DeviceOwner(name, title, size, MEASURED) for name, title, size in names if size and size > 0
    ]
    rest = minus(total, sum(row.bytes for row in rows))
    if rows and free is None and rest is not None and rest > 0:
        rows.append(DeviceOwner("rest", text("not in the log"), rest, DERIVED))
    return rows
