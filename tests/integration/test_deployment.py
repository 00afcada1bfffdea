"""Deployments on several hosts: the commands of docs/deployments.md, each host on loopback with a
name and devices of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.integration.test_serve import request
from tests.support.engine import (
    FORK,
    OLD_STACK,
    STACK,
    RunResult,
    assert_nothing_left,
    engine_pids,
    finish,
    read_events,
    require_stack,
    start_memprof,
    wait_for_server,
)
from tests.support.hosts import Deployment, Host
from tests.support.ports import free_port

pytestmark = [pytest.mark.sim, pytest.mark.alone, pytest.mark.timeout(420)]

#: Start-up of two engines at once on a slow two-core machine, with room.
READY_S = 300.0
STACKS = [STACK, pytest.param(OLD_STACK, marks=pytest.mark.full)]
#: Keeps the KV cache of prompts in files; for a test alone.
CONNECTOR = (
    '"kv_connector": "FileConnector", "kv_connector_module_path": "tests.support.kv_by_files", '
    '"kv_connector_extra_config": {"shared_storage_path": "%s"}'
)

#: A parent that collects its child at once leaves nothing to read of how it died.
KILLED = re.compile(r"worker DP\d TP0 \(pid \d+\) (was killed by SIGKILL|vanished) while serving.*")

Start = Callable[..., Deployment]


@pytest.fixture
def deployment(tmp_path: Path, cleanup_processes: list[subprocess.Popen[str]]) -> Start:
    """Starts the blocks of the page: ``deployment(STACK, "host-a", "host-b")``."""

    def start(stack: str, *names: str, **variables: str) -> Deployment:
        ports = {"HTTP": str(free_port()), "PORT": str(free_port())}
        made = Deployment(tmp_path, {**ports, **variables}, ("--stack", require_stack(stack)))
        cleanup_processes.extend(host.process for host in made.start(*names))
        return made

    return start


def two_hosts(
    deployment: Start, stack: str, first: str, second: str, **variables: str
) -> tuple[Deployment, Host, Host]:
    """Start two hosts of the page; return them when both are ready."""
    made = deployment(stack, first, second, **variables)
    made.wait_until_ready(READY_S)
    return made, made.hosts[first], made.hosts[second]


def serve_some(port: int, model: str, count: int = 4) -> None:
    for number in range(count):
        body = {"model": model, "prompt": f"{number} a b c", "max_tokens": 8, "ignore_eos": True}
        assert request(port, "/v1/completions", body)["usage"]["completion_tokens"] == 8


def whole(run: RunResult, *labels: str) -> dict[str, Any]:
    """Return the part of a run that is recorded from start to end."""
    ranks = run.report["ranks"]
    assert [rank["label"] for rank in ranks] == list(labels)
    for rank in ranks:
        assert rank["budget"]["residual_bytes"] == 0
        assert rank["budget"]["balanced"]
    part: dict[str, Any] = run.info["part"]
    return part


@pytest.mark.parametrize("stack", STACKS)
def test_data_parallel_with_a_headless_host(
    stack: str, deployment: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*FORK)
    made, head, headless = two_hosts(deployment, stack, "host-a", "host-b")
    port = made.variables["PORT"]
    serve_some(int(made.variables["HTTP"]), "memprof/tiny-moe")
    pids = engine_pids(head.run_dir) | engine_pids(headless.run_dir)
    head.send(signal.SIGINT)
    first, second = head.end(), headless.end()

    assert_nothing_left(pids)
    assert (first.returncode, second.returncode) == (0, 0), second.output[-3000:]
    assert (first.info["status"], second.info["status"]) == ("ok", "ok")
    assert first.info["exit_reason"] == "ended by SIGINT"
    assert second.info["exit_reason"] == "the head 127.0.0.1 has ended"
    assert (first.info["host"], second.info["host"]) == ("host-a", "host-b")
    sizes = {
        "deployment": f"127.0.0.1:{port}", "source": "arguments", "group": None, "nodes": None,
        "node_rank": None, "dp_size": 2, "dp_local": 1, "world_size": 1,
    }  # fmt: skip
    assert whole(first, "DP0 TP0") == {**sizes, "headless": False, "dp_start": 0}
    assert whole(second, "DP1 TP0") == {**sizes, "headless": True, "dp_start": 1}
    assert "KV cache" in second.output  # its report was printed


@pytest.mark.full
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_one_engine_core_over_two_hosts(stack: str, deployment: Start) -> None:
    made, head, node = two_hosts(deployment, stack, "node-a", "node-b", MODEL="memprof/tiny")
    port = made.variables["PORT"]
    serve_some(int(made.variables["HTTP"]), "memprof/tiny")
    pids = engine_pids(head.run_dir) | engine_pids(node.run_dir)
    head.send(signal.SIGINT)
    first, second = head.end(), node.end()

    assert_nothing_left(pids)
    assert (first.returncode, second.returncode) == (0, 0), second.output[-3000:]
    assert second.info["exit_reason"] == "the head 127.0.0.1 has ended"
    sizes = {
        "deployment": f"127.0.0.1:{port}", "source": "arguments", "group": None, "nodes": 2,
        "dp_size": 1, "dp_start": 0, "dp_local": 1, "world_size": 2,
    }  # fmt: skip
    assert whole(first, "TP0") == {**sizes, "headless": False, "node_rank": 0}
    assert whole(second, "TP1") == {**sizes, "headless": True, "node_rank": 1}
    granted = [run.report["ranks"][0]["budget"]["kv_cache_bytes"] for run in (first, second)]
    assert granted[0] == granted[1]
    # the plan of the KV cache is the engine core's, on the first host
    assert [run.report["ranks"][0]["kv"]["blocks"] is None for run in (first, second)] == [
        False,
        True,
    ]


@pytest.mark.full
def test_a_process_killed_on_the_headless_host(deployment: Start) -> None:
    _, head, headless = two_hosts(deployment, STACK, "host-a", "host-b")
    pids = engine_pids(head.run_dir) | engine_pids(headless.run_dir)
    os.kill(worker_of(headless.run_dir), signal.SIGKILL)
    second = headless.end()
    assert (second.returncode, second.info["status"]) == (1, "failed")
    assert KILLED.fullmatch(second.info["exit_reason"])

    first = head.end()
    assert_nothing_left(pids)
    assert (first.returncode, first.info["status"]) == (1, "failed")
    assert first.info["exit_reason"].startswith("an engine core on another host failed")
    whole(first, "DP0 TP0")
    whole(second, "DP1 TP0")


@pytest.mark.full
def test_a_process_killed_on_the_first_host(deployment: Start) -> None:
    _, head, headless = two_hosts(deployment, STACK, "host-a", "host-b")
    pids = engine_pids(head.run_dir) | engine_pids(headless.run_dir)
    os.kill(worker_of(head.run_dir), signal.SIGKILL)
    first, second = head.end(), headless.end()
    assert_nothing_left(pids)
    assert (first.returncode, first.info["status"]) == (1, "failed")
    assert KILLED.fullmatch(first.info["exit_reason"])
    assert (second.returncode, second.info["status"]) == (0, "ok")
    assert second.info["exit_reason"] == "the head 127.0.0.1 has ended"


@pytest.mark.full
def test_a_headless_host_that_is_ended_alone(deployment: Start) -> None:
    made, head, headless = two_hosts(deployment, STACK, "host-a", "host-b")
    pids = engine_pids(head.run_dir) | engine_pids(headless.run_dir)
    headless.send(signal.SIGINT)
    second = headless.end()
    assert (second.returncode, second.info["exit_reason"]) == (0, "ended by SIGINT")
    assert head.process.poll() is None  # it is told nothing

    with pytest.raises((URLError, ConnectionError)):  # the next request needs the rank that is gone
        serve_some(int(made.variables["HTTP"]), "memprof/tiny-moe", 1)
    first = head.end()
    assert_nothing_left(pids)
    assert (first.returncode, first.info["status"]) == (1, "failed")
    assert first.info["exit_reason"].startswith("a rank on another host closed its connection")


def worker_of(run_dir: Path) -> int:
    return next(
        int(event["file"].removesuffix(".jsonl").rsplit("-", 1)[1])
        for event in read_events(run_dir)
        if event["kind"] == "identity" and event["role"] == "worker"
    )


#: Figures of a snapshot that say what this rank's torch holds: of no other process, no device.
OF_TORCH = (
    "allocated_bytes", "allocated_peak_bytes", "allocated_run_peak_bytes", "reserved_bytes",
    "reserved_peak_bytes", "reserved_run_peak_bytes", "npu_workspace_bytes", "graph_pool_bytes",
)  # fmt: skip


def edges(run: RunResult, rank: int) -> list[tuple[str, str, dict[str, int | None]]]:
    """Return phase, edge and torch's figures of a rank, up to the end of its start-up."""
    found = []
    for event in read_events(run.run_dir):
        snapshot = event.get("snapshot")
        if event["file"] != file_of(run, rank) or not snapshot or event["kind"] != "phase":
            continue
        figures = {name: snapshot.get(name) for name in OF_TORCH}
        found.append((event["phase"], event["edge"], figures))
        if (event["phase"], event["edge"]) == ("warm_up", "after"):
            break
    return found


