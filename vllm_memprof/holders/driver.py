"""The driver's list, read in a child process: of an NPU, or of a simulated device by its shim.

In: the kind of device, the environment. Out: ``Listed`` rows. Runs in the ``memprof`` process;
neither torch nor the engine is imported, no device is opened, nothing is changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.capture import driver_list
from vllm_memprof.errors import MemprofError

_TIMEOUT_S = 60.0


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


@dataclass
class Listed:
    """What the driver says of one device."""

    device: int
    card: int | None
    chip: int | None
    processes: list[tuple[int, int]] | None  # pid, bytes
    total_bytes: int | None
    used_bytes: int | None
    reasons: list[str]


def npu_source(environ: Mapping[str, str]) -> Source:
    """Return the NPUs of this machine, whether there are any or not."""
    return Source("npu", environ)


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


def read_driver(source: Source) -> list[Listed]:
    """Ask the driver once.

    Raises:
        MemprofError: there is no driver's library, it refuses, or it does not answer.
    """
    command = [sys.executable, "-I", "-S", str(Path(driver_list.__file__))]
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
    listed = [Listed(**row) for row in found["devices"]]
    for each in listed:
        if each.processes is not None:
            each.processes = [(pid, size) for pid, size in each.processes]
        if source.simulated_total_bytes is not None:
            rows, each.used_bytes = each.processes, None
            each.total_bytes = source.simulated_total_bytes
            if rows is not None and len(rows) < driver_list.LISTED_AT_MOST:
                each.used_bytes = sum(size for _, size in rows)
            each.reasons = [reason for reason in each.reasons if "memory_info" not in reason]
    return listed
