"""Audit the engine's figures: beside each stands memprof's own reading of the same memory.

The equation recomputed from the engine's own figures shows that its arithmetic and its release are
understood, and no more: where a figure of the engine is wrong, so is the result. Here every figure
that an equation takes is read again from memprof's snapshots at its own phase edges
(``_READINGS``), and the equation is evaluated with those readings alone. No reading comes from a
field of the engine; a term that memprof cannot read has None and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_memprof.accounting import equations
from vllm_memprof.accounting.model import AuditRow
from vllm_memprof.accounting.quantities import LOAD_SLACK_BYTES, end_of_loading, title_of
from vllm_memprof.engines.equation import Equation, Figures, Term
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
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB, minus

#: Where the device moved by more than this between the two readings that enclose the engine's, the
#: row agrees with nothing and contradicts nothing.
MOST_TOLERANCE_BYTES = 64 * MIB

_SAME_COUNTER = text("the same counter of the allocator, which nothing changes in between")
_CONSTANT = text("nothing: the size of a device does not change")
_NOTHING = text("nothing: memprof's reading and the engine's follow each other")
_START_BETWEEN = text("code without allocations; what others took or released while it ran")
_LOAD_BETWEEN = text(
    "garbage that the engine collects first, and small tensors that load_model makes outside of "
    "what the engine measures"
)
_EACH_OF_ITS_PARTS = text("what lies between the readings that it is made of")


@dataclass(frozen=True)
class OwnReading:
    """A reading of memprof, or what several of them give."""

    bytes: int | None
    tolerance: int = 0  # bytes
    how: str = MEASURED
    source: Text | None = None  # the edges it was read at
    between: Text = _NOTHING  # what lies between memprof's reading and the engine's
    reason: Text | None = None  # why bytes is None


@dataclass(frozen=True)
class EngineMoment:
    """A moment at which the engine reads, as memprof's edges enclose it."""

    nearest: Snapshot | None
    other: Snapshot | None  # the edge on the other side; None: the engine reads right after nearest
    where: Text

    def read(self, field: str, simulated: bool, between: Text = _NOTHING) -> OwnReading:
        """Read a field of the snapshot; the tolerance is what moved between the two edges."""
        size = None if self.nearest is None else getattr(self.nearest, field)
        far = None if self.other is None else getattr(self.other, field)
        if size is None:
            return OwnReading(None, source=self.where, reason=text("no reading at this edge"))
        moved = 0 if far is None else abs(far - size)
        how = MODELLED if simulated and field in _DEVICE_WIDE else MEASURED
        return OwnReading(size, moved, how, self.where, between)


#: Fields that are read from the device, and depend on the profile of a simulated one.
_DEVICE_WIDE = ("device_free_bytes", "non_torch_bytes")


