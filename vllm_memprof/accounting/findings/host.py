"""Findings about host memory: a limit that is reached or below what is asked for, and rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_memprof.accounting.findings.rules import ERROR, WARNING, Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.owners.host import block_bytes
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.record.host import MEMORY, SHM, HostAsk, shortfalls
from vllm_memprof.text import join, text

#: A limit of which less than this share is left is near.
_NEAR = 0.1


def host_limit(run: Context) -> Iterator[Found]:
    """Find limits of host memory that stopped the run, are near, or are below what is asked for."""
    for part in run.run.parts or [run.run]:
        if (record := part.info.host_memory) is None:
            continue
        for short in shortfalls(record.asks, record.limits):
            limit, free = short.limit, short.limit.free_bytes or 0
            asked = {"asked": short.asked_bytes, "free": free, "at_most": not short.certain}
            figures = {**vars(limit), limit.kind: True, **asked, **_asks(short.asks)}
            severity = ERROR if short.certain else WARNING
            yield Found(short.asked_bytes - free, figures, severity)
        for limit in record.limits if record.kills else ():
            if limit.path and limit.bytes and record.last_bytes is not None:
                asks = _asks(ask for ask in record.asks if MEMORY in ask.limits)
                figures = {**vars(limit), **vars(record), MEMORY: True, **asks}
                yield Found(limit.bytes, figures, ERROR)
        for limit in record.ready:
            left = limit.free_bytes
            if (
                limit.bytes
                and left is not None
                and left < _NEAR * limit.bytes
                and limit.kind in (MEMORY, SHM)
            ):
                yield Found(left, {**vars(limit), limit.kind: True, "left": left})


def _asks(asks: Iterable[HostAsk]) -> dict[str, str]:
    """Return the owners of what is asked for with their bytes, the largest first, and by what."""
    ordered = sorted(asks, key=lambda ask: -ask.bytes)
    titles = TITLES["host_owners"]
    owners = (
        text("{owner} {size:size}", owner=titles.get(ask.owner, ask.owner), size=ask.bytes)
        for ask in ordered
    )
    arguments = dict.fromkeys(ask.argument for ask in ordered if ask.argument)
    return {"asks": join(", ", owners), "arguments": ", ".join(arguments)}


def pinned_rounding(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find tensors in pinned memory that take more than they need, and a size that wastes none.

    The nearest size: that at which the largest tensor fills a block, this one or the next smaller.
    """
    record = run.run.info.host_memory
    asks = {ask.owner: ask.argument for ask in record.asks if ask.argument} if record else {}
    made = [each for process in run.run.processes if process.identity.pid == rank.pid
            for each in process.host_owners]  # fmt: skip
    for row in rank.host_memory.rows:
        kind, _, owner = row.owner.partition(":")
        if kind == "pinned" and row.tensor_bytes and row.bytes > row.tensor_bytes:
            name = TITLES["host_owners"].get(owner, owner)
            figures = {"owner": name, "used": row.bytes, "tensors": row.tensor_bytes}
            size = max(max(each.sizes) for each in made if each.owner.startswith(owner))
            block = block_bytes(size)
            nearest = min(block, block // 2, key=lambda other: abs(other - size))
            if owner in asks:
                option, value = asks[owner].split()
                figures |= {"option": option, "nearest": f"{float(value) * nearest / size:.4g}"}
            yield Found(row.bytes - row.tensor_bytes, figures)
