"""Looks at devices until enough of each is free. Nothing is freed, ended or asked to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.holders.rows import WaitRow, Who
from vllm_memprof.units import format_gib

#: Seconds between two looks.
EVERY_S = 1.0


def wait_until_free(
    look: Callable[[], Who],
    free_bytes: int,
    timeout_s: float,
    say: Callable[[Who], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Who:
    """Return the first look at which that much is free on every device, or the last one.

    Args:
        look: reads the devices.
        free_bytes: wanted on each of them.
        timeout_s: from now; a look is made at its end too.
        say: told every look at which it is not free.
        clock: seconds, monotonic.
        sleep: lets seconds pass.

    Raises:
        UsageError: a device has less in all.
        MemprofError: what is free of a device is not known.
    """
    start = clock()
    while True:
        who = look()
        for row in who.devices:
            if row.free_bytes is None:
                why = "; ".join(row.reasons) or "the driver does not tell"
                raise MemprofError(f"what is free of device {row.device} is not known: {why}")
            if row.total_bytes is not None and row.total_bytes < free_bytes:
                raise UsageError(
                    f"device {row.device} has {format_gib(row.total_bytes)} GiB in all: "
                    f"{format_gib(free_bytes)} GiB never are free"
                )
        met = all((row.free_bytes or 0) >= free_bytes for row in who.devices)
        waited = clock() - start
        if met or waited >= timeout_s:
            wait = WaitRow(free_bytes, timeout_s, round(waited, 3), met)
            return replace(who, wait=wait)
        say(who)
        sleep(min(EVERY_S, timeout_s - waited))
