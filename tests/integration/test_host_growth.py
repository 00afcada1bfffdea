"""Host memory by owner, divided again while a server serves."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.engine import finish, start_memprof, wait_for_server
from tests.support.ports import free_port

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(420)]


def test_owners_are_divided_again_while_serving(sim_stack, tmp_path, cleanup_processes):
    """At most 2 % of the time goes into it: a reading of five processes takes up to a second."""
    run_dir = tmp_path / "run"
    process = start_memprof(
        ["serve", "memprof/tiny", "--device", "sim:910b", "--enforce-eager", "--sample", "1",
         "--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(free_port())],
        run_dir,
    )  # fmt: skip
    cleanup_processes.append(process)
    wait_for_server(process, run_dir, 200)
    time.sleep(70)
    process.send_signal(signal.SIGINT)
    run = finish(process, run_dir, 60)
    assert run.returncode == 0, run.output[-3000:]
    (host,) = run.report["host_memory"]
    grown = {row["owner"]: row["grown_bytes"] for row in host["rows"]}
    assert abs(grown["rest:worker"]) < 1 << 30
    assert grown.get("file:cache") is None  # of the cgroup, which is read once
    assert "Grown while" in run.full
