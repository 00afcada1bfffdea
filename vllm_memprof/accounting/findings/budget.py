"""Findings about the KV cache that the engine granted: none, too small, unequal."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import keep_apart, leave_a_kv_cache, most_accepted
from vllm_memprof.accounting.findings.needs import GRANTED, GRANTED_OR_REFUSED, NOTHING
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    Context,
    Found,
    RankContext,
    by_bytes,
    finding,
    finding_of_run,
    known,
)
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import join, text
from vllm_memprof.units import sum_or_none


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
        Equations E2, E3 and E4p subtract what other processes hold on the device, such as the
        first of two instances.

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
    together = sum_or_none(sizes)
    if not missing and asked is not None and sizes and together is not None:
        missing = max(0, together - asked)
    parts = known(
        (text("requested {size:gib} GiB"), asked),
        (text("weights {size:gib} GiB"), context.rank.figures.get("weights_bytes")),
        (
            text("the equation gives {size:gib} GiB"),
            -missing if missing and not granted else None,
        ),
        (text("KV cache {size:gib} GiB"), granted),
    )
    if refused:
        parts.append(text("the engine refused to start: no memory for the cache blocks"))
    action = leave_a_kv_cache(context.rank, missing, context.ranks)
    row = form_of(budget.equation)
    if row is not None and row.subtracts_neighbours:
        neighbour = text(
            "equation {equation} subtracts what other processes hold on the device, another "
            "instance of the engine for one: {advice}",
            equation=budget.equation,
            advice=keep_apart(context.rank),
        )
        action = join("; ", [action, neighbour])
    yield Found(join(", ", parts), granted, action)


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
        evidence = text(
            "max_model_len is {asked:,} tokens, and the KV cache holds {stored:,}",
            asked=int(asked),
            stored=int(stored),
        )
        yield Found(evidence, action=text("--max-model-len {length} fits", length=int(stored)))
        return
    wanted, granted = rank.figures.get("kv_cache_minimum_bytes"), rank.budget.engine_kv_cache_bytes
    if wanted is None or (granted is not None and granted >= wanted):
        return
    parts = [text("one request takes {size:gib} GiB", size=wanted)]
    length = rank.figures.get("estimated_max_model_len")
    fits = text("--max-model-len {length} fits", length=int(length)) if length else None
    missing = 0 if granted is None else int(wanted) - granted  # None: the line was cut
    parts += known((text("KV cache {size:gib} GiB"), granted))
    action = fits or leave_a_kv_cache(rank, missing, context.ranks)
    yield Found(join(", ", parts), missing or None, action)


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
    share = most_accepted(context.ranks)
    action = held
    if share is not None and share * total * 2 >= asked:
        action = text(
            "--gpu-memory-utilization {share:.4f} asks for no more than is free; or {held}",
            share=share,
            held=held,
        )
    evidence = text(
        "requested {asked:gib} of {total:gib} GiB, free {free:gib} GiB",
        asked=asked,
        total=total,
        free=free,
    )
    if rank.budget.gpu_memory_utilization is not None:
        evidence = text(
            "requested {asked:gib} GiB = {share} of {total:gib} GiB, free {free:gib} GiB",
            asked=asked,
            share=rank.budget.gpu_memory_utilization,
            total=total,
            free=free,
        )
    yield Found(evidence, asked - free, action)


@finding_of_run(
    "rank-skew",
    severity=by_bytes,
    title=text("Ranks get unequal KV caches, and all of them serve with the smallest"),
    needs=GRANTED,
)
def rank_skew(context: Context) -> Iterator[Found]:
    """Find ranks of one replica and pipeline stage that were granted unequal KV caches.

    Meaning:
        Ranks that hold the same layers serve with the same number of blocks: the smallest budget
        decides, and the rest of the others' memory stays unused.

    Computed:
        The largest KV cache of the ranks with the same data-parallel and pipeline rank, less the
        smallest; left out where it is less than a KV block. The finding is about the smallest.

    To do:
        Compare the ranks' rows of the budget: the one whose term is larger has the cause, often
        another process on its device.
    """
    peers: dict[tuple[int | None, int | None], list[tuple[int, RankReport]]] = {}
    for rank in context.ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if granted is not None and rank.rank is not None:  # a log may print an unnamed one twice
            peers.setdefault((rank.dp_rank, rank.pp_rank), []).append((granted, rank))
    for group in peers.values():
        low, least = min(group, key=lambda pair: pair[0])
        high, most = max(group, key=lambda pair: pair[0])
        if high > low and worth_in_tokens(least.kv, high - low) != 0:
            evidence = text(
                "{least} {low:gib} GiB, {most} {high:gib} GiB",
                least=least.label,
                low=low,
                most=most.label,
                high=high,
            )
            yield Found(evidence, high - low, about=least)
