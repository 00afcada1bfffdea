"""Keeps the last traceback of every process of a log, for the allocation that fails below it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vllm_memprof.logs.figures import ParsedLine, Prefix
from vllm_memprof.logs.formats import LOGS

PHASE_OF = {name: phase for log in LOGS.values() for name, phase in log.phase_of.items()}
_FRAME = re.compile(r'(?:File "(?P<path>[^"]{1,400})")?, line (?P<line>\d+), in (?P<name>\w+)')
#: Frames of a traceback that are kept, the innermost, and processes whose tracebacks are.
_MAX_FRAMES, _MAX_TRACEBACKS = 200, 4096


@dataclass
class Traceback:
    """What the traceback of one process names."""

    phase: str | None = None
    chain: list[str] = field(default_factory=list)  # functions, the innermost last
    site: str | None = None  # file:line of the last frame outside torch


class Tracebacks:
    """Reads lines one after the other."""

    def __init__(self) -> None:
        self._known: dict[str, Traceback] = {}

    def read(self, line: ParsedLine) -> None:
        """Keep a frame, until the next traceback of the same process begins."""
        if "Traceback (" in line.text:
            self.take(line.prefix)
        match = _FRAME.search(line.text) if ", in " in line.text else None
        if match is None or len(self._known) >= _MAX_TRACEBACKS:
            return
        found = self._known.setdefault(_name(line.prefix), Traceback())
        path = (match["path"] or "").replace("\\", "/")
        if path and "/torch/" not in path and "/torch_npu/" not in path:
            found.site = f"{path.rpartition('/')[2]}:{match['line']}"
        found.chain = [*found.chain, match["name"]][-_MAX_FRAMES:]
        phase = PHASE_OF.get(match["name"])
        if phase is not None and (phase != "request" or found.phase is None):
            found.phase = phase

    def take(self, prefix: Prefix | None) -> Traceback:
        """Return the traceback of a process, and forget it."""
        return self._known.pop(_name(prefix), Traceback())


def _name(prefix: Prefix | None) -> str:
    return "" if prefix is None else prefix.label
