"""Incremental reader of a run's event files, for the launcher's live view. Standard library only.

Runs in the launcher while the engine's processes append. A line counts once its newline is there,
so an event that is still being written is delivered by a later poll, whole.
"""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import listed, open_file
from vllm_memprof.record.lines import Event, parse_events
from vllm_memprof.record.samples import REQUESTS, sample_files
from vllm_memprof.record.schema import EVENTS_DIR, SAMPLES_DIR

#: Bytes read per file and poll, so that one chatty process cannot stall the others.
_CHUNK_BYTES = 1 << 20


class EventTail:
    """Follows ``events/*.jsonl`` of one run folder, and the samples of the same processes.

    The folder, the files and the lines may appear at any time; files of samples also go. Of samples
    the finest level is read, and what tells of requests, under the name of the process's event
    file. Lines that are not a JSON object are skipped; nothing here raises because of what a dying
    process left behind.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        #: Bytes of a file consumed so far, and the start of a line whose newline has not arrived.
        self._read: dict[Path, tuple[int, bytes]] = {}

    def poll(self) -> list[tuple[str, Event]]:
        """Return events completed since the last poll, as (file name, event), in their order."""
        found: list[tuple[str, Event]] = []
        try:
            events = listed(self._run_dir / EVENTS_DIR, "*.jsonl")
            folders = listed(self._run_dir / SAMPLES_DIR, "*")
            samples = [
                (folder.name, path)
                for folder in folders
                for level, path in sample_files(self._run_dir, folder.name)
                if level in (0, REQUESTS)
            ]
        except (OSError, RunRecordError):
            return []
        paths = [(path.stem, path) for path in events] + samples
        self._read = {path: self._read.get(path, (0, b"")) for _, path in paths}
        for process, path in paths:
            offset, pending = self._read[path]
            try:
                with open_file(path, self._run_dir) as stream:
                    stream.seek(offset)
                    data = stream.read(_CHUNK_BYTES)
            except (OSError, RunRecordError):
                continue
            whole, _, rest = (pending + data).rpartition(b"\n")
            self._read[path] = offset + len(data), rest
            found.extend((f"{process}.jsonl", event) for event in parse_events(whole)[0])
        return found
