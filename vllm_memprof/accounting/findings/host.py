"""Findings about host memory: a limit that is reached or below what is asked for, and rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_memprof.accounting.findings.rules import ERROR, WARNING, Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.record.host import MEMORY, HostAsk, HostLimit, shortfalls
from vllm_memprof.text import join, text

#: A limit of which less than this share is left is near.
_NEAR = 0.1


def host_limit(run: Context) -> Iterator[Found]:
    """Find limits of host memory that stopped the run, are near, or are below what is asked for."""
    for part in run.run.parts or [run.run]:
        if (record := part.info.host_memory) is not None:
            for short in shortfalls(record.asks, record.limits):
                severity = WARNING if short.at_most else ERROR
                yield _found(short.limit, short.asks, severity, asked=short.asked_bytes)
            for limit in record.limits if record.last.get("kills") else ():
                if limit.name.startswith("cgroup"):
                    asks = [ask for ask in record.asks if MEMORY in ask.limits]
                    yield _found(limit, asks, ERROR, **record.last)
            for limit in record.ready:
                if limit.used_bytes and limit.free_bytes < _NEAR * limit.bytes:
                    yield _found(limit, (), WARNING, left=limit.free_bytes)


def _found(limit: HostLimit, asks: Sequence[HostAsk], severity: str, **more: object) -> Found:
    owners = (
        text("{owner} {bytes:size}", ask, owner=TITLES["host_owners"][ask.owner]) for ask in asks
    )
    arguments = ", ".join(dict.fromkeys(ask.argument for ask in asks if ask.argument))
    said = {"owners": join(", ", owners), "arguments": arguments, "free": limit.free_bytes}
    figures = {**vars(limit), **said, limit.kind: True, severity: True, **more}
    return Found(limit.bytes, figures, severity)


def pinned_rounding(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find tensors in pinned memory that take more than they need, and a size that wastes none.

    The nearest size: that at which tensors fill their blocks, these or the next smaller ones.
    """
    record = run.run.info.host_memory
    for row in rank.host_memory.rows:
        if record and row.tensor_bytes and row.bytes > row.tensor_bytes:
            figures: dict[str, object] = {"used": row.bytes, "tensors": row.tensor_bytes}
            full = row.bytes / row.tensor_bytes
            nearest = min(full, full / 2, key=lambda factor: abs(factor - 1))
            for ask in record.asks:
                if ask.argument and row.owner.endswith(ask.owner):
                    option, value = ask.argument.split()
                    figures |= {"option": option, "nearest": f"{float(value) * nearest:.4g}"}
            yield Found(row.bytes - row.tensor_bytes, figures)
