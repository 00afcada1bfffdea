"""A deployment on several hosts in a report: hosts, their clocks, engine cores, and gaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from vllm_memprof.record.codec import Allowed
from vllm_memprof.record.deployment import Gap as Gap
from vllm_memprof.record.schema import DeploymentPart

#: How a host's clock was brought to that of the first host.
FIRST, COLLECTIVES, WALL, UNKNOWN = "first", "collectives", "wall", "unknown"


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock against that of the first host of the deployment; ns.

    True is ``least_ns <= offset <= most_ns``: no rank leaves a collective that blocks before every
    rank has entered it. The estimate assumes that the ranks leave it at the same time.
    """

    by: Annotated[str, Allowed((FIRST, COLLECTIVES, WALL, UNKNOWN))]
    offset_ns: int | None  # by which it is ahead; None: nothing tells
    least_ns: int | None = None  # None: no collective bounds it
    most_ns: int | None = None
    #: By which the host's wall clock is ahead of the first host's, as the offset gives it.
    wall_ahead_ns: int | None = None
    #: By which the wall clocks differ at least; 0: they may agree. None: no collective tells.
    wall_differs_ns: int | None = None
    phases: list[str] = field(default_factory=list)  # of the collectives that were used
    ranks: int = 0  # of both hosts, that took part in them
    #: The collectives exclude each other: the record is damaged, or a clock was set.
    contradict: bool = False

    @property
    def uncertainty_ns(self) -> int | None:
        """Return the most that the offset is off; None: nothing bounds it."""
        if self.by == FIRST:
            return 0
        if self.offset_ns is None or self.least_ns is None or self.most_ns is None:
            return None
        return max(self.offset_ns - self.least_ns, self.most_ns - self.offset_ns)


@dataclass(frozen=True)
class HostRow:
    """One host of a deployment, or one of its runs there."""

    host: str | None
    group: str | None
    folder: str
    run: str  # its id
    labels: list[str]  # of its ranks
    status: str
    exit_code: int | None
    exit_reason: str | None
    engine: str | None
    engine_version: str | None
    device: str | None
    clock: HostClock
    command: list[str] = field(default_factory=list)  # secrets redacted
    place: DeploymentPart | None = None
    truncated: bool = False


@dataclass(frozen=True)
class EngineCore:
    """An engine core: its ranks serve with the least KV cache that one of them was granted."""

    group: str | None
    dp_rank: int | None
    hosts: list[str]
    labels: list[str]
    least_label: str | None  # of the rank with the least; None: no grant is known
    granted_bytes: int | None
    tokens: int | None


@dataclass(frozen=True)
class Deployment:
    """Processes on several hosts that serve together."""

    name: str | None
    hosts: list[HostRow]
    cores: list[EngineCore]
    gaps: list[Gap] = field(default_factory=list)

    @property
    def groups(self) -> list[str | None]:
        """Return the groups whose engines have budgets of their own; one where there is but one."""
        return list(dict.fromkeys(row.group for row in self.hosts))

    def offsets(self) -> dict[str | None, int]:
        """Return host -> ns by which its monotonic clock is ahead of the first host's."""
        return {
            row.host: row.clock.offset_ns for row in self.hosts if row.clock.offset_ns is not None
        }
