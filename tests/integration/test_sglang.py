"""``memprof serve`` and ``offline`` with ``--engine sglang``: the unmodified SGLang on the simulated
device, recorded. One offline run and one of a server are part of CI.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import (
    RunResult,
    assert_nothing_left,
    engine_pids,
    finish,
    read_events,
    require_stack,
    run_in_engine,
    start_memprof,
    wait_for_server,
    wait_until,
)
from tests.support.png import write_png
from tests.support.ports import free_port
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

STACK = "sglang-0.5.23"
ARGS = ["--engine", "sglang", "--device", "sim:910b", "--stack", STACK]
TINY = ["memprof/tiny", *ARGS, "--max-running-requests", "16"]
START_UP = {
    "device_init", "hccl_init", "weight_load", "kv_cache_sizing", "kv_cache_alloc", "request_pool",
    "warm_up", "request",
}  # fmt: skip

#: The same as ``memprof offline``, in a script that prints the tokens.
OFFLINE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    outputs = [
        engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8,
                                                        "ignore_eos": True})
        for ids in ([[1, 2, 3] * 40], [[7, 8] * 200])
    ]
    engine.shutdown()
    print("RESULT " + json.dumps([each["output_ids"] for some in outputs for each in some]))
"""


@pytest.fixture(autouse=True)
def stack() -> str:
    return require_stack(STACK)


def offline(run_dir: Path, *args: str) -> RunResult:
    return finish(start_memprof(["offline", *args], run_dir), run_dir)


def assert_reconciled(run: RunResult, ranks: int, more: set[str]) -> None:
    """A complete report: the engine's own token count to the byte, and no byte without an owner."""
    assert run.returncode == 0, run.output[-3000:]
    printed = {int(found) for found in re.findall(r"max_total_num_tokens=(\d+),", run.engine_log)}
    report = run.report
    assert len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        budget, kv = rank["budget"], rank["kv"]
        assert budget["equation"] == "S1"
        assert budget["residual_bytes"] == 0
        assert {kv["tokens"]} == printed
        assert budget["engine_kv_cache_bytes"] == kv["tokens"] * kv["bytes_per_token"]
        assert [check["name"] for check in kv["checks"] if check["ok"] is False] == []
        assert {phase["phase"] for phase in rank["phases"]} >= START_UP | more
        assert all(row["agrees"] is not False for row in budget["audit"])
    assert_explained(run)
    bad = {"missing", "never_called", "error", "overwritten"}
    hooks = [event for event in run.events() if event["kind"] == "hook"]
    assert not [hook for hook in hooks if hook["need"] == "required" and hook["state"] in bad]
    assert not [event for event in run.events() if event["kind"] == "error"]


def assert_explained(run: RunResult) -> None:
    """Nothing but HCCL's own buffers is unexplained at any edge, also where the driver's list of
    processes was not read (inside a graph capture, while requests run)."""
    edges = 0
    for rank in run.report["ranks"]:
        for phase in rank["phases"]:
            for edge in (phase["owners"] or {}).values():
                for part in edge["parts"]:
                    own = part["component"] == "communicators_unnamed"
                    assert own or part["part_of"] != "unexplained" or not part["bytes"], phase
                edges += bool(edge["parts"])
    assert edges > 20


def test_two_ranks_with_graphs(tmp_path: Path) -> None:
    run = offline(
        tmp_path / "run", *TINY, "--tp-size", "2", "--cuda-graph-max-bs-decode", "4",
        "--prompt", "one", "--prompt", "two",
    )  # fmt: skip
    assert_reconciled(run, 2, {"graph_capture", "communicator"})
    report = run.report
    assert report["not_measured"] == []
    for rank in report["ranks"]:
        assert len(rank["requests"]) == 2
        sites = {call["site"].partition(":")[0] for call in rank["empty_cache"]}
        assert {"bootstrap.py", "model_runner.py", "kv_cache_configurator.py"} <= sites
    assert "observation-empties-cache" in {finding["id"] for finding in report["findings"]}
    assert "co-tenant" not in {finding["id"] for finding in report["findings"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "more"),
    [("Qwen/Qwen3-8B", []), ("Qwen/Qwen3-30B-A3B", ["--disable-cuda-graph"])],
)
def test_models_of_two_ranks(tmp_path: Path, model: str, more: list[str]) -> None:
    graphs = more or ["--cuda-graph-max-bs-decode", "8"]
    run = offline(tmp_path / "run", model, *ARGS, "--tp-size", "2", *graphs)
    assert_reconciled(run, 2, set() if more else {"graph_capture"})