@dataclass(frozen=True)
class OwnEdges:
    """What memprof itself read of one rank.

    Attributes:
        spans: phases of the rank.
        simulated: a device's profile sets what lies outside torch.
        equation: its id and its engine say at which moment the first snapshot is taken.
        estimates_graphs: the engine captured graphs inside the profile run for an estimate.
        replica: the ranks that agree on one KV cache, this one among them.
    """

    spans: Sequence[Span]
    simulated: bool
    equation: Equation
    estimates_graphs: bool = False
    replica: ReplicaEdges | None = None

    @cached_property
    def _profile_edges(self) -> list[Span]:
        return [
            span
            for span in self.spans
            if span.phase == "empty_cache" and is_within(self.spans, span, "profile_run")
        ]

    def start(self) -> EngineMoment:
        """Return the moment of the engine's first snapshot.

        vllm-ascend takes it after the last empty_cache of its device set-up, before process groups
        are made; vLLM with E6 after they are, with E0 and E5 before or after, by the release.
        (vllm_ascend/worker/worker.py::NPUWorker._init_device 0.13.0, 0.23.0;
        vllm/v1/worker/gpu_worker.py::Worker.init_device 0.33.0)
        """
        groups = last_of(self.spans, "hccl_init")
        if groups is None:
            return EngineMoment(None, None, text("before hccl_init"))
        if self.equation.engine == "vllm":
            before = None if self.equation.id == "E6" else groups.before
            return EngineMoment(groups.after, before, text("after hccl_init"))
        emptied = [
            span.after
            for span in self.spans
            if span.phase == "empty_cache"
            and span.order < groups.order
            and is_within(self.spans, span, "device_init")
        ]
        return EngineMoment(
            groups.before, emptied[-1] if emptied else None, text("before hccl_init")
        )

    def profile_begin(self) -> EngineMoment:
        calls = self._profile_edges
        where = text("after the first empty_cache of the profile run")
        return EngineMoment(calls[0].after if len(calls) > 1 else None, None, where)

    def profile_end(self) -> EngineMoment:
        calls = self._profile_edges
        where = text("before the last empty_cache of the profile run")
        return EngineMoment(calls[-1].before if calls else None, None, where)

    def profile_after(self) -> EngineMoment:
        calls, run = self._profile_edges, last_of(self.spans, "profile_run")
        where = text("after the last empty_cache of the profile run")
        return EngineMoment(calls[-1].after if calls else None, run.after if run else None, where)

    def capture(self) -> tuple[EngineMoment, EngineMoment]:
        """Return the moments around a graph capture: the engine's own calls of empty_cache there.

        Where it makes none: the edges of the phase.
        """
        span = last_of(self.spans, "graph_capture")
        if span is None or span.error:
            nothing = EngineMoment(None, None, text("graph_capture"))
            return nothing, nothing
        own = [
            each
            for each in self.spans
            if each.phase == "empty_cache"
            and each.parent == span.order
            and (each.string("function") or "").endswith("capture_model")
        ]
        begin = EngineMoment(
            own[0].after if own else span.before, None, text("graph_capture, before")
        )
        last = own[-1].before if len(own) > 1 else span.after
        return begin, EngineMoment(last, None, text("graph_capture, after"))


def _total(at: OwnEdges) -> OwnReading:
    for _, edge in edges_of(at.spans):
        if edge.snapshot.device_total_bytes is not None:
            source = text("the first reading of the device")
            return OwnReading(edge.snapshot.device_total_bytes, source=source, between=_CONSTANT)
    return OwnReading(None, reason=text("no reading of the device"))


def _initial_free(at: OwnEdges) -> OwnReading:
    return at.start().read("device_free_bytes", at.simulated, _START_BETWEEN)


def _initial_non_torch(at: OwnEdges) -> OwnReading:
    return at.start().read("non_torch_bytes", at.simulated, _START_BETWEEN)


def _weights(at: OwnEdges) -> OwnReading:
    span = last_of(at.spans, "weight_load")
    where = text("growth of allocated over weight_load")
    if span is None or span.before is None or span.after is None or span.error:
        return OwnReading(
            None, source=where, reason=text("weight_load was not recorded to its end")
        )
    end = end_of_loading(at.spans, span) or span.after
    if end is not span.after:
        where = text("growth of allocated from the begin of weight_load to that of model_state")
    grown = minus(end.allocated_bytes, span.before.allocated_bytes)
    return OwnReading(grown, LOAD_SLACK_BYTES, DERIVED, where, _LOAD_BETWEEN)


def _allocated_before(at: OwnEdges) -> OwnReading:
    return at.profile_begin().read("allocated_bytes", at.simulated, _SAME_COUNTER)


def _peak(at: OwnEdges) -> OwnReading:
    """The peak of the profile run, folded over resets where it is the highest of the process."""
    if at.estimates_graphs:
        reason = text("graphs were captured for the estimate before memprof's next reading")
        return OwnReading(None, reason=reason)
    begin, end = at.profile_begin(), at.profile_end()
    found = end.read("allocated_peak_bytes", at.simulated, _SAME_COUNTER)
    if begin.nearest is None or end.nearest is None:
        return found
    low, high = begin.nearest.allocated_run_peak_bytes, end.nearest.allocated_run_peak_bytes
    if found.bytes is None or low is None or high is None or high <= low:
        return found
    return OwnReading(max(found.bytes, high), 0, MEASURED, end.where, _SAME_COUNTER)


