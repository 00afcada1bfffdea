"""A plan as requested, its row, and what questions over plans find: what reporters start from.

``plan_row`` makes a row from a run and its report. Bytes are integers, None is unknown.
The keys of their JSON are read by programs (``memprof.sweep/3``, ``memprof.fit/3``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from vllm_memprof.accounting.budget.decomposition import granted_bytes
from vllm_memprof.accounting.budget.kv import concurrency_at
from vllm_memprof.accounting.model import Oom, Report
from vllm_memprof.engines import engine_row
from vllm_memprof.files import read_own
from vllm_memprof.launch.request import DeviceChoice, parse_device
from vllm_memprof.options import devices_of, with_option
from vllm_memprof.record.codec import computed
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import FullStep
from vllm_memprof.record.spans import How, weakest
from vllm_memprof.redact import redact_value
from vllm_memprof.tables import TableFile
from vllm_memprof.units import Amount, one_line, only_known

#: Options of memprof that a sweep may vary as well.
OWN_OPTIONS = ("device", "stack", "python")
#: Values of memprof's options that are those of no option; of every other one, "auto".
_DEFAULTS = {"engine": "vllm", "until": "kv"}


@dataclass(frozen=True)
class Plan:
    """A plan as requested, before it is made."""

    model: str
    engine_args: list[str]
    #: Option -> value, for the row; secrets redacted.
    values: dict[str, str] = field(default_factory=dict)
    #: Options of memprof: device, stack, ranks...; "" is the value of one that takes none.
    own: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0  # until the engine must be ready
    lengths: tuple[int, ...] = ()  # tokens of requests whose concurrency is wanted

    @classmethod
    def asked(
        cls, model: str, engine_args: Sequence[str], own: Mapping[str, object], timeout_s: float
    ) -> Plan:
        """Return a plan with those options of memprof that were given and say no default."""
        said = {
            name: str(value)
            for name, value in own.items()
            if value is not None and value != _DEFAULTS.get(name, "auto")
        }
        return cls(model, list(engine_args), own=said, timeout_s=timeout_s)

    def vary(self, name: str, value: str) -> Plan:
        """Return the same plan with one option set: the engine's, or memprof's own."""
        values = {**self.values, name: redact_value(name, value)}
        if name in OWN_OPTIONS:
            return replace(self, own={**self.own, name: value}, values=values)
        negatable = engine_row(self.engine).arguments.negatable
        engine_args = with_option(self.engine_args, name, value, negatable)
        return replace(self, engine_args=engine_args, values=values)

    @property
    def devices(self) -> int:
        return devices_of(self.engine_args, engine_row(self.engine).devices)

    @property
    def engine(self) -> str:
        """Return the name of its engine, as ``--engine`` has it."""
        return self.own.get("engine", "vllm")

    @property
    def device(self) -> DeviceChoice:
        """Return its device.

        Raises:
            UsageError: there is no such kind of device.
        """
        return parse_device(self.own.get("device", "auto"))

    @property
    def stack(self) -> str | None:
        """Return its simulated stack; None: the default."""
        return self.own.get("stack") or engine_row(self.engine).stack

    @property
    def shares_nothing(self) -> bool:
        """Return True for simulated devices or none; real devices serve one plan at a time."""
        return self.device.kind in ("sim", "cpu")

    @property
    def title(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or self.model

    def command(self, run_dir: Path) -> list[str]:
        """Return the command of its process: ``memprof plan`` of this installation."""
        own = [f"--{name}={value}" if value else f"--{name}" for name, value in self.own.items()]
        own += [f"--run-dir={run_dir}", "--quiet", f"--startup-timeout={self.timeout_s:g}"]
        memprof = [sys.executable, "-m", "vllm_memprof", "plan"]
        return [*memprof, self.model, *own, "--", *self.engine_args]


@dataclass(frozen=True)
class Task:
    """One plan to make, in a folder of its own."""

    place: int  # among the plans of its question
    plan: Plan
    run_dir: Path
    key: str | None = None  # of its content (`store.key_of`)
    environ: Mapping[str, str] | None = None  # of its process; None: this process's


def folder_name(number: int, plan: Plan, width: int = 2) -> str:
    """Return the name of a plan's folder: its number and its values, in safe characters."""
    values = re.sub(r"[^A-Za-z0-9._=-]+", "-", plan.title).strip("-.")[:100]
    return f"{number:0{width}d}-{values or 'plan'}"


