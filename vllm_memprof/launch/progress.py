"""Event lines enter, what is known of each engine process leaves. No files, clock or processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_memprof.record.schema import RunInfo
from vllm_memprof.text import text

#: An event as the tail reads it; another release may have written it.
Event = Mapping[str, Any]

#: Kinds of samples, each with figures that are readings of its process.
SAMPLES = ("sample", "kv_sample", "device_sample")
#: Figures of a sample that the views show, by the names of a snapshot.
_SAMPLED = (
    "allocated_bytes",
    "reserved_bytes",
    "allocated_run_peak_bytes",
    "reserved_run_peak_bytes",
    "non_torch_bytes",
    "device_total_bytes",
    "device_free_bytes",
    "host_rss_bytes",
)
#: Roles that matter to the run: such a process must not go away before the engine ends.
ENGINE_ROLES = ("worker", "engine_core", "api", "detokenizer")
_ROLE_LABELS = {
    "engine_core": "EngineCore",
    "api": "API server",
    "detokenizer": "detokenizer",
}


@dataclass(frozen=True)
class PhaseUnderWay:
    id: object
    phase: str
    t_ns: int  # CLOCK_MONOTONIC


@dataclass(frozen=True)
class DonePhase:
    phase: str
    depth: int  # 0 at the top level
    start_t_ns: int | None
    end_t_ns: int
    error: str | None
    snapshot: dict[str, int]  # after; bytes, only what is known


@dataclass(frozen=True)
class KvSize:
    """The KV cache that an engine core serves with."""

    blocks: int
    bytes_by_worker: tuple[int, ...]  # of all blocks; in the order of the workers

    def of_blocks(self, blocks: int | None) -> int | None:
        """Return the bytes of some blocks on the worker that holds the most of them."""
        if blocks is None or not self.blocks or not self.bytes_by_worker:
            return None
        return max(self.bytes_by_worker) * blocks // self.blocks


@dataclass(frozen=True)
class Load:
    """The last sample of an engine core."""

    t_ns: int  # CLOCK_MONOTONIC
    running: int | None  # requests
    waiting: int | None
    blocks_used: int | None  # of the KV cache
    blocks: int | None


@dataclass(frozen=True)
class Lost:
    """Workers on a Ray node that are gone: all of the node, or the one of a rank."""

    node: str  # id, as Ray gives it
    rank: int | None  # None: the node is gone
    reason: str


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
    open: list[PhaseUnderWay] = field(default_factory=list)  # outermost first
    done: list[DonePhase] = field(default_factory=list)
    readings: dict[str, int] = field(default_factory=dict)  # latest known, by snapshot field
    shutting_down: bool = False
    last_t_ns: int | None = None
    core_ready_t_ns: int | None = None  # of an engine core: it takes requests from here on
    warm_t_ns: int | None = None  # of a worker: its start-up ended
    granted_bytes: int | None = None  # the engine's figure of its KV cache on this rank
    plan: KvSize | None = None  # of an engine core
    load: Load | None = None  # of an engine core, while it serves
    lowest_free_bytes: int | None = None  # of the device, by samples
    samples: int = 0  # lines of all kinds of samples
    open_requests: set[str] = field(default_factory=set)  # ids
    request_end_t_ns: int | None = None  # of the last one that ended
    lost_events: int = 0  # that could not be written; known once writing went on
    blind_because: str | None = None  # events are lost, and no later one says for how long

    @property
    def is_worker(self) -> bool:
        return "worker" in self.roles or bool(self.open or self.done)

    @property
    def matters(self) -> bool:
        return self.is_worker or any(role in self.roles for role in ENGINE_ROLES)

    @property
    def name(self) -> str:
        """Return the name for a person: the label, else the role, else the process id."""
        if self.label:
            return self.label
        for role, label in _ROLE_LABELS.items():
            if role in self.roles:
                return label
        return f"worker {self.pid}" if self.is_worker else f"process {self.pid}"

    def where(self) -> str | None:
        """``in mm_profile (inside profile_run)``, ``after weight_load``, None before its first
        phase."""
        if self.open:
            inner, outer = self.open[-1].phase, self.open[0].phase
            if len(self.open) == 1:
                return text("in {phase}", phase=inner)
            return text("in {phase} (inside {outer})", phase=inner, outer=outer)
        top = [phase for phase in self.done if phase.depth == 0]
        return text("after {phase}", phase=top[-1].phase) if top else None


@dataclass
class EngineProgress:
    """All processes of the engine, in the order of their ranks."""

    host: str | None = None  # of the launcher: process ids are those of its own host
    by_file: dict[str, ProcessProgress] = field(default_factory=dict)
    ready_t_ns: dict[str, int] = field(default_factory=dict)  # what -> CLOCK_MONOTONIC
    versions: dict[str, str] = field(default_factory=dict)
    soc: str | None = None
    first_error: tuple[int, str, str, str] | None = None  # t_ns, process name, phase, message
    oom_message: str | None = None
    ranks: Event | None = None  # of a plan: which ranks are run
    full_step: Event | None = None  # of a plan: the largest batches that it ran
    shutdown_t_ns: int | None = None  # when the first process began to shut down in good order
    lost: list[Lost] = field(default_factory=list)  # on Ray nodes, each once

    @property
    def processes(self) -> list[ProcessProgress]:
        def by_rank(process: ProcessProgress) -> tuple[bool, int, str]:
            number = process.pid or 0 if process.rank is None else process.rank
            return process.rank is None, number, process.file

        return sorted(self.by_file.values(), key=by_rank)

    @property
    def workers(self) -> list[ProcessProgress]:
        return [process for process in self.processes if process.is_worker]

    def ready_at(self, info: RunInfo) -> int | None:
        """Return when the start-up of a run ended, CLOCK_MONOTONIC; None: it has not.

        A host without an API server is ready when its engine cores are; one that has workers alone,
        of an engine core on another host, when those have warmed up.
        """
        part = info.part
        if info.mode != "serve" or part is None or not part.headless:
            what = {"serve": "server", "offline": "model", "plan": "plan"}[info.mode]
            return self.ready_t_ns.get("model" if info.until == "ready" else what)
        if part.node_rank:
            times = [process.warm_t_ns for process in self.workers]
            wanted = (part.world_size or 1) // (part.nodes or 1)
        else:
            times = [process.core_ready_t_ns for process in self.processes]
            wanted = part.dp_local or 1
        known = [t_ns for t_ns in times if t_ns is not None]
        return max(known) if known and len(known) >= wanted else None

    def by_pid(self, pid: int) -> ProcessProgress | None:
        """Return the process of that id on the launcher's host."""
        for process in self.by_file.values():
            if process.pid == pid and (self.host is None or process.host in (None, self.host)):
                return process
        return None

    def fold(self, file: str, event: Event) -> None:
        """Take one event in; unknown kinds and missing keys are skipped."""
        process = self.by_file.setdefault(file, ProcessProgress(file))
        t_ns = event.get("t_ns")
        if isinstance(t_ns, int):
            process.last_t_ns = t_ns
        kind = event.get("kind")
        role = event.get("role")
        if kind in ("process", "identity") and role and role != "unknown":
            process.roles.add(str(role))
        if kind == "process":
            process.host, process.pid = event.get("host"), event.get("pid")
            process.wall = event.get("wall")
            for package, version in (event.get("versions") or {}).items():
                if version:
                    self.versions.setdefault(str(package), str(version))
        elif kind == "identity":
            process.label = event.get("label") or process.label
            if isinstance(event.get("rank"), int):
                process.rank = event["rank"]
            self.soc = self.soc or event.get("soc")
        elif kind == "phase" and isinstance(t_ns, int):
            self._fold_phase(process, event, t_ns)
        elif kind == "ray":
            process.node = event.get("node")
        elif kind == "ray_lost":
            lost = Lost(
                str(event.get("node")), _integer(event.get("rank")), str(event.get("reason"))
            )
            if all((each.node, each.rank) != (lost.node, lost.rank) for each in self.lost):
                self.lost.append(lost)
        elif kind == "ranks":
            self.ranks = event
        elif kind == "full_step":
            self.full_step = event
        elif kind == "ready" and isinstance(t_ns, int):
            self.ready_t_ns.setdefault(str(event.get("what")), t_ns)
            if event.get("what") == "model":
                process.core_ready_t_ns = t_ns
        elif kind == "figures":
            granted = (event.get("values") or {}).get("kv_cache_bytes")
            process.granted_bytes = granted if isinstance(granted, int) else process.granted_bytes
        elif kind == "kv_plan":
            sizes = [size for size in event.get("planned_bytes") or [] if isinstance(size, int)]
            process.plan = KvSize(_integer(event.get("blocks")) or 0, tuple(sizes))
        elif kind == "lost":
            process.lost_events += _integer(event.get("events")) or 0
            lasts = event.get("until_t_ns") is None
            process.blind_because = str(event.get("reason")) if lasts else None
        elif kind in SAMPLES and isinstance(t_ns, int):
            _fold_sample(process, event, t_ns)
        elif kind == "request":
            name = str(event.get("id"))
            if event.get("edge") == "begin":
                process.open_requests.add(name)
            else:
                process.open_requests.discard(name)
                process.request_end_t_ns = _integer(event.get("t_ns"))

    def _fold_phase(self, process: ProcessProgress, event: Event, t_ns: int) -> None:
        phase, phase_id = str(event.get("phase")), event.get("id")
        readings: dict[str, int] = {
            name: value
            for name, value in (event.get("snapshot") or {}).items()
            if isinstance(value, int) and name != "t_ns"
        }
        process.readings.update(readings)
        if phase == "shutdown":
            process.shutting_down = True
            self.shutdown_t_ns = self.shutdown_t_ns or t_ns
        if event.get("edge") == "before":
            process.open.append(PhaseUnderWay(phase_id, phase, t_ns))
            return
        index = next((i for i, entry in enumerate(process.open) if entry.id == phase_id), None)
        start = None if index is None else process.open.pop(index).t_ns
        depth = len(process.open) if index is None else index
        error = event.get("error")
        if phase == "warm_up" and not error:
            process.warm_t_ns = process.warm_t_ns or t_ns
        process.done.append(DonePhase(phase, depth, start, t_ns, error, readings))
        if error and self.first_error is None:
            self.first_error = (t_ns, process.name, phase, str(error))
        if phase == "oom" and self.oom_message is None:
            self.oom_message = str(error or f"{process.name} ran out of device memory")


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _fold_sample(process: ProcessProgress, event: Event, t_ns: int) -> None:
    process.samples += 1
    if event.get("kind") == "kv_sample":
        used, blocks = (_integer(event.get(f"kv_blocks_{what}")) for what in ("used", "total"))
        running, waiting = (_integer(event.get(what)) for what in ("running", "waiting"))
        process.load = Load(t_ns, running, waiting, used, blocks)
        return
    for name in _SAMPLED:
        if (size := _integer(event.get(name))) is not None:
            process.readings[name] = size
    free = _integer(event.get("device_free_bytes"))
    if free is not None:
        lowest = process.lowest_free_bytes
        process.lowest_free_bytes = free if lowest is None else min(lowest, free)
