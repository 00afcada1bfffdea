"""What one rank read of its start-up: every moment found once, every reading with its reason.

The phases of a rank and its engine's figures enter. ``moments`` are those at which engines read;
``own`` has memprof's reading of each figure of the engine. What becomes of both is the table of
quantities, ``accounting.readings.quantities``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, cast

from vllm_memprof.accounting.model import PrintedFigures, Reading
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.files import read_own
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import (
    DERIVED,
    MEASURED,
    MODELLED,
    Span,
    edges_of,
    is_within,
    last_of,
    weakest,
)
from vllm_memprof.text import Text, text, titled
from vllm_memprof.units import MIB, Amount, either, known_items, largest, minus

#: Tensors that ``load_model`` makes outside of what the engine measures as weights (tables of
#: expert load balancing, buffers of a drafter) and garbage that the engine collects first: less
#: than one small segment of the allocator.
LOAD_SLACK_BYTES = 2 * MIB
#: Ranks agree on the least of a figure in 32 bits: below 128 GiB it is off by 4 KiB at most.
_FLOAT32_BYTES = 4096
ALLOCATED, FREE, NON_TORCH = "allocated_bytes", "device_free_bytes", "non_torch_bytes"
#: Fields that are read from the device, and depend on the profile of a simulated one.
_DEVICE_WIDE = (FREE, NON_TORCH)

_OWN = read_own(__file__, "own.toml")
_NO_READING = text("no reading at this edge")
CONSTANT = text("nothing: the size of a device does not change")
_NOT_LOADED = text("weight_load was not recorded to its end")


def unread(reason: str | None, source: str | None = None) -> Reading:
    """Return a reading that is not known, with the reason and where it would be read."""
    return Reading(None, source=source, reason=reason)


class Moment(NamedTuple):
    """A moment at which the engine reads, as memprof's edges enclose it."""

    nearest: Snapshot | None
    where: Text | None
    other: Snapshot | None = None  # the edge on the other side; None: it reads right after nearest
    reason: Text = _NO_READING  # where nearest is None


class ProfilePeak(NamedTuple):
    """The profile run at its worst, bytes."""

    reserved: int
    non_torch: int
    workspace: Amount  # operator workspace, the most of it
    cleared: int  # non-torch memory that its last empty_cache gave back
    end: Snapshot | None  # the last reading of it


