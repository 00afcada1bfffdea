"""What is known of a run at this moment: event lines enter, the state that all views show leaves.

The progress lines, the live view, ``memprof attach``, the metrics and the verdict read it. No
files, clock or processes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_memprof.launch.host import Seen
from vllm_memprof.launch.requests import Requests
from vllm_memprof.record.schema import RunInfo
from vllm_memprof.text import text
from vllm_memprof.units import Amount, largest, smallest

#: An event as the tail reads it; another release may have written it.
Event = Mapping[str, Any]

#: Roles that matter to the run, beside "worker": such a process must not go away before the engine
#: ends.
_ROLE_LABELS = {
    "engine_core": "EngineCore",
    "api": "API server",
    "detokenizer": "detokenizer",
}


@dataclass
class PhaseProgress:
    """One passage through a phase."""

    id: object
    phase: str
    start_t_ns: int | None  # CLOCK_MONOTONIC
    depth: int  # 0 at the top level
    end_t_ns: int = 0  # of one that is done
    error: str | None = None
    snapshot: Mapping[str, int] = field(default_factory=dict)  # after; bytes, only what is known


@dataclass(frozen=True)
class Load:
    """What an engine core does at its last sample, or all of them together; None where unknown."""

    t_ns: int  # CLOCK_MONOTONIC; of the oldest sample
    requests_running: Amount = None
    requests_waiting: Amount = None
    kv_blocks_used: Amount = None
    kv_blocks: Amount = None
    kv_cache_used_bytes: Amount = None  # on the worker that holds the most
    kv_cache_bytes: Amount = None


#: How figures of several engine cores become one.
_TOGETHER: Mapping[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(("requests_running", "requests_waiting", "kv_blocks_used", "kv_blocks"), sum),
    **dict.fromkeys(("kv_cache_used_bytes", "kv_cache_bytes"), max),
}


@dataclass(frozen=True)
class Lost:
    """Workers on a Ray node that are gone: all of the node, or the one of a rank."""

    node: str  # id, as Ray gives it
    rank: int | None  # None: the node is gone
    reason: str


@dataclass(frozen=True)
class GrowingOwner:
    """An owner of a rank's memory that grows while the engine serves; None where unknown."""

    owner: str
    bytes_per_hour: float | None
    hours_until_full: float | None  # of the device, at this rate


@dataclass(frozen=True)
class RankBudget:
    """What accounting says of one rank, when the engine is ready or later; None where unknown."""

    label: str
    pid: int | None
    kv_cache_granted_bytes: Amount
    kv_cache_fits_request_bytes: Amount
    kv_cache_fits_device_bytes: Amount
    headroom_bytes: Amount  # at the serving peak
    owners: Mapping[str, int] = field(default_factory=dict)  # at the last phase edge
    #: Owners that grow; empty: none of those that could be judged. None: none could be yet.
    growth: tuple[GrowingOwner, ...] | None = None
    host: Mapping[str, int] = field(default_factory=dict)  # host memory by owner
    kv_usable_tokens: Amount = None  # most that requests can hold at once


