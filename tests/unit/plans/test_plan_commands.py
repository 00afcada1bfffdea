"""``sweep`` and ``fit`` as a user runs them, on an engine that takes no time
(``fake_python.py``).
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.plans.fake_python import BLOCK, BYTES_PER_TOKEN, GIB, SERVING, figures_of
from vllm_memprof.cli import main
from vllm_memprof.cli.checked import checked_setting
from vllm_memprof.errors import RunRecordError
from vllm_memprof.sources import read_report

Refused = Callable[..., str]
MEMPROF = [sys.executable, "-m", "vllm_memprof"]
FAKE = str(Path(__file__).with_name("fake_python.py"))
ENGINE = ["--device", "cpu", "--python", FAKE]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    made = {
        "NO_COLOR": "1",
        "FAKE_PLAN_LOG": str(tmp_path / "starts"),
        "MEMPROF_CACHE_DIR": str(tmp_path / "cache"),
    }
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **made}


def call(env: dict[str, str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*MEMPROF, *args[:1], "some/model", *ENGINE, *args[1:]]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=300)


def starts(tmp_path: Path) -> list[str]:
    path = tmp_path / "starts"
    return path.read_text().splitlines() if path.exists() else []


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "sweep.csv").read_text())))


def tokens(*args: str) -> int:
    return int(figures_of(list(args))["kv_cache_bytes"]) // (BLOCK * BYTES_PER_TOKEN) * BLOCK


def test_a_sweep_has_a_row_for_each_combination(env: dict[str, str], tmp_path: Path) -> None:
    args = [
        "--over",
        "tensor_parallel_size=1,2,4",
        "--over",
        "max-num-seqs=8,64",
        "-o",
        "sweep",
        "--jobs",
        "2",
    ]
    done = call(
        env, tmp_path, "sweep", *args, "--refuse=64", "--max-model-len", "1024", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    assert "memprof: 6/6" in done.stderr
    found = rows(tmp_path / "sweep")
    combinations = list(itertools.product("124", ("8", "64")))
    assert [(row["tensor-parallel-size"], row["max-num-seqs"]) for row in found] == combinations
    for row in found:
        size, seqs = row["tensor-parallel-size"], row["max-num-seqs"]
        assert row["devices"] == size
        if seqs == "64":
            assert (row["status"], row["tokens"]) == ("failed", "")
            assert "max_num_seqs is refused by this engine" in row["reason"]
        elif size == "1":
            assert (row["status"], row["kv_cache_bytes"]) == ("oom", "")
            assert row["reason"].startswith(
                "TP0 ran out of device memory in weight_load: RuntimeError: NPU out of"
            )
        else:
            assert row["status"] == "ok"
            assert int(row["tokens"]) == tokens(
                "--tensor-parallel-size", size, "--max-num-seqs", seqs
            )
    data = json.loads(done.stdout)
    assert data["schema"] == "memprof.sweep/3"
    assert [row["status"] for row in data["rows"]] == [row["status"] for row in found]
    assert len(starts(tmp_path)) == 6


def test_each_plan_is_an_ordinary_run(env: dict[str, str], tmp_path: Path) -> None:
    assert (
        call(env, tmp_path, "sweep", "--over", "max-num-seqs=8,64", "-o", "sweep").returncode == 0
    )
    a, b = (f"sweep/{row['run']}" for row in rows(tmp_path / "sweep"))
    for args in (
        ["report", a],
        ["diff", a, b],
        ["check", a, "--init"],
        ["diff", f"{a}/report.json", b],
    ):
        done = subprocess.run(
            [*MEMPROF, *args], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60
        )
        assert done.returncode == 0, done.stderr
    diff = subprocess.run(
        [*MEMPROF, "diff", a, b], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60
    )
    assert "--max-num-seqs" in diff.stdout


def wait_for(condition: Any, what: str) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def interrupted_after(
    count: int, env: dict[str, str], tmp_path: Path, *args: str
) -> tuple[int, str, set[int]]:
    """(exit status, stderr, processes that were there) of a sweep that got a Ctrl-C once ``count``
    plans were whole.
    """
    command = [*MEMPROF, "sweep", "some/model", *ENGINE, *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=env,
                               cwd=tmp_path, start_new_session=True)  # fmt: skip
    wait_for(
        lambda: len(list((tmp_path / "sweep").glob("plans/*/plan.json"))) >= count,
        "the first plans",
    )
    children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, children


def identities(folder: Path) -> dict[str, str]:
    return {path.parent.name: json.loads((path.parent / "run.json").read_text())["id"]
            for path in folder.glob("plans/*/plan.json")}  # fmt: skip


def test_ctrl_c_and_the_same_command_again(env: dict[str, str], tmp_path: Path) -> None:
    args = ["--over", "max-num-seqs=1,2,3,4,5,6,7,8", "-o", "sweep", "--jobs", "2"]
    slow = {**env, "FAKE_PLAN_SECONDS": "0.4"}
    code, stderr, children = interrupted_after(3, slow, tmp_path, *args)
    assert code == 130
    assert "the same command continues" in stderr
    wait_for(
        lambda: not any(psutil.pid_exists(pid) for pid in children), "plans outlived the sweep"
    )
    before = identities(tmp_path / "sweep")
    assert 3 <= len(before) < 8
    assert len(rows(tmp_path / "sweep")) == len(before)
    assert f"{len(before)} of 8 plans are made" in stderr
    ended = len(starts(tmp_path))

    done = call(env, tmp_path, "sweep", *args)
    assert done.returncode == 0, done.stderr
    after = identities(tmp_path / "sweep")
    assert len(after) == len(rows(tmp_path / "sweep")) == 8
    assert {name: after[name] for name in before} == before  # none of them was made again
    assert done.stderr.count("(there already)") == len(before)
    assert len(starts(tmp_path)) - ended == 8 - len(before)
    assert {row["status"] for row in rows(tmp_path / "sweep")} == {"ok"}

    again = call(env, tmp_path, "sweep", *args)
    assert again.returncode == 0
    assert identities(tmp_path / "sweep") == after


def test_a_second_ctrl_c_hastens(env: dict[str, str], tmp_path: Path) -> None:
    args = ["--over", "max-num-seqs=1,2", "-o", "sweep", "--jobs", "2", "--stubborn=yes"]
    command = [*MEMPROF, "sweep", "some/model", *ENGINE, *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                               start_new_session=True,
                               env={**env, "FAKE_PLAN_SECONDS": "100"})  # fmt: skip
    wait_for(lambda: len(starts(tmp_path)) == 2, "both plans")
    time.sleep(0.3)
    children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    began = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
    process.communicate(timeout=60)
    assert time.monotonic() - began < 60  # the plans would go on for 100 s
    assert process.returncode == 130
    wait_for(
        lambda: not any(psutil.pid_exists(pid) for pid in children), "plans outlived the sweep"
    )


def test_a_plan_that_ran_out_of_time_is_a_row_and_is_tried_again(
    env: dict[str, str], tmp_path: Path
) -> None:
    args = ["--over", "max-num-seqs=8", "-o", "sweep", "--startup-timeout", "5"]
    done = call({**env, "FAKE_PLAN_SECONDS": "30"}, tmp_path, "sweep", *args)
    assert done.returncode == 1
    (row,) = rows(tmp_path / "sweep")
    assert row["status"] == "failed"
    assert row["reason"].startswith("not ready within 5 s")
    assert call(env, tmp_path, "sweep", *args).returncode == 0
    assert rows(tmp_path / "sweep")[0]["status"] == "ok"
    assert len(starts(tmp_path)) == 2


def test_a_folder_of_another_sweep_is_left_alone(env: dict[str, str], tmp_path: Path) -> None:
    assert call(env, tmp_path, "sweep", "--over", "max-num-seqs=8", "-o", "sweep").returncode == 0
    done = call(env, tmp_path, "sweep", "--over", "max-num-seqs=8,9", "-o", "sweep")
    assert done.returncode == 2
    assert "sweep holds another sweep" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    done = call(env, tmp_path, "sweep", "--over", "max-num-seqs=8", "-o", "full")
    assert (done.returncode, "is not empty, and contains no sweep" in done.stderr) == (2, True)


@pytest.fixture
def refused(env: dict[str, str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> Refused:
    """Runs a command in this process; what it says when it refuses with status 2, and starts
    nothing.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def run(*args: str) -> str:
        assert main(list(args)) == 2
        assert starts(tmp_path) == []
        assert not (tmp_path / "reports").exists()
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "names no option and its values"),
        (["--over", "max-num-seqs"], "names no option and its values"),
        (["--over", "max-num-seqs="], "has an empty value"),
        (["--over", "max-num-seqs=1,,2"], "has an empty value"),
        (["--over", "max-num-seqs=1,1"], "max-num-seqs or a value of it is given twice"),
        (
            ["--over", "max-num-seqs=1", "--over", "max_num_seqs=2"],
            "max-num-seqs or a value of it is given twice",
        ),
        (["--over", "max-num-seqs=1", "--format", "html"], "--format 'html' is not known"),
        (["--over", "device=cpu,npu", "--ray"], "--ray makes plans on simulated devices"),
        (["--over", "tensor-parallel-size=two"], "'two' is not a number of devices"),
        (["--engine", "sglang", "--over", "tp-size=two"], "'two' is not a number of devices"),
        (
            ["--engine", "sglang", "--over", "tp-size=1,2", "--ranks", "one"],
            "--ranks one has no counterpart in SGLang",
        ),
        (["--engine", "tgi", "--over", "tp-size=1,2"], "--engine 'tgi' is not known"),
    ],
)
def test_a_sweep_that_is_none_is_refused(refused: Refused, args: list[str], message: str) -> None:
    assert message in refused("sweep", "some/model", *ENGINE, *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--find", "speed"], "a numeric option of the engine takes --between LOW:HIGH"),
        (["--find", "devices", "--goal", "largest"], "does not go with --find devices"),
        (["--find", "devices", "--until", "done"], "--until 'done' is not known"),
        (
            ["--find", "max-cudagraph-capture-size", "--enforce-eager"],
            "has no effect with --enforce-eager",
        ),
        (["--find", "max-model-len", "--want", "tokens=many"], "--want 'tokens=many' is not known"),
        (["--find", "max-model-len", "--headroom", "2GB"], "not a size"),
        (["--find", "max-model-len", "--between", "5"], "is not a range"),
        (
            ["--find", "max-model-len", "--format", "trace"],
            "--format 'trace' is not known",
        ),
        (["--engine", "sglang", "--find", "devices"], "memprof fit has no counterpart in SGLang"),
    ],
)
def test_a_search_that_is_none_is_refused(refused: Refused, args: list[str], message: str) -> None:
    assert message in refused("fit", "some/model", *ENGINE, *args)


