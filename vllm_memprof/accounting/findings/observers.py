"""Functions that read memory or write a log, told by their names in a call chain."""

from __future__ import annotations

import re
from functools import lru_cache

from vllm_memprof.engines import ENGINES
from vllm_memprof.text import text, titled

#: Patterns of module and of function, without its class, and what they do: ``empty_cache`` there
#: changes what is observed. The most specific first.
OBSERVERS = (
    *(
        (module, function, titled(what))
        for row in ENGINES.values()
        for module, function, what in row.observing
    ),
    (
        r"(logging|loguru|structlog|prometheus_client)(\..*)?",
        r".*",
        text("writing a log or a metric"),
    ),
    (
        r".*",
        r"_?(get|read|query|check|log|print|report|dump|show|current|available)_"
        r"(\w+_)?(memory|mem|hbm|vram)(_\w+)?",
        text("a memory reading"),
    ),
)
#: vLLM empties the cache before it measures what is left for the KV cache: on purpose.
_ON_PURPOSE = re.compile(r"(:|\.)(memory_profiling|determine_available_memory)$")


@lru_cache(maxsize=4096)  # every rank has the same few
def observer_of(chain: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the first observer in a call chain, from the innermost outwards.

    Returns:
        The caller as module:function, and what it is.
    """
    for entry in chain:
        if _ON_PURPOSE.search(entry):
            return None
        module, _, name = entry.partition(":")
        function = name.rpartition(".")[2]
        for in_module, called, what in OBSERVERS:
            if re.fullmatch(in_module, module) and re.fullmatch(called, function):
                return entry, what
    return None
