"""Reads the tables of ``npu-smi info``: device memory used per chip and per process.

Of several tables the last one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vllm_memprof.units import MIB

_NAME_ROW = re.compile(r"^\s*\|\s*(?P<npu>\d+)\s+(?P<name>(?:Ascend\s*)?(?:910|310|950)\w*)\s*\|")
_MEMORY_ROW = re.compile(
    r"^\s*\|\s*(?P<chip>\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\s*\|"
    r".*?(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|?\s*$"
)
_PROCESS_ROW = re.compile(
    r"^\s*\|\s*(?P<npu>\d+)\s+(?P<chip>\d+)\s*\|\s*(?P<pid>\d+)\s*\|\s*(?P<name>[^|]{0,80}?)\s*\|"
    r"\s*(?P<mib>\d+)\s*\|"
)
MAX_ROWS = 256


@dataclass
class NpuSmiChip:
    """One chip; npu-smi prints MiB."""

    npu: int
    chip: int
    name: str | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    processes: dict[int, int] = field(default_factory=dict)  # pid -> bytes


class NpuSmi:
    """The rows of one or more tables."""

    def __init__(self) -> None:
        self.cards: dict[tuple[int, int], NpuSmiChip] = {}
        self._npu: tuple[int, str] | None = None

    def read(self, text: str) -> None:
        """Read one line; lines of other texts are ignored."""
        if "|" not in text:
            return
        if match := _MEMORY_ROW.match(text):
            if self._npu is not None and text.rstrip().endswith("|"):
                card = self._card(self._npu[0], int(match["chip"]))
                if card is not None:
                    card.name = self._npu[1]
                    card.used_bytes = int(match["used"]) * MIB
                    card.total_bytes = int(match["total"]) * MIB
        elif match := _NAME_ROW.match(text):
            self._npu = int(match["npu"]), match["name"]
        elif match := _PROCESS_ROW.match(text):
            card = self._card(int(match["npu"]), int(match["chip"]))
            if card is not None and len(card.processes) < MAX_ROWS:
                card.processes[int(match["pid"])] = int(match["mib"]) * MIB

    def _card(self, npu: int, chip: int) -> NpuSmiChip | None:
        if (npu, chip) not in self.cards and len(self.cards) >= MAX_ROWS:
            return None
        return self.cards.setdefault((npu, chip), NpuSmiChip(npu, chip))
