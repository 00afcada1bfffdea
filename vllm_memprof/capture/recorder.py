"""The recorder of one engine process: its role, its open phases, the engine's figures, its events.

One object per process, made by the plugin. Phases nest per thread: an event's ``parent`` is the
phase that encloses it in the same thread.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from vllm_memprof.capture.attributes import Fields
from vllm_memprof.capture.probe import Probe, with_later
from vllm_memprof.capture.sampler import Pace, Sampler, parse_pace
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
    detail: Fields
    snapshot: Fields  # at its begin


@dataclass
class ProcessNotes:
    """Facts about this process that one hook leaves for another."""

    label: str | None = None  # of the rank, e.g. "TP0"
    worker: Callable[[], Any] = lambda: None  # a weak reference: its life is not prolonged
    serving: bool = False  # the worker is warm
    model_ready: bool = False  # announced
    observes_oom: bool = False  # failed allocations are observed
    oom: tuple[int, int] | None = None  # event id and bytes of one that no exception came of yet
    failures: set[int] = field(default_factory=set)  # ids of exceptions that were read
    profile_result: Any = None  # of the engine's memory_profiling, until the figures are read
    kv_groups: Any = None  # the engine's KV cache groups, while it scales its budget by them
    captured_bytes: int | None = None  # measured by the inherited capture_model
    own_empty_cache: str | None = None  # phase after which memprof itself is calling it
    groups_seen: set[tuple[int, bool]] = field(default_factory=set)  # id of a group, point to point
    awake_tags: set[str] | None = field(default_factory=set)  # of the sleeping pool; None: all
    has_thread: bool = False  # that reads the device while it serves
    merged_in_profile: bool = False  # the profile run merged multimodal embeddings
    requests: Fields = field(default_factory=dict)  # id -> of a scheduler that is sampled
    kept: Any = None  # by the actions of its engine alone
    ray_job: tuple[Any, Any] | None = None  # configuration, and the environment it was given with
    collector: Any = None  # actor of Ray that keeps what other nodes send
    connector: Callable[[], Any] = lambda: None  # the worker's KV connector, a weak reference
    kv_storages: set[int] = field(default_factory=set)  # addresses of what connectors register
    registered_bytes: int = 0  # with a transfer engine, since it was last written


class HooksInForce(Protocol):
    """The part of the observer that an action may call (see observer.py)."""

    def bind_instance(self, instance: object | None) -> None: ...
    def bind_model(self, runner: object | None) -> None: ...
    def release(self, moment: str) -> None: ...
    def self_check(self, moment: str) -> None: ...
    def is_bound(self, hook_id: str) -> bool: ...


class Recorder(ProcessNotes):
    """Records one process.

    Args:
        run_dir: the run folder.
    """

    hooks: HooksInForce  # set by the observer
    engine = "vllm"  # of ``engines.ENGINES``; set by the observer

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.writer = EventWriter(run_dir, lambda: self.role)
        self.emit = self.writer.emit
        self.stop_after = os.environ.get(ENV_STOP_AFTER)
        self.empty_cache_at = os.environ.get(ENV_EMPTY_CACHE_AT, "").split(",")
        self.trace_allocations = int(os.environ.get(ENV_TRACE_ALLOCATIONS, "0"))
        every = os.environ.get(ENV_SAMPLE)
        self.sampled = bool(every)
        self._pace = parse_pace(every) if every else Pace()
        self._begin()

    def after_fork(self) -> None:
        """Become the child: nothing of the parent's record, roles or phases is its own."""
        self.writer.after_fork()
        self._begin()

    def _begin(self) -> None:
        super().__init__()
        self.probe = Probe(on_unread=cache(partial(self.emit, "unread")))
        self.roles: set[str] = set()
        self.figures: dict[str, int | float | None] = dict.fromkeys(FIGURES)
        #: Phases whose calls returned before their non-torch bytes appeared, with the snapshot
        #: of the return: their work is queued.
        self.late: list[tuple[OpenPhase, Fields]] = []
        self._ids = count(1)
        #: Open phases by thread, outermost first.
        self._stacks: dict[int, list[OpenPhase]] = defaultdict(list)
        #: With --trace-allocations: ends the tracing of a kind of memory.
        self.end_tracing: dict[str, Callable[[], None]] = {}
        #: It writes where the run is sampled: its rows are in force there alone.
        self.sampler = Sampler(self.run_dir, self.probe, self._pace, self.writer)

    @property
    def role(self) -> str:
        return max(self.roles, key=_ROLE_ORDER.index, default="unknown")

    def error(self, where: str, error: BaseException) -> None:
        self.emit("error", where=where, message=f"{type(error).__name__}: {error}")

    def emit_figures(self, source: str) -> None:
        """Write every figure of the engine known so far."""
        self.emit("figures", source=source, values=dict(self.figures))

    @property
    def stack(self) -> list[OpenPhase]:
        """Open phases of the calling thread, outermost first."""
        return self._stacks[threading.get_ident()]

    @property
    def is_in_phase(self) -> bool:
        """Whether a phase is under way, in any thread."""
        return any(list(self._stacks.values()))

    def opened(self, phase: str) -> OpenPhase | None:
        """Return the open phase of that name of the calling thread."""
        return next((each for each in self.stack if each.phase == phase), None)

    def is_open(self, phase: str) -> bool:
        return self.opened(phase) is not None

    def begin(
        self,
        phase: str,
        hook: str,
        detail: Fields | None = None,
        workspace: bool = True,
        device: bool = True,
    ) -> OpenPhase:
        """Open a phase with a snapshot.

        Args:
            phase: phase id.
            hook: id of the row that marks it.
            detail: facts beside the snapshot.
            workspace: for start-up edges, see Probe.snapshot.
            device: False where it must not be read yet; the snapshot has host figures only.
        """
        self.settle(force=True)
        before = (self.probe if device else Probe("")).snapshot(workspace)
        opened = OpenPhase(next(self._ids), phase, hook, self._parent, detail or {}, before)
        self._emit_edge(opened, "before", before)
        self.stack.append(opened)
        return opened

    def end(
        self, opened: OpenPhase, error: BaseException | None = None, workspace: bool = True
    ) -> None:
        """Close a phase, and those that were left open inside it."""
        self.settle(force=True)
        while any(open_phase is opened for open_phase in self.stack):
            ended = self.stack.pop()
            self._emit_edge(ended, "after", self.probe.snapshot(workspace), error)

    def end_queued(self, opened: OpenPhase) -> None:
        """Close a phase whose call only queued its work, as soon as its non-torch bytes are there.

        Waiting for the device would change what is measured. So the allocator's counters are those
        of the call's return, and free and non-torch are read again at later calls, at the next
        phase edge at the latest.
        """
        self.stack.remove(opened)
        self.late.append((opened, self.probe.snapshot(workspace=True)))
        self.settle()

    def settle(self, force: bool = False) -> None:
        """Close late phases whose bytes have appeared; all of them when forced."""
        if not self.late:
            return
        seen = None if force else self.probe.snapshot(owners=False)["non_torch_bytes"]
        due = [each for each in self.late if force or _has_come(each[0], seen)]
        if due:
            now = self.probe.snapshot(workspace=True)  # one reading for all that are due
            for late in due:
                self.late.remove(late)
                opened, after = late
                waited_ns = now["t_ns"] - after["t_ns"]
                opened.detail["non_torch_read_after_seconds"] = waited_ns / 1e9
                self._emit_edge(opened, "after", with_later(after, now))
                now["read_again"] = 0  # said once, by the first of them

    def mark(self, phase: str, hook: str, snapshot: Fields, detail: Fields) -> int:
        """Record a phase that is a moment, with the snapshot given, and return its id."""
        moment = OpenPhase(next(self._ids), phase, hook, self._parent, detail, snapshot)
        self._emit_edge(moment, "after", snapshot)
        return moment.id

    @property
    def _parent(self) -> int | None:
        return self.stack[-1].id if self.stack else None

    def _emit_edge(
        self, opened: OpenPhase, edge: str, snapshot: Fields, error: BaseException | None = None
    ) -> None:
        message = None if error is None else f"{type(error).__name__}: {error}"
        fields = {**vars(opened), "snapshot": snapshot}
        self.emit("phase", **fields, edge=edge, error=message)


def _has_come(opened: OpenPhase, seen: int | None) -> bool:
    """Return whether the bytes of a phase are there: of two buffers of known size at least one.

    An operator that is used for the first time meanwhile takes a few MiB as well.
    """
    before: int | None = opened.snapshot["non_torch_bytes"]
    if before is None or seen is None:
        return seen is not None
    one: int = opened.detail.get("buffer_bytes", 0) // 2
    return seen - before >= max(one, 1)
