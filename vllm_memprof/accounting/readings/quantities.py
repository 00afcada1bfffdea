"""The table of quantities: every kind of memory that reports name, with its title and reading.

Reports, comparisons, checks, sweeps and plots walk this table, so that a figure is the same in all
of them. The evidence of one rank enters, bytes leave; what is unknown has a reason instead. Words
and names are rows of ``quantities.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from vllm_memprof.accounting.model import ItemPart, Reading
from vllm_memprof.accounting.readings.counters import (
    HCCL,
    RUNTIME,
    app_outside_torch,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.startup import (
    ALLOCATED,
    FREE,
    LOAD_SLACK_BYTES,
    NON_TORCH,
    Moments,
    after,
    before,
    grown_by,
    growth,
    others_at_start,
    value,
)
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.files import read_own
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import DERIVED, MEASURED, MODELLED, Span, edges_of, is_within
from vllm_memprof.text import Text, text, titled
from vllm_memprof.units import GIB, Amount, either, floor_zero, largest, minus, sum_or_none

#: More than this in use before the engine allocates anything is not a runtime context alone: other
#: processes are on the device. The largest context known from hardware is 0.36 GiB (Ascend A2).
CONTEXT_CEILING_BYTES = 1 * GIB
#: Rows of a divided device that are torch's segments; and all that no profile of a simulated
#: device sets.
TORCH_ROWS = ("allocated", "reserved_not_allocated", "unmapped")
NEVER_MODELLED_ROWS = (
    *TORCH_ROWS,
    "graph_pools",
    "target_weights",
    "draft_weights",
    "lora",
    "draft_kv_cache",
    "kv_connector",
)
#: Phases inside weight_load that load something else than the model -> its owner.
LOADED_BESIDE = {"draft_load": "draft_weights", "lora_load": "lora"}
_ENGINES_FIGURE, _NOT_RECORDED = text("the engine's figure"), text("it was not recorded")
#: Phases in which a worker reads its device for the first time.
_BEFORE_LOADING = ("device_init", "hccl_init")


@dataclass(frozen=True)
class Quantity:
    """A row of the table; ``quantities.toml`` says what its fields are."""

    name: str
    title: Text
    #: Read from what a rank recorded; None: a term or a step of an equation, known from there.
    read: Callable[[Moments], Reading | int | None] | None = None
    device_wide: bool = False
    formula: str = ""
    source: Text = _ENGINES_FIGURE
    unknown: Text = _NOT_RECORDED
    optional: bool = False
    estimated_by: str | None = None
    estimated_within: str | None = None

    def reading(self, of: Moments) -> Reading:
        """Read the quantity, every field filled in."""
        found = None if self.read is None else self.read(of)
        found = found if isinstance(found, Reading) else Reading(found)
        how = MODELLED if of.simulated and self.device_wide else found.how
        return self.named(replace(found, how=how))

    def named(self, found: Reading) -> Reading:
        """Return what was read of the quantity, every field filled in."""
        return replace(
            found,
            name=self.name,
            title=self.title,
            formula=found.formula or self.formula,
            source=found.source or self.source,
            reason=(found.reason or self.unknown) if found.bytes is None else None,
            required=not self.optional or found.bytes is not None,
        )


def title_of(name: str) -> str:
    """Return a quantity's title; the name itself where the table does not have it."""
    row = QUANTITIES.get(name)
    return name if row is None else row.title


def is_device_wide(name: str) -> bool:
    """Whether a quantity is read from the device, so that a simulated one's profile sets it."""
    return name in QUANTITIES and QUANTITIES[name].device_wide


def _weights(of: Moments) -> Reading:
    """Where the engine keeps no figure: the growth of allocated memory while it loaded them.

    Parts are what was loaded: the drafter and LoRA in phases of their own, the target model is the
    rest. Nothing is divided where neither was loaded, or where the engine's figure is not what the
    whole phase has allocated: then it is not known what of them is in it.
    """
    grown, load = of.own["weights_bytes"].bytes, of.last("weight_load")
    size = either(of.figure("weights_bytes"), grown)
    if size is None or grown is None or load is None or abs(size - grown) > LOAD_SLACK_BYTES:
        return Reading(size)
    beside: dict[str, Amount] = {}
    for span in of.spans:
        if span.phase in LOADED_BESIDE and is_within(of.spans, span, load.order):
            beside[span.phase] = sum_or_none([beside.get(span.phase, 0), grown_by(span)])
    rest = minus(size, sum_or_none(beside.values()))
    if not beside or rest is None or rest < 0 or load.error:
        return Reading(size)
    target = ItemPart("target_weights", text("target model"), rest, DERIVED)
    others = (
        ItemPart(LOADED_BESIDE[phase], TITLES["loaded_beside"][phase], more or 0, MEASURED)
        for phase, more in beside.items()
    )
    return Reading(size, parts=(target, *others))


