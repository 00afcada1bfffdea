"""Looks at the devices: the driver's list, read in a child process, and what is known of each
process on it; waits until enough of each is free.

Runs in the ``memprof`` process; neither torch nor the engine is imported, no device is opened,
nothing is freed, ended, asked to end or changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_memprof.capture import driver_list
from vllm_memprof.capture.driver_list import LISTED_AT_MOST, STEP_BYTES
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.holders.processes import left_behind, listed_process, numbers_of_the_driver
from vllm_memprof.holders.rows import ENDED, HERE, OWN_NUMBERS, DeviceRow, WaitRow, Who
from vllm_memprof.text import spans, text
from vllm_memprof.units import format_gib, minus

_TIMEOUT_S = 60.0
#: Seconds between two looks.
EVERY_S = 1.0


@dataclass(frozen=True)
class Source:
    """Where the driver's list of some devices is read."""

    name: str  # npu | sim:PROFILE
    env: Mapping[str, str]  # of the child process that loads the library
    #: Of a simulated device: its total, by the profile. It accounts by process, so that what is
    #: used is the sum of its list, to the byte.
    simulated_total_bytes: int | None = None

    @property
    def simulated(self) -> bool:
        return self.simulated_total_bytes is not None


def simulated_source(profile: str, stack: str | None, environ: Mapping[str, str]) -> Source:
    """Return the simulated devices that all processes of this user share.

    Raises:
        UsageError: no such profile or stack.
        SetupError: the stack, which has the library, is not set up.
    """
    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime(profile, stack)
    total = runtime.profile.device.total_bytes
    return Source(f"sim:{runtime.profile.name}", {**environ, **runtime.env}, total)


def look(source: Source, only: Sequence[int] = ()) -> Who:
    """Return who holds the devices now.

    Args:
        source: where the driver's list is read.
        only: numbers of the devices, as the driver counts them; none: all.

    Raises:
        MemprofError: the driver's list cannot be read.
        UsageError: there is no device of a number in ``only``.
    """
    listed = read_driver(source)
    there = {each["device"] for each in listed}
    if not there.issuperset(only):
        raise UsageError(f"--only: the devices are {spans(there)}")
    numbers = numbers_of_the_driver(source.simulated)
    chosen = [each for each in listed if not only or each["device"] in only]
    devices = [device_row(each, source, numbers) for each in chosen]
    held: Counter[int] = Counter()
    for row in devices:
        held.update({each.pid: each.bytes for each in row.processes or () if each.where == HERE})
    # a process that no list names holds nothing, if the lists are whole and have numbers of here
    whole = numbers == OWN_NUMBERS and all(row.processes_complete for row in devices)
    rest = 0 if whole else None
    behind = [replace(row, bytes=held.get(row.pid, rest)) for row in left_behind()]
    return Who(source.name, source.simulated, numbers, devices, behind)


def read_driver(source: Source) -> list[dict[str, Any]]:
    """Ask the driver once; return its rows, as ``driver_list`` writes them.

    Raises:
        MemprofError: there is no driver's library, it refuses, or it does not answer.
    """
    command = [sys.executable, "-I", "-S", driver_list.__file__]
    try:
        done = subprocess.run(
            command, env=dict(source.env), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise MemprofError(
            f"the driver's library did not answer in {_TIMEOUT_S:.0f} s", hint="npu-smi info"
        ) from None
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise MemprofError(f"the driver's list could not be read: {said[0]}") from None
    if found["reason"] is not None:
        hint = "--device sim:910b needs no NPU; in a container mount /usr/local/dcmi, and pass "
        hint += "--device /dev/davinciN, /dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc"
        raise MemprofError(f"no device can be read: {found['reason']}", hint=hint)
    rows: list[dict[str, Any]] = found["devices"]
    return rows


def device_row(listed: Mapping[str, Any], source: Source, numbers: str) -> DeviceRow:
    """Return a device, from what the driver says of it."""
    rows, held, complete = None, None, None
    total, used, reasons = listed["total_bytes"], listed["used_bytes"], listed["reasons"]
    if listed["processes"] is not None:
        rows = [listed_process(pid, size, numbers) for pid, size in listed["processes"]]
        rows.sort(key=lambda row: (-(row.bytes or 0), row.pid))
        held = sum(row.bytes or 0 for row in rows if row.where != ENDED)
        complete = len(rows) < LISTED_AT_MOST
    if source.simulated:
        total, used = source.simulated_total_bytes, held if complete else None
        reasons = [reason for reason in reasons if "memory_info" not in reason]
    if complete is False:
        most = text("the driver lists {count} processes at most", count=LISTED_AT_MOST)
        reasons = [*reasons, most]
    return DeviceRow(
        listed["device"],
        listed["card"],
        listed["chip"],
        total,
        used,
        minus(total, used),
        None if source.simulated else STEP_BYTES,
        rows,
        complete,
        held,
        minus(used, held) if complete and not source.simulated else None,
        reasons=reasons,
    )


def wait_until_free(
    look: Callable[[], Who], free_bytes: int, timeout_s: float, say: Callable[[Who], None]
) -> Who:
    """Return the first look at which that much is free on every device, or the last one.

    Args:
        look: reads the devices.
        free_bytes: wanted on each of them.
        timeout_s: from now; a look is made at its end too.
        say: told every look at which it is not free.

    Raises:
        UsageError: a device has less in all.
        MemprofError: what is free of a device is not known.
    """
    start = time.monotonic()
    while True:
        who = look()
        met = True
        for row in who.devices:
            if row.free_bytes is None:
                why = "; ".join(row.reasons) or "the driver does not tell"
                raise MemprofError(f"what is free of device {row.device} is not known: {why}")
            if (row.total_bytes or 0) < free_bytes:
                raise UsageError(
                    f"device {row.device} has {format_gib(row.total_bytes)} GiB in all: "
                    f"{format_gib(free_bytes)} GiB never are free"
                )
            met &= row.free_bytes >= free_bytes
        waited = time.monotonic() - start
        if met or waited >= timeout_s:
            return replace(who, wait=WaitRow(free_bytes, timeout_s, round(waited, 3), met))
        say(who)
        time.sleep(min(EVERY_S, timeout_s - waited))