def _free_after(at: OwnEdges) -> OwnReading:
    return at.profile_after().read("device_free_bytes", at.simulated)


def _non_torch_after(at: OwnEdges) -> OwnReading:
    return at.profile_after().read("non_torch_bytes", at.simulated)


def _graph(at: OwnEdges) -> OwnReading:
    begin, end = at.capture()
    where = text("growth of used device memory over graph_capture")
    if last_of(at.spans, "graph_capture") is None:
        return OwnReading(None, source=where, reason=text("no graph was captured in this run"))
    sizes = [each.read("device_free_bytes", at.simulated) for each in (begin, end)]
    return _difference(sizes[0], sizes[1], where)


def _free_before_load(spans: Sequence[Span], simulated: bool) -> OwnReading:
    """SGLang reads right after an empty_cache, before it loads the weights."""
    load = last_of(spans, "weight_load")
    if load is None:
        return OwnReading(None, reason=text("weight_load was not recorded to its end"))
    emptied = [span for span in spans if span.phase == "empty_cache" and span.order < load.order]
    last = emptied[-1].after if emptied else None
    where = text("after the last empty_cache before weight_load")
    return EngineMoment(last, load.before, where).read("device_free_bytes", simulated)


def _free_after_load(spans: Sequence[Span], simulated: bool) -> OwnReading:
    sizing = last_of(spans, "kv_cache_sizing")
    inside = [
        span
        for span in spans
        if sizing is not None and span.phase == "empty_cache" and span.parent == sizing.order
    ]
    where = text("after the empty_cache of kv_cache_sizing")
    last = inside[-1].after if inside else None
    after = None if sizing is None else sizing.after
    return EngineMoment(last, after, where).read("device_free_bytes", simulated)


#: SGLang's ranks agree on the least of a figure in 32 bits: below 128 GiB it is off by 4 KiB at
#: most.
_FLOAT32_BYTES = 4096


_OfARank = Callable[[Sequence[Span], bool], OwnReading]


class ReplicaEdges:
    """The ranks that agree on one KV cache, by the least of what each of them reads."""

    def __init__(self, ranks: Sequence[Sequence[Span]], simulated: bool) -> None:
        """Take the phases of each rank, and whether a device's profile sets what they read."""
        self._ranks = ranks
        self._simulated = simulated
        self._found: dict[_OfARank, OwnReading] = {}

    def least(self, read: _OfARank) -> OwnReading:
        """Return the least of all ranks; unknown where one of them has no reading."""
        if read not in self._found:
            self._found[read] = self._least(read)
        return self._found[read]

    def _least(self, read: _OfARank) -> OwnReading:
        each = [read(spans, self._simulated) for spans in self._ranks]
        least = min(each, key=lambda own: -1 if own.bytes is None else own.bytes)
        if len(each) == 1:
            return least
        if least.bytes is None:
            return OwnReading(
                None, source=least.source, reason=text("another rank has no such reading")
            )
        return replace(least, tolerance=least.tolerance + _FLOAT32_BYTES)


def _least(at: OwnEdges, read: _OfARank) -> OwnReading:
    """Return the least of all ranks, as the engine takes it; of this one where it has none."""
    own = read(at.spans, at.simulated)
    return own if own.bytes is None or at.replica is None else at.replica.least(read)


def _difference(more: OwnReading, less: OwnReading, source: Text) -> OwnReading:
    if more.bytes is None or less.bytes is None:
        unread = more if more.bytes is None else less
        reason = text("{edge}: {reason}", edge=unread.source or source, reason=unread.reason)
        return OwnReading(
            None, source=source, reason=unread.reason if unread.source is None else reason
        )
    how = weakest((DERIVED, more.how, less.how))
    tolerance = more.tolerance + less.tolerance
    return OwnReading(more.bytes - less.bytes, tolerance, how, source, _EACH_OF_ITS_PARTS)