#: Names, figures, patterns and words that plans are told by.
TABLES = read_own(__file__, "tables.toml")
DOCUMENTS = TableFile(__file__, "documents.toml")
#: Where a plan stops: at the KV plan; or it goes on, and runs its largest batches.
KV, READY = "kv", "ready"
#: Figures of a row that the budget of the rank with the least KV cache has, that its KV cache has,
#: and that are the least of all ranks.
_OF_BUDGET = ("gpu_memory_utilization", "requested_bytes", "equation")
_OF_KV = ("tokens", "max_model_len", "max_concurrency")
_LEAST = (
    "fits_request_bytes",
    "fits_request_tokens",
    "fits_device_bytes",
    "fits_device_tokens",
    "headroom_bytes",
)


@dataclass(frozen=True)
class PlanRow:
    """One plan. Of several ranks the least KV cache and headroom: all ranks serve with that."""

    values: dict[str, str]  # option -> value as asked for
    status: str  # ok | oom | failed
    reason: str | None = None  # why it is not ok, one line
    devices: int | None = None
    #: Granted by the engine; where it refused to start, what its equation gives.
    kv_cache_bytes: Amount = None
    tokens: Amount = None
    max_concurrency: float | None = None  # at max_model_len
    max_model_len: Amount = None
    fits_request_bytes: Amount = None
    fits_request_tokens: Amount = None
    fits_device_bytes: Amount = None
    fits_device_tokens: Amount = None
    #: As in ``accounting.model.Budget``: at the serving peak, without what comes after the plan.
    headroom_bytes: Amount = None
    headroom_how: How | None = None
    device_total_bytes: Amount = None
    gpu_memory_utilization: float | None = None
    requested_bytes: Amount = None
    #: Terms of the budget of the rank with the least KV cache.
    weights_bytes: Amount = None
    peak_activation_bytes: Amount = None
    non_torch_bytes: Amount = None
    equation: str | None = None
    balanced: bool | None = None
    simulated: bool = False
    seconds: float | None = None  # that the plan took, also where it was not run again
    cached: bool = False  # the plan had been made before
    run: str | None = None  # its run folder, relative to that of the sweep
    run_id: str | None = None
    final: bool = True  # False: ended by a deadline, a signal or the host; another try may succeed
    #: Length in tokens -> requests at once.
    concurrency_at: dict[int, float | None] = field(default_factory=dict)
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
        return self.ok and self.step is not None and self.step.ran


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
    short_bytes: Amount = None  # None: not a matter of bytes, or not known


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
    short_bytes: Amount = None
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
        device_total_bytes=report.device_total_bytes,
    )
    granted = [rank for rank in report.ranks if granted_bytes(rank) is not None]
    if not granted:
        return row
    least = min(granted, key=lambda rank: granted_bytes(rank) or 0)
    budgets = [rank.budget for rank in report.ranks]
    figures = {name: getattr(least.budget, name) for name in _OF_BUDGET}
    figures |= {name: getattr(least.kv, name) for name in _OF_KV}
    for name in _LEAST if row.ok else _LEAST[:-1]:
        sizes = [getattr(each, name) for each in budgets]
        figures[name] = None if None in sizes else min(sizes)
    for name in ("weights", "peak_activation", "non_torch"):
        figures[f"{name}_bytes"] = least.budget.term(name)
    if figures.get("headroom_bytes") is not None:
        hows = (each.how.get("headroom_bytes") for each in budgets)
        figures["headroom_how"] = weakest(only_known(hows))
    balanced = [each.balanced for each in budgets]
    kv_plan = next((process.kv_plan for process in run.processes if process.kv_plan), None)
    return replace(
        row,
        kv_cache_bytes=granted_bytes(least),
        concurrency_at={
            length: None if kv_plan is None else concurrency_at(kv_plan, length)
            for length in plan.lengths
        },
        balanced=None if None in balanced else all(balanced),
        **figures,
    )
