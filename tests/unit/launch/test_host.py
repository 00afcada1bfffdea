"""What the launcher reads of processes while they serve, on a real process that grows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_memprof.launch import host
from vllm_memprof.record.host import HostRecord

MIB = 1 << 20
GROWS = """
import sys
for line in sys.stdin:
    kept = bytearray(b"x") * int(line)
    print(flush=True)
"""


@pytest.fixture
def child():
    with subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def grow(child: subprocess.Popen, size: int) -> None:
    child.stdin.write(f"{size}\n")
    child.stdin.flush()
    child.stdout.readline()


@pytest.mark.parametrize("again", [True, False])
def test_owners_are_divided_again_only_if_asked(child, monkeypatch, again):
    record = HostRecord()
    watch = host.HostWatch(record, {}, again)
    grow(child, MIB)
    watch.look([child.pid])
    assert not record.later  # the engine is not ready
    watch.read([child.pid])
    grow(child, 65 * MIB)
    watch.look([child.pid])
    assert not record.later  # too early
    monkeypatch.setattr(host.time, "monotonic", lambda: 1e9)
    watch.look([child.pid])
    if not again:
        assert not record.later
        return
    before, after = (
        sum(each[str(child.pid)].values()) for each in (record.processes, record.later)
    )
    assert 60 * MIB < after - before < 70 * MIB
