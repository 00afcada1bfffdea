"""The table of quantities: every kind of memory that reports name, with its title and reading.

Reports, comparisons, checks, sweeps and plots walk this table, so that a figure is the same in all
of them. The evidence of one rank enters, bytes leave; what is unknown has a reason instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    MODELLED,
    ItemPart,
    MemoryItem,
    RankReport,
)
from vllm_memprof.accounting.readings.counters import (
    HCCL,
    RUNTIME,
    app_outside_torch,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.readings.startup import (
    LOAD_SLACK_BYTES,
    Reading,
    StartupReadings,
    after,
    before,
    grown_by,
    growth,
    others_at_start,
    value,
)
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of, is_within
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB, minus, sum_or_none

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
#: Phases inside weight_load that load something else than the model: phase -> its owner, the title.
LOADED_BESIDE: dict[str, tuple[str, Text]] = {
    "draft_load": ("draft_weights", text("draft model")),
    "lora_load": ("lora", text("LoRA slots")),
}
#: Figures of a KV cache -> their titles, in the order of the reports.
KV_TITLES: dict[str, Text] = {
    "tokens": text("KV cache tokens"),
    "max_concurrency": text("max concurrency at max_model_len"),
    "max_model_len": text("max_model_len, tokens"),
    "blocks": text("blocks"),
    "block_size": text("block size, tokens"),
    "bytes_per_token": text("bytes per token"),
    "bytes_per_block": text("bytes per block"),
}
#: How a figure is known -> in words.
HOW_TITLES: dict[str, Text] = {
    MEASURED: text("measured"),
    DERIVED: text("derived"),
    ESTIMATED: text("estimated"),
    MODELLED: text("modelled"),
}
_ENGINES_FIGURE, _NOT_RECORDED = text("the engine's figure"), text("it was not recorded")
_NO_PROFILE = text("no profile run was recorded")
#: Phases in which a worker reads its device for the first time.
_BEFORE_LOADING = ("device_init", "hccl_init")


@dataclass(frozen=True)
class Quantity:
    """A row of the table."""

    name: str
    title: Text
    #: Read from what a rank recorded; None: a term or a step of an equation, known from there.
    read: Callable[[StartupReadings], Reading] | None = None
    device_wide: bool = False  # read from the device: a simulated device's profile has a part in it
    without_neighbours: bool = False  # what other processes hold on the device is taken off
    formula: str = ""  # in the names of figures and snapshots
    source: Text = _ENGINES_FIGURE  # the moment or the file it was read at
    unknown: Text = _NOT_RECORDED  # the reason where bytes is None
    required: bool = True  # False: a run that lacks it has nothing of the kind
    #: A term that holds a part of it, where an equation subtracts that term; and one that holds
    #: that term besides others.
    estimated_by: str | None = None
    estimated_within: str | None = None

    def reading(self, of: StartupReadings) -> Reading:
        """Read the quantity, every field filled in."""
        found = Reading(None) if self.read is None else self.read(of)
        return replace(
            found,
            how=MODELLED if of.simulated and self.device_wide else found.how,
            formula=found.formula or self.formula,
            source=found.source or self.source,
            reason=(found.reason or self.unknown) if found.bytes is None else None,
        )

    def item(self, found: Reading) -> MemoryItem:
        """Return memory that a rank held of the quantity, as it was read."""
        return MemoryItem(
            name=self.name,
            title=self.title,
            bytes=found.bytes,
            how=found.how,
            source=found.source or self.source,
            reason=found.reason,
            formula=found.formula or "",
            required=self.required or found.bytes is not None,
            parts=found.parts,
        )


def held_quantities(rank: RankReport, simulated: bool) -> dict[str, int | None]:
    """Return what a rank held of each quantity, bytes, whether its equation subtracts it or not.

    A report that was written without its figures gives what its terms and items hold.
    """
    readings = StartupReadings.of(rank, simulated)
    found = {
        name: row.reading(readings).bytes
        for name, row in QUANTITIES.items()
        if row.read is not None
    }
    said = [(term.name, term.bytes) for term in rank.budget.terms]
    said += [(item.name, item.bytes) for item in rank.budget.not_subtracted]
    for name, size in said:
        if name in found and found[name] is None:
            found[name] = size
    return found


def title_of(name: str) -> str:
    """Return a quantity's title; the name itself where the table does not have it."""
    row = QUANTITIES.get(name)
    return name if row is None else row.title


