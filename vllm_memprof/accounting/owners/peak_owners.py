"""The device by owner at the moment that decides: the rows of the first screen.

A rank enters, rows in bytes leave; those of a device whose total is known add up to it.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.model import ItemPart, RankReport
from vllm_memprof.accounting.readings.counters import APP
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.accounting.titles import TITLES, title_in
from vllm_memprof.record.spans import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    UNEXPLAINED,
    DeviceMemory,
    edges_of,
    weakest,
)
from vllm_memprof.text import text
from vllm_memprof.units import Amount, either, minus

#: Moments at which the device is divided.
SERVING_PEAK, FAILURE, LAST_READING, LOG = "serving_peak", "failure", "last_reading", "log"
FILE = "file"
FREE, HEADROOM, OVER = "free", "headroom", "over"
_TITLES = TITLES["owners_at_peak"]
#: Terms and quantities that have what was in use before the engine began in them.
_HAVE_THE_START = ("initial_non_torch", "cleared", "used_by_device")


class DividedDevice(NamedTuple):
    """A device by owner."""

    moment: str  # SERVING_PEAK, FAILURE, LAST_READING, LOG, FILE
    phase: str | None  # of LAST_READING; of FILE their names
    total_bytes: Amount
    owners: list[ItemPart]
    #: The device as it was read after the start-up, which tells what non-torch memory is.
    memory: DeviceMemory | None = None


def divided_device(rank: RankReport) -> DividedDevice | None:
    """Return the device by owner: at the failure, at the serving peak, or as far as is known."""
    total = device_total(rank)
    # the last reading before the shutdown that is divided by owner
    read = [
        (edge.snapshot.t_ns or 0, span.name, edge.owners)
        for span, edge in edges_of(rank.phases)
        if span.phase != "shutdown"
        and edge.owners is not None
        and edge.owners.unexplained_bytes is not None
    ]
    _, phase, memory = max(read, key=lambda each: each[0], default=(0, None, None))
    failed = [] if rank.oom is None else rank.oom.owners
    if rank.oom is not None and sum(row.bytes is not None for row in failed) >= 2:
        # a row whose parts are known as these
        divided = {row.part_of for row in failed if row.part_of is not None and row.bytes}
        owners = [
            ItemPart(row.component, row.component, row.bytes, row.how)
            for row in failed
            if row.bytes is not None and row.component not in divided
        ]
        return DividedDevice(FAILURE, None, rank.oom.device_total_bytes or total, owners, memory)
    if rank.budget.held_at_peak and rank.budget.headroom_bytes is not None:
        return DividedDevice(SERVING_PEAK, None, total, _at_the_peak(rank), memory)
    if memory is not None:
        owners = [
            ItemPart(row.component, row.component, row.bytes, row.how)
            for row in memory.rows
            if row.bytes is not None
        ]
        rest, how = memory.unexplained_bytes or 0, memory.unexplained_how
        owners.append(ItemPart(UNEXPLAINED, _TITLES[UNEXPLAINED], rest, how))
        return DividedDevice(LAST_READING, phase, total, owners, memory)
    owners = _as_printed(rank, total)
    if len(owners) > 1:
        return DividedDevice(LOG, None, total, owners)
    owners, names = _of_files(rank), ", ".join(file.name for file in rank.files)
    return (
        DividedDevice(FILE, names, sum(each.bytes for each in owners), owners) if owners else None
    )


def _of_files(rank: RankReport) -> list[ItemPart]:
    """Return the owners that memory files tell: of torch by frames, of the process by module."""
    listed = (row for file in reversed(rank.files) for row in file.rows)
    rows = {row.name: row for row in listed if row.table in ("owners", "modules")}
    if any(row.table == "owners" for row in rows.values()):
        rows.pop(APP, None)  # has torch's segments
    return [
        ItemPart(name, title_in("file_rows", name), row.bytes, MEASURED)
        for name, row in rows.items()
        if row.bytes
    ]


def _at_the_peak(rank: RankReport) -> list[ItemPart]:
    """Return what is in use at the serving peak: items of ``held_at_peak``, torch's divided.

    Reserved memory at the peak is weights, activations, other tensors, and what was reserved
    without a tensor (``accounting.budget.serving_peak.serving_peak``).
    """
    budget = rank.budget
    held = {item.name: item for item in budget.held_at_peak if item.bytes is not None}
    sizes = {name: item.bytes or 0 for name, item in held.items()}
    weights = either(budget.term("weights"), rank.figure("weights_bytes"))
    in_use = minus(budget.fits_device_bytes, budget.headroom_bytes)  # what all ranks serve with
    rows = [("kv_cache", in_use, MEASURED), ("weights", weights, MEASURED)]
    if "reserved_peak" in held:
        peak, activation = sizes["reserved_peak"], budget.term("peak_activation")
        tensors = either(rank.figure("profile_after_allocated_peak_bytes"), peak) or 0
        other = tensors - (weights or 0) - (activation or 0) + sizes.get("late_torch", 0)
        outside = [held[name] for name in ("non_torch_peak", "late_device") if name in held]
        rows += [
            ("activation", activation, MEASURED),
            ("profile_tensors" if activation is None else "other_tensors", other, DERIVED),
            ("reserved", peak - tensors, DERIVED),
            (
                "non_torch",
                sum(item.bytes or 0 for item in outside),
                weakest(item.how for item in outside),
            ),
            ("graph", sizes.get("graph"), DERIVED),
            ("held_later", sizes.get("held_later"), DERIVED),
        ]
    else:
        rows.append(("rest", sizes.get("held_at_worst", 0) - (weights or 0), ESTIMATED))
    over = (budget.headroom_bytes or 0) < 0
    how = budget.how.get("headroom_bytes", DERIVED)
    rows.append((OVER if over else HEADROOM, budget.headroom_bytes, how))
    return [ItemPart(name, _TITLES[name], size, how) for name, size, how in rows if size]


def _as_printed(rank: RankReport, total: Amount) -> list[ItemPart]:
    """Return the terms that a log prints, and what it leaves of the device."""
    budget = rank.budget
    sizes = {"kv_cache": budget.engine_kv_cache_bytes, **budget.subtracted}
    sizes |= {row.name: row.bytes for row in budget.not_subtracted}
    if not budget.terms:
        sizes["weights"] = rank.figure("weights_bytes")
    graph = rank.figure("graph_bytes")
    if graph is not None and "printed_peak" not in sizes:  # which has the estimate in it
        sizes |= {"graph_estimate": None, "graph": graph}
    before = minus(total, rank.initial_free_bytes)
    if not any(map(sizes.get, _HAVE_THE_START)):
        sizes["in_use"] = before
    owners = [
        ItemPart(name, title_of(name), size, MEASURED)
        for name, size in sizes.items()
        if size and size > 0
    ]
    rest = minus(total, sum(owner.bytes for owner in owners))
    if free := rank.figure("free_ready_bytes"):
        owners.append(ItemPart(FREE, FREE, free, MEASURED))
    elif owners and rest and rest > 0:
        told = text("not in the log") if before is None else text("free, or not in the log")
        name = FREE if rest == rank.initial_free_bytes else "rest"  # refused at its start
        owners.append(ItemPart(name, told, rest, DERIVED))
    return owners
