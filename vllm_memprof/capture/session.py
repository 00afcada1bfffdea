"""What one engine process knows while it is recorded: its role, its open phases, its figures. One object per process.

Phases nest per thread: an event's ``parent`` is the phase that encloses it in the same thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_memprof.capture.components import APP
from vllm_memprof.capture.probe import Probe
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.schema import FIGURES

#: From the least to the most telling: a process that is several of these is named by the last one. A worker that lives
#: in the engine core (TP=1), or in the caller's process, has the role worker.
_ROLE_ORDER = ("unknown", "api", "engine_core", "worker")


@dataclass
class OpenPhase:
    """A phase under way. ``detail`` may be completed until it ends."""

    id: int
    phase: str
    hook: str
    parent: int | None
    detail: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)  # its first snapshot


@dataclass
class LatePhase:
    """A phase whose work has been queued, not done: its call returned, but its non-torch bytes have not appeared."""

    opened: OpenPhase
    after: dict[str, Any]  # the snapshot when the call returned


class Session:
    """The recording of one process.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.writer = EventWriter(run_dir)
        self.probe = Probe()
        self.roles: set[str] = set()
        self.figures: dict[str, int | float | None] = dict.fromkeys(FIGURES)
        self.calls: dict[str, int] = {}  # hook id -> calls seen in this process
        self.failed: set[str] = set()  # hooks that raised and are out of the way
        self.notes: dict[str, Any] = {}  # what one hook leaves for another
        self.late: list[LatePhase] = []
        self._next_id = 0
        self._id_lock = threading.Lock()
        self._stacks = threading.local()

    @property
    def role(self) -> str:
        return max(self.roles, key=_ROLE_ORDER.index, default="unknown")

    def emit(self, kind: str, **fields: Any) -> None:
        self.writer.emit(kind, fields, self.role)

    def error(self, where: str, error: BaseException) -> None:
        self.emit("error", where=where, message=f"{type(error).__name__}: {error}")

    @property
    def stack(self) -> list[OpenPhase]:
        """Open phases of the calling thread, outermost first."""
        if not hasattr(self._stacks, "phases"):
            self._stacks.phases = []
        phases: list[OpenPhase] = self._stacks.phases
        return phases

    def is_open(self, phase: str) -> bool:
        return any(open_phase.phase == phase for open_phase in self.stack)

    def begin(
        self,
        phase: str,
        hook: str,
        detail: dict[str, Any] | None = None,
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
        opened.before, reason = (
            (self.probe.host_only(), unread) if unread else self.probe.snapshot(workspace)
        )
        self._emit_edge(opened, "before", opened.before, reason)
        self.stack.append(opened)
        return opened

    def end(
        self, opened: OpenPhase, error: BaseException | None = None, workspace: bool = True
    ) -> None:
        """Close a phase, and those that were left open inside it."""
        self.settle(force=True)
        while any(open_phase is opened for open_phase in self.stack):
            self._emit_edge(self.stack.pop(), "after", *self.probe.snapshot(workspace), error=error)

    def end_queued(self, opened: OpenPhase) -> None:
        """Close a phase whose call only queued its work: at once if its non-torch bytes are there, else when they are.

        Waiting for the device would change what is measured. So the allocator's counters are those of the call's
        return, and free and non-torch are read again at later calls, at the next phase edge at the latest.
        """
        self.stack.remove(opened)
        snapshot, _ = self.probe.snapshot(workspace=True)
        self.late.append(LatePhase(opened, snapshot))
        self.settle()

    def settle(self, force: bool = False) -> None:
        """Close late phases whose bytes have appeared; all of them when forced."""
        if not self.late:
            return
        seen = None if force else self.probe.snapshot(owners=False)[0]["non_torch_bytes"]
        due = [late for late in self.late if force or seen != late.opened.before["non_torch_bytes"]]
        if due:
            now, reason = self.probe.snapshot(workspace=True)  # one reading for all that are due
            for late in due:
                self.late.remove(late)
                waited_ns = now["t_ns"] - late.after["t_ns"]
                late.opened.detail["non_torch_read_after_seconds"] = waited_ns / 1e9
                self._emit_edge(late.opened, "after", _with_later(late.after, now), reason)
                now.pop("read_again", None)  # said once, by the first of them

    def mark(self, phase: str, hook: str, snapshot: dict[str, Any], detail: dict[str, Any]) -> None:
        """A phase that is a moment: one after edge with the snapshot given."""
        parent = self.stack[-1].id if self.stack else None
        self.emit("phase", phase=phase, edge="after", id=self._new_id(), parent=parent, hook=hook, snapshot=snapshot,
                  error=None, detail=detail)  # fmt: skip

    def emit_figures(self, source: str) -> None:
        """Write every figure of the engine known so far."""
        self.emit("figures", source=source, values=dict(self.figures))

    def after_fork(self) -> None:
        """Become the child: nothing of the parent's record, roles or phases is its own."""
        self.writer.after_fork()
        self.probe.reset()
        self.roles.clear()
        self.figures = dict.fromkeys(FIGURES)
        self.calls.clear()
        self.failed.clear()
        self.notes.clear()
        self.late.clear()
        self._id_lock = threading.Lock()
        self._stacks = threading.local()

    def _emit_edge(
        self,
        opened: OpenPhase,
        edge: str,
        snapshot: dict[str, Any],
        reason: str | None,
        error: BaseException | None = None,
    ) -> None:
        for what, why in self.probe.unread:
            self.emit("unread", what=what, reason=why)
        self.probe.unread.clear()
        detail = dict(opened.detail)
        if reason is not None:
            detail["snapshot_reason"] = reason
        self.emit("phase", phase=opened.phase, edge=edge, id=opened.id, parent=opened.parent, hook=opened.hook,
                  snapshot=snapshot, error=None if error is None else f"{type(error).__name__}: {error}",
                  detail=detail or None)  # fmt: skip

    def _new_id(self) -> int:
        with self._id_lock:
            self._next_id += 1
            return self._next_id


#: What a late edge takes from the later reading: all that lies outside the caching allocator.
_LATER = (
    "non_torch_bytes",
    "npu_workspace_bytes",
    "npu_workspace_streams",
    "other_processes_bytes",
    "other_processes",
)


def _with_later(snapshot: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with what a later one says of memory outside torch.

    Free, the process's own figure and the counter that holds torch's segments follow the reserved memory of the
    snapshot, so that its figures still add up; that counter's peak is the one of the snapshot.
    """
    total, reserved, non_torch = (
        snapshot["device_total_bytes"],
        snapshot["reserved_bytes"],
        later["non_torch_bytes"],
    )
    if total is None or reserved is None or non_torch is None:
        return snapshot
    since = later["reserved_bytes"] - reserved
    held = reserved - (snapshot["unmapped_bytes"] or 0)
    moved = {
        **snapshot,
        **{name: later[name] for name in _LATER},
        "device_free_bytes": total - held - non_torch,
    }
    if later["process_bytes"] is not None:
        moved["process_bytes"] = later["process_bytes"] - since
    components = later["components"]
    if components is not None and APP in components:
        size = components[APP]["bytes"] - since
        peak = ((snapshot["components"] or {}).get(APP) or components[APP])["peak_bytes"]
        components = {**components, APP: {"bytes": size, "peak_bytes": max(peak, size)}}
    if again := snapshot.get("read_again", 0) + later.get("read_again", 0):
        moved["read_again"] = again
    return {**moved, "components": components}
