"""What follows from the figures of all ranks of a start, as SGLang's equation takes them.

SGLang sizes the KV cache by the least free memory of all ranks, and rounds it down to whole pages;
the pool holds one page more than the tokens that it serves (``MHATokenToKVPool``: size +
page_size). The printed sizes are those of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import ceil

from vllm_memprof.engines.line_format import Given, PrintedRank
from vllm_memprof.engines.sglang.server_args import ServerArgs
from vllm_memprof.text import text

#: The largest page that SGLang takes by default, on an NPU; 1 on CUDA.
_LARGEST_PAGE = 128


def complete(ranks: Sequence[PrintedRank], given: Given | None) -> None:
    """Add to each rank's figures what the equation takes; what is not known is left out.

    Args:
        ranks: those that agree on one KV cache.
        given: of their start; None where no line of its own tells it.
    """
    args = given if isinstance(given, ServerArgs) and given.complete else ServerArgs()
    for rank in ranks:
        _add_kv_cache(rank, args)
        if args.mem_fraction_static is not None:
            rank.figures["mem_fraction_static"] = args.mem_fraction_static
    size, places = args.world_size, {rank.place for rank in ranks}
    if size is None or args.draft_model or len(ranks) != size:
        return
    if size > 1 and places != {*range(size)}:
        return
    for name in ("free_before_load_bytes", "free_after_load_bytes"):
        sizes = [(rank.figures.get(name), rank.half_units.get(name, 0)) for rank in ranks]
        if any(size is None for size, _ in sizes):
            continue
        least, half = min((int(size or 0), half) for size, half in sizes)
        for rank in ranks:
            rank.figures[f"least_{name}"], rank.half_units[f"least_{name}"] = least, half


def notes(drafts: bool, several: Set[str]) -> list[str]:
    """Return what lines that are printed twice mean for the figures."""
    found: list[str] = []
    if drafts:
        found.append(
            text(
                "speculative decoding: figures that the draft model prints again are left out, and "
                "the equation, which takes both models, is not recomputed"
            )
        )
    if several & {"k_pool_bytes", "v_pool_bytes", "kv_pool_bytes", "pool_tokens"}:
        found.append(text("a rank prints KV pools of several sizes: their sizes are left out"))
    return found


def _add_kv_cache(rank: PrintedRank, args: ServerArgs) -> None:
    """Add the KV cache of the served tokens, without the pool's page more, and half a page."""
    figures, half_units = rank.figures, rank.half_units
    page = args.page_size
    given, tokens = args.max_total_tokens, figures.get("pool_tokens")
    if given is not None and page is not None and tokens == given // page * page:
        figures["limited_tokens"] = int(tokens)
    pool, half = pool_of(figures, half_units)
    if not pool or not tokens or pool <= half:
        _add_sized(rank)  # else below the digits: its size is not known
        return
    largest = int(pool) + half
    if page is None:  # anything up to the largest page
        least = (pool - half) * tokens / (tokens + _LARGEST_PAGE)
        size, half = round((least + largest) / 2), ceil((largest - least) / 2)
    else:
        size = round(pool * tokens / (tokens + page))
        in_page = ceil(largest * page / (tokens + page))
        figures["half_page_bytes"], half_units["half_page_bytes"] = in_page // 2, ceil(in_page / 2)
    figures["kv_cache_bytes"], half_units["kv_cache_bytes"] = size, half


def _add_sized(rank: PrintedRank) -> None:
    """Add the KV cache of pools that SGLang sizes together."""
    sized, half = sized_pools(rank.figures, rank.half_units)
    if sized is not None:
        rank.figures["kv_cache_bytes"], rank.half_units["kv_cache_bytes"] = sized, half
        rank.figures["half_page_bytes"] = 0  # what is printed is not rounded to pages


def sized_pools(
    figures: Mapping[str, int | float | None], half_units: Mapping[str, int]
) -> tuple[int | None, int]:
    """Return (bytes that the pools of DeepSeek-V4 take by SGLang's sizing, half-unit).

    None: unknown, as where a limit of tokens has made them smaller: they have two sizes then.
    """
    budget, tokens = figures.get("pools_budget_bytes"), figures.get("pools_tokens")
    if budget is None or not tokens:
        return None, 0
    return int(budget), half_units.get("pools_budget_bytes", 0)


def pool_of(
    figures: Mapping[str, int | float | None], half_units: Mapping[str, int]
) -> tuple[int | None, int]:
    """Return (bytes of the KV pool, half-unit); None where a part was not printed."""
    names: tuple[str, ...] = ("k_pool_bytes", "v_pool_bytes")
    if figures.get("kv_pool_bytes") is not None:
        names = ("kv_pool_bytes",)
    sizes = [figures.get(name) for name in names]
    if None in sizes:
        return None, 0
    half = sum(half_units.get(name, 0) for name in names)
    return sum(int(size or 0) for size in sizes), half