@dataclass(frozen=True)
class Moments(PrintedFigures):
    """What one rank recorded of its start-up, and what it read at the moments of engines.

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
    replica: Sequence[Moments] = ()
    not_own: Text | None = None
    nothing_later: Text | None = None
    half_units: Mapping[str, int] = field(default_factory=dict)

    def last(self, phase: str) -> Span | None:
        """Return the last passage through a phase."""
        return last_of(self.spans, phase)

    def end_of(self, phase: str) -> Snapshot | None:
        """Return the reading at the end of the last passage; None where it failed or has none."""
        span = self.last(phase)
        return None if span is None or span.error else span.after

    def passages(self, phase: str) -> list[Span]:
        """Return the passages through a phase."""
        return [span for span in self.spans if span.phase == phase]

    @cached_property
    def moments(self) -> dict[str, Moment]:
        """The moments at which engines read: right after most of them they call empty_cache."""
        load, sizing, capture = map(self.last, ("weight_load", "kv_cache_sizing", "graph_capture"))
        end, empties = after(self.last("profile_run")), self.passages("empty_cache")
        calls = [span for span in empties if is_within(self.spans, span, "profile_run")]
        before_load = [each for each in empties if load is not None and each.order < load.order]
        in_sizing = [each for each in empties if sizing is not None and each.parent == sizing.order]
        # the engine's own calls around its captures; where it makes none, the phase's edges
        captures = [
            each
            for each in empties
            if capture is not None
            and each.parent == capture.order
            and (each.string("function") or "").endswith("capture_model")
        ]
        whole = [] if capture is None or capture.error else [capture]
        no_graph = _NO_READING if capture else text("no graph was captured in this run")
        first, last = calls[:-1][:1], calls[-1:]  # the first of at least two
        return {
            "start": self._start(empties),
            "profile_begin": Moment(
                after(*first), text("after the first empty_cache of the profile run")
            ),
            "profile_end": Moment(
                before(*last), text("before the last empty_cache of the profile run")
            ),
            "profile_after": Moment(
                after(*last), text("after the last empty_cache of the profile run"), end
            ),
            # the same; of an engine that makes no such call the end of the run
            "profiled": Moment(after(*last), text("the last empty_cache of the profile run"))
            if calls
            else Moment(end, text("the end of the profile run")),
            # an engine without a profile run reads right after an empty_cache
            "before_load": Moment(
                after(*before_load[-1:]),
                text("after the last empty_cache before weight_load"),
                before(load),
            ),
            "after_load": Moment(
                after(*in_sizing[-1:]),
                text("after the empty_cache of kv_cache_sizing"),
                after(sizing),
            ),
            "capture_begin": Moment(
                after(*captures[:1]) if whole and captures else before(*whole),
                text("graph_capture, before") if capture else None,
                reason=no_graph,
            ),
            "capture_end": Moment(
                before(captures[-1]) if whole and captures[1:] else after(*whole),
                text("graph_capture, after") if capture else None,
                reason=no_graph,
            ),
        }

    def _start(self, empties: list[Span]) -> Moment:
        """Return the moment of the engine's first snapshot, by its equation.

        vllm-ascend takes it after the last empty_cache of its device set-up, before process groups
        are made; vLLM with E6 after they are, with E0 and E5 before or after, by the release.
        (vllm_ascend/worker/worker.py::NPUWorker._init_device 0.13.0, 0.23.0;
        vllm/v1/worker/gpu_worker.py::Worker.init_device 0.33.0)
        """
        groups, starts = self.last("hccl_init"), "before"
        if groups is not None and self.equation is not None:
            starts = self.equation.starts
        if starts != "before":
            other = before(groups) if starts == "either" else None
            return Moment(after(groups), text("after hccl_init"), other)
        emptied = [
            span
            for span in empties
            if groups is not None
            and span.order < groups.order
            and is_within(self.spans, span, "device_init")
        ]
        return Moment(before(groups), text("before hccl_init"), after(*emptied[-1:]))

    def value(self, moment: str, field: str) -> Amount:
        """Return a field of the snapshot that is nearest to a moment."""
        return value(self.moments[moment].nearest, field)

    def at(self, moment: str, field: str) -> Reading:
        """Read a field of a snapshot; the tolerance is what moved between the edges around it."""
        found = self.moments[moment]
        size, far = value(found.nearest, field), value(found.other, field)
        if size is None:
            return unread(found.reason, found.where)
        how = MODELLED if self.simulated and field in _DEVICE_WIDE else MEASURED
        between = text("nothing: memprof's reading and the engine's follow each other")
        if field not in _DEVICE_WIDE:
            between = text("the same counter of the allocator, which nothing changes in between")
        elif moment == "start":
            between = text("code without allocations; what others took or released while it ran")
        moved = abs(minus(far, size) or 0)
        return Reading(size, how, found.where, tolerance_bytes=moved, between=between)

    @cached_property
    def own(self) -> dict[str, Reading]:
        """memprof's reading of each figure of the engine, the rows of ``own.toml``."""
        special: dict[str, Callable[[], Reading]] = {
            "weights_bytes": self._weights,
            "profile_after_allocated_peak_bytes": self._peak,
            "least_free_before_load_bytes": lambda: self._least("before_load"),
            "least_free_after_load_bytes": lambda: self._least("after_load"),
        }
        total = unread(text("no reading of the device"))
        if (size := first_device_total(self.spans)) is not None:
            where = text("the first reading of the device")
            total = Reading(size, source=where, tolerance_bytes=0, between=CONSTANT)
        found = {"device_total_bytes": total}
        for name, row in _OWN.items():
            if name in special:
                found[name] = special[name]()
            elif "at" in row:
                found[name] = self.at(*row["at"])
            elif "less" in row:
                parts, source = [found[each] for each in row["less"]], titled(row["source"])
                missing = next((each for each in parts if each.bytes is None), None)
                if missing is None:
                    more, less = (each.bytes for each in parts)
                    found[name] = made_of(minus(more, less), parts, source)
                else:  # its edge and its reason
                    edge, reason = missing.source, missing.reason
                    if edge:
                        reason = text("{edge}: {reason}", edge=edge, reason=reason)
                    found[name] = unread(reason, source)
        return found

    def _weights(self) -> Reading:
        load = self.last("weight_load")
        where = text("growth of allocated over weight_load")
        if load is None or load.before is None or load.after is None or load.error:
            return unread(_NOT_LOADED, where)
        end = end_of_loading(self.spans, load)
        if end is not load.after:
            where = text("growth of allocated from the begin of weight_load to that of model_state")
        between = text("Python gc, and small tensors that the engine does not measure")
        grown = growth(load.before, end, ALLOCATED)
        return Reading(grown, DERIVED, where, tolerance_bytes=LOAD_SLACK_BYTES, between=between)

    def _peak(self) -> Reading:
        """The peak of the profile run, folded over resets where no peak of the process is above."""
        if self.figures.get("graph_estimate_bytes"):
            return unread(
                text("graphs were captured for the estimate before memprof's next reading")
            )
        found = self.at("profile_end", "allocated_peak_bytes")
        low, high = (
            self.value(moment, "allocated_run_peak_bytes")
            for moment in ("profile_begin", "profile_end")
        )
        if found.bytes is None or low is None or high is None or high <= low:
            return found
        return replace(found, bytes=max(found.bytes, high))

    def _least(self, moment: str) -> Reading:
        """Free memory as the ranks of a replica agree on it; of this one if it has none."""
        found = self.at(moment, FREE)
        if found.bytes is None or len(self.replica) < 2:
            return found
        # one unknown: so is the least
        least = min(self.replica, key=lambda rank: rank.value(moment, FREE) or -1).at(moment, FREE)
        if least.bytes is None:
            return unread(text("another rank has no such reading"), least.source)
        return replace(least, tolerance_bytes=(least.tolerance_bytes or 0) + _FLOAT32_BYTES)

    @cached_property
    def profile_peak(self) -> ProfilePeak | None:
        """The profile run at its worst; None where it failed, or an edge of it was not read."""
        runs = self.passages("profile_run")
        inside = [span for span in self.spans if is_within(self.spans, span, "profile_run")] + runs
        snapshots = [edge.snapshot for _, edge in edges_of(inside)]
        reserved, outside, workspace = (
            largest(value(snapshot, name) for snapshot in snapshots)
            for name in ("reserved_bytes", NON_TORCH, "npu_workspace_bytes")
        )
        reserved = largest([reserved, *map(peak_between, inside)])
        if reserved is None or outside is None or any(span.error for span in runs):
            return None
        freed = minus(self.value("profile_end", NON_TORCH), self.value("profiled", NON_TORCH)) or 0
        return ProfilePeak(reserved, outside, workspace, max(0, freed), runs[-1].after)


