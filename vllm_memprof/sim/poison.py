"""Poison mode of the simulated device: which values the host reads that nobody computed.

The shim follows every byte of the device from the operator that wrote it, or left it unwritten, to
the copy by which the host reads it, and writes a line for each kind of read. The mode changes no
value. Runs in the launcher; ``native/poison.h`` and ``call_site/`` are its other halves.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec

CALL_SITE_DIR = Path(__file__).parent / "call_site"

#: What the host got: memory that nobody wrote, or a defined answer without computing.
UNWRITTEN, ANSWERED = "unwritten", "answered"


@dataclass(frozen=True)
class PoisonedRead:
    """One kind of read, of which there may have been many."""

    kind: str  # UNWRITTEN or ANSWERED
    left_by: str  # the operator that should have written the value, or answered
    read_by: str  # the runtime's function, or the size of which operator's result
    call_site: str  # lines of Python, innermost first; empty where no Python was running
    bytes: int  # of the first such read


def poison_env(path: Path) -> dict[str, str]:
    """Return the variables that turn the mode on, reads going to a file.

    Every tensor gets memory of its own, so that no value of an earlier one passes for its own
    (torch_npu ``NPUCachingAllocator.cpp``), and operators run in the thread that calls them, so
    that a read has its line of Python. Memory figures of such a run are not those of others.
    """
    return {
        "MEMPROF_SIM_POISON": str(path),
        "PYTORCH_NO_NPU_MEMORY_CACHING": "1",
        "TASK_QUEUE_ENABLE": "0",
    }


def load_poisoned_reads(path: Path) -> list[PoisonedRead]:
    """Return the reads of all processes of a run, each kind once; none where there is no file."""
    if not path.exists():
        return []
    reads: dict[tuple[object, ...], PoisonedRead] = {}
    for line in path.read_text("utf-8").splitlines():
        read = msgspec.json.decode(line, type=PoisonedRead)
        reads.setdefault(astuple(read)[:4], read)
    return list(reads.values())
