"""The KV cache sizes that an engine suggests at the end of its start.

Figures of a rank enter, sizes in bytes leave, as printed or computed: the first is to fit the
request, the second the memory that was free at the start.
"""

from __future__ import annotations

from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.units import MIB

#: What engines leave free in the sizes that they suggest, because profiling "may slightly
#: underestimate non-torch allocations". (vllm-ascend 0.23.0, vllm_ascend/worker/worker.py::
#: NPUWorker.compile_or_warm_up_model; vLLM 0.33.0, vllm/v1/worker/gpu_worker.py)
MARGIN_BYTES = 150 * MIB

REQUEST, DEVICE = "request", "device"
#: Where a log has the sizes: exact, and rounded.
_PRINTED = {
    REQUEST: ("suggested_requested_bytes", "suggested_requested_printed_bytes"),
    DEVICE: ("suggested_limit_bytes", "suggested_limit_printed_bytes"),
}
#: What is subtracted from the request, or from the memory that was free at the start.
_TAKEN = ("weights_bytes", "peak_activation_bytes", "non_torch_increase_bytes")


def printed(figures: Figures) -> dict[str, int]:
    """Return the sizes that a log holds, by what they are to fit into."""
    found = {}
    for limit, names in _PRINTED.items():
        size = next((figures[name] for name in names if figures.get(name) is not None), None)
        if size is not None:
            found[limit] = int(size)
    return found


def computed(equation: Equation, figures: Figures, eager: bool) -> dict[str, int]:
    """Return the sizes that the engine printed at the end of a start that got so far.

    They are computed as the engine does, from its own figures; nothing where its release prints
    none, where a fixed size replaced the equation, or where a figure is unknown.

    Args:
        equation: of the engine.
        figures: of one rank.
        eager: no graphs are captured, and the engine takes 0 for them.
    """
    if not equation.suggests or figures.get("kv_cache_memory_bytes_arg") is not None:
        return {}
    graphs = 0 if eager else figures.get("graph_bytes")
    taken = [graphs, *(figures.get(name) for name in _TAKEN)]
    known = [int(size) for size in taken if size is not None]
    if len(known) < len(taken):
        return {}
    limits = {REQUEST: figures.get("requested_bytes"), DEVICE: figures.get("initial_free_bytes")}
    return {
        limit: int(size) - sum(known) - MARGIN_BYTES
        for limit, size in limits.items()
        if size is not None
    }