def _allocated_before(of: Moments) -> Amount:
    """Allocated right before the profile run; the engine's figure is a peak that it just reset."""
    read = value(before(of.last("profile_run")), ALLOCATED)
    return either(of.figure("profile_before_allocated_peak_bytes"), read)


def _reserved_not_allocated(of: Moments) -> Reading:
    """Segments that stay reserved after empty_cache because a live tensor keeps a part of each."""
    end, where = of.moments["profiled"][:2]
    source, reserved = text("after {where}", where=where), value(end, "reserved_bytes")
    left = value(end, ALLOCATED)
    if end is None or left is not None:
        return Reading(minus(reserved, left), source=source)
    # right after a peak reset the peak is what is allocated; a profile run leaves nothing behind
    size = minus(reserved, _allocated_before(of))
    if size is None:
        return Reading(None, source=source)
    return Reading(size, DERIVED, source, formula="reserved - profile_before_allocated_peak")


def _used_at_start(of: Moments) -> Reading:
    """Non-torch memory of the whole device before anything is loaded, neighbours included."""
    size = of.figure("initial_non_torch_bytes")
    if size is not None:
        return Reading(size, DERIVED, formula="initial_non_torch")
    size = minus(of.figure("device_total_bytes"), of.figure("initial_free_bytes"))
    if size is not None:  # nothing reserved yet
        return Reading(size, DERIVED, formula="device_total - initial_free")
    first = next((span.order for span in of.spans if span.phase in _BEFORE_LOADING), None)
    read = [
        edge.snapshot
        for span, edge in edges_of(of.spans)
        if first is not None and first in (span.order, span.parent)
        if edge.snapshot.non_torch_bytes is not None
    ]
    if not read:
        return Reading(None, DERIVED)
    size = min(read, key=lambda snapshot: snapshot.t_ns or 0).non_torch_bytes
    return Reading(size, DERIVED, text("the first reading of the device"), formula="non_torch")


def _initial_non_torch(of: Moments) -> Reading:
    """The runtime context of this process, before it loads anything."""
    found, others = _used_at_start(of), others_at_start(of.spans)
    if found.bytes is None:
        return found
    own = found.bytes - (others or 0)
    if own > CONTEXT_CEILING_BYTES:
        reason = text(
            "{held:gib} GiB were in use at the start: other processes' memory cannot be told apart",
            held=own,
        )
        return replace(found, bytes=None, reason=reason)
    formula = f"{found.formula} - other processes" if others else found.formula
    return replace(found, bytes=own, formula=formula)


def _other_processes_at_start(of: Moments) -> Reading:
    """What else is on the device; where the driver lists nobody, nothing that could be told."""
    if _initial_non_torch(of).bytes is None:
        return Reading(None)
    others = others_at_start(of.spans)
    return Reading(0, DERIVED) if others is None else Reading(others)


def _graph(of: Moments) -> Reading:
    """Return the engine's figure, a growth of the whole device, less that of other processes."""
    size, capture = of.figure("graph_bytes"), of.last("graph_capture")
    if capture is not None and capture.error:
        return Reading(size, reason=text("graph_capture failed"))
    if size is None or capture is None or capture.before is None or capture.after is None:
        return Reading(size)
    start, end = capture.before, capture.after
    others = growth(start, end, "other_processes_bytes") or 0
    formula = "graph_bytes - growth of other processes" if others else ""
    own = size - others
    return Reading(own, formula=formula, parts=_graph_parts(start, end, own, of.simulated))


#: Parts of the memory of captured graphs -> reading of a snapshot.
_GRAPH_PARTS: dict[str, Callable[[Snapshot], Amount]] = {
    "torch": torch_bytes,
    "application": app_outside_torch,
    "npu_workspace": lambda at: at.npu_workspace_bytes,
    "communicators": lambda at: counter(at, HCCL),
    "runtime": lambda at: counter(at, RUNTIME),
}


def _graph_parts(
    start: Snapshot, end: Snapshot, size: int, simulated: bool
) -> tuple[ItemPart, ...]:
    """Divide the growth over graph_capture; the last part is the rest, with its sign.

    Without the runtime's counters everything outside torch is the rest. Where the figure of torch
    is unknown, nothing is divided.
    """
    grown = {name: minus(read(end), read(start)) for name, read in _GRAPH_PARTS.items()}
    if grown["torch"] is None:
        return ()
    parts = [
        ItemPart(
            name,
            TITLES["graph_parts"][name],
            more,
            MODELLED if simulated and name != "torch" else MEASURED,
        )
        for name, more in grown.items()
        if more
    ]
    rest = size - sum(part.bytes for part in parts)
    if rest:
        counted = start.components is not None and end.components is not None
        title = text("not divided further") if counted else text("outside torch")
        parts.append(ItemPart("rest", title, rest, MODELLED if simulated else DERIVED))
    return tuple(parts) if len(parts) > 1 else ()


