"""Rows of ``memprof who``, which reporters start from.

The keys of their JSON are read by programs (``memprof.who/1``). Bytes are integers, None is
unknown. Nothing here reads a clock, a file or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from vllm_memprof.record.codec import one_of

#: Where a process of the driver's list is. HERE: alive, in this process's pid namespace. ENDED: no
#: such process lives. ELSEWHERE: the number is of another pid namespace, so that nothing can be
#: said about the process.
HERE, ENDED, ELSEWHERE = "here", "ended", "elsewhere"
#: Whose numbers the driver's list has, as seen from here.
OWN_NUMBERS, HOST_NUMBERS, UNKNOWN_NUMBERS = "own", "host", "unknown"


@dataclass(frozen=True)
class HolderRow:
    """One process.

    What is None could not be read, or, ELSEWHERE, belongs to a number that nobody can look up here.
    """

    pid: int  # as the driver lists it; of ``left_behind`` as this pid namespace numbers it
    #: On this device; of ``left_behind`` on all that are shown, None where a list of processes is
    #: missing, full or of other numbers, and does not name it.
    bytes: int | None
    where: Annotated[str, one_of(HERE, ENDED, ELSEWHERE)]
    user: str | None = None
    command: list[str] | None = None  # secrets replaced
    started: str | None = None  # ISO 8601, UTC
    parent_pid: int | None = None
    engine: str | None = None  # of ``ENGINES``; None where its title and its record do not say
    role: str | None = None  # EngineCore_DP0, Worker_TP1, scheduler_TP0; or the role recorded
    run_dir: str | None = None  # of memprof, where one recorded this process
    #: An engine's process whose launcher, or a process between, has ended; None: not known.
    left_behind: bool | None = None
    why: str | None = None  # of ``left_behind``, or why little is known; one sentence


@dataclass(frozen=True)
class DeviceRow:
    """One device, by the driver's number."""

    device: int
    card: int | None
    chip: int | None
    total_bytes: int | None
    used_bytes: int | None  # by the driver's own figure, in steps of ``step_bytes``
    free_bytes: int | None
    step_bytes: int | None  # None: exact
    processes: list[HolderRow] | None  # None: the driver does not list them
    processes_complete: bool | None  # False: the driver's list is full, some may be left out
    #: Of the processes that are listed and have not ended.
    held_bytes: int | None
    #: used - held: the driver's own base, and what no living process accounts for. Signed, as both
    #: are read one after the other. Unknown where the list is not complete, or has no rival figure.
    no_process_bytes: int | None
    #: Of that, what the driver and the device hold with no process at all. No driver tells.
    driver_base_bytes: int | None = None
    reasons: list[str] = field(default_factory=list)  # why something is unknown

    @property
    def process_count(self) -> int | None:
        return None if self.processes is None else len(self.processes)


@dataclass(frozen=True)
class WaitRow:
    """What ``--wait`` waited for."""

    free_bytes: int  # wanted on every device
    timeout_seconds: float
    seconds: float  # waited
    met: bool


@dataclass(frozen=True)
class Who:
    """All that is known of who holds the devices."""

    SCHEMA: ClassVar[str] = "memprof.who/1"

    device: str  # npu | sim:PROFILE
    simulated: bool
    numbers: Annotated[str, one_of(OWN_NUMBERS, HOST_NUMBERS, UNKNOWN_NUMBERS)]
    devices: list[DeviceRow]
    #: Engine processes that can be seen here and whose launcher has ended, whether or not a list
    #: names them.
    left_behind: list[HolderRow]
    wait: WaitRow | None = None