@pytest.mark.full
def test_images(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, (width, height) in enumerate([(224, 224), (640, 480), (960, 640)]):
        write_png(images / f"{number}.png", width, height)
    run = offline(
        tmp_path / "run", "Qwen/Qwen3-VL-8B-Instruct", *ARGS, "--disable-cuda-graph",
        "--max-running-requests", "8", "--images", str(images), "--max-tokens", "2",
    )  # fmt: skip
    assert_reconciled(run, 1, set())
    prompts = [request["prompt_tokens"] for request in run.report["ranks"][0]["requests"]]
    assert len(prompts) == 3
    assert len(set(prompts)) == 3, "images of three sizes are so many tokens each"


@pytest.mark.full
def test_the_observer_changes_neither_tokens_nor_bytes(tmp_path: Path) -> None:
    runtime = prepare_runtime("910b", STACK)
    model = resolve_model("memprof/tiny", [])
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    settings = {
        "model_path": model.path, "load_format": "dummy", "random_seed": 1,
        "disable_cuda_graph": True, "max_running_requests": 16, "log_level": "info",
    }  # fmt: skip

    def run(name: str, **env: str) -> tuple[Any, list[str]]:
        state = str(tmp_path / f"devices-{name}")
        made, log = run_in_engine(
            runtime, script, json.dumps(settings), MEMPROF_SIM_STATE=state, **env
        )
        return made, re.findall(
            r"(?:avail mem|mem usage|K size|V size|#tokens|max_total_num_tokens"
            r"|available_gpu_mem)[=:] ?[\d.]+",
            log,
        )

    bare = run("bare")
    (tmp_path / "run" / "events").mkdir(parents=True)
    recorded = run("recorded", MEMPROF_RUN_DIR=str(tmp_path / "run"), MEMPROF_SAMPLE="1")
    assert read_events(tmp_path / "run"), "nothing was recorded"
    assert len(bare[1]) > 6
    assert recorded == bare


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def serve(run_dir: Path) -> tuple[Any, int]:
    port = free_port()
    args = ["serve", *TINY, "--disable-cuda-graph", "--host", "127.0.0.1", "--port", str(port)]
    process = start_memprof(args, run_dir)
    wait_for_server(process, run_dir, 200)
    return process, port


def test_a_server_that_is_asked_for_everything(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process, port = serve(run_dir)
    tokens = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    generate = {"input_ids": list(range(1, 200)), "sampling_params": tokens}
    assert post(port, "/generate", generate)[0] == 200
    assert post(port, "/flush_cache", {})[0] == 200
    assert post(port, "/pause_generation", {"mode": "in_place"})[0] == 200
    assert post(port, "/continue_generation", {"torch_empty_cache": True})[0] == 200
    assert post(port, "/update_weights_from_disk", {"model_path": "/nowhere"})[0] == 400
    assert post(port, "/release_memory_occupation", {})[0] == 200
    assert post(port, "/resume_memory_occupation", {})[0] == 200
    process.send_signal(signal.SIGINT)
    run = finish(process, run_dir, 90)
    assert run.info["status"] == "ok"
    assert run.info["exit_reason"] == "ended by SIGINT"
    online = {
        "flush_cache",
        "pause",
        "continue",
        "weight_update",
        "release_memory",
        "resume_memory",
    }
    assert_reconciled(run, 1, online)
    phases = run.report["ranks"][0]["phases"]
    update = next(phase for phase in phases if phase["phase"] == "weight_update")
    assert update["detail"]["success"] is False
    assert_nothing_left(engine_pids(run_dir))


@pytest.mark.full
@pytest.mark.parametrize("role", ["worker", "detokenizer"])
def test_a_process_that_is_killed_while_it_serves(tmp_path: Path, role: str) -> None:
    run_dir = tmp_path / "run"
    process, _ = serve(run_dir)
    heads = [event for event in read_events(run_dir) if event["kind"] == "process"]
    victim = next(event["pid"] for event in heads if event["role"] == role)
    pids = engine_pids(run_dir)
    os.kill(victim, signal.SIGKILL)
    run = finish(process, run_dir, 90)
    assert run.returncode != 0
    assert run.info["status"] == "failed"
    who = "worker TP0" if role == "worker" else "detokenizer"
    assert run.info["exit_reason"].startswith(
        f"{who} (pid {victim}) was killed by SIGKILL while serving"
    )
    assert run.report["ranks"][0]["budget"]["residual_bytes"] == 0
    assert_nothing_left(pids)


@pytest.mark.full
def test_the_engine_ends_after_its_launcher_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process, _ = serve(run_dir)
    pids = engine_pids(run_dir)
    process.kill()
    process.wait(10)

    def gone() -> bool:
        try:
            assert_nothing_left(pids)
        except AssertionError:
            return False
        return True

    wait_until(gone, 60, "SGLang's processes have ended")


@pytest.mark.full  # CI: the same of vLLM, test_capture.py
def test_a_wrong_argument_gets_the_engine_s_message_and_status(tmp_path: Path) -> None:
    run = offline(tmp_path / "run", *TINY, "--no-such-option")
    assert run.returncode == 2
    assert "unrecognized arguments: --no-such-option" in run.output
