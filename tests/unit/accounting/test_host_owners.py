"""Host memory by owner, read twice: when the engine was ready, and while it served."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.host_runs import SOURCE, write_host
from tests.support.render import table
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import HostMemory
from vllm_memprof.record.loader import load_run


def grown(memory: HostMemory) -> dict[str, int | None]:
    return {row.owner: row.grown_bytes for row in memory.rows}


def test_owners_that_grew_while_serving(tmp_path: Path) -> None:
    """The worker that was not read again has no growth, and is in none of the host."""
    files = sorted((SOURCE / "events").glob("*.jsonl"))
    first = [json.loads(path.read_text().splitlines()[0]) for path in files]
    workers = [str(event["pid"]) for event in first if event["role"] == "worker"]
    ready = {pid: {"": 9 << 30, "/dev/shm/psm_1": 1 << 30} for pid in workers}
    later = {workers[0]: {"": 11 << 30, "/dev/shm/psm_1": 1 << 30}}
    memory = {"processes": ready, "later": later}
    report = build_report(load_run(write_host(tmp_path, "a", files, {"host_memory": memory})))
    by_pid = {str(rank.pid): grown(rank.host_memory) for rank in report.ranks}
    assert by_pid[workers[0]] == {"rest": 2 << 30, "shm:message_queues": 0}
    assert by_pid[workers[1]] == {"rest": None, "shm:message_queues": None}
    (host,) = report.host_memory
    assert grown(host) == {"rest:worker": 2 << 30, "shm:message_queues": 0}
    assert "Grown while" in table(report, 120)