def fit(env: dict[str, str], tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    done = call(env, tmp_path, "fit", *args, "--format", "json")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_fewest_devices(env: dict[str, str], tmp_path: Path) -> None:
    wanted = 300_000
    assert tokens("--tensor-parallel-size", "2") < wanted <= tokens("--tensor-parallel-size", "4")
    code, found = fit(
        env, tmp_path, "--find", "devices", "--want", f"tokens={wanted}", "--run-dir", "fit"
    )
    assert (code, found["answer"], found["flag"]) == (0, "4", "--tensor-parallel-size 4")
    assert [(row["value"], row["holds"]) for row in found["tries"]] == [
        ("1", False),
        ("2", False),
        ("4", True),
    ]
    assert "ran out of device memory" in found["tries"][0]["missing"][0]["text"]
    run = tmp_path / "fit" / found["tries"][-1]["plan"]["run"]
    assert json.loads((run / "report.json").read_text())["run"]["status"] == "ok"
    with pytest.raises(RunRecordError, match="fit has plans, and is no run itself") as raised:
        read_report(str(tmp_path / "fit"))
    *_, first = str(raised.value.hint).split()
    assert read_report(first).run.mode == "plan"
    assert "fit.json" in str(raised.value.hint)


@pytest.mark.parametrize("others", [["-dp", "4", "--enable-expert-parallel"], ["-pp=2", "-dp=2"]])
def test_the_fewest_devices_of_all_parallel_sizes(
    env: dict[str, str], tmp_path: Path, others: list[str]
) -> None:
    wanted = ["--find", "devices", "--want", "tokens=300000", "--run-dir", "fit"]
    code, found = fit(env, tmp_path, *wanted, *others)
    assert (code, found["answer"], found["flag"]) == (0, "16", "--tensor-parallel-size 4")
    assert [(row["value"], row["plan"]["devices"]) for row in found["tries"]] == [
        ("4", 4),
        ("8", 8),
        ("16", 16),
    ]
    replicas = 4 if "-dp" in others else 2
    said = f"KV tokens and concurrency are those of each of {replicas} replicas"
    assert said in found["notes"]
    assert checked_setting(str(tmp_path / "fit")).settings == {"--tensor-parallel-size": "4"}
    code, found = fit(env, tmp_path, "--find", "devices", "--between", "6:8", *others)
    assert (code, found["answer"], found["flag"]) == (0, "8", "--tensor-parallel-size 2")


def test_the_longest_requests_are_those_of_an_exhaustive_search(
    env: dict[str, str], tmp_path: Path
) -> None:
    lengths = range(2048, 32769, 2048)
    blocks = int(figures_of([])["kv_cache_bytes"]) // (BLOCK * BYTES_PER_TOKEN)
    best = max(length for length in lengths if blocks / -(-length // BLOCK) >= 8)
    args = ["--want", "concurrency=8", "--between", "2048:32768", "--step", "2048"]
    code, found = fit(env, tmp_path, "--find", "max-model-len", *args)
    assert (code, found["answer"], found["ordered"]) == (0, str(best), True)
    assert len(found["tries"]) == len(starts(tmp_path)) <= 6


@pytest.mark.full  # CI: the longest requests and the fewest devices, by the same search
def test_the_highest_utilization_leaves_the_headroom(env: dict[str, str], tmp_path: Path) -> None:
    code, found = fit(
        env, tmp_path, "--find", "gpu-memory-utilization", "--headroom", "5GiB", "--step", "0.02",
        "--until", "kv",
    )  # fmt: skip
    values = figures_of([])
    beside = values["profile_after_allocated_peak_bytes"] + values["profile_after_non_torch_bytes"]
    holding = []
    for hundredth in range(10, 100, 2):
        kv_cache = figures_of([f"--gpu-memory-utilization={hundredth / 100}"])["kv_cache_bytes"]
        planned = int(kv_cache) // (BLOCK * BYTES_PER_TOKEN) * BLOCK * BYTES_PER_TOKEN
        if planned > 0 and 64 * GIB - beside - planned >= 5 * GIB:
            holding.append(hundredth / 100)
    assert (code, float(found["answer"])) == (0, max(holding))


def test_a_value_passes_if_it_survives_its_largest_batches(
    env: dict[str, str], tmp_path: Path
) -> None:
    """The plan of the answer was served; that of the next value ran out of memory in a batch."""
    args = ["--find", "gpu-memory-utilization", "--between", "0.9:0.99", "--max-num-seqs", "8"]
    code, found = fit(env, tmp_path, *args)
    values = figures_of(["--max-num-seqs", "8"])
    beside = values["profile_after_allocated_peak_bytes"] + values["profile_after_non_torch_bytes"]
    surviving, free = [], {}
    for hundredth in range(90, 100):
        share = f"--gpu-memory-utilization={hundredth / 100}"
        kv_cache = int(figures_of(["--max-num-seqs", "8", share])["kv_cache_bytes"])
        planned = kv_cache // (BLOCK * BYTES_PER_TOKEN) * BLOCK * BYTES_PER_TOKEN
        free[f"0.{hundredth}"] = int(64 * GIB - beside - planned)
        surviving += [hundredth] * (free[f"0.{hundredth}"] >= SERVING)
    assert 90 < max(surviving) < 99
    answer, after = f"0.{max(surviving)}", f"0.{max(surviving) + 1}"
    assert (code, found["answer"], found["until"]) == (0, answer, "ready")
    by_value = {row["value"]: row["plan"] for row in found["tries"]}
    assert (by_value[answer]["survived"], by_value[after]["status"]) == (True, "oom")
    beyond = found["beyond"]
    oom = beyond["oom"]
    assert (beyond["value"], beyond["kind"], oom["phase"]) == (after, "oom", "request")
    assert (oom["requested_bytes"], oom["free_bytes"]) == (SERVING, free[after])
    assert beyond["short_bytes"] == SERVING - free[after]
    grown = {row["name"]: row["difference_bytes"] for row in beyond["owners"]}
    assert grown["kv_cache"] > 0 == grown["weights"]

    code, planned_only = fit(env, tmp_path, *args, "--until", "kv")
    assert (code, planned_only["answer"], planned_only.get("until", "kv")) == (0, "0.99", "kv")
    assert "whether a value survives serving was not tried" in " ".join(planned_only["notes"])


@pytest.mark.parametrize(
    "args", [["--find", "speed", "--between", "1:100"], ["--find", "devices", "--speed", "3"]]
)
def test_an_option_that_the_engine_does_not_know_ends_the_search(
    args: list[str], env: dict[str, str], tmp_path: Path
) -> None:
    code, found = fit(env, tmp_path, *args)
    assert (code, found["answer"], len(starts(tmp_path))) == (1, None, 1)
    assert "the first plan was refused, for a reason that no value changes" in found["notes"]
    assert "unrecognized arguments: --speed" in found["beyond"]["text"]


def test_ctrl_c_ends_a_search_and_its_plan(env: dict[str, str], tmp_path: Path) -> None:
    command = [*MEMPROF, "fit", "some/model", *ENGINE, "--find", "max-num-seqs", "--run-dir", "fit"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                               start_new_session=True,
                               env={**env, "FAKE_PLAN_SECONDS": "60"})  # fmt: skip
    wait_for(lambda: starts(tmp_path), "the first plan")
    children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted by SIGINT" in stderr
    wait_for(
        lambda: not any(psutil.pid_exists(pid) for pid in children), "a plan outlived the search"
    )
    assert len(starts(tmp_path)) == 1


def test_no_answer_is_said_and_is_exit_status_1(env: dict[str, str], tmp_path: Path) -> None:
    args = [
        "--find",
        "gpu-memory-utilization",
        "--want",
        "tokens=900000000",
        "--step",
        "0.1",
        "--run-dir",
        "fit",
    ]
    done = call(env, tmp_path, "fit", *args)
    assert done.returncode == 1
    assert re.search(r"^answer +none$", done.stdout, re.MULTILINE)
    assert "no value tried passes" in done.stdout
    assert json.loads((tmp_path / "fit" / "fit.json").read_text())["answer"] is None
