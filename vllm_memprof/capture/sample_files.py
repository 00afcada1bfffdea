"""Samples of one process on disk, bounded: lines enter, ``samples/<host>-<pid>/`` leaves.

Runs in every engine process that is sampled. Each level is a ring of files: where one is full the
next one begins, and the oldest goes. Every line also enters the sum of the level above, which
writes one line for ``FOLD`` of them, with the lowest and the highest value of each figure. So
nothing that is written is read or written again, whatever the run lasts, and what is dropped at one
level is still there, thinned, at the next. Nothing is buffered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_memprof.capture.writer import EventWriter, LineFile, line_of
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import (
    FILES,
    FOLD,
    LEVEL_BYTES,
    REQUESTS_BYTES,
    SAMPLES_DIR,
)

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
        self._file: LineFile | None = None
        self._kinds: list[dict[str, int]] = []  # lines by kind, of each file that is there

    def write(self, kind: str, line: bytes) -> None:
        """Append one line.

        Raises:
            OSError: it cannot be written.
        """
        file = self._file
        if file is None or file.written + len(line) > self._file_bytes:
            file = self._next_file()
        file.append(line)
        kinds = self._kinds[-1]
        kinds[kind] = kinds.get(kind, 0) + 1

    def _next_file(self) -> LineFile:
        self.close()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        gone = None
        if len(self._kinds) == FILES:
            self._path(self._number - FILES).unlink(missing_ok=True)
            gone = self._kinds.pop(0)
        self._file = file = LineFile(self._path(self._number))
        self._number += 1
        self._kinds.append({})
        if gone is not None and self._on_drop is not None:
            self._on_drop(gone)
        return self._file or file

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}.jsonl"

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


#: A line on its way to the level above: since_ns, readings and steps that it stands for, lowest and
#: highest values. (A tuple: an object with names costs as much as all else that is done with it.)
_Part = tuple[int, int, int, Values, Values]


class _Sum:
    """Lines of one kind on their way to the level above; added up when they are complete."""

    __slots__ = ("names", "parts")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.parts: list[_Part] = []

    def rename(self, names: tuple[str, ...]) -> None:
        """Take other figures: those that are gone are dropped, new ones begin as unknown."""

        def renamed(row: Values) -> list[int | None]:
            known = dict(zip(self.names, row, strict=True))
            return [known.get(name) for name in names]

        self.parts = [
            (since_ns, folded, steps, renamed(low), renamed(high))
            for since_ns, folded, steps, low, high in self.parts
        ]
        self.names = names

    def add_up(self) -> _Part:
        """Return all parts as one, and begin anew."""
        parts, self.parts = self.parts, []
        since_ns, folded, steps, lows, highs = zip(*parts, strict=True)
        of_lows = [_extremes(column) for column in zip(*lows, strict=True)]
        # the same of readings, which are their own lowest and highest
        of_highs = of_lows if highs == lows else [_extremes(c) for c in zip(*highs, strict=True)]
        lowest, highest = [low for low, _ in of_lows], [high for _, high in of_highs]
        return since_ns[0], sum(folded), sum(steps), lowest, highest


def _extremes(column: Values) -> tuple[int | None, int | None]:
    """Return the lowest and the highest of what is known."""
    known = set(column)  # most figures stay as they are over many steps
    known.discard(None)
    return (min(known), max(known)) if known else (None, None)  # type: ignore[type-var]


class SampleFiles:
    """The files of one process.

    Args:
        run_dir: the run folder.
        largest: returns lines that outlive their file, when one is dropped.
        losses: keeps account of lines that could not be written.
    """

    def __init__(
        self,
        run_dir: Path,
        largest: Callable[[], Sequence[Mapping[str, object]]] = lambda: (),
        losses: EventWriter | None = None,
    ) -> None:
        self._folder = run_dir / SAMPLES_DIR / f"{host_name()}-{os.getpid()}"
        self._largest = largest
        self._lock = threading.RLock()  # of the steps' thread and the one that reads the device
        self._attempt = (losses or EventWriter(run_dir)).attempt
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
        filled = (template % (t_ns, step, steps, *values)).replace("None", "null")
        with self._lock:
            if self._attempt(self._levels[0].write, kind, f"{filled}{rest}}}\n".encode()):
                self._fold(kind, 0, t_ns, step, names, values, (t_ns, 1, steps, values, values))

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write a stage or an edge of a request."""
        with self._lock:
            self._attempt(self._requests.write, kind, line_of({"kind": kind, **fields}))

    def close(self) -> None:
        for ring in (*self._levels, self._requests):
            ring.close()

    def _fold(
        self,
        kind: str,
        level: int,
        t_ns: int,
        step: int | None,
        names: tuple[str, ...],
        last: Values,
        part: _Part,
    ) -> None:
        """Add a line of one level to the sum of the next, and write that where it is complete."""
        if level + 1 == len(self._levels):
            return
        total = self._sums.get((kind, level))
        if total is None:
            total = self._sums[kind, level] = _Sum(names)
        elif total.names is not names and total.names != names:
            total.rename(names)
        total.parts.append(part)
        if len(total.parts) < FOLD:
            return
        whole = since_ns, folded, steps, low, high = total.add_up()
        row: dict[str, object] = {
            "kind": kind,
            "t_ns": t_ns,
            "since_ns": since_ns,
            "folded": folded,
        }
        row |= {} if step is None else {"step": step}
        row |= {"steps": steps, **_known(names, last)}
        row |= {"low": _known(names, low), "high": _known(names, high)}
        if self._attempt(self._levels[level + 1].write, kind, line_of(row)):
            self._fold(kind, level + 1, t_ns, step, names, last, whole)

    def _dropped(self, kinds: dict[str, int]) -> None:
        """Say what has gone, and write the largest again."""
        kept = self._largest()
        for kind, lines in kinds.items():
            if kind not in ("dropped", "again"):
                self._gone[kind] = self._gone.get(kind, 0) + lines
        latest = max((t for each in kept if isinstance(t := each.get("t_ns"), int)), default=0)
        self.event("dropped", {"t_ns": latest, "kinds": dict(self._gone)})
        for fields in kept:
            line = line_of({"kind": "request_memory", **fields, "again": True})
            self._attempt(self._requests.write, "again", line)


def _known(names: tuple[str, ...], values: Values) -> dict[str, object]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}
