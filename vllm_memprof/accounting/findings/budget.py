"""Findings about the KV cache that the engine granted: none, too small, another one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_memprof.accounting.findings.advice import leave_a_kv_cache
from vllm_memprof.accounting.findings.needs import GRANTED_OR_REFUSED, NOTHING, RECOMPUTED
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    WARNING,
    Found,
    RankContext,
    finding,
)
from vllm_memprof.text import join, text


@finding(
    "negative-kv",
    severity=ERROR,
    title=text("The budget leaves nothing for the KV cache"),
    needs=GRANTED_OR_REFUSED,
    priced=False,
)
def negative_kv(context: RankContext) -> Iterator[Found]:
    """Find ranks whose KV cache is zero or less.

    Meaning:
        Weights, the activation peak and memory outside torch take all of the request, so the
        engine cannot serve.

    Computed:
        The KV cache that the engine granted is 0 or negative, or its message says that no memory
        is available for the cache blocks. Some releases print 0 for every negative result; then the
        terms of the equation less the request tell how much is missing.

    To do:
        Raise `--gpu-memory-utilization` above the value that the finding names, lower
        `--max-num-batched-tokens`, or use more devices.
    """
    budget = context.rank.budget
    granted, asked = budget.engine_kv_cache_bytes, budget.requested_bytes
    refused = bool(context.rank.figures.get("no_cache_blocks"))
    if not refused and (granted is None or granted > 0):
        return
    missing = max(0, -(granted or 0))
    sizes = [row.bytes for row in budget.terms if row.subtracted]
    known = [size for size in sizes if size is not None]
    if not missing and asked is not None and sizes and len(known) == len(sizes):
        missing = max(0, sum(known) - asked)
    parts = []
    if asked is not None:
        parts.append(text("requested {size:gib} GiB", size=asked))
    weights = context.rank.figures.get("weights_bytes")
    if weights is not None:
        parts.append(text("weights {size:gib} GiB", size=weights))
    if missing and not granted:
        parts.append(text("the equation gives {size:gib} GiB", size=-missing))
    if granted is not None:
        parts.append(text("KV cache {size:gib} GiB", size=granted))
    if refused:
        parts.append(text("the engine refused to start: no memory for the cache blocks"))
    yield Found(join(", ", parts), granted, leave_a_kv_cache(context.rank, missing))


@finding(
    "kv-too-small",
    severity=ERROR,
    title=text("The KV cache does not hold one request of max_model_len tokens"),
    needs=NOTHING,
    priced=False,
)
def kv_too_small(context: RankContext) -> Iterator[Found]:
    """Find engines that refused to serve because not even one request fits.

    Meaning:
        A request of `--max-model-len` tokens takes more than the whole KV cache.

    Computed:
        What the engine says that one request needs, less the KV cache that it granted
        (`vllm/v1/core/kv_cache_utils.py::check_enough_kv_cache_memory`).

    To do:
        Lower `--max-model-len` to the length that the engine estimates, or raise
        `--gpu-memory-utilization`.
    """
    rank = context.rank
    asked, stored = (
        rank.figures.get(name) for name in ("kv_cache_minimum_tokens", "kv_cache_stored_tokens")
    )
    if asked is not None and stored is not None and asked > stored:
        yield Found(
            text(
                "max_model_len is {asked:,} tokens, and the KV cache holds {stored:,}",
                asked=int(asked),
                stored=int(stored),
            ),
            action=text("--max-model-len {length} fits", length=int(stored)),
        )
        return
    wanted, granted = rank.figures.get("kv_cache_minimum_bytes"), rank.budget.engine_kv_cache_bytes
    if wanted is not None and granted is None:
        evidence = text("one request takes {size:gib} GiB", size=wanted)
        length = rank.figures.get("estimated_max_model_len")
        fits = text("--max-model-len {length} fits", length=int(length)) if length else None
        yield Found(evidence, action=fits or leave_a_kv_cache(rank, 0))
        return
    if wanted is None or granted is None or granted >= wanted:
        return
    length, missing = rank.figures.get("estimated_max_model_len"), int(wanted) - granted
    parts = [
        text("one request takes {size:gib} GiB", size=wanted),
        text("KV cache {size:gib} GiB", size=granted),
    ]
    fits = text("--max-model-len {length} fits", length=int(length)) if length else None
    yield Found(join(", ", parts), missing, fits or leave_a_kv_cache(rank, missing))


@finding(
    "startup-refused",
    severity=ERROR,
    title=text("The engine asks for more than is free, and refuses to start"),
    needs=NOTHING,
    priced=False,
)
def startup_refused(context: RankContext) -> Iterator[Found]:
    """Find engines that ended at the start because the device was in use.

    Meaning:
        `--gpu-memory-utilization` is a share of the device's total. Another process holds so much
        that the share is not free.

    Computed:
        Requested (total x utilization) less free memory at the engine's first snapshot
        (`vllm/v1/worker/utils.py::request_memory`).

    To do:
        End the process that holds the memory, or ask for a share that is free.
    """
    rank = context.rank
    total, free = rank.device_total_bytes, rank.initial_free_bytes
    asked = rank.budget.requested_bytes
    if not rank.figures.get("startup_refused") or not total or free is None:
        return
    held = text(
        "end what else is on the device: {size:gib} GiB were in use, with this process's own "
        "runtime context",
        size=total - free,
    )
    if asked is None:  # the line was cut
        evidence = text("free {free:gib} of {total:gib} GiB", free=free, total=total)
        yield Found(evidence, action=held)
        return
    share = math.floor(free / total * 10_000) / 10_000
    action = held
    if free * 2 >= asked:
        action = text(
            "--gpu-memory-utilization {share:.4f} asks for what is free; or {held}",
            share=share,
            held=held,
        )
    evidence = text(
        "requested {asked:gib} GiB = {share} of {total:gib} GiB, free {free:gib} GiB",
        asked=asked,
        share=rank.budget.gpu_memory_utilization,
        total=total,
        free=free,
    )
    yield Found(evidence, asked - free, action)


@finding(
    "equation-unbalanced",
    severity=ERROR,
    title=text("The KV cache differs from what the engine's equation gives"),
    needs=RECOMPUTED,
)
def equation_unbalanced(context: RankContext) -> Iterator[Found]:
    """Find budgets that the recorded figures do not give.

    Meaning:
        memprof recomputes the KV cache from the engine's own figures. A difference means that
        another equation was at work, or that a figure was read at another moment. Of a log it is
        a warning: its lines may come from two runs, or from another release.

    Computed:
        KV cache granted by the engine less the KV cache by the equation; more than the rounding of
        the printed figures. `vllm_memprof/accounting/equations.py::EQUATIONS` has the equations.

    To do:
        Report it with the run folder: the row of the equation for this release needs a correction.
        Of a log, check that all lines are of one run.
    """
    budget = context.rank.budget
    if budget.balanced is not False:
        return
    granted, given = budget.engine_kv_cache_bytes, budget.kv_cache_bytes
    if context.run.source != "log":
        evidence = text(
            "engine {granted:bytes}, recomputed {given:bytes} bytes ({cite})",
            granted=granted,
            given=given,
            cite=budget.cite,
        )
        title = text(
            "The engine granted another KV cache than its equation {equation} gives",
            equation=budget.equation,
        )
        yield Found(evidence, budget.residual_bytes, title=title)
        return
    evidence = text(
        "engine {granted:bytes}, recomputed {given:bytes} bytes", granted=granted, given=given
    )
    if budget.tolerance_bytes:
        evidence = text(
            "engine {granted:gib} GiB, recomputed {given:gib} +-{slack:gib} GiB: {exact}",
            granted=granted,
            given=given,
            slack=budget.tolerance_bytes,
            exact=evidence,
        )
    title = text(
        "The printed KV cache is not what equation {equation} gives with the printed figures: the "
        "lines are of two runs, or of another release",
        equation=budget.equation,
    )
    yield Found(evidence, budget.residual_bytes, title=title, severity=WARNING)
