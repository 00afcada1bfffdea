"""Why a run ended: the first cause, in one sentence, whatever order things were noticed in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from vllm_memprof.launch import verdict as module
from vllm_memprof.launch import watch as watch_module
from vllm_memprof.launch.host import Seen
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.verdict import EngineEnd, RunVerdict, describe_stuck, find_error_line
from vllm_memprof.launch.watch import Death, ProcessWatch, read_stat

S = 1_000_000_000


def progress_of(*ranks: str, phase: str | None = "weight_load") -> EngineProgress:
    """Ranks with pids 10, 11...; each is inside the phase since second 1, if there is one."""
    progress = EngineProgress()
    for rank, label in enumerate(ranks):
        file = f"h-{10 + rank}.jsonl"
        progress.fold(file, {"kind": "process", "t_ns": S, "pid": 10 + rank, "role": "unknown"})
        progress.fold(
            file, {"kind": "identity", "t_ns": S, "role": "worker", "rank": rank, "label": label}
        )
        if phase:
            progress.fold(
                file, {"kind": "phase", "t_ns": S, "phase": phase, "edge": "before", "id": 1}
            )
    return progress


def end_phase(
    progress: EngineProgress,
    rank: int,
    seconds: float,
    error: str | None = None,
    phase: str = "weight_load",
):
    event: dict[str, Any] = {
        "kind": "phase",
        "t_ns": int(seconds * S),
        "phase": phase,
        "edge": "after",
        "id": 1,
    }
    progress.fold(f"h-{10 + rank}.jsonl", {**event, "error": error})


def seen(**fields: Any) -> EngineEnd:
    return EngineEnd(**{"mode": "serve", "progress": EngineProgress(), "engine_code": 1, **fields})


def judge(end: EngineEnd, progress: EngineProgress) -> RunVerdict:
    end.progress = progress
    return module.judge(end)


def test_a_violent_death_comes_before_what_followed_from_it():
    progress = progress_of("TP0", "TP1")
    end_phase(progress, 0, 5.2, error="RuntimeError: peer closed the connection")
    deaths = [Death(11, 5 * S, code=-9), Death(10, 6 * S, code=-15)]
    verdict = judge(seen(deaths=deaths), progress)
    died = "worker TP1 (pid 11) was killed by SIGKILL in weight_load"
    assert verdict.reason == f"{died}; after it ended TP0 (pid 10)"


def test_an_engine_core_that_wrote_nothing_is_named_by_its_title():
    progress = progress_of("TP0", "TP1")
    progress.seen |= {5: Seen(3 << 29, "EngineCore DP1"), 6: Seen(1 << 30, "")}
    deaths = [
        Death(6, 4 * S, code=-9),
        Death(5, 5 * S, code=-9),
        Death(10, 6 * S),
        Death(11, 7 * S),
    ]
    assert judge(seen(deaths=deaths), progress).reason == (
        "EngineCore DP1 (pid 5) was killed by SIGKILL with workers in weight_load, with 1.50 GiB of "
        "host memory; after it ended TP0 (pid 10), TP1 (pid 11)"
    )


def test_an_exception_comes_before_the_deaths_that_followed_from_it():
    progress = progress_of("TP0", "TP1")
    end_phase(progress, 0, 4.0, error="ValueError: bad shape")
    verdict = judge(seen(deaths=[Death(11, 5 * S)]), progress)
    assert verdict.reason == "TP0 failed in weight_load: ValueError: bad shape"


def test_of_deaths_noticed_at_once_the_violent_one_counts():
    deaths = [Death(10, 5 * S), Death(11, 5 * S + 1000, code=-9)]
    assert "TP1" in str(judge(seen(deaths=deaths), progress_of("TP0", "TP1")).reason)
    later = [Death(10, 5 * S), Death(11, 7 * S, code=-9)]
    assert "TP0" in str(judge(seen(deaths=later), progress_of("TP0", "TP1")).reason)


def test_of_deaths_noticed_at_once_that_nobody_saw_both_are_named():
    deaths = [Death(10, 5 * S), Death(11, 5 * S + 1000)]
    reason = judge(seen(deaths=deaths), progress_of("TP0", "TP1")).reason
    assert reason == (
        "worker TP0 (pid 10) vanished in weight_load; "
        "worker TP1 (pid 11) vanished in weight_load at the same time"
    )
    known = [Death(10, 5 * S), Death(11, 5 * S + 1000, code=0)]
    assert "TP1" not in str(judge(seen(deaths=known), progress_of("TP0", "TP1")).reason)


def test_deaths_in_good_order_are_no_cause():
    progress = progress_of("TP0", phase=None)
    progress.fold(
        "h-10.jsonl",
        {"kind": "phase", "t_ns": 5 * S, "phase": "shutdown", "edge": "before", "id": 2},
    )
    progress.fold("h-12.jsonl", {"kind": "process", "t_ns": S, "pid": 12, "role": "engine_core"})
    deaths = [Death(10, 6 * S), Death(12, 8 * S, code=-9)]
    assert judge(seen(engine_code=0, ready=True, deaths=deaths), progress).status == "ok"
    assert (
        judge(seen(engine_code=0, mode="offline", deaths=[Death(12, S)]), progress).status == "ok"
    )


def test_a_shutdown_that_followed_from_a_death_hides_nothing():
    """Noticed late: the other worker's shutdown, which the death had caused, is older than the
    notice."""
    progress = progress_of("TP0", "TP1", phase=None)
    progress.fold("h-12.jsonl", {"kind": "process", "t_ns": S, "pid": 12, "role": "engine_core"})
    progress.fold(
        "h-11.jsonl",
        {"kind": "phase", "t_ns": 5 * S, "phase": "shutdown", "edge": "before", "id": 2},
    )
    for death in (Death(10, 9 * S, code=-9), Death(12, 6 * S, code=-9)):
        verdict = judge(seen(engine_code=0, ready=True, deaths=[death]), progress)
        assert verdict.exit_code == 1
        assert "SIGKILL while serving" in str(verdict.reason)


def test_a_server_that_lost_a_worker_and_says_0_failed_all_the_same():
    verdict = judge(
        seen(engine_code=0, ready=True, deaths=[Death(10, 6 * S, code=-15)]),
        progress_of("TP0", phase=None),
    )
    assert (verdict.status, verdict.exit_code) == ("failed", 1)
    assert verdict.reason == "worker TP0 (pid 10) was killed by SIGTERM while serving"


def test_a_server_whose_engine_core_left_in_good_order_failed():
    """As after SIGTERM to the engine core alone: vLLM's API server exits with status 0."""
    progress = progress_of("TP0", phase=None)
    core = {"kind": "process", "t_ns": S, "pid": 20, "role": "engine_core"}
    progress.fold("h-20.jsonl", core)
    shutdown = {"kind": "phase", "t_ns": 10 * S, "phase": "shutdown", "edge": "before", "id": 2}
    progress.fold("h-10.jsonl", shutdown)
    deaths = [Death(10, 12 * S, code=0), Death(20, 25 * S, code=0)]
    ended = {"engine_code": 0, "ready": True, "ready_t_ns": 2 * S, "deaths": deaths}
    assert judge(seen(**ended), progress).status == "ok"  # by SIGTERM to the API server
    verdict = judge(seen(**ended, lost_core=True), progress)
    assert (verdict.status, verdict.exit_code) == ("failed", 1)
    assert "exited with status 0 while serving" in str(verdict.reason)
    assert "pid 20" in str(verdict.reason)


