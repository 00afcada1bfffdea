"""The recorder of one engine process: its role, its open phases, the engine's figures, its events.

One object per process, made by the plugin. Phases nest per thread: an event's ``parent`` is the
phase that encloses it in the same thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_memprof.capture.allocations import Tracer
from vllm_memprof.capture.probe import Probe
from vllm_memprof.capture.sampler import Sampler, parse_every
from vllm_memprof.capture.snapshot import SnapshotDict, with_later
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.schema import (
    ENV_EMPTY_CACHE_AT,
    ENV_SAMPLE,
    ENV_STOP_AFTER,
    ENV_TRACE_ALLOCATIONS,
    FIGURES,
)

#: From the least to the most telling: a process that is several of these is named by the last one.
#: A worker that lives in the engine core (TP=1), or in the caller's process, has the role worker.
_ROLE_ORDER = ("unknown", "detokenizer", "api", "engine_core", "worker")


@dataclass
class OpenPhase:
    """A phase under way. ``detail`` may be completed until it ends."""

    id: int
    phase: str
    hook: str
    parent: int | None
    detail: dict[str, object] = field(default_factory=dict)
    before: SnapshotDict = field(default_factory=SnapshotDict)


@dataclass
class ProcessNotes:
    """Facts about this process that one hook leaves for another."""

    label: str | None = None  # of the rank, e.g. "TP0"
    worker: weakref.ref[Any] | None = None  # its life is not prolonged by it
    serving: bool = False  # the worker is warm
    model_ready: bool = False  # announced
    oom_observed: bool = False  # the allocator tells of failed allocations
    oom: tuple[int, int] | None = None  # event id and bytes of one that no exception came of yet
    failures: set[int] = field(default_factory=set)  # ids of exceptions that were read
    profile_result: Any = None  # of the engine's memory_profiling, until the figures are read
    kv_groups: Any = None  # the engine's KV cache groups, while it scales its budget by them
    mm_profile: OpenPhase | None = None
    weight_update: OpenPhase | None = None
    layers_before_draft: frozenset[str] | None = None  # names of the model's layers
    graphs_before: int | None = None  # graphs captured before the capture under way
    captured_bytes: int | None = None  # measured by the inherited capture_model
    own_empty_cache: tuple[str, int] | None = None  # phase and thread of memprof's own call
    groups_seen: set[tuple[int, bool]] = field(default_factory=set)  # id of a group, point to point
    awake_tags: set[str] = field(default_factory=set)  # of the sleeping pool
    device_thread: threading.Thread | None = None
    merged_in_profile: bool = False  # the profile run merged multimodal embeddings
    requests: dict[str, Any] = field(default_factory=dict)  # id -> of a scheduler that is sampled
    engine: Any = None  # what the actions of its engine alone keep
    collector: Any = None  # actor of Ray that keeps what other nodes send


class HooksInForce(Protocol):
    """The part of the observer that an action may call (see observer.py)."""

    def bind_instance(self, instance: object | None) -> None: ...
    def bind_model(self, runner: object | None) -> None: ...
    def release(self, moment: str) -> None: ...
    def self_check(self, moment: str) -> None: ...
    def observe_oom(self) -> None: ...
    def is_bound(self, hook_id: str) -> bool: ...


class Recorder:
    """Records one process.

    Args:
        run_dir: the run folder.
    """

    hooks: HooksInForce  # set by the observer
    engine = "vllm"  # of ``engines.ENGINES``; set by the observer

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.writer = EventWriter(run_dir)
        self.probe = Probe()
        self.stop_after = os.environ.get(ENV_STOP_AFTER)
        self.empty_cache_at = frozenset(os.environ.get(ENV_EMPTY_CACHE_AT, "").split(",")) - {""}
        self.trace_allocations = int(os.environ.get(ENV_TRACE_ALLOCATIONS, "0"))
        self._every = parse_every(every) if (every := os.environ.get(ENV_SAMPLE)) else None
        self._last_id = 0
        self._forget()

    def _forget(self) -> None:
        self.roles: set[str] = set()
        self.figures: dict[str, int | float | None] = dict.fromkeys(FIGURES)
        self.calls: dict[str, int] = {}  # hook id -> calls seen in this process
        self.failed: set[str] = set()  # hooks that raised and are out of the way
        self.notes = ProcessNotes()
        #: Phases whose calls returned before their non-torch bytes appeared, with the snapshot
        #: of the return: their work is queued.
        self.late: list[tuple[OpenPhase, SnapshotDict]] = []
        self._id_lock = threading.Lock()
        self._stacks = threading.local()
        #: Phases under way, in all threads.
        self.under_way: set[int] = set()
        #: With --trace-allocations: by kind of memory.
        self.tracers: dict[str, Tracer] = {}
        #: None: this run is not sampled.
        self.sampler: Sampler | None = None
        if self._every is not None:
            self.sampler = Sampler(self.run_dir, self.probe, self._every, self.writer)

    def after_fork(self) -> None:
        """Become the child: nothing of the parent's record, roles or phases is its own."""
        self.writer.after_fork()
        if self.sampler is not None:
            self.sampler.after_fork()
        self.probe.reset()
        self._forget()

    @property
    def role(self) -> str:
        return max(self.roles, key=_ROLE_ORDER.index, default="unknown")

    def emit(self, kind: str, **fields: object) -> None:
        self.writer.emit(kind, fields, self.role)

    def error(self, where: str, error: BaseException) -> None:
        self.emit("error", where=where, message=f"{type(error).__name__}: {error}")

    def emit_figures(self, source: str) -> None:
        """Write every figure of the engine known so far."""
        self.emit("figures", source=source, values=dict(self.figures))

    @property
    def stack(self) -> list[OpenPhase]:
        """Open phases of the calling thread, outermost first."""
        phases: list[OpenPhase] = vars(self._stacks).setdefault("phases", [])
        return phases

    def is_open(self, phase: str) -> bool:
        return any(open_phase.phase == phase for open_phase in self.stack)

    def begin(
        self,
        phase: str,
        hook: str,
        detail: dict[str, object] | None = None,
        workspace: bool = True,
        unread: str | None = None,
    ) -> OpenPhase:
        """Open a phase with a snapshot.

        Args:
            phase: phase id.
            hook: id of the row that marks it.
            detail: facts beside the snapshot.
            workspace: for start-up edges, see Probe.snapshot.
            unread: why the device must not be read yet; the snapshot then has host figures only.
        """
        self.settle(force=True)
        parent = self.stack[-1].id if self.stack else None
        opened = OpenPhase(self._new_id(), phase, hook, parent, dict(detail or {}))
        host = self.probe.host_only
        opened.before, reason = (host(), unread) if unread else self.probe.snapshot(workspace)
        self._emit_edge(opened, "before", opened.before, reason)
        self.stack.append(opened)
        self.under_way.add(opened.id)
        return opened

    def end(
        self, opened: OpenPhase, error: BaseException | None = None, workspace: bool = True
    ) -> None:
        """Close a phase, and those that were left open inside it."""
        self.settle(force=True)
        while any(open_phase is opened for open_phase in self.stack):
            ended = self.stack.pop()
            self._emit_edge(ended, "after", *self.probe.snapshot(workspace), error=error)
            self.under_way.discard(ended.id)

    def end_queued(self, opened: OpenPhase) -> None:
        """Close a phase whose call only queued its work, as soon as its non-torch bytes are there.

        Waiting for the device would change what is measured. So the allocator's counters are those
        of the call's return, and free and non-torch are read again at later calls, at the next
        phase edge at the latest.
        """
        self.stack.remove(opened)
        self.under_way.discard(opened.id)
        self.late.append((opened, self.probe.snapshot(workspace=True)[0]))
        self.settle()

    def settle(self, force: bool = False) -> None:
        """Close late phases whose bytes have appeared; all of them when forced."""
        if not self.late:
            return
        seen = None if force else self.probe.snapshot(owners=False)[0]["non_torch_bytes"]
        due = [each for each in self.late if force or seen != each[0].before["non_torch_bytes"]]
        if due:
            now, reason = self.probe.snapshot(workspace=True)  # one reading for all that are due
            for late in due:
                self.late.remove(late)
                opened, after = late
                waited_ns = now["t_ns"] - after["t_ns"]
                opened.detail["non_torch_read_after_seconds"] = waited_ns / 1e9
                self._emit_edge(opened, "after", with_later(after, now), reason)
                now.pop("read_again", None)  # said once, by the first of them

    def mark(self, phase: str, hook: str, snapshot: SnapshotDict, detail: dict[str, object]) -> int:
        """Record a phase that is a moment, with the snapshot given, and return its id."""
        parent = self.stack[-1].id if self.stack else None
        number = self._new_id()
        self.emit("phase", phase=phase, edge="after", id=number, parent=parent, hook=hook,
                  snapshot=snapshot, error=None, detail=detail)  # fmt: skip
        return number

    def _emit_edge(
        self,
        opened: OpenPhase,
        edge: str,
        snapshot: SnapshotDict,
        reason: str | None,
        error: BaseException | None = None,
    ) -> None:
        for what, why in self.probe.unread:
            self.emit("unread", what=what, reason=why)
        self.probe.unread.clear()
        detail = opened.detail | ({} if reason is None else {"snapshot_reason": reason})
        message = None if error is None else f"{type(error).__name__}: {error}"
        self.emit("phase", phase=opened.phase, edge=edge, id=opened.id, parent=opened.parent,
                  hook=opened.hook, snapshot=snapshot, error=message,
                  detail=detail or None)  # fmt: skip

    def _new_id(self) -> int:
        with self._id_lock:
            self._last_id += 1
            return self._last_id
