"""The table of quantities: every kind of memory that reports name, with its title and reading.

Reports, comparisons, checks, sweeps and plots walk this table, so that a figure is the same in all
of them. The evidence of one rank enters, bytes leave; what is unknown has a reason instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_memprof.accounting.counters import (
    HCCL,
    RUNTIME,
    app_outside_torch,
    counter,
    torch_bytes,
)
from vllm_memprof.accounting.model import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    MODELLED,
    ItemPart,
    RankReport,
)
from vllm_memprof.engines.equation import Figures
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of, is_within, last_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import GIB, MIB, minus

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
#: Tensors that ``load_model`` makes outside of what the engine measures as weights (tables of
#: expert load balancing, buffers of a drafter) and garbage that the engine collects first: less
#: than one small segment of the allocator.
LOAD_SLACK_BYTES = 2 * MIB
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
#: Phases in which a worker reads its device for the first time.
_BEFORE_LOADING = ("device_init", "hccl_init")


@dataclass(frozen=True)
class Evidence:
    """What one rank recorded, as far as quantities are read from it."""

    figures: Figures
    spans: list[Span]
    simulated: bool

    def figure(self, name: str) -> int | None:
        """Return a figure of the engine in whole bytes."""
        value = self.figures.get(name)
        return None if value is None else int(value)

    def profile_end(self) -> tuple[Snapshot | None, Snapshot | None, Text]:
        """Return the snapshots around the moment at which the engine reads its non-torch figure.

        That is the last ``empty_cache`` of the profile run; without one, the run's end.
        """
        return self._profile_end

    @cached_property
    def _profile_end(self) -> tuple[Snapshot | None, Snapshot | None, Text]:
        for span in reversed(self.spans):
            if span.phase == "empty_cache" and is_within(self.spans, span, "profile_run"):
                return span.before, span.after, text("the last empty_cache of the profile run")
        last = last_of(self.spans, "profile_run")
        return None, last.after if last else None, text("the end of the profile run")


@dataclass(frozen=True)
class QuantityReading:
    """A quantity as one rank's evidence gives it; None where the row of the table says it all."""

    bytes: int | None
    how: str | None = None
    formula: str | None = None
    source: Text | None = None
    reason: Text | None = None  # why bytes is None
    parts: tuple[ItemPart, ...] = ()


@dataclass(frozen=True)
class Quantity:
    """A row of the table."""

    name: str
    title: Text
    #: Read from the evidence of a rank; None: a term or a step of an equation, known from there.
    read: Callable[[Evidence], QuantityReading] | None = None
    device_wide: bool = False  # read from the device: a simulated device's profile has a part in it
    without_neighbours: bool = False  # what other processes hold on the device is taken off
    how: str = MEASURED
    formula: str = ""  # in the names of figures and snapshots
    source: Text = _ENGINES_FIGURE  # the moment or the file it was read at
    unknown: Text = _NOT_RECORDED  # the reason where bytes is None
    required: bool = True  # False: a run that lacks it has nothing of the kind
    #: A term that holds a part of it, where an equation subtracts that term; and one that holds
    #: that term besides others.
    estimated_by: str | None = None
    estimated_within: str | None = None

    def reading(self, evidence: Evidence) -> QuantityReading:
        """Read the quantity, every field filled in."""
        found = QuantityReading(None) if self.read is None else self.read(evidence)
        how = MODELLED if evidence.simulated and self.device_wide else found.how or self.how
        reason = (found.reason or self.unknown) if found.bytes is None else None
        formula, source = found.formula or self.formula, found.source or self.source
        return QuantityReading(found.bytes, how, formula, source, reason, found.parts)


def others_at_start(spans: list[Span], own: Collection[str] = ()) -> int | None:
    """Return what other processes held when the driver was first asked, bytes; None: it was not.

    Args:
        spans: phases of a rank.
        own: process numbers that do not count, e.g. of the run's other ranks.
    """
    each = (others_in(edge.snapshot, own) for _, edge in edges_of(spans))
    return next((others for others in each if others is not None), None)


