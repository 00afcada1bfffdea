"""Samples of one process on disk, bounded: lines enter, ``samples/<host>-<pid>/`` leaves.

Runs in every engine process that is sampled. Each level is a ring of files: where one is full the
next one begins, and the oldest goes. Every line also enters the sum of the level above, which
writes one line for ``FOLD`` of them, with the lowest and the highest value of each figure. So
nothing that is written is read or written again, whatever the run lasts, and what is dropped at one
level is still there, thinned, at the next. Nothing is buffered.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from vllm_memprof.capture.attributes import Fields
from vllm_memprof.capture.writer import EventWriter, LineFile, encode, line_of, process_name
from vllm_memprof.record.schema import (
    FILES,
    FOLD,
    LEVEL_BYTES,
    REQUESTS_BYTES,
    SAMPLES_DIR,
)


class _Ring:
    """The files of one level.

    Args:
        path: of its files, without their number.
        size: bytes of all its files at most.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._file_bytes = path, size // FILES
        self._number = 0  # of the next file
        self._file: LineFile | None = None
        self._kinds: list[Counter[str]] = []  # lines by kind, of each file that is there
        self.gone: Counter[str] = Counter()  # lines by kind, of files that are not

    def write(self, kind: str, line: bytes) -> None:
        """Append one line.

        Raises:
            OSError: it cannot be written.
        """
        file = self._file
        if file is None or file.written + len(line) > self._file_bytes:
            if file is not None:
                file.close()
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(self._kinds) == FILES:
                self._numbered(self._number - FILES).unlink(missing_ok=True)
                self.gone += self._kinds.pop(0)
            self._file = file = LineFile(self._numbered(self._number))
            self._number += 1
            self._kinds.append(Counter())
        file.append(line)
        self._kinds[-1][kind] += 1

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}-{number}.jsonl")


class SampleFiles:
    """The files of one process.

    Args:
        run_dir: the run folder.
        losses: keeps account of lines that could not be written.
        largest: returns lines that outlive their file, when one is dropped.
    """

    def __init__(
        self,
        run_dir: Path,
        losses: EventWriter,
        largest: Callable[[], Sequence[Fields]],
    ) -> None:
        folder = run_dir / SAMPLES_DIR / process_name()
        self._largest = largest
        self._lock = threading.RLock()  # of the steps' thread and the one that reads the device
        self._attempt = losses.attempt
        self._levels = [_Ring(folder / str(n), size) for n, size in enumerate(LEVEL_BYTES)]
        self._requests = _Ring(folder / "requests", REQUESTS_BYTES)
        #: By kind and level: lines with their lowest and highest figures, on their way to the next.
        self._parts: dict[tuple[str, int], list[tuple[Fields, Fields, Fields]]] = defaultdict(list)
        self._dropped: Counter[str] = Counter()  # that was said

    def sample(
        self, kind: str, t_ns: int, step: int | None, steps: int, figures: Fields, **more: object
    ) -> None:
        """Write one sample.

        Args:
            kind: sample | kv_sample | device_sample.
            t_ns: when it was taken.
            step: of the process; None: none.
            steps: that it stands for.
            figures: by name; None is unknown.
            more: that no sum has.
        """
        row = {"kind": kind, "t_ns": t_ns, "step": step, "steps": steps}
        with self._lock:
            self._write(0, row, figures, more)

    def _write(self, level: int, row: Fields, figures: Fields, more: Fields) -> None:
        """Write a line of one level; where that completes the sum of the next, that as well."""
        kind, line = str(row["kind"]), f"{encode({**row, **figures, **more})}\n".encode()
        if not self._attempt(self._levels[level].write, kind, line):
            return
        parts = self._parts[kind, level]
        parts.append((row, more.get("low", figures), more.get("high", figures)))
        if len(parts) == FOLD:
            rows, lows, highs = zip(*parts, strict=True)
            parts.clear()
            if level + 1 < len(self._levels):
                whole = {
                    **row,
                    "since_ns": rows[0].get("since_ns", rows[0]["t_ns"]),
                    "folded": sum(each.get("folded", 1) for each in rows),
                    "steps": sum(each["steps"] for each in rows),
                }
                bounds = {"low": _each(min, lows), "high": _each(max, highs)}
                self._write(level + 1, whole, figures, bounds)

    def event(self, kind: str, fields: Fields) -> None:
        """Write a stage or an edge of a request."""
        with self._lock:
            self._append(kind, fields)
            gone = self._requests.gone
            if gone == self._dropped:
                return
            # say what has gone, and write the largest again
            self._dropped = Counter(gone)
            kept = self._largest()
            kinds = {name: lines for name, lines in gone.items() if name}
            latest = max((each["t_ns"] for each in kept), default=0)
            self._append("", {"kind": "dropped", "t_ns": latest, "kinds": kinds})
            for each in kept:
                self._append("", {"kind": "request_memory", **each, "again": True})

    def _append(self, kind: str, fields: Fields) -> None:
        self._attempt(self._requests.write, kind, line_of({"kind": kind, **fields}))


def _each(choose: Callable[..., int], rows: Sequence[Fields]) -> Fields:
    """Return the lowest or the highest of what is known, by figure."""
    columns = {
        name: {row.get(name) for row in rows} - {None} for name in dict.fromkeys(chain(*rows))
    }
    return {name: choose(known) for name, known in columns.items() if known}
