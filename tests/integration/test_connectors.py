"""KV connectors live on simulated devices: prefill and decode apart with vllm-ascend's Mooncake
connectors over the stand-in for the transfer engine, and offload to the host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_serve import request
from tests.support.engine import OLD_STACK, STACK, require_stack
from tests.support.hosts import Deployment
from tests.support.pd_proxy import proxy
from tests.support.ports import free_port

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

MIB = 1 << 20
READY_S = 300.0
PULL, PUSH = "MooncakeConnectorV1", "MooncakeLayerwiseConnector"
#: Blocks of the KV cache have 128 tokens.
PROMPTS = ["a b c " * (20 + number % 40) for number in range(200)]

Row = dict[str, Any]


class Apart:
    """A prefill and a decode instance of docs/deployments.md, and what they have answered."""

    def __init__(
        self,
        folder: Path,
        cleanup: list[subprocess.Popen[str]],
        connector: str,
        options: Sequence[str] = (),
        **sizes: int,
    ) -> None:
        self.layerwise = connector == PUSH
        self.ports = {"prefill": free_port(), "decode": free_port()}
        given = {
            "kv_connector": connector,
            "kv_port": str(free_port()),
            "kv_connector_extra_config": {
                group: {"dp_size": 1, "tp_size": sizes.get(group, 1)} for group in self.ports
            },
        }
        variables = {
            "MODEL": "memprof/tiny",
            "CONNECTOR": json.dumps(given)[1:-1],
            "ASCEND_BUFFER_POOL": "4:8",
        }
        self.made = Deployment(
            folder, variables, ("--stack", require_stack(STACK), "--sample", "4")
        )
        for group, port in self.ports.items():
            self.made.variables["HTTP"] = str(port - (group == "decode"))
            more = ["--tensor-parallel-size", str(sizes.get(group, 1)), *options]
            self.made.more = (*self.made.more[:4], *more)
            cleanup += [host.process for host in self.made.start(group)]
        self.made.wait_until_ready(READY_S)

    def send(self, count: int) -> list[str]:
        """Send requests through a proxy; what each was answered."""
        with (
            proxy(self.ports["prefill"], self.ports["decode"], self.layerwise) as port,
            ThreadPoolExecutor(6) as pool,
        ):
            return [*pool.map(lambda prompt: complete(port, prompt), PROMPTS[:count])]

    def end(self) -> dict[str, Any]:
        """End both; one report of them."""
        for host in self.made.hosts.values():
            host.send(signal.SIGINT)
        for host in self.made.hosts.values():
            run = host.end()
            assert run.returncode == 0, run.output[-3000:]
        out = self.made.folder / "report.json"
        command = ["report", "runs", "--deployment", "demo", "--format", "json", "-o", str(out)]
        subprocess.run(
            [sys.executable, "-m", "vllm_memprof", *command], cwd=self.made.folder, check=True
        )
        report: dict[str, Any] = json.loads(out.read_text())
        return report


def complete(port: int, prompt: str) -> str:
    body = {"model": "memprof/tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = request(port, "/v1/completions", {**body, "temperature": 0})
    assert answer["usage"]["completion_tokens"] == 4
    return str(answer["choices"][0]["text"])


def rows_of(rank: dict[str, Any]) -> dict[str, Row]:
    return {row["owner"]: row for row in rank["connectors"]}


def assert_explained(rank: dict[str, Any]) -> None:
    """Every byte of the connector has a row: nothing is left over at the end of the start-up."""
    warm_up = next(phase for phase in rank["phases"] if phase["phase"] == "warm_up")
    assert warm_up["owners"]["after"]["unexplained_bytes"] == 0
    kv, rows = rank["kv"], rows_of(rank)
    # keys and values of two layers
    assert 4 * 2 * MIB <= rows["alignment"]["bytes"] <= 4 * (2 * MIB + 512)
    assert rows["registered"]["bytes"] == kv["planned_bytes"]
    assert rank["budget"]["residual_bytes"] == 0
    # four buffers of 8 MiB, each with the driver's rounding
    assert rows["buffer_pool"]["bytes"] == 32 * MIB <= rows["links"]["bytes"] <= 48 * MIB


@pytest.mark.full
def test_prefill_and_decode_apart(
    tmp_path: Path, cleanup_processes: list[subprocess.Popen[str]]
) -> None:
    apart = Apart(tmp_path, cleanup_processes, PULL)
    answers = apart.send(20)
    assert answers == [complete(apart.ports["decode"], prompt) for prompt in PROMPTS[:20]]
    report = apart.end()
    assert [rank["group"] for rank in report["ranks"]] == ["prefill", "decode"]
    for rank in report["ranks"]:
        assert_explained(rank)
    # the decode instance has pulled
    phases = [[phase["phase"] for phase in rank["phases"]] for rank in report["ranks"]]
    assert ["kv_transfer" in names for names in phases] == [False, True]


@pytest.mark.full
@pytest.mark.parametrize("connector", [PULL, PUSH])
def test_two_hundred_requests_and_none_is_lost(
    connector: str, tmp_path: Path, cleanup_processes: list[subprocess.Popen[str]]
) -> None:
    apart = Apart(tmp_path, cleanup_processes, connector)
    answers = apart.send(200)
    assert len(answers) == 200
    alone = [complete(apart.ports["decode"], prompt) for prompt in PROMPTS[:40]]
    assert answers == alone * 5
    report = apart.end()
    for rank in report["ranks"]:
        assert_explained(rank)
        grown = {row["owner"]: row for row in rank["growth"]}
        assert grown["connector_device"]["verdict"] != "growing"
    assert len(report["ranks"]) == 2


@pytest.mark.full
def test_layers_are_resharded_in_a_buffer_of_their_own(
    tmp_path: Path, cleanup_processes: list[subprocess.Popen[str]]
) -> None:
    """Two ranks prefill for one that decodes: keys and values of a layer once more."""
    few = ["--num-gpu-blocks-override", "2000"]  # of two layers: the half of it once more
    apart = Apart(tmp_path, cleanup_processes, PUSH, few, prefill=2)
    assert len(apart.send(20)) == 20
    report = apart.end()
    for rank in report["ranks"][:2]:
        row = rows_of(rank)["layer_buffer"]
        assert (row["how"], row["place"]) == ("measured", "device")
        layer = rank["kv"]["planned_bytes"] // 2
        assert layer + 8 * MIB <= row["bytes"] <= layer + 9 * MIB
        assert rows_of(rank)["resharding_communicator"]["how"] == "estimated"
        spans = {phase["phase"]: phase["owners"] for phase in rank["phases"]}
        before = spans["kv_connector"]["before"]["unexplained_bytes"]  # of the communicator
        assert spans["warm_up"]["after"]["unexplained_bytes"] == before


OFFLOAD = {
    STACK: {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 100 * MIB}},
    OLD_STACK: {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "num_cpu_blocks": 400, "spec_name": "NPUOffloadingSpec",
                    "spec_module_path": "vllm_ascend.kv_offload.npu"}},
}  # fmt: skip


@pytest.mark.full  # CI: test_host_memory.py
@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_offload_is_named_on_the_host(
    run_memprof: Callable[..., Any], sim_stack: str, stack: str
) -> None:
    config = json.dumps(OFFLOAD[stack])
    options = ["--kv-transfer-config", config, "--enforce-eager", "--max-model-len=512"]
    own = ["--device", "sim:910b", "--stack", require_stack(stack), "--max-tokens", "2"]
    run = run_memprof("offline", "memprof/tiny", *own, *options)
    assert run.returncode == 0, run.output + run.engine_log[-3000:]
    rank = run.report["ranks"][0]
    rows = rows_of(rank)
    offload = rows["kv_offload"]
    assert (offload["place"], offload["how"]) == ("host", "measured")
    assert 90 * MIB < offload["bytes"] <= 100 * MIB
    assert rank["budget"]["residual_bytes"] == 0