def is_device_wide(name: str) -> bool:
    """Whether a quantity is read from the device, so that a simulated one's profile sets it."""
    return name in QUANTITIES and QUANTITIES[name].device_wide


def _weights(of: StartupReadings) -> Reading:
    """Where the engine keeps no figure: the growth of allocated memory while it loaded them.

    Parts are what was loaded: the drafter and LoRA in phases of their own, the target model is the
    rest. Nothing is divided where neither was loaded, or where the engine's figure is not what the
    whole phase has allocated: then it is not known what of them is in it.
    """
    grown, load = growth(*of.loaded, "allocated_bytes"), of.last("weight_load")
    size = of.figure("weights_bytes")
    size = grown if size is None else size
    if size is None or grown is None or abs(size - grown) > LOAD_SLACK_BYTES:
        return Reading(size)
    parts: dict[str, ItemPart] = {}
    rest = size
    for span in of.spans:
        if span.phase in LOADED_BESIDE and load and is_within(of.spans, span, load.order):
            more = grown_by(span)
            if more is None:
                return Reading(size)
            name, title = LOADED_BESIDE[span.phase]
            known = parts[name].bytes if name in parts else 0
            parts[name] = ItemPart(name, title, known + more, MEASURED)
            rest -= more
    if not parts or rest < 0 or (load and load.error):
        return Reading(size)
    target = ItemPart("target_weights", text("target model"), rest, DERIVED)
    return Reading(size, parts=(target, *parts.values()))


def _allocated_before(of: StartupReadings) -> int | None:
    """Allocated right before the profile run; the engine's figure is a peak that it just reset."""
    size = of.figure("profile_before_allocated_peak_bytes")
    return value(before(of.last("profile_run")), "allocated_bytes") if size is None else size


def _peak_activation(of: StartupReadings) -> Reading:
    size = of.figure("peak_activation_bytes")
    peak = of.figure("profile_after_allocated_peak_bytes")
    return Reading(minus(peak, _allocated_before(of)) if size is None else size)


def _reserved_not_allocated(of: StartupReadings) -> Reading:
    """Segments that stay reserved after empty_cache because a live tensor keeps a part of each."""
    _, end, where = of.profile_end
    source, reserved = text("after {where}", where=where), value(end, "reserved_bytes")
    left = value(end, "allocated_bytes")
    if end is None or left is not None:
        return Reading(minus(reserved, left), source=source)
    # right after a peak reset the peak is what is allocated; a profile run leaves nothing behind
    size = minus(reserved, _allocated_before(of))
    if size is None:
        return Reading(None, source=source)
    return Reading(size, DERIVED, source, formula="reserved - profile_before_allocated_peak")


def _used_at_start(of: StartupReadings) -> Reading:
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


def _initial_non_torch(of: StartupReadings) -> Reading:
    """The runtime context of this process, before it loads anything."""
    found, others = _used_at_start(of), others_at_start(of.spans)
    if found.bytes is None:
        return found
    own = found.bytes - (others or 0)
    if others:
        found = replace(found, formula=f"{found.formula} - other processes")
    if own <= CONTEXT_CEILING_BYTES:
        return replace(found, bytes=own)
    reason = text(
        "{held:gib} GiB were in use at the start: other processes' memory cannot be told apart",
        held=own,
    )
    return replace(found, bytes=None, reason=reason)


def _other_processes_at_start(of: StartupReadings) -> Reading:
    """What else is on the device; where the driver lists nobody, nothing that could be told."""
    if _initial_non_torch(of).bytes is None:
        return Reading(None)
    others = others_at_start(of.spans)
    return Reading(0, DERIVED) if others is None else Reading(others)


