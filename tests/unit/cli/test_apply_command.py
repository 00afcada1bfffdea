"""``memprof apply`` as a user runs it: what it writes, what it refuses, and with which status."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.accounting.builders import DATA
from vllm_memprof.cli import main
from vllm_memprof.cli.checked import checked_setting
from vllm_memprof.errors import UsageError
from vllm_memprof.record.schema import RunInfo

STEP = {
    "prefill_tokens": 2048, "decode_requests": 8, "decode_length": 1024,
    "max_num_batched_tokens": 2048, "max_num_seqs": 8, "max_model_len": 65536,
    "multimodal": False, "steps": 3, "seconds": 1.0, "not_run": None,
}  # fmt: skip
SCRIPT = "exec vllm serve Qwen/Qwen3-14B -tp 2 --gpu-memory-utilization 0.8 --port $PORT\n"


def write_plan(folder: Path, values: dict[str, str] | None = None, *args: str, **info: Any) -> Path:
    """A plan of two ranks that survived its largest batches, or as the fields of its run say."""
    shutil.copytree(DATA / info.pop("like", "graph_tp2"), folder)
    path = folder / "run.json"
    own = ["--device=sim:910b", "--until=ready", "--run-dir=x", "--quiet", "--", "-tp", "2"]
    run = json.loads(path.read_text()) | {
        "mode": "plan", "until": "ready", "full_step": STEP, "model": "Qwen/Qwen3-14B",
        "command": ["memprof", "plan", "Qwen/Qwen3-14B", *own, *args], "status": "ok",
    }  # fmt: skip
    path.write_text(json.dumps(run | info))
    if values is not None:
        (folder / "plan.json").write_text(json.dumps({"key": None, "row": {"values": values}}))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "start.sh").write_text(SCRIPT)
    return tmp_path


def apply(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    try:
        status = main(["apply", *args])
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_setting_is_shown_then_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(place / "plan")
    script = place / "start.sh"
    script.chmod(0o750)
    (place / "link.sh").symlink_to(script)
    status, shown, said = apply(capsys, "plan", "--to", "link.sh")
    assert (status, script.read_text()) == (0, SCRIPT)
    assert shown.endswith(f"-{SCRIPT}+{SCRIPT.replace('0.8', '0.95')}")
    assert "--yes writes it" in said
    assert apply(capsys, "plan", "--to", "link.sh", "--yes")[:2] == (0, shown)
    assert script.read_text() == SCRIPT.replace("0.8", "0.95")
    assert (script.stat().st_mode & 0o777, (place / "link.sh").is_symlink()) == (0o750, True)
    assert "is in link.sh already" in apply(capsys, "plan", "--to", "link.sh", "--yes")[2]


def test_a_size_a_cure_and_the_answer_of_a_search(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(place / "size", None, "--kv-cache-memory-bytes", "1000000000")
    write_plan(place / "proved/plans/1-as", {"change": "as it was"}, status="failed")
    write_plan(place / "proved/plans/2-b", {"change": "--max-num-seqs 64"}, "--max-num-seqs=64")
    for run, added in (
        ("size", "--kv-cache-memory-bytes 1000000000"),
        ("proved", "--max-num-seqs 64"),
    ):
        (place / "start.sh").write_text("memprof serve --device sim Qwen/Qwen3-14B -tp 2\n")
        assert apply(capsys, run, "--to", "start.sh", "--yes")[0] == 0
        assert (place / "start.sh").read_text().endswith(f"-tp 2 {added}\n")


def test_the_share_of_sglang(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["memprof", "plan", "m/tiny", "--engine=sglang", "--", "--mem-fraction-static", "0.7"]
    write_plan(place / "plan", like="recorded_sglang_tp2", model="m/tiny", command=command)
    text = "python -m sglang.launch_server --model-path m/tiny \\\n  --mem-fraction-static=0.8\n"
    (place / "start.sh").write_text(text)
    assert apply(capsys, "plan", "--to", "start.sh", "--yes")[0] == 0
    assert (place / "start.sh").read_text() == text.replace("0.8", "0.7")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (SCRIPT.replace("14B", "32B"), 2, "model Qwen3-14B when checked, Qwen3-32B here"),
        (SCRIPT.replace("-tp 2", "-tp 4 --enforce-eager"), 2,
         "--tensor-parallel-size 2 when checked, 4 here; "
         "--enforce-eager not given when checked, given here"),
        (SCRIPT.replace("0.8", '"$UTIL"'), 2, "line 1: $UTIL decides"),
        ("echo nothing\n", 2, "no engine is started"),
        (SCRIPT * 2, 2, "several engines are started, in lines 1, 2"),
    ],
)  # fmt: skip
def test_another_start_is_left(
    text: str, code: int, words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(place / "plan")
    (place / "start.sh").write_text(text)
    status, shown, said = apply(capsys, "plan", "--to", "start.sh", "--yes")
    assert (status, shown) == (code, "")
    assert words in said
    assert (place / "start.sh").read_text() == text


@pytest.mark.parametrize(
    "info",
    [{"full_step": None}, {"full_step": {**STEP, "not_run": "no room"}}, {"status": "failed"}],
    ids=["kv", "not-run", "failed"],
)
def test_what_was_not_tried_is_not_written(
    info: dict[str, Any], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(place / "plan", **info)
    status, _, said = apply(capsys, "plan", "--to", "start.sh", "--yes")
    assert status == 3
    assert "no plan of it survived the largest batches" in said
    assert "memprof fit MODEL" in said
    assert (place / "start.sh").read_text() == SCRIPT


@pytest.mark.parametrize(
    ("release", "simulated", "variables", "words"),
    [
        ("0.23.0", True, {}, None),
        ("0.18.0", True, {}, "vllm-ascend 0.23.0 when checked, vllm-ascend 0.18.0 here"),
        ("0.23.0", False, {}, "simulated, profile ascend910b when checked, real here"),
        ("0.23.0", True, {"HCCL_BUFFSIZE": "400"},
         "HCCL_BUFFSIZE not given when checked, 400 here"),
    ],
)  # fmt: skip
def test_a_start_takes_what_was_checked_for_it(
    release: str, simulated: bool, variables: dict[str, str], words: str | None, place: Path
) -> None:
    write_plan(place / "plan")
    checked = checked_setting("plan")
    assert checked.words == ["--gpu-memory-utilization", "0.95"]
    device = "ascend910b" if simulated else None
    start = RunInfo(
        "", "serve", "/models/Qwen3-14B", [], simulated=simulated, device_profile=device,
        device=device, versions={"vllm-ascend": release}, env=checked.report.run.env | variables,
    )  # fmt: skip
    with contextlib.nullcontext() if words is None else pytest.raises(UsageError, match=words):
        checked.require_same(start, [*checked.words, "--tensor-parallel-size=2", "--port", "80"])
