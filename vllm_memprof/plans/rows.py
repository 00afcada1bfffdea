"""Rows of plans, and the results of a search or a sweep over plans, which reporters start from.

``plan_row`` makes a row from a run and its report. Bytes are integers, None is unknown.
The keys of their JSON are read by programs (``memprof.sweep/3``, ``memprof.fit/3``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm_memprof.accounting.budget.decomposition import granted_bytes
from vllm_memprof.accounting.budget.kv import concurrency_at
from vllm_memprof.accounting.model import Oom, Report
from vllm_memprof.plans.request import Plan
from vllm_memprof.record.codec import computed
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import FullStep
from vllm_memprof.record.spans import How, weakest
from vllm_memprof.units import one_line

#: Where a plan stops: at the KV plan; or it goes on, and runs its largest batches.
KV, READY = "kv", "ready"
#: Terms of the budget that a row has, of the rank with the least KV cache.
TERMS = ("weights", "peak_activation", "non_torch")


@dataclass(frozen=True)
class PlanRow:
    """One plan. Of several ranks the least KV cache and headroom: all ranks serve with that."""

    values: dict[str, str]  # option -> value as asked for
    status: str  # ok | oom | failed
    reason: str | None = None  # why it is not ok, one line
    devices: int | None = None
    run_id: str | None = None
    run: str | None = None  # its run folder, relative to that of the sweep
    seconds: float | None = None  # that the plan took, also where it was not run again
    cached: bool = False  # the plan had been made before
    final: bool = True  # False: ended by a deadline, a signal or the host; another try may succeed
    device_total_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    requested_bytes: int | None = None
    terms: dict[str, int | None] = field(default_factory=dict)  # TERMS, bytes
    #: Granted by the engine; where it refused to start, what its equation gives.
    kv_cache_bytes: int | None = None
    fits_request_bytes: int | None = None
    tokens: int | None = None
    fits_request_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None  # at max_model_len
    #: Length in tokens -> requests at once.
    concurrency_at: dict[int, float | None] = field(default_factory=dict)
    fits_device_bytes: int | None = None
    fits_device_tokens: int | None = None
    #: As in ``accounting.model.Budget``: at the serving peak, without what comes after the plan.
    headroom_bytes: int | None = None
    headroom_how: How | None = None
    simulated: bool = False
    equation: str | None = None
    balanced: bool | None = None
    until: str | None = None  # kv | ready
    step: FullStep | None = None  # of a plan until ready: its largest batches

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def title(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    @computed
    def survived(self) -> bool:
        """It came up, and its largest batches were run to their end."""
        step = self.step
        return self.ok and step is not None and step.not_run is None and bool(step.prefill_tokens)


@dataclass(frozen=True)
class Knob:
    """One option that a sweep varies."""

    name: str  # without dashes
    values: list[str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command that makes plans has found."""

    command: list[str] = field(default_factory=list)  # as typed, secrets redacted
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sweep(Answer):
    """All combinations of the knobs' values, in the order in which the last knob varies fastest."""

    model: str
    knobs: list[Knob]
    rows: list[PlanRow]
    SCHEMA: ClassVar[str] = "memprof.sweep/3"


@dataclass(frozen=True)
class Miss:
    """A condition that a plan does not meet."""

    text: str
    #: Of the want; length: of requests; plan: it failed; room: none for a KV cache; small: of a
    #: batch; refused: no value would do.
    kind: str
    short_bytes: int | None = None  # None: not a matter of bytes, or not known


