"""Event lines of one process: dictionaries enter, ``events/<host>-<pid>.jsonl`` leaves.

Runs in every engine process.

Each event is one ``write`` system call on a descriptor opened with O_APPEND: nothing is buffered,
so a process that is killed loses at most the line under way, and no flush is ever owed at exit.

A full disk ends the writing, not the engine. The first line has room behind its object, on the disk
already, for the moment since when events are lost; they are counted, and writing goes on when there
is space again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.engines import ENGINES
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import EVENTS_BYTES, EVENTS_DIR, EVENTS_SCHEMA
from vllm_memprof.redact import may_hold_secret, redact_command, redact_data

#: Packages whose versions the first line carries: module that is surely loaded if the package is in
#: use -> name.
_VERSIONED = {
    "torch": "torch",
    "torch_npu": "torch_npu",
    "vllm_ascend": "vllm_ascend",
    **{row.package: f"{row.package}.version" for row in ENGINES.values()},
}

#: Spaces behind the object of the first line: room for a ``lost`` event where nothing can be added.
_ROOM_BYTES = 320
#: Between two attempts to write again, after one that failed.
_RETRY_NS = 1_000_000_000
#: Characters of an operating system's message in a ``lost`` event.
_MOST_REASON = 120


@dataclass
class _Loss:
    """Events that could not be written, while they cannot."""

    since_t_ns: int
    retry_t_ns: int
    reason: str
    events: int = 1


#: Bytes that are kept for what comes seldom and must not be missing: an OOM, a shutdown.
_RESERVE_BYTES = 1 << 20
_SELDOM = ("oom", "shutdown")


class EventWriter:
    """Appends events to this process's file, which is created at the first event.

    The file has ``EVENTS_BYTES`` at most: of later events only their number is written, at every
    doubling.

    Args:
        run_dir: the run folder; its ``events`` folder is made when missing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._events_dir = run_dir / EVENTS_DIR
        self._file: LineFile | None = None
        self._room_at: int | None = None  # offset of the room in the first line
        self._loss: _Loss | None = None
        self._dropped: dict[str, int] = {}
        self._lock = threading.RLock()
        #: Called after each event; of a process whose lines are sent elsewhere.
        self.written: Callable[[], None] | None = None

    @property
    def path(self) -> Path:
        return self._events_dir / f"{host_name()}-{os.getpid()}.jsonl"

    def emit(self, kind: str, fields: Mapping[str, object], role: str) -> None:
        """Write one event.

        Args:
            kind: a kind of the record schema.
            fields: the event's own keys; ``t_ns`` is added when missing.
            role: this process's role, for the first line of its file.

        Raises:
            nothing: a full disk or an unwritable folder ends the writing, not the engine.
        """
        event = {"kind": kind, "t_ns": time.monotonic_ns(), **fields}
        written = self.attempt(self._write, event, role)
        if written and self.written is not None:
            self.written()

    def attempt(self, write: Callable[..., None], *arguments: object) -> bool:
        """Write a line, of this file or another one of this process; count it where that fails.

        While lines are lost it is tried once a second; the first one that is written again is
        followed by what was lost.

        Args:
            write: may raise OSError.
            arguments: of it.
        """
        with self._lock:
            if self._loss is not None and self.loses:
                self._loss.events += 1
                return False
            now = time.monotonic_ns()
            try:
                write(*arguments)
                if self._loss is not None:
                    self._put(b"", self._file or self._open("unknown"))
            except OSError as error:
                self._lose(error, now)
                return False
        return True

    def after_fork(self) -> None:
        """Forget the parent's file; the child opens its own at its first event."""
        self._lock = threading.RLock()
        self._loss, self._room_at = None, None
        self._dropped = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def loses(self) -> bool:
        """Whether lines are lost now, and nothing is tried."""
        loss = self._loss
        return loss is not None and time.monotonic_ns() < loss.retry_t_ns

    def _open(self, role: str) -> LineFile:
        self._events_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = LineFile(self.path)
        first = line_of(_process_event(role)).rstrip(b"\n")
        try:
            file.append(first + b" " * _ROOM_BYTES + b"\n")
        except OSError:
            os.ftruncate(file.fd, 0)  # the first line is whole, or not there
            file.close()
            raise
        self._file, self._room_at = file, len(first)
        return file

    def _write(self, event: Mapping[str, object], role: str) -> None:
        """Write an event, or count it where the file has no room for it."""
        file = self._file or self._open(role)
        line, kind = line_of(event), str(event["kind"])
        seldom = kind in ("dropped", "lost") or event.get("phase") in _SELDOM
        room = EVENTS_BYTES - (0 if seldom else _RESERVE_BYTES)
        if file.written + len(line) <= room:
            self._put(line, file)
            return
        count = self._dropped[kind] = self._dropped.get(kind, 0) + 1
        if kind != "dropped" and count & (count - 1) == 0:
            kinds = dict(self._dropped)
            self._write({"kind": "dropped", "t_ns": event.get("t_ns"), "kinds": kinds}, role)

    def _put(self, line: bytes, file: LineFile) -> None:
        """Write a line; after a loss, behind an event that says what was lost."""
        loss = self._loss
        if loss is not None:
            line = line_of(_lost_event(loss, time.monotonic_ns(), loss.events)) + line
        file.append(line)
        self._loss = None

    def _lose(self, error: OSError, now: int) -> None:
        if self._loss is not None:
            self._loss.events += 1
            self._loss.retry_t_ns = now + _RETRY_NS
            return
        reason = (error.strerror or str(error))[:_MOST_REASON]
        self._loss = _Loss(now, now + _RETRY_NS, reason)
        self._note_in_room(self._loss)
        with contextlib.suppress(OSError, ValueError):
            print(
                f"memprof: cannot write {self.path}: {reason}; this process records nothing "
                "until it can; the engine goes on",
                file=sys.stderr,
            )

    def _note_in_room(self, loss: _Loss) -> None:
        """Write since when events are lost over spaces that the file has already."""
        note = b"\n" + line_of(_lost_event(loss, None, None)).rstrip(b"\n")
        if self._room_at is None or len(note) > _ROOM_BYTES:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # one that does not append
            try:
                os.pwrite(fd, note.ljust(_ROOM_BYTES), self._room_at)
            finally:
                os.close(fd)