#: Figure of the engine -> memprof's reading of the same memory. A figure that is not here, and that
#: no difference of these gives, has no independent reading.
_READINGS: dict[str, Callable[[OwnEdges], OwnReading]] = {
    "device_total_bytes": _total,
    "initial_free_bytes": _initial_free,
    "initial_non_torch_bytes": _initial_non_torch,
    "weights_bytes": _weights,
    "profile_before_allocated_peak_bytes": _allocated_before,
    "profile_before_non_torch_bytes": lambda at: at.profile_begin().read(
        "non_torch_bytes", at.simulated
    ),
    "profile_after_allocated_peak_bytes": _peak,
    "peak_activation_bytes": lambda at: _difference(
        _peak(at), _allocated_before(at), text("peak of the profile run less allocated before it")
    ),
    "profile_end_free_bytes": lambda at: at.profile_end().read("device_free_bytes", at.simulated),
    "profile_end_non_torch_bytes": lambda at: at.profile_end().read(
        "non_torch_bytes", at.simulated
    ),
    "profile_after_allocated_bytes": lambda at: at.profile_after().read(
        "allocated_bytes", at.simulated, _SAME_COUNTER
    ),
    "profile_after_free_bytes": _free_after,
    "profile_after_non_torch_bytes": _non_torch_after,
    "non_torch_increase_bytes": lambda at: _difference(
        _non_torch_after(at),
        _initial_non_torch(at),
        text("non-torch after the profile run less non-torch before hccl_init"),
    ),
    "graph_bytes": _graph,
    "least_free_before_load_bytes": lambda at: _least(at, _free_before_load),
    "least_free_after_load_bytes": lambda at: _least(at, _free_after_load),
}
#: Figures that stand in a term and in the request, and have no row of their own.
_LEAST_OF_RANKS = frozenset({"least_free_before_load_bytes", "least_free_after_load_bytes"})
#: Terms that memprof cannot read, and why.
_UNREADABLE: dict[str, Text] = {
    "graph_estimate": text("an estimate of the engine: nothing holds it when it is made"),
    "mm_reserved": text("set aside: nothing holds it when the KV cache is sized"),
    "page_rounding": text("a page of the pool, as the engine makes it"),
    "mm_ipc": text("set aside for the front end: nothing holds it during the start-up"),
    "consumed": text("the engine computes it from the host's memory"),
}
#: Terms that set memory aside -> the engine's limit of what is taken from it later. No memory is
#: read: it says whether two settings of the engine are the same.
_SET_ASIDE: dict[str, tuple[str, Text]] = {
    "mm_reserved": (
        "mm_cache_limit_bytes",
        text("limit of the cache of embeddings that the engine makes later"),
    ),
}
_NOT_HELD = text("nothing: two settings of the engine, of memory that nothing holds yet")
#: Figures beside the terms of equations -> their titles.
TITLES: dict[str, Text] = {
    "device_total": text("device total"),
    "initial_free": text("free at the start"),
    "initial_non_torch": text("non-torch at the start"),
    "profile_before_allocated_peak": text("allocated before profiling"),
    "profile_before_non_torch": text("non-torch before profiling"),
    "profile_after_allocated_peak": text("allocated peak of profiling"),
    "profile_after_non_torch": text("non-torch after profiling"),
    "profile_after_free": text("free after profiling"),
    "kv_cache": text("KV cache"),
}
#: Terms that are differences of which memprof does not know both moments, and why.
_NO_SPAN: dict[str, Text] = {
    "transient_headroom": text("from which allocated memory this release counts it was not read"),
}
_NOT_KEPT = text("the engine keeps no figure of it: memprof's reading stands in the equation")
_FROM_LOG = text("a log holds the engine's figures only")