def _non_torch(of: StartupReadings) -> Reading:
    size = of.figure("non_torch_increase_bytes")
    if size is None:
        size = of.figure("profile_after_non_torch_bytes")
        size = value(of.profile_end[1], "non_torch_bytes") if size is None else size
        size = minus(size, _used_at_start(of).bytes)
    return Reading(size)


def _non_torch_cleared(of: StartupReadings) -> Reading:
    """Operator workspace that empty_cache freed before the reading; serving takes it again."""
    start, end, where = of.profile_end
    size = growth(end, start, "non_torch_bytes")
    source = text("around {where}", where=where)
    return Reading(None if size is None else max(0, size), source=source)


def _graph(of: StartupReadings) -> Reading:
    """Return the engine's figure, a growth of the whole device, less that of other processes."""
    size, capture = of.figure("graph_bytes"), of.last("graph_capture")
    if capture is not None and capture.error:
        return Reading(size, reason=text("graph_capture failed"))
    if size is None or capture is None or capture.before is None or capture.after is None:
        return Reading(size)
    start, end = capture.before, capture.after
    others = growth(start, end, "other_processes_bytes") or 0
    formula = "graph_bytes - growth of other processes" if others else None
    own = size - others
    return Reading(own, formula=formula, parts=_graph_parts(start, end, own, of.simulated))


#: Parts of the memory of captured graphs: name, title, reading of a snapshot.
_GRAPH_PARTS: tuple[tuple[str, Text, Callable[[Snapshot], int | None]], ...] = (
    ("torch", text("torch, reserved"), torch_bytes),
    ("application", text("ATB and other allocations outside torch"), app_outside_torch),
    ("npu_workspace", text("operator workspace"), lambda at: at.npu_workspace_bytes),
    ("communicators", text("communicators"), lambda at: counter(at, HCCL)),
    ("runtime", text("the runtime: streams, task buffers"), lambda at: counter(at, RUNTIME)),
)


def _graph_parts(
    start: Snapshot, end: Snapshot, size: int, simulated: bool
) -> tuple[ItemPart, ...]:
    """Divide the growth over graph_capture; the last part is the rest, with its sign.

    Without the runtime's counters everything outside torch is the rest. Where the figure of torch
    is unknown, nothing is divided.
    """
    parts = []
    for name, title, read in _GRAPH_PARTS:
        grown = minus(read(end), read(start))
        if name == "torch" and grown is None:
            return ()
        if grown:
            how = MODELLED if simulated and name != "torch" else MEASURED
            parts.append(ItemPart(name, title, grown, how))
    rest = size - sum(part.bytes for part in parts)
    if rest:
        counted = start.components is not None and end.components is not None
        title = text("not divided further") if counted else text("outside torch")
        parts.append(ItemPart("rest", title, rest, MODELLED if simulated else DERIVED))
    return tuple(parts) if len(parts) > 1 else ()


def _late_non_torch(of: StartupReadings) -> Reading:
    """ATB pools, communicators first used in warm-up; the graph figure holds its own growth."""
    warm_up, capture = of.last("warm_up"), of.last("graph_capture")
    if warm_up is None or warm_up.error or warm_up.after is None:
        return Reading(None)
    moments = (*of.profile_end[:2], warm_up.after, before(capture), after(capture))
    told_apart = all(
        moment.other_processes_bytes is not None for moment in moments if moment is not None
    )
    started, ended, last, unto, since = (
        minus(
            value(moment, "non_torch_bytes"),
            value(moment, "other_processes_bytes") if told_apart else 0,
        )
        for moment in moments
    )
    known = [size for size in (started, ended) if size is not None]
    in_graphs = 0 if capture is None else minus(since, unto)
    size = minus(minus(last, max(known, default=None)), in_graphs)
    source = None if told_apart else text("after warm_up; other processes are not told apart")
    return Reading(None if size is None else max(0, size), source=source)


def _request_pools(of: StartupReadings) -> Reading:
    """What SGLang's pools took of the device beside keys and values."""
    span = of.last("kv_cache_alloc")
    if span is not None:
        size = minus(_taken(span), of.figure("kv_cache_bytes"))
        return _derived(size, "used over kv_cache_alloc - KV cache")
    pool = of.figure("kv_pool_bytes")
    if pool is None:
        pool = sum_or_none([of.figure("k_pool_bytes"), of.figure("v_pool_bytes")])
    taken = minus(of.figure("free_after_load_bytes"), of.figure("free_after_pools_bytes"))
    return _derived(minus(taken, pool))