@dataclass
class ProcessProgress:
    """One process, folded from its event file."""

    file: str
    host: str | None = None
    node: str | None = None  # id of its Ray node
    pid: int | None = None
    wall: float | None = None  # time.time() at its first event
    roles: set[str] = field(default_factory=set)
    label: str | None = None
    rank: int | None = None
    open: list[PhaseProgress] = field(default_factory=list)  # outermost first
    done: list[PhaseProgress] = field(default_factory=list)
    readings: dict[str, int] = field(default_factory=dict)  # latest known, by snapshot field
    shutting_down: bool = False
    last_t_ns: int = 0
    kv_blocks: int = 0  # of an engine core: the KV cache that it serves with
    kv_cache_bytes: Amount = None  # of all blocks, on the worker that holds the most
    load: Load | None = None  # of an engine core, while it serves
    lowest_free_bytes: int = sys.maxsize  # of the device, by samples
    samples: int = 0  # lines of all kinds of samples
    open_requests: set[str] = field(default_factory=set)  # ids
    request_end_t_ns: int = 0  # of the last one that ended
    lost_events: int = 0  # that could not be written; known once writing went on
    blind_because: str | None = None  # events are lost, and no later one says for how long
    budget: RankBudget | None = None  # once the engine was ready

    @property
    def is_worker(self) -> bool:
        return "worker" in self.roles or bool(self.open or self.done)

    @property
    def matters(self) -> bool:
        return self.is_worker or not self.roles.isdisjoint(_ROLE_LABELS)

    @property
    def name(self) -> str:
        """Return the name for a person: the label, else the role, else the process id."""
        roles = (label for role, label in _ROLE_LABELS.items() if role in self.roles)
        kind = "worker" if self.is_worker else "process"
        return self.label or next(roles, f"{kind} {self.pid}")

    @property
    def headroom_bytes(self) -> int | None:
        """Return accounting's figure of the serving peak, or the least free memory of a sample."""
        known = None if self.budget is None else self.budget.headroom_bytes
        return None if known is None else min(known, self.lowest_free_bytes)

    def where(self, t_ns: int = sys.maxsize) -> str | None:
        """``in mm_profile (inside profile_run)``, ``after weight_load``, None before its first
        phase; at a time of the past without what is inside of one that has ended since."""
        begun = [each for each in self.done if each.depth == 0 and (each.start_t_ns or 0) < t_ns]
        under_way = [each for each in self.open if (each.start_t_ns or 0) < t_ns]
        if begun and begun[-1].end_t_ns > t_ns:
            under_way = begun[-1:]
        if len(under_way) > 1:
            inner, outer = under_way[-1].phase, under_way[0].phase
            return text("in {phase} (inside {outer})", phase=inner, outer=outer)
        if under_way:
            return text("in {phase}", phase=under_way[0].phase)
        return text("after {phase}", phase=begun[-1].phase) if begun else None

    def _fold_phase(self, event: Event, t_ns: int) -> PhaseProgress | None:
        """Return the phase that ended."""
        name, snapshot = str(event.get("phase")), _sizes(event.get("snapshot") or {})
        self.readings |= snapshot
        if event.get("edge") == "before":
            self.open.append(PhaseProgress(event.get("id"), name, t_ns, len(self.open)))
            return None
        begun = (each for each in self.open if each.id == event.get("id"))
        phase = next(begun, PhaseProgress(None, name, None, len(self.open)))
        self.open = [each for each in self.open if each is not phase]
        phase.end_t_ns, phase.error, phase.snapshot = t_ns, event.get("error"), snapshot
        self.done.append(phase)
        return phase

    def _fold_sample(self, event: Event, t_ns: int) -> None:
        self.samples += 1
        if event.get("kind") == "kv_sample":
            used, total = event.get("kv_blocks_used"), self.kv_cache_bytes
            held = None
            if used is not None and total is not None and self.kv_blocks:
                held = total * used // self.kv_blocks
            running, waiting = event.get("running"), event.get("waiting")
            blocks = event.get("kv_blocks_total")
            self.load = Load(t_ns, running, waiting, used, blocks, held, total)
            return
        fresh = _sizes(event)
        self.readings |= fresh
        free = fresh.get("device_free_bytes", sys.maxsize)
        self.lowest_free_bytes = min(free, self.lowest_free_bytes)


def _sizes(figures: Event) -> dict[str, int]:
    """Return the sizes among the figures of a snapshot or a sample, those that are known."""
    return {name: size for name, size in figures.items()
            if name.endswith("_bytes") and isinstance(size, int)}  # fmt: skip


