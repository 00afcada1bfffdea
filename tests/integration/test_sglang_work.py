"""What a server and a model with images do with SGLang on the simulated device, recorded: images and
their encoder, weight updates of every kind, a grammar, the end by SIGTERM.

The stack takes minutes to set up (make sim-every): no part of CI.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_sglang import ARGS, STACK, assert_reconciled, offline, post
from tests.support.engine import (
    RunResult,
    finish,
    require_stack,
    start_memprof,
    wait_for_server,
)
from tests.support.png import write_png
from tests.support.ports import free_port
from vllm_memprof.record.loader import load_run
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.units import minus

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

#: Pictures of a request each, and those of one request more, which has more pixels than each of them.
ALONE = [(224, 224), (640, 480), (960, 640)]
TOGETHER = [(512, 512), (640, 640), (800, 480)]


@pytest.fixture(autouse=True)
def stack() -> str:
    return require_stack(STACK)


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("memprof/tiny-vl", ["--disable-cuda-graph"]),
        ("Qwen/Qwen3-VL-8B-Instruct", ["--cuda-graph-max-bs-decode", "4"]),
    ],
)
def test_images_of_requests_and_their_encoder(tmp_path: Path, model: str, more: list[str]) -> None:
    def picture(width: int, height: int) -> str:
        path = tmp_path / f"{width}x{height}.png"
        write_png(path, width, height)
        return str(path)

    asked: list[dict[str, Any]] = [{"text": "what?", "image": picture(*each)} for each in ALONE]
    urls = [{"type": "image_url", "image_url": {"url": picture(*each)}} for each in TOGETHER]
    text = {"type": "text", "text": "which?"}
    asked.append({"messages": [{"role": "user", "content": [*urls, text]}]})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    run = offline(
        tmp_path / "run", model, *ARGS, "--tp-size", "2", "--max-running-requests", "8",
        *more, "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "2",
    )  # fmt: skip
    graphs = "--cuda-graph-max-bs-decode" in more
    assert_reconciled(run, 2, {"graph_capture"} if graphs else set())
    assert_images(run)


def assert_images(run: RunResult) -> None:
    for rank in run.report["ranks"]:
        for row in rank["budget"]["audit"][1:]:
            assert row["agrees"] is True, row
        seen = [request["images"] for request in rank["requests"]]
        assert [len(each) for each in seen] == [1, 1, 1, 3]
        for request, pictures in zip(rank["requests"], seen, strict=True):
            # a token per 32 x 32 pixels, after the processor has resized the picture
            assert request["image_tokens"] == sum(w * h // 1024 for w, h in pictures)
            assert request["peak_stage"] in ("mm_encoder", "mm_merge", "step")
        stages = {stage["stage"]: stage for stage in rank["stages"]}
        assert {name: (each["passages"], each["items"]) for name, each in stages.items()} == {
            "mm_encoder": (4, 6), "mm_merge": (4, 6), "mm_cache_insert": (6, 6),
        }  # fmt: skip
        assert [each["failed"] for each in stages.values()] == [0, 0, 0]
        # every image stays in SGLang's cache of embeddings, which the reservation is for
        kept = stages["mm_cache_insert"]["cache_bytes"]
        reserved = {row["term"]: row["engine_bytes"] for row in rank["budget"]["audit"]}
        assert 0 < kept < reserved["mm_reserved"]
    [first, second] = [passages(run.run_dir, label) for label in ("TP0", "TP1")]
    for each in first:
        print(each)
    assert [(items, tokens) for items, tokens, _, _ in first] == [
        (len(request["images"]), request["image_tokens"])
        for request in run.report["ranks"][0]["requests"]
    ]
    totals = [total for _, _, total, _ in first]
    assert totals == sorted(totals), "the more pixels, the more the encoder takes"
    assert totals == [total for _, _, total, _ in second], "both ranks run half of the same encoder"
    # known where torch's peak rose: the first and smallest may lie below that of a graph capture
    peaks = [peak for *_, peak in first]
    assert None not in peaks[1:]
    known = [peak for peak in peaks if peak is not None]
    assert known == sorted(known)


def passages(run_dir: Path, label: str) -> list[tuple[int, int, int, int | None]]:
    """Items, their tokens, bytes handed out and peak less what was allocated, of each passage
    through the encoder."""
    process = next(each for each in load_run(run_dir).processes if each.identity.label == label)
    found = []
    for stage in process.served.stages:
        if stage.stage == "mm_encoder":
            figures = stage.figures
            tokens = sum(item.tokens or 0 for item in stage.items)
            peak = minus(figures["allocated_peak_bytes"], figures["allocated_before_bytes"])
            found.append((len(stage.items), tokens, figures["allocated_total_bytes"] or 0, peak))
    return found


# --- a server ----------------------------------------------------------------------------------------


#: Sends weights to a server of the port argv[1]: of itself as tensors, and over a group of HCCL whose
#: store is at the port argv[2]; last what a checkpoint engine would hand over.
TRAINER = """
import base64, json, os, sys, threading, urllib.error, urllib.request
import torch, torch_npu
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group

PORT, STORE = int(sys.argv[1]), int(sys.argv[2])
NAME, SIZE = "model.norm.weight", 256
answers = {}