@dataclass(frozen=True)
class Try:
    """One plan of a search."""

    value: str
    plan: PlanRow
    missing: list[Miss]  # empty where it passes

    @property
    @computed
    def holds(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class OwnerChange:
    """An owner of device memory in the plan of the answer and in one that does not pass."""

    name: str  # of ``accounting.readings.quantities``, or kv_cache
    title: str
    answer_bytes: int
    beyond_bytes: int
    how: How

    @property
    @computed
    def difference_bytes(self) -> int:
        return self.beyond_bytes - self.answer_bytes


@dataclass(frozen=True)
class FirstFailure:
    """The first value that does not pass, and why."""

    value: str
    #: oom: an allocation failed. kv-cache: the engine refused to start with so small a KV cache.
    #: in-use: it refused because the device is in use. want: a condition is not met. failed:
    #: anything else, in the engine's words.
    kind: str
    text: str  # why, in one line
    label: str | None = None  # of the rank that the figures are of
    #: Bytes that it lacks; None: not a matter of bytes, not known, or free in pieces.
    short_bytes: int | None = None
    at_least: bool = False  # short_bytes is what is known to lack: it may be more
    oom: Oom | None = None
    modelled: bool = (
        False  # what was free, or the headroom, follows from a simulated device's profile
    )
    #: What both plans tell of, by growth; empty where there is no answer.
    owners: list[OwnerChange] = field(default_factory=list)


@dataclass(frozen=True)
class Fit(Answer):
    """A search for the best value of one option."""

    model: str
    knob: str  # devices, or an option without dashes
    option: str  # that the engine takes, with dashes
    goal: str  # smallest | largest
    wanted: list[str]  # in words
    low: str  # range of the search, both ends included
    high: str
    step: str  # from a value to the next, in words
    tries: list[Try]  # in their order
    answer: str | None  # None: no value tried holds
    ordered: bool  # False: a value beyond one that does not hold does, there may be a better one
    flag: str | None = None  # what to give the engine for the answer
    #: What a plan had to reach: kv, its KV plan; ready, the end of its largest batches.
    until: str = KV
    beyond: FirstFailure | None = None
    SCHEMA: ClassVar[str] = "memprof.fit/3"

    @property
    def best(self) -> Try | None:
        return next((each for each in self.tries if each.value == self.answer), None)


def plan_row(run: Run, report: Report, plan: Plan) -> PlanRow:
    """Return the row of a plan that has left a run folder, and its report."""
    head, outcome = report.run, report.run.outcome
    totals = (rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes)
    row = PlanRow(
        values=dict(plan.values),
        status=outcome if outcome in ("ok", "oom") else "failed",
        reason=None if outcome == "ok" else one_line(head.exit_reason or outcome),
        devices=plan.devices,
        run_id=head.id,
        seconds=head.seconds,
        simulated=head.simulated,
        until=head.until,
        step=head.full_step,
        device_total_bytes=next(totals, None),
    )
    granted = [rank for rank in report.ranks if granted_bytes(rank) is not None]
    if not granted:
        return row
    least = min(granted, key=lambda rank: granted_bytes(rank) or 0)
    budget, kv, budgets = least.budget, least.kv, [rank.budget for rank in report.ranks]
    balanced = [each.balanced for each in budgets]
    kv_plan = next((process.kv_plan for process in run.processes if process.kv_plan), None)

    def least_of(name: str) -> int | None:
        """Return the least of a figure of all ranks; None where one of them is unknown."""
        sizes = [getattr(each, name) for each in budgets]
        return None if None in sizes else min(sizes)

    spare = least_of("headroom_bytes") if row.ok else None
    hows = [each.how["headroom_bytes"] for each in budgets if "headroom_bytes" in each.how]
    return replace(
        row,
        gpu_memory_utilization=budget.gpu_memory_utilization,
        requested_bytes=budget.requested_bytes,
        terms={name: budget.term(name) for name in TERMS},
        kv_cache_bytes=granted_bytes(least),
        fits_request_bytes=least_of("fits_request_bytes"),
        tokens=kv.tokens,
        fits_request_tokens=least_of("fits_request_tokens"),
        max_model_len=kv.max_model_len,
        max_concurrency=kv.max_concurrency,
        concurrency_at={
            length: None if kv_plan is None else concurrency_at(kv_plan, length)
            for length in plan.lengths
        },
        fits_device_bytes=least_of("fits_device_bytes"),
        fits_device_tokens=least_of("fits_device_tokens"),
        headroom_bytes=spare,
        headroom_how=None if spare is None else weakest(hows),
        equation=budget.equation,
        balanced=None if None in balanced else all(balanced),
    )
