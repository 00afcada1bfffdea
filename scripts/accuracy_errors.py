"""Signed errors of plans against published figures, and what of them is a prediction.

In: rows of the table, and what their plans gave. Out: an `Error` for each figure that both have.
An error is (simulated - published) / published. A published figure has the rounding of its digits,
so whether a target is met is asked of everything that rounds to it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from scripts.accuracy_runs import PublishedFigure, PublishedRun
from vllm_memprof.accuracy.spread import ErrorSpread

#: Figure -> largest error that is aimed at, of 1. Those without one are shown only.
TARGETS = {
    "weights": 0.001,
    "peak_activation": 0.03,
    "kv_cache": 0.005,
    "tokens": 0.005,
    "graphs": 0.3,
    "limit": 0.01,
}
#: Figure of which reports print the spread.
FIGURE = "kv_cache"
#: Fewer errors than this support no spread.
LEAST_RUNS = 5


@dataclass(frozen=True)
class PlannedRow:
    """What the plan of a row gave."""

    status: str  # ok, or why there are no figures: failed, oom
    seconds: float
    reason: str | None = None
    failure: str | None = None  # kind of failure, of a start that failed
    stack: str | None = None
    equation: str | None = None
    engine_version: str | None = None
    world_size: int = 1
    communicators: int = 0  # with a collective up to the KV plan
    neighbours: int = 0  # other processes with a context on the rank's device
    binaries: int = 0  # bytes of operators' binaries that its equation subtracts
    figures: Mapping[str, float | None] = field(default_factory=dict)  # bytes, counts
    graph_count: int | None = None  # captured graphs
    constants: Mapping[str, int] = field(default_factory=dict)  # of the device profile
    taken: Sequence[str] = ()  # those of them that were taken from a run
    #: Starts tried for a limit: value of the option -> KV cache granted / that of one request.
    tries: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None  # the value at which that is 1


@dataclass(frozen=True)
class Error:
    """One figure of one row, published and simulated. Bytes, or a count."""

    run: PublishedRun
    planned: PlannedRow
    figure: str
    published: PublishedFigure
    simulated: float

    @property
    def relative(self) -> float:
        return (self.simulated - self.published.value) / self.published.value

    @property
    def fitted(self) -> bool:
        """Return True if a constant in it was taken from this run; tokens follow the KV cache."""
        source = "kv_cache" if self.figure in ("tokens", "concurrency") else self.figure
        return source in self.run.fitted

    @property
    def counts(self) -> bool:
        """Return True if it is a prediction of a figure that was printed with its digits."""
        return not self.fitted and not self.run.inexact

    @property
    def target(self) -> float | None:
        return TARGETS.get(self.figure)

    @property
    def met(self) -> bool | None:
        """Return whether the target is met by something that rounds to the published figure."""
        if self.target is None:
            return None
        low, high = self.published.low, self.published.high
        return low * (1 - self.target) <= self.simulated <= high * (1 + self.target)

    @property
    def without_fitted(self) -> float | None:
        """Return the simulated figure without constants taken from any run; None: not known."""
        return without_fitted(self.planned, self.figure, self.simulated)

    @property
    def relative_without_fitted(self) -> float | None:
        value = self.without_fitted
        return None if value is None else (value - self.published.value) / self.published.value


def errors_of(run: PublishedRun, planned: PlannedRow) -> list[Error]:
    """Return the error of every figure that the row and its plan have."""
    found = []
    for name, published in run.published.items():
        simulated = planned.figures.get(name)
        if simulated is not None and published.value:
            found.append(Error(run, planned, name, published, simulated))
    if run.limit is not None and planned.limit is not None:
        middle = (run.limit.starts + run.limit.fails) / 2
        interval = PublishedFigure(middle, (run.limit.fails - run.limit.starts) / 2)
        found.append(Error(run, planned, "limit", interval, planned.limit))
    return found


def without_fitted(planned: PlannedRow, figure: str, simulated: float) -> float | None:
    """Return a figure with every constant that was taken from a run set to nothing.

    E2 subtracts all non-torch memory of the device, contexts included; E3 and E4 what was added
    since the process began. HCCL takes something beside the buffers of each communicator.
    """
    taken = {name: planned.constants[name] for name in planned.taken}
    non_torch = taken.get("hccl_base_bytes", 0) * planned.communicators
    non_torch += planned.binaries if "operator_binary_bytes" in taken else 0
    if planned.equation == "E2":
        non_torch += taken.get("context_bytes", 0)
        non_torch += taken.get("further_context_bytes", 0) * planned.neighbours
    match figure:
        case "kv_cache":
            return simulated + non_torch
        case "non_torch":
            return simulated - non_torch
        case "tokens" | "concurrency":
            kv_cache = planned.figures.get("kv_cache")
            return simulated * (1 + non_torch / kv_cache) if kv_cache else None
        case "graphs":
            each = taken.get("graph_capture_bytes", 0)
            per_task = taken.get("graph_argument_bytes", 0) + taken.get("graph_queue_bytes", 0)
            if per_task or (each and planned.graph_count is None):
                return None  # tasks are not counted in a report
            return simulated - each * (planned.graph_count or 0)
        case "limit":
            return None if non_torch else simulated
    return simulated


@dataclass(frozen=True)
class Statistics:
    """Of signed relative errors."""

    count: int
    median: float
    percentile_90: float  # of their sizes
    worst: Error
    met: int | None  # errors within the target; None without one


def statistics_of(errors: Iterable[Error]) -> Statistics | None:
    """Return the statistics of those errors that count; None where none does."""
    counted = [each for each in errors if each.counts]
    if not counted:
        return None
    signed = [each.relative for each in counted]
    sizes = sorted(abs(each) for each in signed)
    met = [each.met for each in counted]
    return Statistics(
        count=len(counted),
        median=statistics.median(signed),
        percentile_90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        worst=max(counted, key=lambda each: abs(each.relative)),
        met=None if None in met else sum(bool(each) for each in met),
    )


def spreads_text(errors: Sequence[Error], profiles: Mapping[str, str]) -> str:
    """Return the content of ``vllm_memprof/accuracy/data/spread.json``.

    Args:
        errors: of the whole table.
        profiles: device of a row -> name of its profile.
    """
    kv = [error for error in errors if error.figure == FIGURE and error.counts]
    kinds = sorted({(error.planned.equation or "", error.run.device) for error in kv})
    rows = []
    for equation, device in kinds:
        off = [
            round(each.simulated - each.published.value)
            for each in kv
            if (each.planned.equation, each.run.device) == (equation, device)
        ]
        if len(off) >= LEAST_RUNS:
            of_kind = min(off), round(statistics.median(off)), max(off)
            rows.append(ErrorSpread(equation, profiles[device], len(off), *of_kind))
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"
