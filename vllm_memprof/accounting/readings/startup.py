"""What one rank read of its start-up: every moment found once, every reading with its reason.

The phases of a rank and its engine's figures enter. What is read of them is a ``Reading``: bytes,
how they are known, where they were read, or why they are not known. ``READINGS`` has memprof's own
reading of each figure of the engine; the table of quantities is ``accounting.readings.quantities``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

from vllm_memprof.accounting.model import DERIVED, MEASURED, MODELLED, ItemPart, RankReport
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of, is_within, last_of, weakest
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB, minus

#: Tensors that ``load_model`` makes outside of what the engine measures as weights (tables of
#: expert load balancing, buffers of a drafter) and garbage that the engine collects first: less
#: than one small segment of the allocator.
LOAD_SLACK_BYTES = 2 * MIB
#: SGLang's ranks agree on the least of a figure in 32 bits: below 128 GiB it is off by 4 KiB at
#: most.
_FLOAT32_BYTES = 4096
#: Fields that are read from the device, and depend on the profile of a simulated one.
_DEVICE_WIDE = ("device_free_bytes", "non_torch_bytes")

_SAME_COUNTER = text("the same counter of the allocator, which nothing changes in between")
CONSTANT = text("nothing: the size of a device does not change")
_NOTHING = text("nothing: memprof's reading and the engine's follow each other")
_START_BETWEEN = text("code without allocations; what others took or released while it ran")
_LOAD_BETWEEN = text(
    "garbage that the engine collects first, and small tensors that load_model makes outside of "
    "what the engine measures"
)
OF_ITS_PARTS = text("what lies between the readings that it is made of")
_NO_READING = text("no reading at this edge")
_NOT_LOADED = text("weight_load was not recorded to its end")


@dataclass(frozen=True)
class Reading:
    """Bytes as the evidence of a rank gives them, or the reason why it does not."""

    bytes: int | None
    how: str = MEASURED
    source: Text | None = None  # the moment or the edges it was read at
    reason: Text | None = None  # why bytes is None
    tolerance: int = 0  # bytes that may lie between it and the engine's reading
    between: Text = _NOTHING  # what lies there
    formula: str | None = None  # in the names of figures and snapshots
    parts: tuple[ItemPart, ...] = ()


def unread(reason: Text | None, source: Text | None = None) -> Reading:
    """Return a reading that is not known, with the reason and where it would be read."""
    return Reading(None, source=source, reason=reason)


@dataclass(frozen=True)
class Moment:
    """A moment at which the engine reads, as memprof's edges enclose it."""

    nearest: Snapshot | None
    where: Text | None = None
    other: Snapshot | None = None  # the edge on the other side; None: it reads right after nearest
    reason: Text = _NO_READING  # where nearest is None


@dataclass(frozen=True)
class ProfilePeak:
    """The profile run at its worst, bytes."""

    reserved: int
    non_torch: int
    workspace: int | None  # operator workspace, the most of it
    cleared: int  # non-torch memory that its last empty_cache gave back
    end: Snapshot | None  # the last reading of it