def _runner_buffers(of: StartupReadings) -> Reading:
    """What SGLang took between its pools and its readiness, graphs left out."""
    span, capture = of.last("warm_up"), of.last("graph_capture")
    if span is not None and not span.error:
        size = minus(_taken(span), 0 if capture is None else _taken(capture))
        return _derived(size, "used over warm_up - used over graph_capture")
    start = of.figure("free_after_pools_bytes")
    return _derived(minus(start, of.figure("free_before_capture_bytes")))


def _first_steps(of: StartupReadings) -> Reading:
    """What the first step took and kept; of a log, where a weight update prints what is free."""
    span = of.last("request")
    if span is not None and not span.error:
        return _derived(_taken(span), "used over the first batch")
    return _derived(minus(of.figure("free_ready_bytes"), of.figure("free_at_update_bytes")))


def _taken(span: Span) -> int | None:
    """Return how much less of the device is free after a phase, other processes left out."""
    taken = growth(span.after, span.before, "device_free_bytes")
    return minus(taken, growth(span.before, span.after, "other_processes_bytes") or 0)


def _derived(size: int | None, over: str | None = None) -> Reading:
    """Return what memprof's own readings give over a phase, or what SGLang prints as free."""
    source = text("memprof's readings at the edges of the phase") if over else None
    return Reading(None if size is None else max(0, size), DERIVED, source, formula=over)


