"""Reads the tables of ``npu-smi info``: device memory used per chip and per process.

Of several tables the last one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME_ROW = re.compile(r"^\s*\|\s*(?P<npu>\d+)\s+(?:Ascend\s*)?(?:910|310|950)\w*\s*\|")
_MEMORY_ROW = re.compile(
    r"^\s*\|\s*(?P<chip>\d+)(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\s*\|"
    r".*?(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|\s*$"
)
_PROCESS_ROW = re.compile(
    r"^\s*\|\s*(?P<npu>\d+)\s+(?P<chip>\d+)\s*\|\s*(?P<pid>\d+)\s*\|\s*[^|]{0,80}?\s*\|"
    r"\s*(?P<mib>\d+)\s*\|"
)
#: Chips, and processes of one, that are read; chips that notes name.
_MAX_ROWS, _MAX_NOTES = 256, 16


@dataclass
class NpuSmi:
    """The rows of one or more tables, MiB by NPU and chip."""

    chips: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # used, total
    _processes: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)  # by pid
    _npu: str | None = None

    def read(self, text: str) -> None:
        """Read one line; lines of other texts are ignored."""
        if "|" not in text:
            return
        if match := _MEMORY_ROW.match(text):
            if self._npu is not None and len(self.chips) < _MAX_ROWS:
                self.chips[self._npu, match["chip"]] = int(match["used"]), int(match["total"])
        elif match := _NAME_ROW.match(text):
            self._npu = match["npu"]
        elif match := _PROCESS_ROW.match(text):
            held = self._processes.setdefault((match["npu"], match["chip"]), {})
            if len(held) < _MAX_ROWS and len(self._processes) < _MAX_ROWS:
                held[match["pid"]] = int(match["mib"])

    def notes(self) -> list[str]:
        """Return what each chip holds."""
        notes = []
        for (npu, chip), (used, total) in list(self.chips.items())[:_MAX_NOTES]:
            note = f"npu-smi: NPU {npu} chip {chip} uses {used:,} of {total:,} MiB"
            if held := self._processes.get((npu, chip)):
                note += f", {sum(held.values()):,} of them in {len(held)} processes"
            notes.append(note)
        return notes
