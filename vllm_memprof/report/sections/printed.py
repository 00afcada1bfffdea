"""Figures that a log prints and that no term of the budget equation shows."""

from __future__ import annotations

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.document import Row, Section
from vllm_memprof.tables import COUNT, GIB4, SIZES, Size, alike, table
from vllm_memprof.text import Text, text

#: Figure -> the term of an equation that shows it where the equation is known.
_SHOWN_BY = {
    "weights_bytes": "weights",
    "peak_activation_bytes": "peak_activation",
    "non_torch_increase_bytes": "non_torch",
    "consumed_bytes": "consumed",
    "printed_peak_activation_bytes": "printed_peak",
    "graph_estimate_bytes": "graph_estimate",
    "graph_bytes": "graph",
    "mm_reserved_bytes": "mm_reserved",
    "graph_prefill_bytes": "graph_prefill",
}
#: Figure -> title. Bytes unless the name says otherwise; in the order of a start-up.
_TITLES: dict[str, Text] = {
    "draft_weights_bytes": text("weights of the draft model"),
    "non_kv_cache_bytes": text("all but the KV cache, as printed"),
    "suggested_requested_bytes": text("--kv-cache-memory suggested for the request"),
    "suggested_limit_bytes": text("--kv-cache-memory suggested for the whole device"),
    "equivalent_utilization": text("utilization with the same KV cache, no graph estimate"),
    "suggested_utilization": text("utilization suggested to make up for the estimate"),
    "kv_planner_bytes": text("KV cache with what lies in host memory"),
    "kv_cache_minimum_bytes": text("KV cache of one request of max_model_len"),
    "estimated_max_model_len": text("max_model_len that fits, as the engine estimates"),
    "warm_up_reserved_bytes": text("reserved after warm-up"),
    "warm_up_allocated_bytes": text("allocated after warm-up"),
    "serving_reserved_bytes": text("reserved while serving, the most printed"),
    "serving_allocated_bytes": text("allocated while serving, the most printed"),
    "free_before_load_bytes": text("free before the weights are loaded"),
    "free_after_load_bytes": text("free after the weights are loaded"),
    "k_pool_bytes": text("keys of the KV pool, with its spare page"),
    "v_pool_bytes": text("values of the KV pool, with its spare page"),
    "kv_pool_bytes": text("keys and values of the KV pool, with its spare page"),
    "pools_budget_bytes": text("KV pools of DeepSeek-V4, as sized"),
    "free_after_pools_bytes": text("free after the KV pools"),
    "free_before_capture_bytes": text("free before graphs are captured"),
    "free_after_capture_bytes": text("free after graphs are captured"),
    "free_ready_bytes": text("free at the end of the start-up"),
    "free_at_update_bytes": text("free before a weight update, the least printed"),
    "emptied_before_bytes": text("reserved before continue_generation called empty_cache"),
    "emptied_after_bytes": text("reserved after it"),
    "emptied_bytes": text("released by it"),
    "least_static_fraction": text("--mem-fraction-static above which a KV cache fits"),
    "chunked_prefill_tokens": text("chunk of a prefill"),
    "max_prefill_tokens": text("prefill batch, at most"),
    "max_running_requests": text("requests at a time, at most"),
}
#: Where the engine prints the bytes of a suggestion on another part of the line, which may be cut.
_ROUNDED = {
    "suggested_requested_bytes": "suggested_requested_printed_bytes",
    "suggested_limit_bytes": "suggested_limit_printed_bytes",
}


def printed_sections(report: Report) -> list[Section]:
    """Return the table of each group of ranks of a log that print the same; none for other runs."""
    if not EVIDENCE[report.run.source].partial:
        return []
    tables = {rank.label: _table(rank) for rank in report.ranks}

    def draw(rank: RankReport, labels: str) -> list[Section]:
        rows, notes = tables[rank.label]
        title = text("Other figures of the log, {labels}", labels=labels)
        return [table(title, SIZES if rows else (), rows, notes)]

    return alike([rank for rank in report.ranks if any(tables[rank.label])], draw)


def _table(rank: RankReport) -> tuple[list[Row | Size], list[str]]:
    """Return the rows and the notes of one rank."""
    terms = {term.name: term.bytes for term in rank.budget.terms if term.bytes is not None}
    rows: list[Row | Size] = []
    shown = set(terms)
    if rank.budget.override:  # the equation shows none then
        shown = set(terms) - set(_SHOWN_BY.values())
        rows += [Size(title_of(name), terms[name]) for name in terms if name in shown]
    for name in (*_SHOWN_BY, *_TITLES):
        value = rank.figures.get(name)
        if value is None and name in _ROUNDED:
            value = rank.figures.get(_ROUNDED[name])
        term = _SHOWN_BY.get(name)
        if value is None or term in shown:
            continue
        title = _TITLES[name] if term is None else title_of(term)
        if name.endswith("_bytes"):
            half = rank.half_units.get(name if name in rank.figures else _ROUNDED[name], 0)
            size = COUNT(int(value)) + (f" ±{half:,}" if half else "")
            rows.append(Row([title, GIB4(value), size]))
        elif name.endswith(("_utilization", "_fraction")):
            rows.append(Row([title, f"{value:.4f}", ""]))
        elif name.endswith("_requests"):
            rows.append(Row([title, "", COUNT(int(value))]))
        else:
            rows.append(Row([title, "", text("{tokens} tokens", tokens=COUNT(int(value)))]))
    return rows, _notes(rank)


def _notes(rank: RankReport) -> list[str]:
    """Return what the log says of the estimate of graph memory, where no equation does."""
    subtracted = rank.figures.get("graph_estimate_charged")
    notes: list[str] = []
    if subtracted is not None and rank.budget.equation is None:
        notes.append(
            text("the engine says that it subtracts its graph estimate from the KV cache")
            if subtracted
            else text("the engine says that it does not subtract its graph estimate")
        )
    return [*notes, *_estimate_notes(rank)]


def _estimate_notes(rank: RankReport) -> list[str]:
    """Return what follows from two printed utilizations: the estimate of graph memory."""
    asked, equivalent = (
        rank.figures.get(name) for name in ("gpu_memory_utilization", "equivalent_utilization")
    )
    if asked is None or equivalent is None:
        return []
    total, share = rank.figures.get("device_total_bytes"), asked - equivalent
    if total is None:
        return [
            text(
                "graphs, estimated: {asked:.4f} - {equivalent:.4f} = {share:.4f} of the device's "
                "total, which the log does not print",
                asked=asked,
                equivalent=equivalent,
                share=share,
            )
        ]
    if rank.figures.get("graph_estimate_bytes") != round(share * total):
        return []  # printed as well
    return [
        text(
            "graphs, estimated: derived, ({asked:.4f} - {equivalent:.4f}) x device total = "
            "{size:gib} +-{slack:gib} GiB",
            asked=asked,
            equivalent=equivalent,
            size=round(share * total),
            slack=rank.half_units.get("graph_estimate_bytes", 0),
        )
    ]