@dataclass(frozen=True)
class StartupReadings:
    """What one rank recorded of its start-up, as far as figures are read from it.

    Attributes:
        spans: phases of the rank.
        figures: of the engine, bytes.
        simulated: a device's profile sets what lies outside torch.
        equation: its id and its engine say at which moment the first snapshot is taken.
        replica: the ranks that agree on one KV cache, this one among them.
        not_own: why memprof itself read nothing, as of a log; None: it did.
        nothing_later: why nothing is recorded after the KV plan; None where that is not known.
        half_units: of figures that a log prints, bytes: half a last digit.
    """

    spans: list[Span]
    figures: Figures
    simulated: bool = False
    equation: Equation | None = None
    replica: Sequence[StartupReadings] = ()
    not_own: Text | None = None
    nothing_later: Text | None = None
    half_units: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: RankReport, simulated: bool = False) -> StartupReadings:
        """Return the readings of a finished rank."""
        return cls(rank.phases, rank.figures, simulated, half_units=rank.half_units)

    def rounding(self, *names: str) -> int:
        """Return what the rounding of printed figures adds up to, bytes; 0 from hooks."""
        return sum(self.half_units.get(name, 0) for name in names)

    def figure(self, name: str) -> int | None:
        """Return a figure of the engine in whole bytes."""
        size = self.figures.get(name)
        return None if size is None else int(size)

    def last(self, phase: str) -> Span | None:
        """Return the last passage through a phase."""
        return self._last.get(phase)

    @cached_property
    def _last(self) -> dict[str, Span]:
        return {span.phase: span for span in self.spans}

    @cached_property
    def profile_empties(self) -> list[Span]:
        """The calls of ``empty_cache`` in the profile run."""
        return [
            span
            for span in self.spans
            if span.phase == "empty_cache" and is_within(self.spans, span, "profile_run")
        ]

    @cached_property
    def profile_end(self) -> tuple[Snapshot | None, Snapshot | None, Text]:
        """The snapshots around the moment at which the engine reads its non-torch figure.

        That is the last ``empty_cache`` of the profile run; without one, the run's end.
        """
        if self.profile_empties:
            call = self.profile_empties[-1]
            return call.before, call.after, text("the last empty_cache of the profile run")
        return None, after(self.last("profile_run")), text("the end of the profile run")

    @cached_property
    def profile_peak(self) -> ProfilePeak | None:
        """The profile run at its worst; None where it failed, or an edge of it was not read."""
        runs = [span for span in self.spans if span.phase == "profile_run"]
        inside = [span for span in self.spans if is_within(self.spans, span, "profile_run")]
        inside[:0] = runs
        reserved, outside, workspaces = (
            [
                size
                for _, edge in edges_of(inside)
                if (size := value(edge.snapshot, name)) is not None
            ]
            for name in ("reserved_bytes", "non_torch_bytes", "npu_workspace_bytes")
        )
        reserved += [size for span in inside if (size := peak_between(span)) is not None]
        if not reserved or not outside or any(span.error for span in runs):
            return None
        start, end, _ = self.profile_end
        freed = growth(end, start, "non_torch_bytes") or 0
        workspace = max(workspaces, default=None)
        return ProfilePeak(max(reserved), max(outside), workspace, max(0, freed), runs[-1].after)

    @cached_property
    def loaded(self) -> tuple[Snapshot | None, Snapshot | None]:
        """The snapshots between which the weights are loaded."""
        load = self.last("weight_load")
        return (None, None) if load is None else (load.before, end_of_loading(self.spans, load))

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """The moments at which engines read."""
        calls = self.profile_empties
        load, sizing, capture = map(self.last, ("weight_load", "kv_cache_sizing", "graph_capture"))
        empties = [span for span in self.spans if span.phase == "empty_cache"]
        before_load = [each for each in empties if load is not None and each.order < load.order]
        in_sizing = [each for each in empties if sizing is not None and each.parent == sizing.order]
        begin = end = Moment(None, text("graph_capture"))
        if capture is not None and not capture.error:
            # the engine's own calls around its captures; where it makes none, the phase's edges
            own = [
                each
                for each in empties
                if each.parent == capture.order
                and (each.string("function") or "").endswith("capture_model")
            ]
            first = own[0].after if own else capture.before
            last = own[-1].before if len(own) > 1 else capture.after
            begin = Moment(first, text("graph_capture, before"))
            end = Moment(last, text("graph_capture, after"))
        return {
            "start": self._start(empties),
            "profile_begin": Moment(
                calls[0].after if len(calls) > 1 else None,
                text("after the first empty_cache of the profile run"),
            ),
            "profile_end": Moment(
                calls[-1].before if calls else None,
                text("before the last empty_cache of the profile run"),
            ),
            "profile_after": Moment(
                calls[-1].after if calls else None,
                text("after the last empty_cache of the profile run"),
                after(self.last("profile_run")),
            ),
            "capture_begin": begin,
            "capture_end": end,
            # SGLang reads right after an empty_cache, before it loads the weights
            "before_load": Moment(None, reason=_NOT_LOADED)
            if load is None
            else Moment(
                before_load[-1].after if before_load else None,
                text("after the last empty_cache before weight_load"),
                load.before,
            ),
            "after_load": Moment(
                in_sizing[-1].after if in_sizing else None,
                text("after the empty_cache of kv_cache_sizing"),
                after(sizing),
            ),
        }

    def _start(self, empties: list[Span]) -> Moment:
        """Return the moment of the engine's first snapshot.

        vllm-ascend takes it after the last empty_cache of its device set-up, before process groups
        are made; vLLM with E6 after they are, with E0 and E5 before or after, by the release.
        (vllm_ascend/worker/worker.py::NPUWorker._init_device 0.13.0, 0.23.0;
        vllm/v1/worker/gpu_worker.py::Worker.init_device 0.33.0)
        """
        groups, row = self.last("hccl_init"), self.equation
        if groups is not None and row is not None and row.engine == "vllm":
            other = None if row.id == "E6" else groups.before
            return Moment(groups.after, text("after hccl_init"), other)
        emptied = [
            span.after
            for span in empties
            if groups is not None
            and span.order < groups.order
            and is_within(self.spans, span, "device_init")
        ]
        other = emptied[-1] if emptied else None
        return Moment(before(groups), text("before hccl_init"), other)

    def at(self, moment: str, field: str, between: Text = _NOTHING) -> Reading:
        """Read a field of a snapshot; the tolerance is what moved between the edges around it."""
        found = self.moments[moment]
        size, far = value(found.nearest, field), value(found.other, field)
        if size is None:
            return unread(found.reason, found.where)
        how = MODELLED if self.simulated and field in _DEVICE_WIDE else MEASURED
        return Reading(size, how, found.where, None, abs(minus(far, size) or 0), between)

    @cached_property
    def own(self) -> dict[str, Reading]:
        """memprof's reading of each figure of the engine; ``READINGS`` has their names."""
        if self.not_own is not None:
            return dict.fromkeys(READINGS, unread(self.not_own))
        return {name: read(self) for name, read in READINGS.items()}