def test_readiness_counts_at_the_time_of_the_death():
    progress = progress_of("TP0")
    end_phase(progress, 0, 2.0)
    death = [Death(10, 5 * S, code=-9)]
    assert "after weight_load" in str(judge(seen(deaths=death), progress).reason)
    assert "while serving" in str(
        judge(seen(deaths=death, ready=True, ready_t_ns=4 * S), progress).reason
    )
    assert "after weight_load" in str(
        judge(seen(deaths=death, ready=True, ready_t_ns=6 * S), progress).reason
    )


def test_host_memory_is_named_when_the_kernel_killed():
    deaths = [Death(10, 5 * S, code=-9)]
    assert "host memory" in str(
        judge(seen(deaths=deaths, host_oom_kills=1), progress_of("TP0")).reason
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "oom"),
        ("Failed to allocate resource[DeviceMemory] with info [size:2147483648]. Reason: x", "oom"),
        ("E: [memprof simulated device] device 0 has 3 of 9 bytes free, 4 requested", "oom"),
        ("ValueError: To serve at least one request, 8.0 GiB KV cache is needed", "failed"),
    ],
)
def test_status_from_the_log(line, status):
    verdict = judge(
        seen(error_lines=[f"(EngineCore pid=1) ERROR 11-21 03:07:49 [core.py:1] {line}"]),
        EngineProgress(),
    )
    assert verdict.status == status
    assert str(verdict.reason).endswith(f"before any worker reported: {line}")