def file_of(run: RunResult, dp_rank: int) -> str:
    files = (
        str(event["file"])
        for event in read_events(run.run_dir)
        if event["kind"] == "identity" and event.get("dp_rank") == dp_rank
    )
    return next(files)


@pytest.mark.full
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_two_hosts_hold_what_one_host_holds(
    stack: str,
    deployment: Start,
    tmp_path: Path,
    cleanup_processes: list[subprocess.Popen[str]],
) -> None:
    """Torch's figures of each rank are equal to the byte at every edge of the start-up, and so is
    the KV cache that follows from them and from the device's: each rank has a device of its own.

    Not compared: what is read outside torch after the plan. ATB's pool appears when torch_npu's
    queue gets to the first operation, on a busy machine after the edge.
    """
    made = deployment(stack, "host-a", "host-b")
    made.wait_until_ready(READY_S)
    made.hosts["host-a"].send(signal.SIGINT)
    apart = [made.hosts[name].end() for name in ("host-a", "host-b")]

    arguments = [
        "serve", "memprof/tiny-moe", "--device", "sim:910b", "--stack", stack,
        "--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager",
        "--max-model-len", "512", "--max-num-seqs", "8", "--api-server-count", "1",
        "--port", str(free_port()),
    ]  # fmt: skip
    run_dir = tmp_path / "together"
    process = start_memprof(arguments, run_dir)
    cleanup_processes.append(process)
    wait_for_server(process, run_dir, READY_S)
    process.send_signal(signal.SIGINT)
    together = finish(process, run_dir, 60)

    assert together.info["part"] is None
    for rank, run in enumerate(apart):
        assert edges(run, rank) == edges(together, rank)
        one, other = run.report["ranks"][0], together.report["ranks"][rank]
        assert one["budget"]["terms"] == other["budget"]["terms"]
        assert one["budget"]["kv_cache_bytes"] == other["budget"]["kv_cache_bytes"]
        assert one["kv"] == other["kv"]


@pytest.mark.full
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_prefill_and_decode_apart(stack: str, deployment: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    http = free_port()  # the page takes the next one for the other engine
    made = deployment(
        stack, "prefill", "decode", MODEL="memprof/tiny", HTTP=str(http), CONNECTOR=CONNECTOR % kept
    )
    made.wait_until_ready(READY_S)
    serve_some(http, "memprof/tiny", 1)
    assert list(kept.iterdir())  # the prefill engine handed the prompt's KV cache over
    serve_some(http + 1, "memprof/tiny", 1)
    for host in made.hosts.values():
        host.send(signal.SIGINT)
    for group, host in made.hosts.items():
        run = host.end()
        assert run.returncode == 0
        part = whole(run, "TP0")
        assert (part["deployment"], part["group"], part["source"]) == ("demo", group, "option")
        assert not part["headless"]
