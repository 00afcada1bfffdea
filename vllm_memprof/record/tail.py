"""Incremental reader of a run's event files, for the launcher's live view. Standard library only.

Runs in the launcher while the engine's processes append. A line counts once its newline is there,
so an event that is still being written is delivered by a later poll, whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.record.lines import Event, parse_event
from vllm_memprof.record.schema import EVENTS_DIR, SAMPLES_DIR

#: Bytes read per file and poll, so that one chatty process cannot stall the others.
_CHUNK_BYTES = 1 << 20


@dataclass
class _Cursor:
    offset: int = 0  # bytes of the file consumed so far
    pending: bytes = b""  # the start of a line whose newline has not arrived


class EventTail:
    """Follows ``events/*.jsonl`` of one run folder, and the samples of the same processes.

    The folder, the files and the lines may appear at any time; files of samples also go. Of samples
    the finest level is read, and what tells of requests, under the name of the process's event
    file. Lines that are not a JSON
    object are skipped and counted in ``skipped_lines``; nothing here raises because of what a dying
    process left behind.
    """

    def __init__(self, run_dir: Path) -> None:
        self._events_dir = Path(run_dir) / EVENTS_DIR
        self._samples_dir = Path(run_dir) / SAMPLES_DIR
        self._cursors: dict[str, _Cursor] = {}
        self.skipped_lines = 0

    def poll(self) -> list[tuple[str, Event]]:
        """Return events completed since the last poll, as (file name, event), in their order."""
        found: list[tuple[str, Event]] = []
        for file, path in self._files():
            cursor = self._cursors.setdefault(str(path), _Cursor())
            found.extend((file, event) for event in self._read_new(path, cursor))
        return found

    def _files(self) -> list[tuple[str, Path]]:
        """Return each file with the name of the event file of its process; events come first."""
        try:
            events = sorted(self._events_dir.glob("*.jsonl"))
            samples = sorted(self._samples_dir.glob("*/0-*.jsonl"), key=_by_number)
            samples += sorted(self._samples_dir.glob("*/requests-*.jsonl"), key=_by_number)
        except OSError:
            return []
        gone = self._cursors.keys() - {str(path) for path in (*events, *samples)}
        for path in gone:
            del self._cursors[path]
        return [(path.name, path) for path in events] + [
            (f"{path.parent.name}.jsonl", path) for path in samples
        ]

    def _read_new(self, path: Path, cursor: _Cursor) -> list[Event]:
        try:
            with path.open("rb") as stream:
                stream.seek(cursor.offset)
                data = stream.read(_CHUNK_BYTES)
        except OSError:
            return []
        cursor.offset += len(data)
        *lines, cursor.pending = (cursor.pending + data).split(b"\n")
        events = []
        for line in lines:
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                self.skipped_lines += 1
            else:
                events.append(event)
        return events


def _by_number(path: Path) -> tuple[str, int, str]:
    number = path.stem.partition("-")[2]
    return path.parent.name, int(number) if number.isdecimal() else 0, path.name