def _late_non_torch(of: Moments) -> Reading:
    """ATB pools, communicators first used in warm-up; the graph figure holds its own growth."""
    end, capture = of.end_of("warm_up"), of.last("graph_capture")
    if end is None:
        return Reading(None)
    profile = (of.moments[name].nearest for name in ("profile_end", "profiled"))
    moments = (*profile, end, before(capture), after(capture))
    told_apart = all(
        moment.other_processes_bytes is not None for moment in moments if moment is not None
    )
    started, ended, last, unto, since = (
        minus(value(moment, NON_TORCH), value(moment, "other_processes_bytes") if told_apart else 0)
        for moment in moments
    )
    in_graphs = 0 if capture is None else minus(since, unto)
    source = None if told_apart else text("after warm_up; other processes are not told apart")
    return Reading(
        floor_zero(minus(minus(last, largest((started, ended))), in_graphs)), source=source
    )


#: Quantities that a phase took of the device -> the phase, the figures that a log prints of what
#: was free before and after, and how the phase's own readings give it.
_TAKEN_OVER = {
    # what an engine's pools took beside keys and values
    "request_pools": (
        "kv_cache_alloc",
        ("free_after_load_bytes", "free_after_pools_bytes"),
        "used over kv_cache_alloc - KV cache",
    ),
    # what it took between its pools and its readiness, graphs left out
    "runner_buffers": (
        "warm_up",
        ("free_after_pools_bytes", "free_before_capture_bytes"),
        "used over warm_up - used over graph_capture",
    ),
    # what the first step took and kept; of a log, where a weight update prints what is free
    "first_steps": (
        "request",
        ("free_ready_bytes", "free_at_update_bytes"),
        "used over the first batch",
    ),
}


def _taken_over(name: str, of: Moments) -> Reading:
    """Return what a phase took of the device; where there is none, what is printed of it."""
    phase, (start, end), formula = _TAKEN_OVER[name]
    span = of.last(phase)
    if span is None or span.error:
        printed = minus(of.figure(start), of.figure(end))
        if name == "request_pools":
            pools = [of.figure("k_pool_bytes"), of.figure("v_pool_bytes")]
            printed = minus(printed, either(of.figure("kv_pool_bytes"), sum_or_none(pools)))
        return Reading(floor_zero(printed), DERIVED)
    but: Amount = 0
    capture = of.last("graph_capture")
    if name == "request_pools":
        but = of.figure("kv_cache_bytes")
    elif name == "runner_buffers" and capture is not None:
        but = _taken(capture)
    source = text("memprof's readings at the edges of the phase")
    return Reading(floor_zero(minus(_taken(span), but)), DERIVED, source, formula=formula)


def _taken(span: Span) -> Amount:
    """Return how much less of the device is free after a phase, other processes left out."""
    taken = growth(span.after, span.before, FREE)
    return minus(taken, growth(span.before, span.after, "other_processes_bytes") or 0)


_READ: dict[str, Callable[[Moments], Reading | int | None]] = {
    "weights": _weights,
    "persistent_torch": lambda of: minus(_allocated_before(of), _weights(of).bytes),
    "peak_activation": lambda of: either(
        of.figure("peak_activation_bytes"),
        minus(of.figure("profile_after_allocated_peak_bytes"), _allocated_before(of)),
    ),
    "kept_torch": lambda of: minus(of.value("profiled", ALLOCATED), _allocated_before(of)),
    "reserved_not_allocated": _reserved_not_allocated,
    "initial_non_torch": _initial_non_torch,
    "other_processes_at_start": _other_processes_at_start,
    "non_torch": lambda of: either(
        of.figure("non_torch_increase_bytes"),
        minus(
            either(of.figure("profile_after_non_torch_bytes"), of.value("profiled", NON_TORCH)),
            _used_at_start(of).bytes,
        ),
    ),
    # operator workspace that empty_cache freed before the reading; serving takes it again
    "non_torch_cleared": lambda of: Reading(
        floor_zero(minus(of.value("profile_end", NON_TORCH), of.value("profiled", NON_TORCH))),
        source=text("around {where}", where=of.moments["profiled"].where),
    ),
    "graph": _graph,
    "late_non_torch": _late_non_torch,
    "graph_prefill": lambda of: of.figure("graph_prefill_bytes"),
    **{name: partial(_taken_over, name) for name in _TAKEN_OVER},
}
_WORDS = ("title", "source", "unknown")

#: The table, in the order in which reports list quantities.
QUANTITIES: dict[str, Quantity] = {
    name: Quantity(
        name,
        read=_READ.get(name),
        **(said | {key: titled(said[key]) for key in _WORDS if key in said}),
    )
    for name, said in read_own(__file__, "quantities.toml").items()
}


class StartupReadings(Moments):
    """All that was read of one rank's start-up: each moment and each quantity once."""

    @cached_property
    def quantities(self) -> dict[str, Reading]:
        """What is read, by name, whether the equation subtracts it or not."""
        return {name: row.reading(self) for name, row in QUANTITIES.items() if row.read is not None}
