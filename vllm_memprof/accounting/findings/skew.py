"""The finding about ranks with unequal KV caches."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import GRANTED
from vllm_memprof.accounting.findings.registry import Context, Found, by_bytes, finding_of_run
from vllm_memprof.accounting.kv import worth_in_tokens
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import text


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
        unnamed = context.run.source == "log" and rank.rank is None  # it may print a rank twice
        if granted is not None and not unnamed:
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
