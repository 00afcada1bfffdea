"""Samples of one process on disk, bounded: lines enter, ``samples/<host>-<pid>/`` leaves.

Runs in every engine process that is sampled. Each level is a ring of files: where one is full the
next one begins, and the oldest goes. Every line also enters the sum of the level above, which
writes one line for ``FOLD`` of them, with the lowest and the highest value of each figure. So
nothing that is written is read or written again, whatever the run lasts, and what is dropped at one
level is still there, thinned, at the next. Nothing is buffered.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from vllm_memprof.record.schema import (
    FILES,
    FOLD,
    LEVEL_BYTES,
    REQUESTS_BYTES,
    SAMPLES_DIR,
)
from vllm_memprof.redact import may_hold_secret, redact_data

Values = Sequence["int | None"]


class _Ring:
    """The files of one level.

    Args:
        folder: of the process.
        name: of the level.
        size: bytes of all its files at most.
        on_drop: called with the lines by kind of a file that has gone.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        size: int,
        on_drop: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        self._folder, self._name = folder, name
        self._file_bytes = size // FILES
        self._on_drop = on_drop
        self._number = 0
        self._fd: int | None = None
        self._written = 0
        self._kinds: list[dict[str, int]] = []  # lines by kind, of each file that is there

    def write(self, kind: str, line: bytes) -> None:
        """Append one line.

        Raises:
            OSError: it cannot be written.
        """
        if self._fd is None or self._written + len(line) > self._file_bytes:
            self._next_file()
        assert self._fd is not None
        os.write(self._fd, line)
        self._written += len(line)
        kinds = self._kinds[-1]
        kinds[kind] = kinds.get(kind, 0) + 1

    def _next_file(self) -> None:
        self.close()
        gone = None
        if len(self._kinds) == FILES:
            self._path(self._number - FILES).unlink(missing_ok=True)
            gone = self._kinds.pop(0)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path(self._number), flags, 0o600)
        self._number += 1
        self._written = 0
        self._kinds.append({})
        if gone is not None and self._on_drop is not None:
            self._on_drop(gone)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}.jsonl"

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


class _Sum:
    """Lines of one kind on their way to the level above; added up when they are complete."""

    __slots__ = ("_highs", "_lows", "folded", "lines", "names", "since_ns", "steps")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.lines, self.folded, self.steps, self.since_ns = 0, 0, 0, 0
        self._lows: list[Values] = []
        self._highs: list[Values] = []

    def rename(self, names: tuple[str, ...]) -> None:
        """Take other figures: those that are gone are dropped, new ones begin as unknown."""
        for rows in (self._lows, self._highs):
            known = [dict(zip(self.names, row, strict=True)) for row in rows]
            rows[:] = [[row.get(name) for name in names] for row in known]
        self.names = names

    def add(self, since_ns: int, folded: int, steps: int, low: Values, high: Values) -> None:
        if not self.lines:
            self.since_ns = since_ns
        self.lines += 1
        self.folded += folded
        self.steps += steps
        self._lows.append(low)
        self._highs.append(high)

    @property
    def low(self) -> list[int | None]:
        return [_extreme(min, column) for column in zip(*self._lows, strict=True)]

    @property
    def high(self) -> list[int | None]:
        return [_extreme(max, column) for column in zip(*self._highs, strict=True)]


def _extreme(pick: Callable[[Iterable[int]], int], column: Values) -> int | None:
    """Return the lowest or the highest of what is known."""
    known = [value for value in column if value is not None]
    return pick(known) if known else None