def audit(
    equation: Equation,
    engine: Figures,
    spans: Sequence[Span],
    source: str,
    simulated: bool,
    asked_utilization: float | None = None,
    replica: ReplicaEdges | None = None,
) -> list[AuditRow]:
    """Return a row per term of the equation, and one per other figure of the engine.

    Args:
        equation: of the engine.
        engine: the figures that the engine itself keeps; none that memprof filled in.
        spans: phases of the rank.
        source: of the run, ``hooks`` or ``log``. A log has no reading of memprof.
        simulated: a device's profile sets what lies outside torch.
        asked_utilization: ``--gpu-memory-utilization`` of the command, None where it was not given.
        replica: the ranks that agree on one KV cache; None: this one alone.

    Returns:
        Rows in bytes: the request, the terms, the other figures, and last the KV cache that the
        equation gives with memprof's readings alone.
    """
    estimates = bool(engine.get("graph_estimate_bytes"))
    at = OwnEdges(spans, simulated, equation, estimates, replica)
    own = {} if source == "log" else {name: read(at) for name, read in _READINGS.items()}
    utilization = asked_utilization or engine.get(equation.share)
    total = own.get(equation.base)
    request = _request(equation, total, utilization, asked_utilization)
    terms = {term.name: _of_term(term, own, engine) for term in equation.terms}
    rows = [_row("requested", _whole(engine.get("requested_bytes")), request, source)]
    for term in equation.terms:
        passed = equation.pages is not None and term.figure == "half_page_bytes"
        if not passed and not (term.optional and term.value(engine) is None):
            rows.append(_row(term.name, term.value(engine), terms[term.name], source))
    of_terms = {term.figure for term in equation.terms} | _LEAST_OF_RANKS
    for name in _READINGS:
        if engine.get(name) is not None and name not in of_terms:
            reading = own.get(name, OwnReading(None))
            rows.append(_row(name.removesuffix("_bytes"), _whole(engine[name]), reading, source))
    granted = _granted(equation, engine, request, total, utilization, terms, own)
    return [*rows, _row("kv_cache", _whole(engine.get("kv_cache_bytes")), granted, source)]


def _whole(value: float | int | None) -> int | None:
    return None if value is None else int(value)


def _request(
    equation: Equation, total: OwnReading | None, utilization: float | None, asked: float | None
) -> OwnReading:
    if total is None or total.bytes is None or utilization is None:
        return OwnReading(None, reason=text("device total or utilization is unknown"))
    figures = {equation.base: total.bytes, equation.share: utilization}
    size = equations.computed_request(equation, figures)
    if equation.base != "device_total_bytes":
        source = text("free memory as read x the share as the engine holds it")
        return OwnReading(_whole(size), total.tolerance, weakest((DERIVED, total.how)), source)
    source = text("device total as read x utilization of the command")
    if asked is None:
        source = text("device total as read x utilization as the engine holds it")
    return OwnReading(_whole(size), 0, DERIVED, source, _CONSTANT)


def _of_term(term: Term, own: Mapping[str, OwnReading], engine: Figures) -> OwnReading:
    """Return memprof's reading of a term: that of its figure, else of the figures it is made of."""
    if term.name in _NO_SPAN:
        return OwnReading(None, reason=_NO_SPAN[term.name])
    if term.figure is not None and term.figure in own:
        return own[term.figure]
    limit, source = _SET_ASIDE.get(term.name, ("", None))
    if own and engine.get(limit) is not None:
        return OwnReading(_whole(engine[limit]), 0, DERIVED, source, _NOT_HELD)
    parts = (*term.plus, *term.minus)
    if not own or not parts or any(name not in own for name in parts):
        return OwnReading(None, reason=_UNREADABLE.get(term.name))
    unread = next((own[name] for name in parts if own[name].bytes is None), None)
    if unread is not None:
        return OwnReading(None, reason=unread.reason)
    size = term.derived({name: own[name].bytes for name in parts})
    source = text(
        "{added} less {taken}",
        added=join(" + ", [own[name].source or name for name in term.plus]),
        taken=join(" + ", [own[name].source or name for name in term.minus]),
    )
    how = weakest([DERIVED, *(own[name].how for name in parts)])
    tolerance = sum(own[name].tolerance for name in parts)
    return OwnReading(size, tolerance, how, source, _EACH_OF_ITS_PARTS)