def before(span: Span | None) -> Snapshot | None:
    """Return the snapshot before a phase."""
    return None if span is None else span.before


def after(span: Span | None) -> Snapshot | None:
    """Return the snapshot after a phase."""
    return None if span is None else span.after


def value(snapshot: Snapshot | None, field: str) -> int | None:
    """Return a field of a snapshot; None without one."""
    return cast("int | None", getattr(snapshot, field, None))


def growth(start: Snapshot | None, end: Snapshot | None, field: str) -> int | None:
    """Return what a field of snapshots grew by; None where it is not known of both."""
    return minus(value(end, field), value(start, field))


def grown_by(span: Span) -> int | None:
    """Return what a phase that came to its end has left allocated, bytes."""
    return None if span.error else growth(span.before, span.after, "allocated_bytes")


def peak_between(span: Span, field: str = "reserved_run_peak_bytes") -> int | None:
    """Return the peak that the allocator kept and that fell within a phase, bytes; None: none."""
    grown = growth(span.before, span.after, field)
    return value(span.after, field) if grown and grown > 0 else None


def end_of_loading(spans: Sequence[Span], load: Span) -> Snapshot | None:
    """Return the reading at which the weights are loaded: V2's model_state comes after them."""
    state = last_of(spans, "model_state")
    if state is not None and state.before is not None and is_within(spans, state, load.order):
        return state.before
    return load.after


def first_device_total(spans: Sequence[Span]) -> int | None:
    """Return the device total that the first snapshot with one read, bytes."""
    totals = (edge.snapshot.device_total_bytes for _, edge in edges_of(spans))
    return next((total for total in totals if total is not None), None)


