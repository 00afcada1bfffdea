"""Findings of SGLang alone: a static share that is too small, pools beside keys and values, and a
flush that frees nothing (seen in 0.5.18 on the simulated NPU).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import HOOKS, NOTHING, item_known
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    Found,
    RankContext,
    by_bytes,
    finding,
)
from vllm_memprof.record.spans import ancestors
from vllm_memprof.text import join, text
from vllm_memprof.units import MIB, minus

#: Bytes of one place in the request-to-token pool.
#: (sglang/srt/mem_cache/memory_pool.py::ReqToTokenPool, int32)
_PLACE_BYTES = 4
#: What pools may take beyond their sizing, as a part of it: spare rows of each.
_FRACTION = 20
#: Tokens of a page of DeepSeek-V4's pools, a multiple of 128 by an assertion of SGLang.
_DSV4_PAGE = 256


@finding(
    "static-share-too-small",
    severity=ERROR,
    title=text("The static share leaves nothing for the KV cache"),
    needs=NOTHING,
    priced=False,
)
def static_share_too_small(context: RankContext) -> Iterator[Found]:
    """Find starts that SGLang refused because its weights take all of the static share.

    Meaning:
        SGLang gives weights and KV cache the share `--mem-fraction-static` of what was free before
        the model. Here the weights alone take it, or another process took memory meanwhile.

    Computed:
        SGLang's own message. Where the log prints it, the free memory before and after the weights
        are loaded, and the share above which a KV cache fits: 1 - free after / free before, which
        is rounded to three digits upwards in SGLang's message.

    To do:
        Raise `--mem-fraction-static` above the value that the finding names, or use more ranks
        (`--tp-size`).
    """
    figures = context.rank.figures
    if not figures.get("static_refused"):
        return
    before, after = (
        figures.get(f"least_{name}", figures.get(name))
        for name in ("free_before_load_bytes", "free_after_load_bytes")
    )
    parts = [text("the engine refused to start: no memory for the KV cache")]
    if before is not None and after is not None:
        parts.append(
            text(
                "free {before:gib} GiB before the weights were loaded, {after:gib} GiB after",
                before=int(before),
                after=int(after),
            )
        )
    share, least = figures.get("mem_fraction_static"), figures.get("least_static_fraction")
    if share is not None:
        parts.append(text("mem_fraction_static {share}", share=share))
    action = text("raise --mem-fraction-static, or use more ranks (--tp-size)")
    if least is not None:
        action = text("more than --mem-fraction-static {share} is enough", share=least)
    yield Found(join(", ", parts), action=action)


@finding(
    "request-pool-not-subtracted",
    severity=by_bytes,
    title=text("The equation does not subtract the request-to-token pool"),
    needs=item_known("request_pools"),
)
def request_pool_not_subtracted(context: RankContext) -> Iterator[Found]:
    """Find pools beside keys and values, which SGLang allocates after it has sized the KV cache.

    Meaning:
        SGLang keeps a table of the tokens of every request, as long as the longest request may be,
        for as many requests as may run. It takes what the static share leaves for steps and graphs.

    Computed:
        Free after the weights were loaded, less free after the KV pools, less the printed pools of
        keys and values; each is rounded to 0.01 GiB
        (`vllm_memprof/accounting/readings/quantities.py::_request_pools`). Beside it, requests x
        context length x 4 bytes, as the log prints them.

    To do:
        Lower `--max-running-requests` or `--context-length`, where steps need the memory.
    """
    rank = context.rank
    items = rank.budget.not_subtracted
    size = next((item.bytes for item in items if item.name == "request_pools"), None)
    half = sum(
        rank.half_units.get(name, 0)
        for name in (
            "free_after_load_bytes",
            "free_after_pools_bytes",
            "k_pool_bytes",
            "v_pool_bytes",
            "kv_pool_bytes",
        )
    )
    if size is None or size <= half:
        return
    evidence = text("{size:gib} +-{slack:gib} GiB beside keys and values", size=size, slack=half)
    requests, length = rank.figures.get("max_running_requests"), rank.kv.max_model_len
    if requests is not None and length is not None:
        table = text(
            "max_running_requests {requests:,} x context_len {length:,} x 4 bytes = {table:gib} "
            "GiB",
            requests=int(requests),
            length=length,
            table=int(requests) * length * _PLACE_BYTES,
        )
        evidence = join("; ", [evidence, table])
    action = text("a lower --max-running-requests or --context-length, where steps need it")
    yield Found(evidence, size, action)


@finding(
    "flush-frees-nothing",
    severity=by_bytes,
    title=text("A flush of the cache says that it succeeded and releases no memory"),
    needs=HOOKS,
)
def flush_frees_nothing(context: RankContext) -> Iterator[Found]:
    """Find flushes that should empty the allocator's cache and never call empty_cache.

    Meaning:
        The KV cache is cleared and the log says "Cache flushed successfully!", but the device has
        no byte more. SGLang 0.5.14 to 0.5.18 call `current_platform.empty_cache()`, which is an
        empty function on an NPU; SGLang 0.5.20 and later call the allocator. A warning from
        128 MiB on, info below.

    Computed:
        Phases `flush_cache` that returned success, were not asked to leave the cache alone
        (`torch_empty_cache=false` of a weight update), and have no call of empty_cache in them,
        in a process in which such calls were recorded at other times. The bytes are what was
        reserved and not allocated after the flush, and the operator workspace where it was read: a
        call would have released up to them.

    To do:
        Use SGLang 0.5.20 or later.
    """
    spans = context.rank.phases
    calls = [span for span in spans if span.phase == "empty_cache"]
    if not calls:  # not a sign of an empty function: calls may not have been recorded at all
        return
    emptied = {parent.order for call in calls for parent in ancestors(spans, call)}
    left: list[tuple[int, int]] = []
    for span in spans:
        if span.phase != "flush_cache" or span.order in emptied or span.after is None:
            continue
        if span.detail.get("success") is True and span.detail.get("empty_cache") is not False:
            size = minus(span.after.reserved_bytes, span.after.allocated_bytes)
            workspace = span.after.npu_workspace_bytes or 0
            if size is not None and size + workspace >= MIB:
                left.append((size, workspace))
    if not left:
        return
    cached, workspace = max(left, key=sum)
    evidence = text(
        "{count} flush(es) succeeded, empty_cache was called in none of them: {size:bytes} bytes "
        "reserved and not allocated and {workspace:bytes} bytes of operator workspace after it",
        count=len(left),
        size=cached,
        workspace=workspace,
    )
    action = text(
        "use SGLang 0.5.20 or later: in 0.5.14 to 0.5.18 the function that the flush calls is "
        "empty on an NPU"
    )
    yield Found(evidence, cached + workspace, action)


@finding(
    "pools-larger-than-sized",
    severity=by_bytes,
    title=text("The KV pools take more memory than SGLang sized them for"),
    needs=NOTHING,
)
def pools_larger_than_sized(context: RankContext) -> Iterator[Found]:
    """Find pools of DeepSeek-V4 that take more than the bytes per token of their sizing.

    Meaning:
        SGLang sizes the pools of DeepSeek-V4 together, by bytes per token, and the pools that it
        then allocates may have other types or more rows. Graphs, communicators and steps have less
        than `--mem-fraction-static` leaves for them.

    Computed:
        Free after the weights were loaded − free after the KV pools − the table of requests, as the
        log prints them, beside what SGLang sized. Reported from a twentieth of the sized bytes on.
        The number of tokens is what the sized bytes hold at the bytes per token that were taken.

    To do:
        Give `--max-total-tokens` that the pools really hold, or lower `--mem-fraction-static`.
    """
    rank = context.rank
    figures, half_units = rank.figures, rank.half_units
    budget, tokens = figures.get("pools_budget_bytes"), int(figures.get("pools_tokens") or 0)
    before, after = figures.get("free_after_load_bytes"), figures.get("free_after_pools_bytes")
    if not budget or budget < 0 or not tokens or before is None or after is None:
        return  # where a limit of tokens has made the pools smaller, they have two sizes
    sized = int(budget)
    requests, length = figures.get("max_running_requests"), rank.kv.max_model_len
    table = int(requests or 0) * (length or 0) * _PLACE_BYTES
    took = int(before - after) - table
    read = ("pools_budget_bytes", "free_after_load_bytes", "free_after_pools_bytes")
    slack = sum(half_units.get(name, 0) for name in read)
    if took - sized <= max(slack, sized // _FRACTION):
        return
    tokens = tokens * sized // took // _DSV4_PAGE * _DSV4_PAGE
    evidence = text(
        "sized {sized:gib} GiB, took {took:gib} +-{slack:gib} GiB: free {before:gib} GiB before "
        "the KV pools, {after:gib} GiB after",
        sized=sized,
        took=took,
        slack=slack,
        before=int(before),
        after=int(after),
    )
    action = text(
        "--max-total-tokens {tokens} takes what SGLang sized; or a lower --mem-fraction-static",
        tokens=tokens,
    )
    yield Found(evidence, took - sized, action)


FINDINGS = (
    static_share_too_small,
    request_pool_not_subtracted,
    pools_larger_than_sized,
    flush_frees_nothing,
)
