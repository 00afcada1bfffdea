"""The communicators of a rank: when each was first used, what it is configured to hold, and what was seen to come."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import PhaseRow, RankReport
from vllm_memprof.accounting.owners import HCCL, counter


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
    """In the order of their first collectives."""
    phases = {row.order: row.phase for row in rank.phases}
    return [
        CommunicatorUse(
            names=[*_strings(row.detail.get("names")), *(["p2p"] if row.detail.get("p2p") else [])],
            ranks=row.detail.get("ranks"),
            buffer_bytes=row.detail.get("buffer_bytes"),
            buffer_source=row.detail.get("buffer_source"),
            op=row.detail.get("op"),
            phase=None if row.parent is None else phases.get(row.parent),
            seen_bytes=_seen(row),
        )
        for row in rank.phases
        if row.phase == "communicator"
    ]


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _seen(row: PhaseRow) -> int | None:
    if row.before is None or row.after is None:
        return None
    before, after = counter(row.before, HCCL), counter(row.after, HCCL)
    if before is None or after is None:
        before, after = row.before.non_torch_bytes, row.after.non_torch_bytes
    return None if before is None or after is None else after - before
