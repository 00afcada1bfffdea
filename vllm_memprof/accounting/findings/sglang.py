"""Findings of SGLang alone: a static share that is too small, and pools beside keys and values."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import NOTHING, item_known
from vllm_memprof.accounting.findings.registry import (
    ERROR,
    Found,
    RankContext,
    by_bytes,
    finding,
)
from vllm_memprof.text import join, text

#: Bytes of one place in the request-to-token pool.
#: (sglang/srt/mem_cache/memory_pool.py::ReqToTokenPool, int32)
_PLACE_BYTES = 4


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
        (`vllm_memprof/accounting/quantities.py::_request_pools`). Beside it, requests x context
        length x 4 bytes, as the log prints them.

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