_SGLANG_LINES = text("free memory as SGLang prints it")
_ROWS = (
    # --- what is asked for, and what a rank holds of it
    Quantity("requested", text("requested")),
    Quantity("weights", text("weights"), _weights, formula="weights"),
    Quantity(
        "persistent_torch",
        text("torch memory outside the weights"),  # input buffers, rope tables, sampler's state
        lambda of: Reading(minus(_allocated_before(of), _weights(of).bytes)),
        formula="profile_before_allocated_peak - weights",
        source=text("the engine's snapshot before the profile run, right after its peak reset"),
        unknown=_NO_PROFILE,
    ),
    Quantity(
        "peak_activation",
        text("peak activation"),
        _peak_activation,
        formula="profile_after_allocated_peak - profile_before_allocated_peak",
        unknown=_NO_PROFILE,
    ),
    Quantity(
        "kept_torch",
        text("torch memory that profiling left"),
        lambda of: Reading(
            minus(value(of.profile_end[1], "allocated_bytes"), _allocated_before(of))
        ),
        formula="allocated after profile_run - allocated before it",
        unknown=_NO_PROFILE,
    ),
    Quantity(
        "reserved_not_allocated",
        text("reserved but not allocated"),
        _reserved_not_allocated,
        formula="reserved - allocated",
        unknown=text("no snapshot after the profile run was recorded"),
    ),
    Quantity("reserved_at_end", text("reserved beyond the allocated peak")),
    Quantity(
        "initial_non_torch",
        text("non-torch, held at the start"),
        _initial_non_torch,
        device_wide=True,
        without_neighbours=True,
        formula="initial_non_torch",
        source=text("the engine's first snapshot"),
        unknown=text("no start-up snapshot was recorded"),
    ),
    Quantity(
        "other_processes_at_start",
        text("other processes, at the start"),
        _other_processes_at_start,
        device_wide=True,
        formula="other processes at the first reading",
        source=text("the driver's list of processes"),
        unknown=text("other processes' memory cannot be told apart"),
    ),
    Quantity(
        "non_torch",
        text("non-torch increase"),
        _non_torch,
        device_wide=True,
        formula="profile_after_non_torch - initial_non_torch",
        unknown=_NO_PROFILE,
    ),
    Quantity(
        "non_torch_cleared",
        text("non-torch, freed just before read"),
        _non_torch_cleared,
        device_wide=True,
        formula="max(0, non_torch before - non_torch after)",
        unknown=text("no empty_cache inside the profile run was recorded"),
    ),
    Quantity("graph_estimate", text("graphs, estimated"), device_wide=True),
    Quantity(
        "graph",
        text("captured graphs"),
        _graph,
        device_wide=True,  # a growth of device memory, non-torch included
        without_neighbours=True,
        formula="graph_bytes",
        source=text("the engine's figure for its graph capture"),
        unknown=text("no graph was captured in this run"),
        required=False,
        estimated_by="graph_estimate",
        estimated_within="printed_peak",
    ),
    Quantity(
        "late_non_torch",
        text("non-torch, after profiling"),
        _late_non_torch,
        device_wide=True,
        without_neighbours=True,
        formula="max(0, non_torch after warm_up - non_torch peak of the profile run"
        " - growth in graph_capture)",
        source=text("after warm_up"),
        unknown=text("the run did not get through its warm-up"),
        required=False,
    ),
    Quantity("mm_ipc", text("multi-modal decoding")),
    # --- SGLang: from free memory of the device at the edges of its start-up
    Quantity("loaded", text("taken while the weights were loaded"), device_wide=True),
    Quantity("mm_reserved", text("reserved for multi-modal input")),
    Quantity("page_rounding", text("rounded down to a page: half of one")),
    Quantity("whole_pages", text("rounded down to whole pages")),
    Quantity(
        "request_pools",
        text("request-to-token pool and others"),
        _request_pools,
        device_wide=True,
        formula="free_after_load - free_after_pools - KV pool",
        source=_SGLANG_LINES,
    ),
    Quantity(
        "runner_buffers",
        text("buffers of the runner"),
        _runner_buffers,
        device_wide=True,
        formula="free_after_pools - free_before_capture",
        source=_SGLANG_LINES,
    ),
    Quantity(
        "graph_prefill",
        text("captured graphs of prefill"),
        lambda of: Reading(of.figure("graph_prefill_bytes")),
        device_wide=True,
        formula="graph_prefill",
        required=False,
    ),
    Quantity(
        "first_steps",
        text("kept by the first steps: communicators, workspace"),
        _first_steps,
        device_wide=True,
        formula="free_ready - free_at_update",
        source=_SGLANG_LINES,
    ),
    # --- beside the KV cache at the serving peak, see ``accounting.budget.serving_peak``
    Quantity("reserved_peak", text("reserved, peak of the profile run")),
    Quantity("non_torch_peak", text("non-torch, peak of the profile run"), device_wide=True),
    Quantity("late_torch", text("torch memory, after profiling")),
    Quantity("late_device", text("non-torch, after profiling, graphs included"), device_wide=True),
    Quantity("held_later", text("more, at a later moment"), device_wide=True),
    Quantity("held_at_worst", text("all that is held beside the KV cache"), device_wide=True),
    # --- terms of equations that hold several of them, see ``Term.parts``
    Quantity("peak_allocated", text("allocated peak")),
    Quantity("used_by_device", text("used on the device"), device_wide=True),
    Quantity("cleared", text("cleared by empty_cache"), device_wide=True),
    Quantity("consumed", text("consumed"), device_wide=True),
    Quantity("transient_headroom", text("transient headroom")),
    Quantity("printed_peak", text("peak activation, as printed")),
    # --- stages of equations: held by the device, and not counted by the engine; or the reverse
    Quantity("multi_group", text("KV cache of the other groups")),
    Quantity("layer_reuse", text("KV cache of layers that share buffers")),
    Quantity("kv_elsewhere", text("KV cache in host memory or on other ranks")),
    # --- from the sum of the terms to the KV cache
    Quantity("equation", text("the equation of a run, and so all of its terms")),
    Quantity("fixed_size", text("fixed size instead of the equation")),
    Quantity("halved", text("half kept for operator workspace")),
    Quantity("clamped", text("raised from below 0 to 0")),
    Quantity("rounding", text("rounding to whole bytes")),
    Quantity("printed_digits", text("rounding of the printed digits")),
    Quantity("residual", text("the engine's figure is not its equation's")),
)
#: The table, in the order in which reports list quantities.
QUANTITIES: dict[str, Quantity] = {row.name: row for row in _ROWS}