def others_in(snapshot: Snapshot, own: Collection[str] = ()) -> int | None:
    """Return what other processes held at one moment, those of ``own`` left out, bytes."""
    total, by_process = snapshot.other_processes_bytes, snapshot.other_processes or {}
    return minus(total, sum(size for pid, size in by_process.items() if pid in own))


def held_quantities(rank: RankReport, simulated: bool) -> dict[str, int | None]:
    """Return what a rank held of each quantity, bytes, whether its equation subtracts it or not.

    A report that was written without its figures gives what its terms and items hold.
    """
    evidence = Evidence(rank.figures, rank.phases, simulated)
    found = {
        name: row.reading(evidence).bytes
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


def _weights(evidence: Evidence) -> QuantityReading:
    """Where the engine keeps no figure: the growth of allocated memory while it loaded them."""
    size = evidence.figure("weights_bytes")
    span = last_of(evidence.spans, "weight_load")
    end = None if span is None else end_of_loading(evidence.spans, span)
    if size is None and span is not None and span.before is not None and end is not None:
        grown = minus(end.allocated_bytes, span.before.allocated_bytes)
        found = QuantityReading(grown, formula="growth of allocated in weight_load")
        return replace(found, parts=_weight_parts(evidence.spans, grown))
    return QuantityReading(size, parts=_weight_parts(evidence.spans, size))


def _weight_parts(spans: list[Span], size: int | None) -> tuple[ItemPart, ...]:
    """Divide the weights by what was loaded: the drafter and LoRA in phases of their own.

    The target model is the rest. Nothing is divided where neither was loaded, or where the engine's
    figure is not what the whole phase has allocated: then it is not known what of them is in it.
    """
    load = last_of(spans, "weight_load")
    end = None if load is None else end_of_loading(spans, load)
    if load is None or load.error or load.before is None or end is None:
        return ()
    grown = minus(end.allocated_bytes, load.before.allocated_bytes)
    inner = [
        span for span in spans if span.phase in LOADED_BESIDE and is_within(spans, span, load.order)
    ]
    added = [grown_by(span) for span in inner]
    if size is None or grown is None or not inner or abs(size - grown) > LOAD_SLACK_BYTES:
        return ()
    parts: dict[str, ItemPart] = {}
    rest = size
    for span, more in zip(inner, added, strict=True):
        if more is None:
            return ()
        name, title = LOADED_BESIDE[span.phase]
        known = parts[name].bytes if name in parts else 0
        parts[name] = ItemPart(name, title, known + more, MEASURED)
        rest -= more
    if rest < 0:
        return ()
    return (ItemPart("target_weights", text("target model"), rest, DERIVED), *parts.values())


def end_of_loading(spans: Sequence[Span], load: Span) -> Snapshot | None:
    """Return the reading at which the weights are loaded: V2's model_state comes after them."""
    state = last_of(spans, "model_state")
    if state is not None and state.before is not None and is_within(spans, state, load.order):
        return state.before
    return load.after


def grown_by(span: Span) -> int | None:
    """Return what a phase that came to its end has left allocated, bytes."""
    if span.error is not None or span.before is None or span.after is None:
        return None
    return minus(span.after.allocated_bytes, span.before.allocated_bytes)


def _allocated_before(evidence: Evidence) -> int | None:
    """Allocated right before the profile run; the engine's figure is a peak that it just reset."""
    size = evidence.figure("profile_before_allocated_peak_bytes")
    span = last_of(evidence.spans, "profile_run")
    return span.before.allocated_bytes if size is None and span and span.before else size


def _persistent_torch(evidence: Evidence) -> QuantityReading:
    return QuantityReading(minus(_allocated_before(evidence), _weights(evidence).bytes))


def _peak_activation(evidence: Evidence) -> QuantityReading:
    size = evidence.figure("peak_activation_bytes")
    peak = evidence.figure("profile_after_allocated_peak_bytes")
    return QuantityReading(minus(peak, _allocated_before(evidence)) if size is None else size)


def _kept_torch(evidence: Evidence) -> QuantityReading:
    _, after, _ = evidence.profile_end()
    left = None if after is None else after.allocated_bytes
    return QuantityReading(minus(left, _allocated_before(evidence)))


def _reserved_not_allocated(evidence: Evidence) -> QuantityReading:
    """Segments that stay reserved after empty_cache because a live tensor keeps a part of each."""
    _, after, where = evidence.profile_end()
    source = text("after {where}", where=where)
    if after is None or after.allocated_bytes is not None:
        size = None if after is None else minus(after.reserved_bytes, after.allocated_bytes)
        return QuantityReading(size, source=source)
    # right after a peak reset the peak is what is allocated; a profile run leaves nothing behind
    size = minus(after.reserved_bytes, _allocated_before(evidence))
    if size is None:
        return QuantityReading(None, source=source)
    return QuantityReading(size, DERIVED, "reserved - profile_before_allocated_peak", source)


def _used_at_start(evidence: Evidence) -> QuantityReading:
    """Non-torch memory of the whole device before anything is loaded, neighbours included."""
    size = evidence.figure("initial_non_torch_bytes")
    if size is not None:
        return QuantityReading(size, formula="initial_non_torch")
    total, free = evidence.figure("device_total_bytes"), evidence.figure("initial_free_bytes")
    if total is not None and free is not None:
        return QuantityReading(
            total - free, formula="device_total - initial_free"
        )  # nothing reserved yet
    first = next((span.order for span in evidence.spans if span.phase in _BEFORE_LOADING), None)
    read = [
        edge.snapshot
        for span, edge in edges_of(evidence.spans)
        if first is not None and first in (span.order, span.parent)
        if edge.snapshot.non_torch_bytes is not None
    ]
    if not read:
        return QuantityReading(None)
    size = min(read, key=lambda snapshot: snapshot.t_ns or 0).non_torch_bytes
    return QuantityReading(
        size, formula="non_torch", source=text("the first reading of the device")
    )


def _initial_non_torch(evidence: Evidence) -> QuantityReading:
    """The runtime context of this process, before it loads anything."""
    found, others = _used_at_start(evidence), others_at_start(evidence.spans)
    if found.bytes is None:
        return found
    own = found.bytes - (others or 0)
    formula = f"{found.formula} - other processes" if others else found.formula
    if own > CONTEXT_CEILING_BYTES:
        reason = text(
            "{held:gib} GiB were in use at the start: other processes' memory cannot be told apart",
            held=own,
        )
        return QuantityReading(None, formula=formula, source=found.source, reason=reason)
    return QuantityReading(own, formula=formula, source=found.source)


def _other_processes_at_start(evidence: Evidence) -> QuantityReading:
    """What else is on the device; where the driver lists nobody, nothing that could be told."""
    if _initial_non_torch(evidence).bytes is None:
        return QuantityReading(None)
    others = others_at_start(evidence.spans)
    return QuantityReading(0, DERIVED) if others is None else QuantityReading(others)


def _non_torch(evidence: Evidence) -> QuantityReading:
    size = evidence.figure("non_torch_increase_bytes")
    if size is None:
        size = evidence.figure("profile_after_non_torch_bytes")
        _, after, _ = evidence.profile_end()
        size = after.non_torch_bytes if size is None and after is not None else size
        size = minus(size, _used_at_start(evidence).bytes)
    return QuantityReading(size)


def _non_torch_cleared(evidence: Evidence) -> QuantityReading:
    """Operator workspace that empty_cache freed before the reading; serving takes it again."""
    before, after, where = evidence.profile_end()
    source = text("around {where}", where=where)
    if before is None or after is None:
        return QuantityReading(None, source=source)
    size = minus(before.non_torch_bytes, after.non_torch_bytes)
    return QuantityReading(None if size is None else max(0, size), source=source)


def _graph(evidence: Evidence) -> QuantityReading:
    """Return the engine's figure, a growth of the whole device, less that of other processes."""
    capture = last_of(evidence.spans, "graph_capture")
    if capture is not None and capture.error:
        return QuantityReading(evidence.figure("graph_bytes"), reason=text("graph_capture failed"))
    size = evidence.figure("graph_bytes")
    if size is None or capture is None or capture.before is None or capture.after is None:
        return QuantityReading(size)
    before, after = capture.before, capture.after
    others = minus(after.other_processes_bytes, before.other_processes_bytes) or 0
    formula = "graph_bytes - growth of other processes" if others else None
    own = size - others
    return QuantityReading(
        own, formula=formula, parts=_graph_parts(before, after, own, evidence.simulated)
    )


#: Parts of the memory of captured graphs: name, title, reading of a snapshot.
_GRAPH_PARTS: tuple[tuple[str, Text, Callable[[Snapshot], int | None]], ...] = (
    ("torch", text("torch, reserved"), torch_bytes),
    ("application", text("ATB and other allocations outside torch"), app_outside_torch),
    ("npu_workspace", text("operator workspace"), lambda at: at.npu_workspace_bytes),
    ("communicators", text("communicators"), lambda at: counter(at, HCCL)),
    ("runtime", text("the runtime: streams, task buffers"), lambda at: counter(at, RUNTIME)),
)


def _graph_parts(
    before: Snapshot, after: Snapshot, size: int, simulated: bool
) -> tuple[ItemPart, ...]:
    """Divide the growth over graph_capture; the last part is the rest, with its sign.

    Without the runtime's counters everything outside torch is the rest. Where the figure of torch
    is unknown, nothing is divided.
    """
    parts = []
    for name, title, read in _GRAPH_PARTS:
        grown = minus(read(after), read(before))
        if name == "torch" and grown is None:
            return ()
        if grown:
            how = MODELLED if simulated and name != "torch" else MEASURED
            parts.append(ItemPart(name, title, grown, how))
    rest = size - sum(part.bytes for part in parts)
    if rest:
        counted = before.components is not None and after.components is not None
        title = text("not divided further") if counted else text("outside torch")
        parts.append(ItemPart("rest", title, rest, MODELLED if simulated else DERIVED))
    return tuple(parts) if len(parts) > 1 else ()


def _late_non_torch(evidence: Evidence) -> QuantityReading:
    """ATB pools, communicators first used in warm-up; the graph figure holds its own growth."""
    warm_up, capture = last_of(evidence.spans, "warm_up"), last_of(evidence.spans, "graph_capture")
    before, after, _ = evidence.profile_end()
    if warm_up is None or warm_up.error or warm_up.after is None:
        return QuantityReading(None)
    ends = [] if capture is None else [capture.before, capture.after]
    edges = [edge for edge in (before, after, warm_up.after, *ends) if edge is not None]
    told_apart = all(edge.other_processes_bytes is not None for edge in edges)

    def own(edge: Snapshot | None) -> int | None:
        others = edge.other_processes_bytes if edge is not None and told_apart else 0
        return None if edge is None else minus(edge.non_torch_bytes, others)

    known = [size for size in (own(before), own(after)) if size is not None]
    in_graphs = 0 if capture is None else minus(own(capture.after), own(capture.before))
    size = minus(minus(own(warm_up.after), max(known, default=None)), in_graphs)
    source = None if told_apart else text("after warm_up; other processes are not told apart")
    return QuantityReading(None if size is None else max(0, size), source=source)


def _request_pools(evidence: Evidence) -> QuantityReading:
    """What SGLang's pools took of the device beside keys and values."""
    span = last_of(evidence.spans, "kv_cache_alloc")
    if span is not None:
        taken, served = _taken(span.before, span.after), evidence.figure("kv_cache_bytes")
        size = minus(taken, served)
        return _of_snapshots(size, "used over kv_cache_alloc - KV cache")
    before, after = (
        evidence.figure(name) for name in ("free_after_load_bytes", "free_after_pools_bytes")
    )
    sizes = [evidence.figure(name) for name in ("k_pool_bytes", "v_pool_bytes")]
    joint = evidence.figure("kv_pool_bytes")
    pool = joint if joint is not None else None
    if pool is None and None not in sizes:
        pool = sum(size or 0 for size in sizes)
    size = minus(minus(before, after), pool)
    return QuantityReading(None if size is None else max(0, size))


def _runner_buffers(evidence: Evidence) -> QuantityReading:
    """What SGLang took between its pools and its readiness, graphs left out."""
    span = last_of(evidence.spans, "warm_up")
    if span is not None and not span.error:
        size = _taken(span.before, span.after)
        capture = last_of(evidence.spans, "graph_capture")
        if capture is not None:
            size = minus(size, _taken(capture.before, capture.after))
        return _of_snapshots(size, "used over warm_up - used over graph_capture")
    before = evidence.figure("free_before_capture_bytes")
    size = minus(evidence.figure("free_after_pools_bytes"), before)
    return QuantityReading(None if size is None else max(0, size))


def _first_steps(evidence: Evidence) -> QuantityReading:
    """What the first step took and kept; of a log, where a weight update prints what is free."""
    span = last_of(evidence.spans, "request")
    if span is not None and not span.error:
        size = _taken(span.before, span.after)
        return _of_snapshots(size, "used over the first batch")
    size = minus(evidence.figure("free_ready_bytes"), evidence.figure("free_at_update_bytes"))
    return QuantityReading(None if size is None else max(0, size))


def _taken(before: Snapshot | None, after: Snapshot | None) -> int | None:
    """Return how much less of the device is free after a phase, other processes left out."""
    if before is None or after is None:
        return None
    taken = minus(before.device_free_bytes, after.device_free_bytes)
    others = minus(after.other_processes_bytes, before.other_processes_bytes) or 0
    return minus(taken, others)


def _of_snapshots(size: int | None, formula: str) -> QuantityReading:
    """Return what memprof's own readings give, where a log has what SGLang prints."""
    source = text("memprof's readings at the edges of the phase")
    return QuantityReading(
        None if size is None else max(0, size), how=DERIVED, formula=formula, source=source
    )


_SGLANG_LINES = text("free memory as SGLang prints it")
_ROWS = (
    # --- what is asked for, and what a rank holds of it
    Quantity("requested", text("requested")),
    Quantity("weights", text("weights"), _weights, formula="weights"),
    Quantity(
        "persistent_torch",
        text("torch memory outside the weights"),  # input buffers, rope tables, sampler's state
        _persistent_torch,
        formula="profile_before_allocated_peak - weights",
        source=text("the engine's snapshot before the profile run, right after its peak reset"),
        unknown=text("no profile run was recorded"),
    ),
    Quantity(
        "peak_activation",
        text("peak activation"),
        _peak_activation,
        formula="profile_after_allocated_peak - profile_before_allocated_peak",
        unknown=text("no profile run was recorded"),
    ),
    Quantity(
        "kept_torch",
        text("torch memory that profiling left"),
        _kept_torch,
        formula="allocated after profile_run - allocated before it",
        unknown=text("no profile run was recorded"),
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
        how=DERIVED,
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
        unknown=text("no profile run was recorded"),
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
        how=DERIVED,
        formula="free_after_load - free_after_pools - KV pool",
        source=_SGLANG_LINES,
    ),
    Quantity(
        "runner_buffers",
        text("buffers of the runner"),
        _runner_buffers,
        device_wide=True,
        how=DERIVED,
        formula="free_after_pools - free_before_capture",
        source=_SGLANG_LINES,
    ),
    Quantity(
        "graph_prefill",
        text("captured graphs of prefill"),
        lambda evidence: QuantityReading(evidence.figure("graph_prefill_bytes")),
        device_wide=True,
        formula="graph_prefill",
        required=False,
    ),
    Quantity(
        "first_steps",
        text("kept by the first steps: communicators, workspace"),
        _first_steps,
        device_wide=True,
        how=DERIVED,
        formula="free_ready - free_at_update",
        source=_SGLANG_LINES,
    ),
    # --- beside the KV cache at the serving peak, see ``accounting.spare``
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