def test_error_lines_that_only_pass_on_are_skipped():
    lines = [
        "ValueError: real",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert find_error_line(lines) == "ValueError: real"
    assert find_error_line(lines[1:]) == lines[1]
    assert find_error_line([]) is None


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (-9, 137), (-15, 143), (None, 1)])
def test_exit_codes(code, expected):
    assert judge(seen(engine_code=code), EngineProgress()).exit_code == expected


def test_the_signal_that_memprof_sent_is_not_the_engines_status():
    assert judge(seen(engine_code=-15, forced_main=True), EngineProgress()).exit_code == 1
    assert judge(seen(engine_code=-9, forced=True), EngineProgress()).exit_code == 137


def test_where_each_rank_is_stuck():
    progress = progress_of("TP0", "TP1")
    end_phase(progress, 1, 3.0)
    assert (
        describe_stuck(progress, 31 * S)
        == "TP0 in weight_load for 30 s, TP1 after weight_load for 28 s"
    )
    assert describe_stuck(EngineProgress(), S) == ""


def test_foreign_events_are_skipped():
    progress = EngineProgress()
    edge = {"kind": "phase", "t_ns": 1, "phase": "x", "edge": "after"}
    ready, identity = {"kind": "ready", "t_ns": "x"}, {"kind": "identity"}
    for event in ({}, {"kind": "new"}, {"kind": "phase"}, edge, ready, identity):
        progress.fold("f", event)
    assert progress.workers[0].done[0].start_t_ns is None


def test_watching_a_child_die():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watch = ProcessWatch(child.pid)
    try:
        assert watch.living() == [child.pid]
        watch.track(child.pid)
        watch.signal([child.pid], signal.SIGKILL)
        limit = time.monotonic() + 5
        while not (deaths := watch.refresh()) and time.monotonic() < limit:
            time.sleep(0.01)
        assert [(death.pid, death.code) for death in deaths] == [(child.pid, -signal.SIGKILL)]
        assert watch.living() == []
        child.wait()
        assert watch.refresh() == []
        watch.signal([child.pid], signal.SIGKILL)  # the id may be someone else's now
    finally:
        watch.close()


def test_how_a_process_died_is_known_once_its_parent_has_collected_it(monkeypatch):
    """As on a busy machine, where nobody looks in the moment in between. Linux 6.15"""
    monkeypatch.setattr(ProcessWatch, "_wait_for_deaths", lambda self: None)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pidfd = os.pidfd_open(child.pid)
    watch = ProcessWatch(child.pid)
    try:
        child.kill()
        child.wait()
        if watch_module._collected(pidfd) is None:
            pytest.skip("this kernel keeps no status of a process that was collected")
        assert [(death.pid, death.code) for death in watch.refresh()] == [(child.pid, -9)]
    finally:
        watch.close()
        os.close(pidfd)


def test_an_id_that_was_used_again_is_not_ours():
    watch = ProcessWatch(os.getpid())
    try:
        parent = os.getppid()
        watch.track(parent, started_before=1.0)  # the event is of 1970: another process
        assert [death.pid for death in watch.refresh()] == [parent]
        assert parent not in watch.living()
    finally:
        watch.close()


def test_reading_the_process_table():
    stat = read_stat(os.getpid())
    assert stat is not None
    assert stat.ppid == os.getppid()
    assert read_stat(2**22 + 1) is None


def of_two_nodes() -> EngineProgress:
    """Two ranks whose start-up is over, each on a Ray node of its own, with one process id."""
    progress = EngineProgress("node-a")
    for rank, host in enumerate(("node-a", "node-b")):
        file = f"{host}-10.jsonl"
        process = {"kind": "process", "t_ns": S, "host": host, "pid": 10, "role": "unknown"}
        progress.fold(file, process)
        progress.fold(file, {"kind": "ray", "t_ns": S, "node": f"n{rank}", "folder": None})
        label = f"TP{rank}"
        identity = {"kind": "identity", "t_ns": S, "role": "worker", "rank": rank, "label": label}
        progress.fold(file, identity)
    return progress


def test_a_lost_node_is_named_with_its_rank_and_phase():
    progress = of_two_nodes()
    for _ in range(2):  # the engine core and the collector both say so
        lost = {"kind": "ray_lost", "t_ns": 3 * S, "node": "n1", "rank": None, "reason": "gone"}
        progress.fold("node-a-9.jsonl", lost)
    [gone] = progress.lost
    verdict = judge(seen(ready=True, engine_code=0, lost=[gone]), progress)
    said = "worker TP1 on node-b (pid 10) was lost with its node while serving"
    assert (verdict.status, verdict.exit_code, verdict.reason) == ("failed", 1, said)
    opened = {"kind": "phase", "t_ns": 2 * S, "phase": "weight_load", "edge": "before", "id": 1}
    progress.fold("node-b-10.jsonl", opened)
    reason = judge(seen(lost=[gone], deaths=[Death(10, 3 * S, code=1)]), progress).reason
    assert reason == "worker TP1 on node-b (pid 10) was lost with its node in weight_load"


