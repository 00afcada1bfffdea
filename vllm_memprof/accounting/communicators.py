"""The communicators of a rank: first use, configured buffers, and growth at the first use."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.counters import HCCL, counter
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.spans import Span, ancestors
from vllm_memprof.units import minus


@dataclass(frozen=True)
class CommunicatorUse:
    """The first collective of one communicator."""

    names: list[str]  # vLLM's names of the groups that share it
    ranks: list[int] | None
    buffer_bytes: int | None  # of all its buffers, as configured
    buffer_source: str | None  # hccl_config | a variable's name | default
    op: str | None
    phase: str | None  # in which it was first used; None outside every phase
    seen_bytes: int | None  # growth of the HCCL counter over it, else of non-torch memory


def communicators_of(rank: RankReport) -> list[CommunicatorUse]:
    """Return the communicators of a rank in the order of their first collectives."""
    found = []
    for span in rank.phases:
        if span.phase != "communicator":
            continue
        names, ranks = span.detail.get("names"), span.detail.get("ranks")
        around = next(ancestors(rank.phases, span), None)
        use = CommunicatorUse(
            names=[str(name) for name in names] if isinstance(names, list) else [],
            ranks=ranks if isinstance(ranks, list) else None,
            buffer_bytes=span.integer("buffer_bytes"),
            buffer_source=span.string("buffer_source"),
            op=span.string("op"),
            phase=None if around is None else around.phase,
            seen_bytes=_seen(span),
        )
        if span.detail.get("p2p"):
            use.names.append("p2p")
        found.append(use)
    return found


def _seen(span: Span) -> int | None:
    edges = [(edge.snapshot, counter(edge.snapshot, HCCL)) for edge in span.edges]
    counted = all(size is not None for _, size in edges)
    sizes = [size if counted else snapshot.non_torch_bytes for snapshot, size in edges]
    return minus(sizes[1], sizes[0]) if len(sizes) == 2 else None