class SampleFiles:
    """The files of one process.

    Args:
        run_dir: the run folder.
        largest: returns lines that outlive their file, when one is dropped.
    """

    def __init__(
        self,
        run_dir: Path,
        largest: Callable[[], Sequence[Mapping[str, object]]] = lambda: (),
    ) -> None:
        self._folder = run_dir / SAMPLES_DIR / f"{socket.gethostname()}-{os.getpid()}"
        self._largest = largest
        self._lock = threading.RLock()  # of the steps' thread and the one that reads the device
        self._broken = False
        self._opened = False
        self._levels = [_Ring(self._folder, str(n), size) for n, size in enumerate(LEVEL_BYTES)]
        self._requests = _Ring(self._folder, "requests", REQUESTS_BYTES, self._dropped)
        self._sums: dict[tuple[str, int], _Sum] = {}
        self._templates: dict[str, tuple[tuple[str, ...], str]] = {}
        self._gone: dict[str, int] = {}

    def sample(
        self,
        kind: str,
        t_ns: int,
        step: int | None,
        steps: int,
        names: tuple[str, ...],
        values: Values,
        rest: str = "",
    ) -> None:
        """Write one sample.

        Args:
            kind: sample | kv_sample | device_sample.
            t_ns: when it was taken.
            step: of the process; None: none.
            steps: that it stands for.
            names: of the figures.
            values: in the order of the names; None is unknown.
            rest: more of the object, as JSON that begins with a comma.
        """
        # from a template: json.dumps costs as much as the reading
        known, template = self._templates.get(kind, (None, ""))
        if known is not names:
            figures = "".join(f',"{name}":%s' for name in names)
            template = f'{{"kind":"{kind}","t_ns":%s,"step":%s,"steps":%s{figures}'
            self._templates[kind] = names, template
        filled = template % (
            t_ns,
            "null" if step is None else step,
            steps,
            *["null" if value is None else value for value in values],
        )
        with self._lock:
            if self._write(self._levels[0], kind, f"{filled}{rest}}}\n".encode()):
                self._fold(kind, 0, t_ns, t_ns, 1, step, steps, names, values, values, values)

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write a stage or an edge of a request."""
        with self._lock:
            self._write(self._requests, kind, _line(kind, fields))

    def close(self) -> None:
        for ring in (*self._levels, self._requests):
            ring.close()

    def _fold(
        self,
        kind: str,
        level: int,
        t_ns: int,
        since_ns: int,
        folded: int,
        step: int | None,
        steps: int,
        names: tuple[str, ...],
        last: Values,
        low: Values,
        high: Values,
    ) -> None:
        """Add a line of one level to the sum of the next, and write that where it is complete."""
        if level + 1 == len(self._levels):
            return
        key = (kind, level)
        total = self._sums.get(key)
        if total is None:
            total = self._sums[key] = _Sum(names)
        elif total.names is not names and total.names != names:
            total.rename(names)
        total.add(since_ns, folded, steps, low, high)
        if total.lines < FOLD:
            return
        del self._sums[key]
        line = json.dumps(
            {"kind": kind, "t_ns": t_ns, "since_ns": total.since_ns, "folded": total.folded,
             "step": step, "steps": total.steps, **_known(names, last),
             "low": _known(names, total.low), "high": _known(names, total.high)},
            separators=(",", ":"),
        )  # fmt: skip
        if self._write(self._levels[level + 1], kind, f"{line}\n".encode()):
            self._fold(
                kind, level + 1, t_ns, total.since_ns, total.folded, step, total.steps,
                names, last, total.low, total.high,
            )  # fmt: skip

    def _write(self, ring: _Ring, kind: str, line: bytes) -> bool:
        if self._broken:
            return False
        try:
            if not self._opened:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._opened = True
            ring.write(kind, line)
        except OSError as error:
            self._broken = True
            print(
                f"memprof: cannot write {self._folder}: {error}; this process samples no more",
                file=sys.stderr,
            )
            return False
        return True

    def _dropped(self, kinds: dict[str, int]) -> None:
        """Say what has gone, and write the largest again."""
        kept = list(self._largest())
        for kind, lines in kinds.items():
            if kind not in ("dropped", "again"):
                self._gone[kind] = self._gone.get(kind, 0) + lines
        self.event("dropped", {"t_ns": _latest(kept), "kinds": dict(self._gone)})
        for fields in kept:
            line = _line("request_memory", {**fields, "again": True})
            self._write(self._requests, "again", line)


def _known(names: tuple[str, ...], values: Values) -> dict[str, int]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _line(kind: str, fields: Mapping[str, object]) -> bytes:
    line = json.dumps({"kind": kind, **fields}, separators=(",", ":"), default=str)
    if may_hold_secret(line):  # an exception's message may quote an argument
        line = json.dumps(redact_data(json.loads(line)), separators=(",", ":"))
    return f"{line}\n".encode()


def _latest(kept: Sequence[Mapping[str, object]]) -> int:
    return max((t for fields in kept if isinstance(t := fields.get("t_ns"), int)), default=0)
