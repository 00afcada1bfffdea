"""Findings about what the engine estimates, suggests and prints."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.serving_peak import MARGIN_BYTES
from vllm_memprof.accounting.findings.advice import device_total, make_up_for
from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import (
    INFO,
    WARNING,
    WARNING_BYTES,
    Found,
    RankContext,
    finding,
)
from vllm_memprof.text import text
from vllm_memprof.units import GIB

_SUGGESTION_FIGURES = (
    "requested_bytes",
    "consumed_bytes",
    "printed_peak_activation_bytes",
    "graph_bytes",
)


@finding(
    "graph-estimate-high",
    severity=INFO,
    title=text("The engine took more from the KV cache for graphs than they used"),
    needs=NOTHING,
)
def graph_estimate_high(context: RankContext) -> Iterator[Found]:
    """Find estimates of graph memory that the capture did not use.

    Meaning:
        Some releases subtract an estimate of the graph pools before the capture. What the capture
        did not take stays unused.

    Computed:
        The estimate that the equation subtracts less the bytes of the capture, 128 MiB or more
        (`vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory`).

    To do:
        Raise `--gpu-memory-utilization` to the value that the finding names.
    """
    rank = context.rank
    rows = (row for row in rank.budget.terms if row.name == "graph_estimate" and row.subtracted)
    estimate, actual = next((row.bytes for row in rows), None), rank.figures.get("graph_bytes")
    if estimate is None or actual is None:
        return
    over = estimate - max(0, int(actual))
    if over < WARNING_BYTES:
        return
    evidence = text(
        "estimated {estimate:gib}, captured {actual:gib} GiB", estimate=estimate, actual=actual
    )
    yield Found(evidence, over, make_up_for(rank, over, context.ranks))


@finding(
    "engine-suggestion-wrong",
    severity=WARNING,
    title=text(
        "The KV cache that the engine suggests is too small: it subtracts graph memory twice"
    ),
    needs=NOTHING,
)
def engine_suggestion_wrong(context: RankContext) -> Iterator[Found]:
    """Find suggested KV caches from which graph memory was taken twice.

    Meaning:
        Engines with equation E6 print a `--kv-cache-memory` that fits into the request. The peak
        activation that it subtracts holds the estimate of the graphs already, and the captured
        graphs are subtracted again.

    Computed:
        The suggestion is requested - consumed - peak activation - graphs - 150 MiB within the
        rounding of the log; the right one is larger by the estimate
        (`vllm/v1/worker/gpu_worker.py::Worker.compile_or_warm_up_model`, 0.33.0, vllm#57936).

    To do:
        Use the size that the finding names instead of the engine's.
    """
    rank = context.rank
    figures, half = rank.figures, rank.half_units
    parts = [size for name in _SUGGESTION_FIGURES if (size := figures.get(name)) is not None]
    estimate = figures.get("graph_estimate_bytes")
    printed_name = "suggested_requested_printed_bytes"
    printed = figures.get("suggested_requested_bytes", figures.get(printed_name))
    if (
        rank.budget.equation != "E6"
        or not estimate
        or printed is None
        or len(parts) < len(_SUGGESTION_FIGURES)
    ):
        return
    asked, consumed, peak, graph = parts
    slack = sum(half.get(name, 0) for name in (*_SUGGESTION_FIGURES, printed_name))
    if abs(asked - consumed - peak - graph - MARGIN_BYTES - printed) > slack + 1:
        return
    right = int(printed) + int(estimate)
    evidence = text(
        "{asked:gib} - {consumed:gib} - {peak:gib} - {graph:gib} - 0.15 = {printed:gib} GiB, and "
        "the peak activation holds the estimate of {estimate:gib} GiB already ({issue})",
        asked=asked,
        consumed=consumed,
        peak=peak,
        graph=graph,
        printed=printed,
        estimate=estimate,
        issue="vllm#57936",
    )
    action = text(
        "--kv-cache-memory-bytes {size} ({size:gib} GiB) is the same suggestion without that",
        size=right,
    )
    yield Found(evidence, int(estimate), action if right > 0 else "")


@finding(
    "requested-base-mistaken",
    severity=INFO,
    title=text("The request is a share of the device's total, not of what was free at the start"),
    needs=NOTHING,
)
def requested_base_mistaken(context: RankContext) -> Iterator[Found]:
    """Find notes in a log that take the request for a share of the free memory.

    Meaning:
        `--gpu-memory-utilization` is a share of the device's total. An author who computes with
        the free memory gets another budget.

    Computed:
        The engine's request less the claimed base x utilization, where that is more than the
        rounding of both (`vllm/v1/worker/utils.py::request_memory`).

    To do:
        Compute with the total.
    """
    rank = context.rank
    base = rank.figures.get("claimed_request_base_bytes")
    asked, share = rank.figures.get("requested_bytes"), rank.budget.gpu_memory_utilization
    total = device_total(rank)
    if base is None or asked is None or share is None or total is None:
        return
    off = round(asked - base * share)
    rounded = ("requested_bytes", "claimed_request_base_bytes")
    if abs(off) <= sum(rank.half_units.get(name, 0) for name in rounded):
        return
    evidence = text(
        "{base:gib} x {share} = {wrong:gib}, not {asked:gib} GiB: {asked:gib} / {share} = "
        "{total:gib} GiB",
        base=base,
        share=share,
        wrong=base * share,
        asked=asked,
        total=total,
    )
    yield Found(evidence, off)


@finding(
    "gb-is-gib",
    severity=INFO,
    title=text('"Loading model weights took ... GB" prints GiB'),
    needs=NOTHING,
    priced=False,
)
def gb_is_gib(context: RankContext) -> Iterator[Found]:
    """Find weights that vllm-ascend prints as GB.

    Meaning:
        The line divides by 2^30 and says GB. Taken for 10^9 bytes, the weights look 7 % smaller
        than they are.

    Computed:
        Weights in bytes less the printed number x 10^9, of logs whose line has four digits
        (`vllm_ascend/worker/model_runner_v1.py::NPUModelRunner.load_model`).

    To do:
        Read the figure as GiB.
    """
    rank = context.rank
    size = rank.figures.get("weights_bytes")
    if context.run.info.engine != "vllm-ascend" or size is None:
        return
    if rank.half_units.get("weights_bytes", GIB) > GIB // 10_000:
        return  # other lines print two digits, and GiB
    evidence = text(
        "{value:.4f} GB is {value:.4f} GiB = {size:bytes} bytes, by {where}",
        value=size / GIB,
        size=round(size),
        where="NPUModelRunner.load_model",
    )
    yield Found(evidence, round(size - size / GIB * 10**9))
