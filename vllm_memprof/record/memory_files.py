"""What files of other tools say about the memory of a device. Types only; standard library."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.record.schema import Count


@dataclass
class FileRow:
    """A row of a memory file. Bytes; unknown is None."""

    table: str  # of ``TITLES["file_tables"]``
    name: str  # of ``TITLES["file_rows"]``, or as the file has it
    bytes: Count = None  # at the end of the file
    allocated_bytes: Count = None  # part of it, where the file tells it from what is reserved
    peak_bytes: Count = None
    peak_s: float | None = None  # seconds after the first record of the file
    largest_bytes: Count = None  # of ``count`` blocks or allocations
    count: Count = None


@dataclass(frozen=True)
class MemoryFile:
    """A file that another tool has written about one device: what it says was measured by it."""

    name: str
    kind: str  # of ``TITLES["file_kinds"]``
    rows: list[FileRow]
