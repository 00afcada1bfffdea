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
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vllm_memprof.capture.attributes import Fields
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import EVENTS_BYTES, EVENTS_DIR, EVENTS_SCHEMA
from vllm_memprof.redact import may_hold_secret, redact_command, redact_data

#: Packages whose versions the first line carries -> module that is surely loaded if the package is
#: in use.
_VERSIONED = {
    **{package: package for package in ("torch", "torch_npu", "vllm_ascend")},
    **{row.package: f"{row.package}.version" for row in ENGINES.values()},
}

#: Spaces behind the object of the first line: room for a ``lost`` event where nothing can be added.
_ROOM_BYTES = 320
#: Between two attempts to write again, after one that failed.
_RETRY_NS = 1_000_000_000
#: Characters of an operating system's message in a ``lost`` event.
_MOST_REASON = 120
#: Bytes that are kept for what comes seldom and must not be missing: an OOM, a shutdown.
_RESERVE_BYTES = 1 << 20
_SELDOM = ("dropped", "lost", "oom", "shutdown")

encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def process_name() -> str:
    """Return ``<host>-<pid>``, which the files of this process are named by."""
    return f"{host_name()}-{os.getpid()}"


class EventWriter:
    """Appends events to this process's file, which is created at the first event.

    The file has ``EVENTS_BYTES`` at most: of later events only their number is written, at every
    doubling.

    Args:
        run_dir: the run folder; its ``events`` folder is made when missing.
        role: returns the role of this process, for the first line of its file.
    """

    def __init__(self, run_dir: Path, role: Callable[[], str] = lambda: "unknown") -> None:
        self._events_dir, self._role = run_dir / EVENTS_DIR, role
        self._file: LineFile | None = None
        #: Called after each event; of a process whose lines are sent elsewhere.
        self.written: Callable[[], None] | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the parent's file; the child opens its own at its first event."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._room_at: int | None = None  # offset of the room in the first line
        #: The ``lost`` event of the lines that cannot be written, while they cannot.
        self.loss: Fields | None = None
        self._lost = self._retry_ns = 0
        self._dropped: Counter[str] = Counter()
        self._lock = threading.RLock()

    @property
    def path(self) -> Path:
        return self._events_dir / f"{process_name()}.jsonl"

    def emit(self, kind: str, **fields: object) -> None:
        """Write one event of a kind of the record schema; ``t_ns`` is added when missing.

        Raises:
            nothing: a full disk or an unwritable folder ends the writing, not the engine.
        """
        event = {"kind": kind, "t_ns": time.monotonic_ns(), **fields}
        if self.attempt(self._write, event) and self.written is not None:
            self.written()

    def attempt(self, write: Callable[..., None], *arguments: object) -> bool:
        """Write a line, of this file or another one of this process; count it where that fails.

        While lines are lost it is tried once a second; the first one that is written again stands
        behind an event that says what was lost.

        Args:
            write: may raise OSError.
            arguments: of it.
        """
        with self._lock:
            now = time.monotonic_ns()
            if self.loss is None or now >= self._retry_ns:
                try:
                    if self.loss is not None:
                        end = {"t_ns": now, "until_t_ns": now, "events": self._lost}
                        self._write({**self.loss, **end})
                        self.loss = None
                    write(*arguments)
                    return True
                except OSError as error:
                    self._lose(error, now)
            self._lost += 1
            return False

    def _open(self) -> LineFile:
        self._events_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, versions = LineFile(self.path), {}
        for package, name in _VERSIONED.items():
            if (module := sys.modules.get(name)) is not None:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    version = getattr(module, "__version__", None)
                    versions[package] = str(version or importlib.metadata.version(package))
        event = {
            "kind": "process",
            "t_ns": time.monotonic_ns(),
            "schema": EVENTS_SCHEMA,
            "host": host_name(),
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "role": self._role(),
            "wall": time.time(),
            "argv": redact_command(sys.argv),
            "python": sys.version.split()[0],
            "versions": versions,  # of the engine's packages that are imported already
        }
        first = line_of(event)[:-1]
        try:
            file.append(first + b" " * _ROOM_BYTES + b"\n")
        except OSError:
            os.ftruncate(file.fd, 0)  # the first line is whole, or not there
            file.close()
            raise
        self._file, self._room_at = file, len(first)
        return file

    def _write(self, event: Fields) -> None:
        """Write an event, or count it where the file has no room for it."""
        file = self._file or self._open()
        line, kind = line_of(event), str(event["kind"])
        seldom = kind in _SELDOM or event.get("phase") in _SELDOM
        if file.written + len(line) <= EVENTS_BYTES - (0 if seldom else _RESERVE_BYTES):
            file.append(line)
        elif not seldom:
            self._dropped[kind] += 1
            count = self._dropped[kind]
            if count & (count - 1) == 0:
                kinds = dict(self._dropped)
                self._write({"kind": "dropped", "t_ns": event["t_ns"], "kinds": kinds})

    def _lose(self, error: OSError, now: int) -> None:
        self._retry_ns = now + _RETRY_NS
        if self.loss is not None:
            return
        self._lost = 0
        reason = (error.strerror or str(error))[:_MOST_REASON]
        self.loss = {"kind": "lost", "t_ns": now, "since_t_ns": now, "until_t_ns": None,
                     "events": None, "reason": reason}  # fmt: skip
        note, room_at = b"\n" + line_of(self.loss)[:-1], self._room_at
        with contextlib.suppress(OSError):
            if room_at is not None and len(note) <= _ROOM_BYTES:
                with self.path.open("r+b", buffering=0) as file:  # one that does not append
                    file.seek(room_at)
                    file.write(note.ljust(_ROOM_BYTES))
        with contextlib.suppress(OSError, ValueError):
            print(
                f"memprof: cannot write {self.path}: {reason}; this process records nothing "
                "until it can; the engine goes on",
                file=sys.stderr,
            )


class LineFile:
    """A file that lines are appended to, one system call each.

    Raises:
        OSError: it cannot be opened; so does ``append``. The rest of a line of which a part was
            written is lost, and the next one begins a line of its own.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        self.written = 0
        self._torn = b""

    def append(self, line: bytes) -> None:
        line = self._torn + line
        while line:
            count = os.write(self.fd, line)
            self.written += count
            line = line[count:]
            self._torn = b"\n" if line else b""  # what is left may be refused

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def line_of(event: Fields) -> bytes:
    """Return an event as a line of JSON, without secrets."""
    line = encode(event)
    if may_hold_secret(line):  # an exception's message may quote an argument
        line = encode(redact_data(json.loads(line)))
    return f"{line}\n".encode()
