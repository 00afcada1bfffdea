"""Memory growth by owner, within phases and between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.spans import AFTER, BEFORE, UNEXPLAINED, DeviceMemory
from vllm_memprof.units import minus, sum_or_none


@dataclass(frozen=True)
class Growth:
    """One passage of a rank through a phase, or the time between two phases, by owner."""

    phase: str
    order: int  # of the phase; of the later one for a gap
    depth: int
    after: str | None  # None: within the phase; else the phase that the gap before this one follows
    owners: dict[str, int | None] = field(
        default_factory=dict
    )  # bytes, signed; None where an edge was not read
    between: tuple[DeviceMemory, DeviceMemory] | None = None  # before and after it

    @cached_property
    def remainders(self) -> dict[str, int | None]:
        """Return growth of the remainders that are the owner ``unexplained``."""
        return {} if self.between is None else remainders(*self.between)

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
            edges = previous[1], before
            between = difference(*edges)
            if any(between.values()):
                found.append(Growth(row.name, row.order, 0, previous[0], between, edges))
        if before is not None and after is not None:
            grown = difference(before, after)
            found.append(Growth(row.name, row.order, row.depth, None, grown, (before, after)))
        if row.depth == 0 and after is not None:
            previous = row.name, after
    return found


def difference(before: DeviceMemory, after: DeviceMemory) -> dict[str, int | None]:
    """After minus before by owner, the free memory left out; None where either is unknown.

    Where neither moment was read as far as the total, nothing is known of any owner.
    """
    low, high = (
        {row.component: row.bytes for row in memory.rows if row.component != "free"}
        for memory in (before, after)
    )
    low[UNEXPLAINED], high[UNEXPLAINED] = before.unexplained_bytes, after.unexplained_bytes
    if low[UNEXPLAINED] is None or high[UNEXPLAINED] is None:  # the total is unknown, as in a log
        low[UNEXPLAINED], high[UNEXPLAINED] = (
            sum_or_none([row.bytes for row in memory.remainders() if row.component != "rest"])
            for memory in (before, after)
        )
    return _less(low, high)


def remainders(before: DeviceMemory, after: DeviceMemory) -> dict[str, int | None]:
    """After minus before of each remainder; None where either is unknown."""
    low, high = (
        {row.component: row.bytes for row in memory.remainders()} for memory in (before, after)
    )
    return _less(low, high)


def _less(low: dict[str, int | None], high: dict[str, int | None]) -> dict[str, int | None]:
    names = low if low.keys() == high.keys() else dict.fromkeys([*low, *high])
    return {name: minus(high.get(name), low.get(name)) for name in names}
