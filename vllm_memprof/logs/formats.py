"""What engines print, by the tables of log lines in their folders."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from vllm_memprof.engines import ENGINES, VLLM, row_of_run
from vllm_memprof.engines.line_format import LineFormat, LogLines

LOGS: dict[str, LogLines] = {
    row.name: import_module(row.log_lines).LOG for row in ENGINES.values() if row.log_lines
}
#: In this order; a number that one row has read is not read again by a later one.
FORMATS: tuple[LineFormat, ...] = tuple(line for log in LOGS.values() for line in log.formats)


@cache
def log_of(engine: str | None) -> LogLines:
    """Return the lines of the engine of a run; vLLM's where none is known."""
    return LOGS.get(row_of_run(engine).name, LOGS[VLLM.name])


def words(field: str) -> tuple[str, ...]:
    """Return what all engines have in a field of ``LogLines``, without repeats."""
    return tuple(dict.fromkeys(each for log in LOGS.values() for each in getattr(log, field)))