def before(span: Span | None = None) -> Snapshot | None:
    """Return the snapshot before a phase; None without one."""
    return None if span is None else span.before


def after(span: Span | None = None) -> Snapshot | None:
    """Return the snapshot after a phase; None without one."""
    return None if span is None else span.after


def value(snapshot: Snapshot | None, field: str) -> Amount:
    """Return a field of a snapshot; None without one."""
    return cast("Amount", getattr(snapshot, field, None))


def growth(start: Snapshot | None, end: Snapshot | None, field: str) -> Amount:
    """Return what a field of snapshots grew by; None where it is not known of both."""
    return minus(value(end, field), value(start, field))


def grown_by(span: Span) -> Amount:
    """Return what a phase that came to its end has left allocated, bytes."""
    return None if span.error else growth(span.before, span.after, ALLOCATED)


def peak_between(span: Span, field: str = "reserved_run_peak_bytes") -> Amount:
    """Return the peak that the allocator kept and that fell within a phase, bytes; None: none."""
    grown = growth(span.before, span.after, field)
    return value(span.after, field) if grown and grown > 0 else None


def end_of_loading(spans: Sequence[Span], load: Span) -> Snapshot | None:
    """Return the reading at which the weights are loaded: V2's model_state comes after them."""
    state = last_of(spans, "model_state")
    if state is not None and state.before is not None and is_within(spans, state, load.order):
        return state.before
    return load.after


def first_device_total(spans: Sequence[Span]) -> Amount:
    """Return the device total that the first snapshot with one read, bytes."""
    return either(*(edge.snapshot.device_total_bytes for _, edge in edges_of(spans)))


def others_at_start(spans: Sequence[Span], own: Collection[str] = ()) -> Amount:
    """Return what other processes held when the driver was first asked, bytes; None: it was not.

    Args:
        spans: phases of a rank.
        own: process numbers that do not count, e.g. of the run's other ranks.
    """
    return either(*(others_in(edge.snapshot, own) for _, edge in edges_of(spans)))


def others_in(snapshot: Snapshot, own: Collection[str]) -> Amount:
    """Return what other processes held at one moment, those of ``own`` left out, bytes."""
    total, by_process = snapshot.other_processes_bytes, snapshot.other_processes or {}
    return minus(total, sum(size for pid, size in by_process.items() if pid in own))


def made_of(
    size: Amount, parts: Iterable[Reading], source: Text | None = None, divisor: int = 1
) -> Reading:
    """Return a reading that others give: as known, and as near to the engine's, as they are."""
    used = list(parts)
    how = weakest([DERIVED, *(each.how for each in used)])
    tolerance = sum(each.tolerance_bytes or 0 for each in used) // divisor
    between = text("what lies between the readings that it is made of")
    return Reading(size, how, source, tolerance_bytes=tolerance, between=between)


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
    figures, of = dict(process.figures), Moments(process.phases, {})
    if figures.get("kv_cache_reduced_bytes") is not None:
        figures["kv_cache_bytes"] = figures["kv_cache_reduced_bytes"]
    if figures.get("graph_bytes") == 0 and of.last("graph_capture") is None:
        figures["graph_bytes"] = None
    if equation is None:
        return figures
    names = equation.from_snapshots
    if not row_of_run(equation.engine).profiles:
        names = ("device_total_bytes", "weights_bytes")
    elif names:
        names = ("device_total_bytes", *names)
    # the peak since the engine's own reset
    read = of.own | {
        "profile_after_allocated_peak_bytes": of.at("profile_end", "allocated_peak_bytes")
    }
    filled = {name: read[name].bytes for name in names}
    if eager and any(term.name == "graph_estimate" for term in equation.terms):
        filled["graph_estimate_bytes"] = 0
    missing = {name: size for name, size in filled.items() if figures.get(name) is None}
    return figures | known_items(missing)