def post(path, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/{path}", data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            answers[path] = reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        answers[path] = error.code, error.read().decode()

def beside(path, work, **body):
    thread = threading.Thread(target=post, args=(path,), kwargs=body)
    thread.start()
    try:
        return work()
    finally:
        thread.join(90)

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    post("begin_weight_update")
    tensor = torch.ones(SIZE, dtype=torch.bfloat16)
    sent = base64.b64encode(MultiprocessingSerializer.serialize([(NAME, tensor)])).decode()
    post("update_weights_from_tensor", serialized_named_tensors=[sent])

    torch.npu.set_device(1)
    weight = torch.full((SIZE,), 0.5, dtype=torch.bfloat16, device="npu")
    group = beside(
        "init_weights_update_group",
        lambda: init_custom_process_group(
            backend="hccl", init_method=f"tcp://127.0.0.1:{STORE}", world_size=2, rank=0,
            group_name="trainer"),
        master_address="127.0.0.1", master_port=STORE, rank_offset=1, world_size=2,
        group_name="trainer", backend="hccl")
    beside(
        "update_weights_from_distributed",
        lambda: torch.distributed.broadcast(weight, src=0, group=group),
        names=[NAME], dtypes=["bfloat16"], shapes=[[SIZE]], group_name="trainer")
    post("end_weight_update")
    post("update_weights_from_ipc", zmq_handles={"NPU-0": "ipc:///tmp/nobody"})
    print("RESULT " + json.dumps(answers), flush=True)
    os._exit(0)  # the group waits for the server's process, which keeps it
"""

#: In the place of the package ``checkpoint-engine``, which the stack does not have: SGLang's own path
#: to it is run, and weights come from this process instead of another's memory.
CHECKPOINT_ENGINE = {
    "__init__.py": "",
    "device_utils.py": "def npu_generate_uuid():\n    return '0'\n",
    "worker.py": """
import torch

def update_weights_from_ipc(context, handle, device_id, *, run, post_hook=None):
    run([("model.norm.weight", torch.ones(256, dtype=torch.bfloat16, device=f"npu:{device_id}"))])
    post_hook()
""",
}

#: Constraint of the sampling parameters -> what its answer is.
GRAMMARS = {
    "regex": ("(north|south)-[0-9]{3}", re.compile(r"(north|south)-[0-9]{3}")),
    "json_schema": (
        json.dumps({"type": "object", "properties": {"side": {"enum": ["left", "right"]}},
                    "required": ["side"], "additionalProperties": False}),
        re.compile(r'\{\s*"side"\s*:\s*"(left|right)"\s*\}'),
    ),
}  # fmt: skip


def test_a_server_that_gets_weights_and_grammars_and_is_asked_to_end(tmp_path: Path) -> None:
    package = tmp_path / "more" / "checkpoint_engine"
    package.mkdir(parents=True)
    for name, source in CHECKPOINT_ENGINE.items():
        (package / name).write_text(source)
    port, run_dir = free_port(), tmp_path / "run"
    args = ["serve", "memprof/tiny", *ARGS, "--max-running-requests", "16", "--disable-cuda-graph"]
    # greedy tokens of a model without weights may be white space without an end
    args.append("--constrained-json-disable-any-whitespace")
    process = start_memprof(
        [*args, "--host", "127.0.0.1", "--port", str(port), "--sample", "1"],
        run_dir,
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{os.environ['PYTHONPATH']}"},
    )
    try:
        wait_for_server(process, run_dir, 200)
        ask_everything(port, tmp_path)
    finally:
        process.send_signal(signal.SIGTERM)
        run = finish(process, run_dir, 90)
    assert run.info["status"] == "ok", run.engine_log[-3000:]
    assert run.info["exit_reason"] == "ended by SIGTERM"
    assert_reconciled(run, 1, {"weight_update", "shutdown"})
    phases = run.report["ranks"][0]["phases"]
    updates = [phase["detail"] for phase in phases if phase["phase"] == "weight_update"]
    assert [(each["kind"], each["success"]) for each in updates] == [
        ("tensor", True), ("distributed", True), ("ipc", True),
    ]  # fmt: skip
    assert [phase["phase"] for phase in phases][-1] == "shutdown"


def ask_everything(port: int, tmp_path: Path) -> None:
    """Ask for answers of a grammar, then send weights in each way."""
    for name, (constraint, answer) in GRAMMARS.items():
        params = {"temperature": 0, "max_new_tokens": 40, name: constraint}
        status, text = post(port, "/generate", {"text": "where?", "sampling_params": params})
        assert status == 200, text
        made = json.loads(text)
        assert answer.fullmatch(made["text"]), made
        assert made["meta_info"]["finish_reason"]["type"] == "stop"

    (tmp_path / "trainer.py").write_text(TRAINER)
    runtime = prepare_runtime("910b", STACK)
    env = {**os.environ, **runtime.env, "MEMPROF_SIM_STATE": str(tmp_path / "trainer-devices")}
    command = [str(runtime.python), str(tmp_path / "trainer.py"), str(port), str(free_port())]
    # into a file: the manager of shared tensors keeps a pipe open as long as the server lives
    with (tmp_path / "trainer.out").open("w") as out:
        subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=200)
    log = (tmp_path / "trainer.out").read_text()
    line = next((line for line in log.splitlines() if line.startswith("RESULT ")), None)
    assert line, log[-4000:]
    answers = json.loads(line.removeprefix("RESULT "))
    print(json.dumps(answers, indent=1))
    assert {path: status for path, (status, _) in answers.items()} == dict.fromkeys(answers, 200)