def others_at_start(spans: Sequence[Span], own: Collection[str] = ()) -> int | None:
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


def made_of(
    size: int | None, parts: Iterable[Reading], source: Text | None = None, divisor: int = 1
) -> Reading:
    """Return a reading that others give: as known, and as near to the engine's, as they are."""
    used = list(parts)
    how = weakest([DERIVED, *(each.how for each in used)])
    tolerance = sum(each.tolerance for each in used) // divisor
    return Reading(size, how, source, None, tolerance, OF_ITS_PARTS)


Read = Callable[[StartupReadings], Reading]


def _at(moment: str, field: str, between: Text = _NOTHING) -> Read:
    return lambda of: of.at(moment, field, between)


def _difference(more: Read, less: Read, source: Text) -> Read:
    def read(of: StartupReadings) -> Reading:
        both = more(of), less(of)
        unknown = next((each for each in both if each.bytes is None), None)
        if unknown is not None:
            reason = unknown.reason
            if unknown.source is not None:
                reason = text("{edge}: {reason}", edge=unknown.source, reason=reason)
            return unread(reason, source)
        return made_of(minus(both[0].bytes, both[1].bytes), both, source)

    return read


def _least(moment: str) -> Read:
    """Free memory as the ranks of a replica agree on it: the least; of this one if it has none."""

    def read(of: StartupReadings) -> Reading:
        found = of.at(moment, "device_free_bytes")
        if found.bytes is None or len(of.replica) < 2:
            return found
        each = (value(rank.moments[moment].nearest, "device_free_bytes") for rank in of.replica)
        sizes = [-1 if size is None else size for size in each]  # one unknown: so is the least
        least = of.replica[sizes.index(min(sizes))].at(moment, "device_free_bytes")
        if least.bytes is None:
            reason = text("another rank has no such reading")
            return unread(reason, least.source)
        return replace(least, tolerance=least.tolerance + _FLOAT32_BYTES)

    return read


def _total(of: StartupReadings) -> Reading:
    total, source = first_device_total(of.spans), text("the first reading of the device")
    if total is None:
        return unread(text("no reading of the device"))
    return Reading(total, source=source, between=CONSTANT)


def _weights(of: StartupReadings) -> Reading:
    load, (start, end) = of.last("weight_load"), of.loaded
    where = text("growth of allocated over weight_load")
    if load is None or start is None or load.after is None or load.error:
        return unread(_NOT_LOADED, where)
    if end is not load.after:
        where = text("growth of allocated from the begin of weight_load to that of model_state")
    grown = growth(start, end, "allocated_bytes")
    return Reading(grown, DERIVED, where, None, LOAD_SLACK_BYTES, _LOAD_BETWEEN)


def _peak(of: StartupReadings) -> Reading:
    """The peak of the profile run, folded over resets where it is the highest of the process."""
    if of.figures.get("graph_estimate_bytes"):
        reason = text("graphs were captured for the estimate before memprof's next reading")
        return unread(reason)
    found = of.at("profile_end", "allocated_peak_bytes", _SAME_COUNTER)
    low, high = (
        value(of.moments[name].nearest, "allocated_run_peak_bytes")
        for name in ("profile_begin", "profile_end")
    )
    if found.bytes is None or low is None or high is None or high <= low:
        return found
    return replace(found, bytes=max(found.bytes, high))


def _graph(of: StartupReadings) -> Reading:
    where = text("growth of used device memory over graph_capture")
    if of.last("graph_capture") is None:
        return unread(text("no graph was captured in this run"), where)
    begin, end = (_at(f"capture_{edge}", "device_free_bytes") for edge in ("begin", "end"))
    return _difference(begin, end, where)(of)


