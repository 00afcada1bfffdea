"""The real engine on the simulated device, offline: reference figures, balance, phases, graph mode, MoE."""

from __future__ import annotations

import re

import pytest

from tests.support.engine import REFERENCE_ARGS
from vllm_memprof.units import GIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


def phase_names(rank):
    return [phase["phase"] for phase in rank["phases"]]


def assert_balanced(report):
    for rank in report["ranks"]:
        assert rank["budget"]["residual_bytes"] == 0, rank["label"]
        assert rank["budget"]["balanced"] is True


def printed_gib(log: str, pattern: str) -> float:
    match = re.search(pattern, log)
    assert match, pattern
    return float(match.group(1))


def test_reference_run_reproduces_hardware_figures(run_memprof):
    """Qwen3-VL-8B TP=2: measured on 2 x Ascend 910B, weights 9.1948 GiB and KV cache 44.30 GiB."""
    run = run_memprof(
        "offline",
        "Qwen/Qwen3-VL-8B-Instruct",
        "--device",
        "sim:910b",
        "--prompt",
        "hi",
        *REFERENCE_ARGS,
    )
    assert run.returncode == 0, run.output[-3000:]
    report = run.report
    assert [rank["label"] for rank in report["ranks"]] == ["TP0", "TP1"]
    assert_balanced(report)
    for rank in report["ranks"]:
        terms = {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}
        assert terms["weights"] == pytest.approx(9.1948 * GIB, rel=0.005)
        assert rank["budget"]["engine_kv_cache_bytes"] == pytest.approx(44.30 * GIB, rel=0.01)
        assert (
            rank["kv"]["bytes_per_token"] == 73_728
        )  # 36 layers x 4 KV heads x 128 x (K, V) x 2 bytes
        assert rank["kv"]["tokens"] == rank["kv"]["blocks"] * 128
        names = phase_names(rank)
        for name in (
            "device_init",
            "hccl_init",
            "communicator",
            "weight_load",
            "mm_profile",
            "profile_run",
        ):
            assert name in names
        assert names.count("graph_capture") == 1
        assert terms["graph"] > 0
    captured = printed_gib(
        run.engine_log, r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB"
    )
    graph = {term["name"]: term["bytes"] for term in report["ranks"][0]["budget"]["terms"]}["graph"]
    assert captured == pytest.approx(graph / GIB, abs=0.005)
    printed = printed_gib(run.engine_log, r"Available KV cache memory: ([\d.]+) GiB")
    assert printed == pytest.approx(
        report["ranks"][0]["budget"]["engine_kv_cache_bytes"] / GIB, abs=0.005
    )
    tokens = printed_gib(run.engine_log.replace(",", ""), r"KV cache size: (\d+) tokens")
    assert tokens == report["ranks"][0]["kv"]["tokens"]
    assert "TP0" in run.output
    assert report["run"]["status"] == "ok"


@pytest.mark.full  # CI: the rows of test_accuracy.py
def test_14b_weights_print_what_a_user_saw_on_hardware(run_memprof):
    run = run_memprof(
        "plan",
        "Qwen/Qwen3-14B",
        "--device",
        "sim:910b",
        "--enforce-eager",
        "--max-model-len",
        "8192",
    )
    assert run.returncode == 0, run.output[-3000:]
    assert "Loading model weights took 27.5376 GB" in run.engine_log
    assert_balanced(run.report)
    # Device pages that nobody touches cost no host memory: 27.5 GiB of weights, under 2 GiB
    # resident.
    assert 0 < max(host_rss(run)) < 2 * GIB


def host_rss(run):
    snapshots = [event.get("snapshot") or {} for event in run.events() if event["kind"] == "phase"]
    return [snapshot["host_rss_bytes"] for snapshot in snapshots if snapshot.get("host_rss_bytes")]


@pytest.mark.full  # CI: test_capture.py
def test_eager_mode_has_no_graph_figure(run_memprof):
    run = run_memprof(
        "offline",
        "memprof/tiny",
        "--device",
        "sim:910b",
        "--enforce-eager",
        "--max-model-len",
        "4096",
        "--prompt",
        "hi",
    )
    assert run.returncode == 0, run.output[-3000:]
    assert_balanced(run.report)
    rank = run.report["ranks"][0]
    assert "warm_up" in phase_names(rank)
    assert all(
        phase["after"] is None for phase in rank["phases"] if phase["phase"] == "graph_capture"
    )
    assert {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}.get("graph") is None
    assert not re.search(r"graph\S* .*\b0\.00", run.output, re.IGNORECASE)


@pytest.mark.full  # CI: the reference run
def test_graph_mode_reports_graph_memory(run_memprof):
    run = run_memprof(
        "offline",
        "memprof/tiny",
        "--device",
        "sim:910b",
        "--max-model-len",
        "4096",
        "--prompt",
        "hi",
    )
    assert run.returncode == 0, run.output[-3000:]
    rank = run.report["ranks"][0]
    assert_balanced(run.report)
    captured = [phase for phase in rank["phases"] if phase["phase"] == "graph_capture"]
    assert len(captured) == 1
    terms = {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}
    printed = printed_gib(
        run.engine_log, r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB"
    )
    assert terms["graph"] / GIB == pytest.approx(printed, abs=0.005)
    assert terms["graph"] > 0


@pytest.mark.full
def test_mixture_of_experts_loads(run_memprof):
    run = run_memprof(
        "plan",
        "Qwen/Qwen3-30B-A3B",
        "--device",
        "sim:910b",
        "--enforce-eager",
        "--max-model-len",
        "8192",
        "-tp",
        "2",
    )
    assert run.returncode == 0, run.output[-3000:]
    assert_balanced(run.report)
    # 30.53 B parameters in bf16 over two ranks, plus the replicated part: between 28 and 30 GiB
    # each.
    for rank in run.report["ranks"]:
        terms = {term["name"]: term["bytes"] for term in rank["budget"]["terms"]}
        assert 28 * GIB < terms["weights"] < 30 * GIB