@dataclass
class EngineProgress:
    """All processes of the engine, and what accounting and the engine's output say of the run."""

    host: str | None = None  # of the launcher: process ids are those of its own host
    by_file: dict[str, ProcessProgress] = field(default_factory=dict)
    ready_t_ns: dict[str, list[int]] = field(default_factory=dict)  # what -> when, of each
    versions: dict[str, str] = field(default_factory=dict)
    soc: str | None = None
    first_error: tuple[int, str, str, str] | None = None  # t_ns, process name, phase, message
    oom_message: str | None = None
    ranks: Event | None = None  # of a plan: which ranks are run
    full_step: Event | None = None  # of a plan: the largest batches that it ran
    shutdown_t_ns: int | None = None  # when the first process began to shut down in good order
    lost: list[Lost] = field(default_factory=list)  # on Ray nodes, each once
    serves: bool = False  # views show what it does, no longer how it starts
    requests: Requests = field(default_factory=Requests)  # of an offline run
    output: deque[str] = field(default_factory=deque)  # last lines of the engine
    seen: dict[int, Seen] = field(default_factory=dict)  # process id -> its last reading

    @property
    def processes(self) -> list[ProcessProgress]:
        """Return all processes in the order of their ranks."""

        def by_rank(process: ProcessProgress) -> tuple[bool, int, str]:
            number = process.pid or 0 if process.rank is None else process.rank
            return process.rank is None, number, process.file

        return sorted(self.by_file.values(), key=by_rank)

    @property
    def workers(self) -> list[ProcessProgress]:
        return [process for process in self.processes if process.is_worker]

    @property
    def serving(self) -> Load | None:
        """Return what the engine cores do, all replicas together; None: no sample of one."""
        loads: list[Load] = []
        for process in self.by_file.values():
            load = process.load
            if load is None:
                continue
            if not process.open_requests and process.request_end_t_ns >= load.t_ns:
                load = replace(load, requests_running=0, requests_waiting=0)  # all ended since
            loads.append(load)
        if not loads:
            return None
        figures: dict[str, int | None] = {}
        for name, together in _TOGETHER.items():
            values = [getattr(load, name) for load in loads]
            figures[name] = None if None in values else together(values)
        return Load(min(load.t_ns for load in loads), **figures)

    @property
    def headroom_bytes(self) -> int | None:
        """Return the least of all ranks; None where one of them is unknown."""
        sizes = [process.headroom_bytes for process in self.workers]
        return None if None in sizes else smallest(sizes)

    @property
    def growing(self) -> list[tuple[str, GrowingOwner]]:
        """Return (rank, owner that grows) of all ranks, the fastest first."""
        found = [
            (process.name, owner)
            for process in self.workers
            if process.budget is not None
            for owner in process.budget.growth or ()
        ]
        return sorted(found, key=lambda pair: -(pair[1].bytes_per_hour or 0))

    @property
    def growth_judged(self) -> bool:
        """Return whether the readings of every rank were enough to tell what grows."""
        budgets = [process.budget for process in self.workers]
        return bool(budgets) and all(each and each.growth is not None for each in budgets)

    @property
    def fullest(self) -> ProcessProgress | None:
        """Return the rank that has reserved the most; None where no rank has a reading."""
        known = [each for each in self.workers if "reserved_bytes" in each.readings]
        return max(known, key=lambda each: each.readings["reserved_bytes"], default=None)

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        """Take in what accounting says of the ranks: the engine serves from here on."""
        self.serves = True
        by_pid = {budget.pid: budget for budget in budgets if budget.pid is not None}
        for process in self.by_file.values():
            if process.pid is not None:
                process.budget = by_pid.get(process.pid)

    def ready_at(self, info: RunInfo) -> int | None:
        """Return when the start-up of a run ended, CLOCK_MONOTONIC; None: it has not.

        A host without an API server is ready when its engine cores are; one that has workers alone,
        of an engine core on another host, when those have warmed up.
        """
        part, wanted = info.part, 1
        headless = info.mode == "serve" and part is not None and part.headless
        what = {"serve": "server", "offline": "model", "plan": "plan"}[info.mode]
        if headless or info.until == "ready":
            what = "model"
        times = self.ready_t_ns.get(what, [])[: None if headless else 1]
        if headless and part is not None and part.node_rank:
            wanted = (part.world_size or 1) // (part.nodes or 1)
            warm = [[each.end_t_ns for each in process.done if each.phase == "warm_up"]
                    for process in self.workers]  # fmt: skip
            times = [ends[0] for ends in warm if ends]
        elif headless and part is not None:
            wanted = part.dp_local or 1
        return max(times) if len(times) >= wanted else None

    def by_pid(self, pid: int) -> ProcessProgress | None:
        """Return the process of that id on the launcher's host; one that has written nothing by its
        title."""
        here = (None, self.host)
        for each in self.by_file.values():
            if each.pid == pid and each.matters and (self.host is None or each.host in here):
                return each
        seen = self.seen.get(pid)
        return ProcessProgress("", label=seen.title) if seen and seen.title else None

    def fold(self, file: str, event: Event) -> None:
        """Take one event in; unknown kinds and missing keys are skipped."""
        process = self.by_file.setdefault(file, ProcessProgress(file))
        t_ns = event.get("t_ns")
        if not isinstance(t_ns, int):
            return
        process.last_t_ns = t_ns
        kind, role = event.get("kind"), event.get("role")
        if kind in ("process", "identity") and role and role != "unknown":
            process.roles.add(str(role))
        if kind == "process":
            process.host, process.pid = event.get("host"), event.get("pid")
            process.wall = event.get("wall")
            versions = event.get("versions") or {}
            self.versions = {**{name: each for name, each in versions.items() if each},
                             **self.versions}  # fmt: skip
        elif kind == "identity":
            process.label = event.get("label") or process.label
            rank = event.get("rank")
            process.rank = process.rank if rank is None else rank
            self.soc = self.soc or event.get("soc")
        elif kind == "phase":
            if event.get("phase") == "shutdown":
                process.shutting_down = True
                self.shutdown_t_ns = self.shutdown_t_ns or t_ns
            ended = process._fold_phase(event, t_ns)
            if ended and ended.error and self.first_error is None:
                self.first_error = (t_ns, process.name, ended.phase, str(ended.error))
            if ended and ended.phase == "oom" and self.oom_message is None:
                told = str(ended.error or f"{process.name} ran out of device memory")
                self.oom_message = told
        elif kind == "ray":
            process.node = event.get("node")
        elif kind == "ray_lost":
            lost = Lost(str(event.get("node")), event.get("rank"), str(event.get("reason")))
            if all((each.node, each.rank) != (lost.node, lost.rank) for each in self.lost):
                self.lost.append(lost)
        elif kind == "ranks":
            self.ranks = event
        elif kind == "full_step":
            self.full_step = event
        elif kind == "ready":
            self.ready_t_ns.setdefault(str(event.get("what")), []).append(t_ns)
        elif kind == "kv_plan":
            process.kv_blocks = event.get("blocks") or 0
            process.kv_cache_bytes = largest(event.get("planned_bytes") or [])
        elif kind == "lost":
            process.lost_events += event.get("events") or 0
            lasts = event.get("until_t_ns") is None
            process.blind_because = str(event.get("reason")) if lasts else None
        elif kind in ("sample", "kv_sample", "device_sample"):
            process._fold_sample(event, t_ns)
        elif kind == "request" and event.get("edge") == "begin":
            process.open_requests.add(str(event.get("id")))
        elif kind == "request":
            process.open_requests.discard(str(event.get("id")))
            process.request_end_t_ns = t_ns
