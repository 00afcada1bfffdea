"""The engine's figures of one rank, as its equation takes them."""

from __future__ import annotations

from vllm_memprof.accounting.readings import StartupReadings, first_device_total, growth, value
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation
from vllm_memprof.record.loader import ProcessRecord

#: Figures that an engine reads and does not keep: the moment at which it does, and the field of the
#: snapshot.
_IN_SNAPSHOTS = {
    "profile_end_free_bytes": ("profile_end", "device_free_bytes"),
    "profile_end_non_torch_bytes": ("profile_end", "non_torch_bytes"),
    "profile_after_allocated_peak_bytes": ("profile_end", "allocated_peak_bytes"),
    "profile_after_allocated_bytes": ("profile_after", "allocated_bytes"),
    "profile_after_free_bytes": ("profile_after", "device_free_bytes"),
}


def engine_figures(
    process: ProcessRecord, eager: bool, equation: Equation | None
) -> dict[str, int | float | None]:
    """Return the engine's figures; those that it does not keep are taken from the snapshots.

    The engine's graph figure starts at 0 and is known only once a capture has run. A log prints the
    KV cache before multi-modal decoding takes its share, and then what is left.

    Args:
        process: one worker.
        eager: the engine captures no graphs; its estimate of them is 0.
        equation: of the engine, None where it is not known.
    """
    figures, of = dict(process.figures), StartupReadings(process.phases, {})
    if figures.get("kv_cache_reduced_bytes") is not None:
        figures["kv_cache_bytes"] = figures["kv_cache_reduced_bytes"]
    if figures.get("graph_bytes") == 0 and of.last("graph_capture") is None:
        figures["graph_bytes"] = None
    if equation is None:
        return figures
    profiles, load = row_of_run(equation.engine).profiles, of.last("weight_load")
    filled: dict[str, int | None] = {}
    if equation.from_snapshots or not profiles:
        filled["device_total_bytes"] = first_device_total(process.phases)
    for name in equation.from_snapshots:
        moment, field = _IN_SNAPSHOTS[name]
        if of.moments["profile_end"].nearest is not None:  # else there is no such moment
            filled[name] = value(of.moments[moment].nearest, field)
    if not profiles and load is not None and not load.error:
        filled["weights_bytes"] = growth(load.before, load.after, "allocated_bytes")
    if eager and any(term.name == "graph_estimate" for term in equation.terms):
        filled["graph_estimate_bytes"] = 0
    known = {name: size for name, size in filled.items() if figures.get(name) is None}
    return figures | {name: size for name, size in known.items() if size is not None}
