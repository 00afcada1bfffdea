"""Event lines of one process: dictionaries enter, ``events/<host>-<pid>.jsonl`` leaves.

Runs in every engine process.

Each event is one ``write`` system call on a descriptor opened with O_APPEND: nothing is buffered,
so a process that is killed loses at most the line under way, and no flush is ever owed at exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_memprof.record.schema import EVENTS_BYTES, EVENTS_DIR, EVENTS_SCHEMA
from vllm_memprof.redact import may_hold_secret, redact_command, redact_data

#: Packages whose versions the first line carries: module that is surely loaded if the package is in
#: use -> name.
_VERSIONED = {
    "vllm": "vllm.version",
    "torch": "torch",
    "torch_npu": "torch_npu",
    "vllm_ascend": "vllm_ascend",
}


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
        self._fd: int | None = None
        self._broken = False
        self._written = 0
        self._dropped: dict[str, int] = {}
        self._lock = threading.RLock()

    @property
    def path(self) -> Path:
        return self._events_dir / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def emit(self, kind: str, fields: Mapping[str, object], role: str) -> None:
        """Write one event.

        Args:
            kind: a kind of the record schema.
            fields: the event's own keys; ``t_ns`` is added when missing.
            role: this process's role, for the first line of its file.

        Raises:
            nothing: a full disk or an unwritable folder ends the writing, not the engine.
        """
        if self._broken:
            return
        event = {"kind": kind, "t_ns": time.monotonic_ns(), **fields}
        try:
            with self._lock:
                if self._fd is None:
                    self._events_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                    self._fd = os.open(self.path, flags, 0o600)
                    self._write(_process_event(role))
                self._write(event)
        except OSError as error:
            self._broken = True
            print(
                f"memprof: cannot write {self.path}: {error}; this process records no more",
                file=sys.stderr,
            )

    def after_fork(self) -> None:
        """Forget the parent's file; the child opens its own at its first event."""
        self._lock = threading.RLock()
        self._broken = False
        self._written, self._dropped = 0, {}
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _write(self, event: Mapping[str, object]) -> None:
        assert self._fd is not None
        line = json.dumps(event, separators=(",", ":"), default=str)
        if may_hold_secret(line):  # an exception's message may quote an argument
            line = json.dumps(redact_data(json.loads(line)), separators=(",", ":"))
        data = f"{line}\n".encode()
        kind = str(event["kind"])
        seldom = kind == "dropped" or event.get("phase") in _SELDOM
        room = EVENTS_BYTES - (0 if seldom else _RESERVE_BYTES)
        if self._written + len(data) <= room:
            self._written += os.write(self._fd, data)
            return
        count = self._dropped[kind] = self._dropped.get(kind, 0) + 1
        if kind != "dropped" and count & (count - 1) == 0:
            kinds = dict(self._dropped)
            self._write({"kind": "dropped", "t_ns": event.get("t_ns"), "kinds": kinds})


def _process_event(role: str) -> dict[str, object]:
    return {
        "kind": "process",
        "t_ns": time.monotonic_ns(),
        "schema": EVENTS_SCHEMA,
        "host": socket.gethostname(),
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
        module = sys.modules.get(module_name)
        if module is None:
            continue
        version = getattr(module, "__version__", None)
        if not version:
            import importlib.metadata

            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(package)
        if version:
            versions[package] = str(version)
    return versions
