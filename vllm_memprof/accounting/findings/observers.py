"""Functions that read memory or write a log, told by their names in a call chain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllm_memprof.engines import ENGINES
from vllm_memprof.text import Text, text, titled


@dataclass(frozen=True)
class ObservingCall:
    """Functions that read memory or write a log: ``empty_cache`` there changes what is observed."""

    module: str  # pattern of the whole module name
    function: str  # pattern of the function's name, without its class
    what: Text


_READING = text("a memory reading")
#: The most specific first.
OBSERVERS: tuple[ObservingCall, ...] = (
    ObservingCall(
        r"vllm\.platforms\.\w+",
        r"get_current_memory_usage",
        text("vLLM's reading of memory around the weight load"),
    ),
    ObservingCall(
        r"vllm\.utils(\.mem_utils)?", r"(measure|current_memory_usage|__enter__|__exit__)", _READING
    ),
    *(
        ObservingCall(module, function, titled(what))
        for row in ENGINES.values()
        for module, function, what in row.observing
    ),
    ObservingCall(
        r"(logging|loguru|structlog|prometheus_client)(\..*)?",
        r".*",
        text("writing a log or a metric"),
    ),
    ObservingCall(
        r".*",
        r"_?(get|read|query|check|log|print|report|dump|show|current|available)_"
        r"(\w+_)?(memory|mem|hbm|vram)(_\w+)?",
        _READING,
    ),
)
#: vLLM empties the cache before it measures what is left for the KV cache: on purpose.
_ON_PURPOSE = re.compile(r"(:|\.)(memory_profiling|determine_available_memory)$")


def observer_of(chain: Sequence[str]) -> tuple[str, Text] | None:
    """Return the first observer in a call chain, from the innermost outwards.

    Returns:
        The caller as module:function, and what it is.
    """
    for entry in chain:
        if _ON_PURPOSE.search(entry):
            return None
        row = _observer(entry)
        if row is not None:
            return entry, row.what
    return None


@lru_cache(maxsize=4096)  # every rank has the same few
def _observer(entry: str) -> ObservingCall | None:
    module, _, name = entry.partition(":")
    function = name.rpartition(".")[2]
    for row in OBSERVERS:
        if re.fullmatch(row.module, module) and re.fullmatch(row.function, function):
            return row
    return None