_ALLOCATED_BEFORE = _at("profile_begin", "allocated_bytes", _SAME_COUNTER)
_INITIAL_NON_TORCH = _at("start", "non_torch_bytes", _START_BETWEEN)
_NON_TORCH_AFTER = _at("profile_after", "non_torch_bytes")
#: Figure of the engine -> memprof's reading of the same memory. A figure that is not here, and that
#: no difference of these gives, has no independent reading.
READINGS: dict[str, Read] = {
    "device_total_bytes": _total,
    "initial_free_bytes": _at("start", "device_free_bytes", _START_BETWEEN),
    "initial_non_torch_bytes": _INITIAL_NON_TORCH,
    "weights_bytes": _weights,
    "profile_before_allocated_peak_bytes": _ALLOCATED_BEFORE,
    "profile_before_non_torch_bytes": _at("profile_begin", "non_torch_bytes"),
    "profile_after_allocated_peak_bytes": _peak,
    "peak_activation_bytes": _difference(
        _peak, _ALLOCATED_BEFORE, text("peak of the profile run less allocated before it")
    ),
    "profile_end_free_bytes": _at("profile_end", "device_free_bytes"),
    "profile_end_non_torch_bytes": _at("profile_end", "non_torch_bytes"),
    "profile_after_allocated_bytes": _at("profile_after", "allocated_bytes", _SAME_COUNTER),
    "profile_after_free_bytes": _at("profile_after", "device_free_bytes"),
    "profile_after_non_torch_bytes": _NON_TORCH_AFTER,
    "non_torch_increase_bytes": _difference(
        _NON_TORCH_AFTER,
        _INITIAL_NON_TORCH,
        text("non-torch after the profile run less non-torch before hccl_init"),
    ),
    "graph_bytes": _graph,
    "least_free_before_load_bytes": _least("before_load"),
    "least_free_after_load_bytes": _least("after_load"),
}


#: Figures that an engine reads and does not keep: the moment at which it does, and the field of the
#: snapshot.
_IN_SNAPSHOTS = {
    "profile_end_free_bytes": ("profile_end", "device_free_bytes"),
    "profile_end_non_torch_bytes": ("profile_end", "non_torch_bytes"),
    "profile_after_allocated_peak_bytes": ("profile_end", "allocated_peak_bytes"),
    "profile_after_allocated_bytes": ("profile_after", "allocated_bytes"),
    "profile_after_free_bytes": ("profile_after", "device_free_bytes"),
}


def engine_figures(
    process: ProcessRecord, eager: bool, equation: Equation | None
) -> dict[str, int | float | None]:
    """Return the engine's figures; those that it does not keep are taken from the snapshots.

    The engine's graph figure starts at 0 and is known only once a capture has run. A log prints the
    KV cache before multi-modal decoding takes its share, and then what is left.

    Args:
        process: one worker.
        eager: the engine captures no graphs; its estimate of them is 0.
        equation: of the engine, None where it is not known.
    """
    figures, of = dict(process.figures), StartupReadings(process.phases, {})
    if figures.get("kv_cache_reduced_bytes") is not None:
        figures["kv_cache_bytes"] = figures["kv_cache_reduced_bytes"]
    if figures.get("graph_bytes") == 0 and of.last("graph_capture") is None:
        figures["graph_bytes"] = None
    if equation is None:
        return figures
    profiles, load = row_of_run(equation.engine).profiles, of.last("weight_load")
    filled: dict[str, int | None] = {}
    if equation.from_snapshots or not profiles:
        filled["device_total_bytes"] = first_device_total(process.phases)
    for name in equation.from_snapshots:
        moment, field = _IN_SNAPSHOTS[name]
        if of.moments["profile_end"].nearest is not None:  # else there is no such moment
            filled[name] = value(of.moments[moment].nearest, field)
    if not profiles and load is not None and not load.error:
        filled["weights_bytes"] = growth(load.before, load.after, "allocated_bytes")
    if eager and any(term.name == "graph_estimate" for term in equation.terms):
        filled["graph_estimate_bytes"] = 0
    known = {name: size for name, size in filled.items() if figures.get(name) is None}
    return figures | {name: size for name, size in known.items() if size is not None}