def test_a_lost_worker_is_the_reason_unless_it_said_why():
    progress = of_two_nodes()
    lost = {"kind": "ray_lost", "t_ns": 3 * S, "node": "n1", "rank": 1, "reason": "ActorDiedError"}
    progress.fold("node-a-9.jsonl", lost)
    given = seen(ready=True, lost=progress.lost)
    assert judge(given, progress).reason == (
        "worker TP1 on node-b (pid 10) was lost while serving: ActorDiedError"
    )
    error = {"kind": "phase", "t_ns": 2 * S, "phase": "request", "edge": "after", "id": 2}
    progress.fold("node-b-10.jsonl", {**error, "error": "ValueError: of its own"})
    assert judge(given, progress).reason == "TP1 failed in request: ValueError: of its own"


def test_a_node_that_is_lost_before_its_worker_reports_is_named_by_its_id():
    progress = of_two_nodes()
    lost = {"kind": "ray_lost", "t_ns": S, "node": "0123456789abcdef", "rank": None, "reason": ""}
    progress.fold("node-a-9.jsonl", lost)
    reason = judge(seen(lost=progress.lost), progress).reason
    assert reason == "the Ray node 0123456789ab was lost before its worker reported"


def test_a_death_is_looked_up_among_the_processes_of_the_own_host():
    progress = of_two_nodes()
    process = progress.by_pid(10)
    assert process is not None
    assert process.host == "node-a"


def test_seconds_are_told_of_the_own_host_alone():
    progress = of_two_nodes()
    assert describe_stuck(progress, 5 * S) == (
        "TP0 before its first phase for 4 s, TP1 before its first phase"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ready": True, "engine_code": 0}, ("ok", 0, "the head h has ended")),
        (  # signalled by memprof, it ended well
            {"ready": True, "engine_code": 0, "forced": True, "forced_main": True},
            (
                "ok", 0,
                "the head h has ended; the engine did not end until memprof ended its processes",
            ),
        ),
        ({"ready": True, "engine_code": -9, "forced_main": True}, ("ok", 1, "the head h has ended")),
        (
            {"ready": False, "engine_code": 0},
            ("failed", 1, "the head h ended before this host was ready: TP0 in weight_load"),
        ),
    ],
)  # fmt: skip
def test_the_end_of_the_head(fields: dict[str, Any], expected: tuple[str, int, str]) -> None:
    verdict = judge(seen(head_ended="h", **fields), progress_of("TP0"))
    assert (verdict.status, verdict.exit_code, verdict.reason) == expected


def test_an_engine_core_of_another_host_comes_before_the_workers_that_vllm_kills() -> None:
    """The API server ends all of its processes when a core on another host says that it fails."""
    progress = progress_of("TP0", phase=None)
    death = Death(10, 9 * S, code=-signal.SIGKILL)
    fields = {"ready": True, "engine_code": 0, "deaths": [death]}
    verdict = judge(seen(**fields, other_host_t_ns=5 * S), progress)
    assert (verdict.status, verdict.exit_code) == ("failed", 1)
    assert verdict.reason is not None
    assert verdict.reason.startswith("an engine core on another host failed")
    verdict = judge(seen(**fields, lost_peer_t_ns=5 * S), progress)
    assert verdict.reason is not None
    assert verdict.reason.startswith("a rank on another host closed its connection")
    verdict = judge(seen(**fields, other_host_t_ns=10 * S), progress)
    assert verdict.reason is not None
    assert "TP0" in verdict.reason


def test_a_headless_host_that_ends_unasked_failed() -> None:
    """Its main process says 0 whatever its engine core did."""
    lines = ["(EngineCore_DP1 pid=1) RuntimeError: no such operator"]
    fields = {"engine_code": 0, "ready": True, "headless": True, "error_lines": lines}
    verdict = judge(seen(**fields), progress_of("TP0", phase=None))
    assert (verdict.status, verdict.exit_code) == ("failed", 1)
    assert verdict.reason is not None
    assert "no such operator" in verdict.reason
    assert judge(seen(**{**fields, "interrupted_by": 2}), progress_of("TP0")).status == "ok"