class LineFile:
    """A file that lines are appended to, one system call each.

    Raises:
        OSError: it cannot be opened; so does ``append``. The rest of a line of which a part was
            written is lost, and the next one begins a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.written = 0
        self._torn = False

    def append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        while line:
            count = os.write(self.fd, line)
            self.written += count
            line = line[count:]
            self._torn = bool(line)  # what is left may be refused

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def line_of(event: Mapping[str, object]) -> bytes:
    """Return an event as a line of JSON, without secrets."""
    line = json.dumps(event, separators=(",", ":"), default=str)
    if may_hold_secret(line):  # an exception's message may quote an argument
        line = json.dumps(redact_data(json.loads(line)), separators=(",", ":"))
    return f"{line}\n".encode()


def _lost_event(loss: _Loss, until_t_ns: int | None, events: int | None) -> dict[str, object]:
    since = loss.since_t_ns
    return {"kind": "lost", "t_ns": until_t_ns or since, "since_t_ns": since,
            "until_t_ns": until_t_ns, "events": events, "reason": loss.reason}  # fmt: skip


def _process_event(role: str) -> dict[str, object]:
    return {
        "kind": "process",
        "t_ns": time.monotonic_ns(),
        "schema": EVENTS_SCHEMA,
        "host": host_name(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "role": role,
        "wall": time.time(),
        "argv": redact_command(sys.argv),
        "python": sys.version.split()[0],
        "versions": loaded_versions(),
    }


def loaded_versions() -> dict[str, str]:
    """Return the versions of the engine's packages that this process has imported already."""
    versions: dict[str, str] = {}
    for package, module_name in _VERSIONED.items():
        if (module := sys.modules.get(module_name)) is not None:
            version = getattr(module, "__version__", None)
            if not version:
                import importlib.metadata

                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    version = importlib.metadata.version(package)
            if version:
                versions[package] = str(version)
    return versions
