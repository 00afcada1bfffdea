"""``memprof serve`` on the simulated device: the HTTP interface answers, Ctrl-C leaves nothing, the report is whole."""

from __future__ import annotations

import base64
import json
import signal
import struct
import urllib.request
import zlib
from pathlib import Path

import pytest

from tests.support.engine import assert_nothing_left, engine_pids, finish, start_memprof, wait_until
from tests.support.ports import free_port

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]


#: Given to the server as its keys; every spelling in which vLLM prints its arguments has them.
SECRETS = ("Mk7QzSEEDx9first", "Mk7QzSEEDx9second")


def png(width: int, height: int) -> bytes:
    """A grey picture, written by hand so that the test needs no imaging library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + b"\x80\x80\x80" * width for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def request(port: int, path: str, body: dict | None = None, timeout_s: float = 90):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRETS[1]}"}
    call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    with urllib.request.urlopen(call, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def models(port: int):
    try:
        return request(port, "/v1/models", timeout_s=2)
    except OSError:
        return None


@pytest.mark.parametrize(
    "model",
    ["memprof/tiny-vl", pytest.param("Qwen/Qwen3-VL-8B-Instruct", marks=pytest.mark.full)],
)
def test_serve_answers_a_chat_with_an_image_and_ends_cleanly(
    model, sim_stack, tmp_path, cleanup_processes
):
    port = free_port()
    run_dir = tmp_path / "run"
    args = [
        "serve",
        model,
        "--device",
        "sim:910b",
        "--tensor-parallel-size",
        "2",
        "--enforce-eager",
    ]
    args += [
        "--max-model-len",
        "16384",
        "--max-num-seqs",
        "4",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--api-key",
        *SECRETS,
    ]
    process = start_memprof(args, run_dir)
    cleanup_processes.append(process)
    answer = wait_until(
        lambda: models(port) or process.poll() is not None, 300, "the server answers"
    )
    assert answer is not True, (tmp_path / "run.out").read_text()[-3000:]
    assert [entry["id"] for entry in answer["data"]] == [model]

    picture = "data:image/png;base64," + base64.b64encode(png(640, 480)).decode()
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]
    reply = request(
        port,
        "/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8},
    )
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] > 300  # 640 x 480 is 20 x 15 merged patches

    pids = engine_pids(run_dir)
    assert len(pids) >= 4  # API server, engine core, two workers
    process.send_signal(signal.SIGINT)
    run = finish(process, run_dir, 60)
    assert_nothing_left(pids)
    assert run.returncode == 0, run.output[-3000:]
    assert run.info["status"] == "ok"
    for rank in run.report["ranks"]:
        assert rank["budget"]["residual_bytes"] == 0
    assert (run_dir / "report.md").read_text().startswith("#")
    assert_no_secret_in(run_dir)


def assert_no_secret_in(run_dir: Path) -> None:
    """The server was given two keys, and vLLM prints its arguments: no file of the run has them."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"run.json", "engine.log", "report.json", "report.md"} <= {path.name for path in files}
    assert len(files) >= 7  # four event files at least
    held = {path.name for path in files for key in SECRETS if key.encode() in path.read_bytes()}
    assert held == set()
    assert "***" in (run_dir / "engine.log").read_text(errors="replace")
    assert "***" in (run_dir / "run.json").read_text()
