"""Keeps the last traceback of every process of a log, for the allocation that fails below it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vllm_memprof.logs.figures import ParsedLine, Prefix
from vllm_memprof.logs.formats import OF_ENGINES

#: Function in a traceback -> the phase that it is. The innermost counts; ``execute_model`` only
#: where no other is there, because the profile run of V0 calls it as well.
_PHASE_OF = {
    "load_model": "weight_load",
    "determine_num_available_blocks": "profile_run",
    "determine_available_memory": "profile_run",
    "profile_run": "profile_run",
    "initialize_from_config": "kv_cache_alloc",
    "initialize_kv_cache": "kv_cache_alloc",
    "compile_or_warm_up_model": "warm_up",
    "capture_model": "graph_capture",
    "execute_model": "request",
    **{name: phase for log in OF_ENGINES for name, phase in log.phase_of.items()},
}
_FRAME = re.compile(r'(?:File "(?P<path>[^"]{1,400})")?, line (?P<line>\d+), in (?P<name>\w+)')
#: Frames of a traceback that are kept, the innermost.
_MAX_FRAMES = 200
#: Processes whose tracebacks are kept.
_MAX_TRACEBACKS = 4096


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
        process = _name(line.prefix)
        if "Traceback (" in line.text:
            self._known.pop(process, None)
        match = _FRAME.search(line.text) if ", in " in line.text else None
        if match is None or len(self._known) >= _MAX_TRACEBACKS:
            return
        found = self._known.setdefault(process, Traceback())
        path = (match["path"] or "").replace("\\", "/")
        if path and "/torch/" not in path and "/torch_npu/" not in path:
            found.site = f"{path.rpartition('/')[2]}:{match['line']}"
        found.chain.append(match["name"])
        del found.chain[:-_MAX_FRAMES]
        phase = _PHASE_OF.get(match["name"])
        if phase is not None and (phase != "request" or found.phase is None):
            found.phase = phase

    def take(self, prefix: Prefix | None) -> Traceback:
        """Return the traceback of a process, and forget it."""
        return self._known.pop(_name(prefix), Traceback())


def _name(prefix: Prefix | None) -> str:
    return "" if prefix is None else prefix.label
