"""The engine's figures of one rank, as its equation takes them."""

from __future__ import annotations

from vllm_memprof.accounting.quantities import Evidence
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.spans import edges_of, last_of
from vllm_memprof.units import minus

#: Figures that an engine reads and does not keep: the edge of the profile run's last empty_cache,
#: and the field of the snapshot.
_IN_SNAPSHOTS = {
    "profile_end_free_bytes": ("before", "device_free_bytes"),
    "profile_end_non_torch_bytes": ("before", "non_torch_bytes"),
    "profile_after_allocated_peak_bytes": ("before", "allocated_peak_bytes"),
    "profile_after_allocated_bytes": ("after", "allocated_bytes"),
    "profile_after_free_bytes": ("after", "device_free_bytes"),
}


def engine_figures(
    process: ProcessRecord, source: str, eager: bool, equation: Equation | None
) -> dict[str, int | float | None]:
    """Return the engine's figures; those that it does not keep are taken from the snapshots.

    The engine's graph figure starts at 0 and is known only once a capture has run. A log prints the
    KV cache before multi-modal decoding takes its share, and then what is left.

    Args:
        process: one worker.
        source: of the run, ``hooks`` or ``log``.
        eager: the engine captures no graphs; its estimate of them is 0.
        equation: of the engine, None where it is not known.
    """
    figures = dict(process.figures)
    if source == "log":
        if figures.get("kv_cache_reduced_bytes") is not None:
            figures["kv_cache_bytes"] = figures["kv_cache_reduced_bytes"]
    else:
        captured = any(span.phase == "graph_capture" for span in process.phases)
        if not figures.get("graph_bytes") and not captured:
            figures["graph_bytes"] = None
        if equation is not None and equation.from_snapshots:
            _complete(figures, process, equation.from_snapshots)
        if equation is not None and not row_of_run(equation.engine).profiles:
            _complete_without_profile(figures, process)
    terms = () if equation is None else equation.terms
    if eager and any(term.name == "graph_estimate" for term in terms):
        figures["graph_estimate_bytes"] = figures.get("graph_estimate_bytes") or 0
    return figures


def _complete_without_profile(
    figures: dict[str, int | float | None], process: ProcessRecord
) -> None:
    """Add what such an engine does not measure: what was allocated while the weights loaded."""
    weights = last_of(process.phases, "weight_load")
    if figures.get("weights_bytes") is None and weights is not None and not weights.error:
        before, after = (
            None if edge is None else edge.allocated_bytes
            for edge in (weights.before, weights.after)
        )
        figures["weights_bytes"] = minus(after, before)
    if figures.get("device_total_bytes") is None:
        figures["device_total_bytes"] = first_device_total(process)


def first_device_total(process: ProcessRecord) -> int | None:
    """Return the device total that the first snapshot with one read, bytes."""
    totals = (edge.snapshot.device_total_bytes for _, edge in edges_of(process.phases))
    return next((total for total in totals if total is not None), None)


def _complete(
    figures: dict[str, int | float | None], process: ProcessRecord, names: tuple[str, ...]
) -> None:
    if figures.get("device_total_bytes") is None:
        figures["device_total_bytes"] = first_device_total(process)
    before, after, _ = Evidence(figures, process.phases, simulated=False).profile_end()
    for name in names:
        if figures.get(name) is None:
            edge, field_name = _IN_SNAPSHOTS[name]
            snapshot = before if edge == "before" else after
            # without an empty_cache there is no such moment
            known = snapshot is not None and before is not None
            figures[name] = getattr(snapshot, field_name) if known else None