def _granted(
    equation: Equation,
    engine: Figures,
    request: OwnReading,
    total: OwnReading | None,
    utilization: float | None,
    terms: Mapping[str, OwnReading],
    own: Mapping[str, OwnReading],
) -> OwnReading:
    """Evaluate the equation with memprof's readings; an estimate is the engine's, and named."""
    if equation.override and engine.get(equation.override) is not None:
        return OwnReading(None, reason=text("a fixed size replaced the equation"))
    if request.bytes is None or utilization is None or total is None:
        return OwnReading(None, reason=request.reason)
    figures: dict[str, int | float | None] = {
        equation.base: total.bytes,
        equation.share: utilization,
        "graph_estimate_charged": engine.get("graph_estimate_charged"),
    }
    used: list[OwnReading] = [request]
    borrowed: list[str] = []
    if equation.limited_by and engine.get(equation.limited_by) is not None:
        return OwnReading(None, reason=text("a fixed size replaced the equation"))
    if equation.pages is not None:
        figures[equation.pages] = engine.get(equation.pages)
    for stage in equation.stages:
        if stage.factor(engine) is not None:
            if stage.replaces:
                reason = text("the engine's planner of blocks made it of the device's budget")
                return OwnReading(None, reason=reason)
            figures |= {name: engine.get(name) for name in stage.figures}
            borrowed.append(stage.name)
    for term in equation.terms:
        if not term.is_subtracted(engine):
            continue
        if term.figure is None:
            figures |= {name: own[name].bytes for name in (*term.plus, *term.minus) if name in own}
            used.append(terms[term.name])
            continue
        if equation.pages is not None and (term.optional or term.figure == "half_page_bytes"):
            figures[term.figure] = term.value(engine)  # of the engine's own set-up
            continue
        size = terms[term.name].bytes
        if size is not None:
            used.append(terms[term.name])
        elif term.name in _UNREADABLE:
            size = term.value(engine)
            borrowed += [term.name] if size else []
        else:
            return OwnReading(None, reason=text("{term} has no reading", term=term.name))
        figures[term.figure] = size
    if len(used) == 1:
        return OwnReading(None, reason=text("no term has a reading"))
    source = text("the equation with memprof's readings")
    if borrowed:
        source = text(
            "the equation with memprof's readings, and the engine's {terms}",
            terms=", ".join(borrowed),
        )
    size = equations.evaluate(equation, figures).kv_cache_bytes
    if size is None:
        return OwnReading(None, source=source, reason=text("a term has neither reading nor figure"))
    tolerance = sum(each.tolerance for each in used) // equation.divisor
    how = weakest([DERIVED, *(each.how for each in used)])
    return OwnReading(size, tolerance, how, source, _EACH_OF_ITS_PARTS)


def _row(name: str, engine: int | None, own: OwnReading, source: str) -> AuditRow:
    reason = _FROM_LOG if source == "log" else own.reason
    if own.bytes is not None:
        reason = _NOT_KEPT if engine is None else None
    elif reason is None:
        reason = text("memprof does not read it")
    if own.bytes is not None and engine is not None and own.tolerance > MOST_TOLERANCE_BYTES:
        reason = text(
            "it moved by {size:gib} GiB between the readings that enclose the engine's",
            size=own.tolerance,
        )
    return AuditRow(
        term=name,
        engine_bytes=engine,
        own_bytes=own.bytes,
        tolerance_bytes=None if own.bytes is None else own.tolerance,
        undecided=own.bytes is not None and own.tolerance > MOST_TOLERANCE_BYTES,
        how=own.how if own.bytes is not None else None,
        source=own.source,
        between=own.between if own.bytes is not None else None,
        reason=reason,
    )


def audit_title(row: AuditRow) -> str:
    """Return the title of a row: that of its quantity, or of its moment."""
    found = TITLES.get(row.term)
    return found if found is not None else title_of(row.term)
