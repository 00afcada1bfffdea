"""Memory growth by owner, within phases and between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.spans import AFTER, BEFORE, UNEXPLAINED, ComponentRow, DeviceMemory
from vllm_memprof.units import minus, sum_or_none

_Sizes = dict[str, int | None]


@dataclass(frozen=True)
class Growth:
    """One passage of a rank through a phase, or the time between two phases, by owner."""

    phase: str
    order: int  # of the phase; of the later one for a gap
    depth: int
    after: str | None  # None: within the phase; else the phase that the gap before this one follows
    edges: tuple[DeviceMemory, DeviceMemory]  # at its beginning and its end

    @cached_property
    def owners(self) -> _Sizes:
        """Return growth by owner, bytes, the free memory left out; None where it is not known.

        Where neither moment was read as far as the total, nothing is known of any owner.
        """
        low, high = (
            _sizes(row for row in memory.rows if row.component != "free") for memory in self.edges
        )
        totals = [memory.unexplained_bytes for memory in self.edges]
        if None in totals:  # the total is unknown, as in a log
            totals = [
                sum_or_none(row.bytes for row in memory.remainders() if row.component != "rest")
                for memory in self.edges
            ]
        low[UNEXPLAINED], high[UNEXPLAINED] = totals
        return _less(low, high)

    @cached_property
    def remainders(self) -> _Sizes:
        """Return growth of the remainders that are the owner ``unexplained``."""
        return _less(*(_sizes(memory.remainders()) for memory in self.edges))

    @property
    def place(self) -> str:
        return self.phase if self.after is None else f"between {self.after} and {self.phase}"


def growth_by_owner(rank: RankReport) -> list[Growth]:
    """Return growth in every phase of a rank, and between its outermost phases where any changed.

    A phase's growth includes that of the phases inside it. Growth in no phase is in the rows
    between, so that the outermost rows add up to the whole.
    """
    found: list[Growth] = []
    previous: tuple[str, DeviceMemory] | None = None
    for row in rank.phases:
        before, after = row.owners.get(BEFORE), row.owners.get(AFTER)
        if row.depth == 0 and previous is not None and before is not None:
            gap = Growth(row.name, row.order, 0, previous[0], (previous[1], before))
            found += [gap] if any(gap.owners.values()) else []
        if before is not None and after is not None:
            found.append(Growth(row.name, row.order, row.depth, None, (before, after)))
        if row.depth == 0 and after is not None:
            previous = row.name, after
    return found


def _sizes(rows: Iterable[ComponentRow]) -> _Sizes:
    return {row.component: row.bytes for row in rows}


def _less(low: _Sizes, high: _Sizes) -> _Sizes:
    return {name: minus(high.get(name), low.get(name)) for name in {**low, **high}}
