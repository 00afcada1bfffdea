"""Deployments on several hosts: the commands of docs/deployments.md, each host on loopback with a
name and devices of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_serve import free_port, request
from tests.support.engine import (
    OLD_STACK,
    STACK,
    RunResult,
    assert_nothing_left,
    engine_pids,
    finish,
    require_stack,
    start_memprof,
    wait_for_server,
)
from tests.support.hosts import Deployment

pytestmark = [pytest.mark.sim, pytest.mark.alone, pytest.mark.timeout(420)]

#: Start-up of two engines at once on a slow two-core machine, with room.
READY_S = 300.0
STACKS = [STACK, pytest.param(OLD_STACK, marks=pytest.mark.full)]
#: Keeps the KV cache of prompts in files; for a test alone.
CONNECTOR = (
    '"kv_connector": "FileConnector", "kv_connector_module_path": "tests.support.kv_by_files", '
    '"kv_connector_extra_config": {"shared_storage_path": "%s"}'
)

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
def test_data_parallel_with_a_headless_host(stack: str, deployment: Start) -> None:
    made = deployment(stack, "host-a", "host-b")
    made.wait_until_ready(READY_S)
    port = made.variables["PORT"]
    serve_some(int(made.variables["HTTP"]), "memprof/tiny-moe")
    head, headless = made.hosts["host-a"], made.hosts["host-b"]
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
