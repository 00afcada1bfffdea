"""What follows from the figures of all ranks of a start, as SGLang's equation takes them.

SGLang sizes the KV cache by the least free memory of all ranks, and rounds it down to whole pages;
the pool holds one page more than the tokens that it serves (``MHATokenToKVPool``: size +
page_size). The printed sizes are those of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from vllm_memprof.engines.sglang.server_args import ServerArgs

#: The largest page that SGLang takes by default, on an NPU; 1 on CUDA.
_LARGEST_PAGE = 128


@dataclass
class Rank:
    """Printed figures of one rank, and half of the last digit of each, bytes."""

    figures: dict[str, int | float | None]
    half_units: dict[str, int]
    place: int | None = None  # among the ranks that agree on one KV cache


@dataclass
class Derived:
    """Figures that are added to a rank's."""

    figures: dict[str, int | float | None] = field(default_factory=dict)
    half_units: dict[str, int] = field(default_factory=dict)


def derive(ranks: Sequence[Rank], args: ServerArgs | None) -> list[Derived]:
    """Return what each rank's figures lack for the equation; what is not known is left out.

    Args:
        ranks: those that agree on one KV cache.
        args: of their start; None where no line of its own tells them.
    """
    args = args if args is not None and args.complete else ServerArgs()
    found = [_kv_cache(rank, args) for rank in ranks]
    for each in found:
        if args.mem_fraction_static is not None:
            each.figures["mem_fraction_static"] = args.mem_fraction_static
    if args.world_size is None or args.draft_model or not _all_there(ranks, args.world_size):
        return found
    for name in ("free_before_load_bytes", "free_after_load_bytes"):
        sizes = [(rank.figures.get(name), rank.half_units.get(name, 0)) for rank in ranks]
        if any(size is None for size, _ in sizes):
            continue
        least, half = min((int(size or 0), half) for size, half in sizes)
        for each in found:
            each.figures[f"least_{name}"] = least
            each.half_units[f"least_{name}"] = half
    return found


def _all_there(ranks: Sequence[Rank], world_size: int) -> bool:
    if world_size == 1:
        return len(ranks) == 1
    return sorted(-1 if rank.place is None else rank.place for rank in ranks) == list(
        range(world_size)
    )


def _kv_cache(rank: Rank, args: ServerArgs) -> Derived:
    """Return the KV cache of the served tokens, without the pool's page more, and half a page."""
    found = Derived()
    page = args.page_size
    given, served = args.max_total_tokens, rank.figures.get("pool_tokens")
    if given is not None and page is not None and served == given // page * page:
        found.figures["limited_tokens"] = int(served)
    pool, half = pool_of(rank.figures, rank.half_units)
    tokens = rank.figures.get("pool_tokens")
    if not pool or not tokens or pool <= half:
        return found  # below the digits: its size is not known
    largest = int(pool) + half
    if page is None:  # anything up to the largest page
        least = (pool - half) * tokens / (tokens + _LARGEST_PAGE)
        size, half = round((least + largest) / 2), ceil((largest - least) / 2)
    else:
        size = round(pool * tokens / (tokens + page))
        in_page = ceil(largest * page / (tokens + page))
        found.figures["half_page_bytes"] = in_page // 2
        found.half_units["half_page_bytes"] = ceil(in_page / 2)
    found.figures["kv_cache_bytes"] = size
    found.half_units["kv_cache_bytes"] = half
    return found


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
