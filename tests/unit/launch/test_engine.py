"""What is started: command lines, environments, run folders, requests."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from vllm_memprof.engines.driver import Options
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch import folder, interpreter, prepare
from vllm_memprof.launch.engine import build_command, build_env
from vllm_memprof.launch.folder import create_run_dir, default_run_dir, write_run_info
from vllm_memprof.launch.interpreter import (
    InterpreterFacts,
    find_python,
    probe_interpreter,
    require_engine,
)
from vllm_memprof.launch.prepare import find_shutdown_timeout, require_device
from vllm_memprof.launch.request import DeviceChoice, LaunchRequest, parse_device
from vllm_memprof.record.schema import EMPTY_CACHE_AT, TRAVELS, RunInfo

PYTHON = Path("/venv/bin/python")


def test_serve_passes_arguments_as_they_are():
    request = LaunchRequest("serve", "M", ["-tp", "2", "--foo=bar", "", "--", "-q", "awq"])
    command = build_command(PYTHON, request, "/models/M", ["--load-format", "dummy"])
    assert command[:4] == [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve"]
    assert command[4:] == [
        "/models/M",
        "--load-format",
        "dummy",
        "-tp",
        "2",
        "--foo=bar",
        "",
        "--",
        "-q",
        "awq",
    ]


def test_offline_and_plan_go_through_the_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").touch()
    request = LaunchRequest(
        "offline",
        "M",
        ["-tp", "2"],
        prompts_file=Path("p.jsonl"),
        prompts=["-a", "b"],
        max_tokens=4,
    )
    command = build_command(PYTHON, request, "M", [])
    assert command[1:4] == ["-m", "vllm_memprof.engines.vllm.driver", "offline"]
    assert Options(**json.loads(command[4])) == Options(
        "M", prompts_file=str(tmp_path / "p.jsonl"), prompts=["-a", "b"], max_tokens=4
    )
    assert command[5:] == ["-tp", "2"]
    given = {"sleep_cycles": 5, "at_once": True, "repeat": 2, "until": "ready"}
    command = build_command(PYTHON, LaunchRequest("offline", "M", **given), "M", [])
    assert Options(**json.loads(command[4])) == Options("M", prompts=[], **given)


@pytest.mark.parametrize(
    ("mode", "engine", "version", "safe"),
    [
        ("serve", "vllm", "3.11.7", True),  # `vllm serve` is a script
        ("serve", "sglang", "3.11.7", False),  # `python -m sglang.launch_server`
        ("offline", "sglang", "3.12.0", True),
        ("plan", "vllm", "3.10.9", False),  # it has no such option
        ("plan", "vllm", None, False),
    ],
)
def test_modules_of_the_user_s_folder_are_not_the_engine_s(mode, engine, version, safe):
    request = LaunchRequest(mode, "M", engine=engine)
    command = build_command(PYTHON, request, "M", [], None, version)
    assert (command[1] == "-P") is safe
    assert command[1 + safe] == "-m"


def test_an_experiment_is_never_inherited(tmp_path):
    """Only who asks for empty_cache on the command line gets it; a variable left in the shell
    changes no run."""
    left = {"MEMPROF_EMPTY_CACHE_AT": "warm_up"}
    assert "MEMPROF_EMPTY_CACHE_AT" not in build_env(left, tmp_path, "offline", {})
    asked = build_env(left, tmp_path, "offline", {"MEMPROF_EMPTY_CACHE_AT": "profile_run"})
    assert asked["MEMPROF_EMPTY_CACHE_AT"] == "profile_run"


def test_an_experiment_names_phases_that_exist():
    LaunchRequest("offline", "m", empty_cache_at=["warm_up", "sleep"])
    with pytest.raises(UsageError, match="'device_init'") as failure:
        LaunchRequest("offline", "m", empty_cache_at=["warm_up", "device_init"])
    assert failure.value.exit_code == 2
    assert all(phase in failure.value.hint for phase in EMPTY_CACHE_AT)


def test_environment_switches_capture_on(tmp_path):
    env = build_env(
        {"PATH": "/bin", "MEMPROF_STOP_AFTER": "x"}, tmp_path, "serve", {"LD_LIBRARY_PATH": "/shim"}
    )
    assert env["MEMPROF_RUN_DIR"] == str(tmp_path)
    assert env["LD_LIBRARY_PATH"] == "/shim"
    assert "MEMPROF_STOP_AFTER" not in env
    assert "VLLM_PLUGINS" not in env  # setting it would shut every other plugin out
    assert env["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",") == [*TRAVELS]
    assert build_env({}, tmp_path, "plan", {})["MEMPROF_STOP_AFTER"] == "kv_plan"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "memprof"), ("ascend", "ascend,memprof"), ("memprof,a", "memprof,a")],
)
def test_allow_list_of_plugins_is_extended(tmp_path, given, expected):
    assert build_env({"VLLM_PLUGINS": given}, tmp_path, "serve", {})["VLLM_PLUGINS"] == expected


def test_default_run_dir_is_named_after_time_and_model(monkeypatch):
    now = time.struct_time((2026, 11, 21, 2, 33, 9, 0, 0, 0))
    monkeypatch.setattr(
        folder.time, "strftime", lambda form, strftime=time.strftime: strftime(form, now)
    )
    assert default_run_dir("Qwen/Qwen3-14B") == Path("reports/20261121-023309-Qwen3-14B")
    assert default_run_dir("/models/a b:c/").name == "20261121-023309-a-b-c"
    assert default_run_dir("..").name == "20261121-023309-model"


def test_two_runs_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        time, "localtime", lambda: time.struct_time((2026, 11, 21, 2, 33, 9, 0, 0, 0))
    )
    first, second = create_run_dir(None, "m"), create_run_dir(None, "m")
    assert second.name == first.name + "-2"
    assert stat.S_IMODE(second.stat().st_mode) == 0o700


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    create_run_dir(tmp_path / "new" / "deep", "m")
    with pytest.raises(UsageError, match="not empty"):
        create_run_dir(tmp_path / "new" / "deep", "m")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a run"):
        create_run_dir(tmp_path, "m")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot make the run folder"):
        create_run_dir(tmp_path / "file" / "run", "m")


def test_run_json_is_replaced_whole(tmp_path):
    info = RunInfo(id="1", mode="serve", model="m", command=["memprof"])
    write_run_info(tmp_path, info)
    info.status = "ok"
    write_run_info(tmp_path, info)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "ok"
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "kind", "profile"),
    [
        ("auto", "auto", None),
        ("NPU", "npu", None),
        ("sim", "sim", "910b"),
        ("sim:310p", "sim", "310p"),
    ],
)
def test_devices(text, kind, profile):
    assert parse_device(text) == DeviceChoice(kind, profile)


@pytest.mark.parametrize("text", ["", "gpu", "sim:", "npu:0", "sim910b"])
def test_unknown_devices(text):
    with pytest.raises(UsageError, match="not known"):
        parse_device(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"empty_cache_at": [""]},
        {"on_error": "x"},
        {"sample": "0"},
        {"at_once": True, "concurrency": 2},
    ],
)
def test_impossible_requests(wrong):
    with pytest.raises(UsageError):
        LaunchRequest("offline", "m", **wrong)


def test_a_device_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(prepare.DEVICE_FILES, "npu", (str(tmp_path / "davinci0"),))
    with pytest.raises(LaunchError, match="this machine has none of"):
        require_device(DeviceChoice("npu"))
    require_device(DeviceChoice("auto"))
    (tmp_path / "davinci0").touch()
    require_device(DeviceChoice("npu"))


@pytest.mark.parametrize(
    ("args", "seconds"),
    [
        ([], 0),
        (["--shutdown-timeout", "30"], 30),
        (["--shutdown_timeout=5"], 5),
        (["--shutdown-timeout"], 0),
    ],
)
def test_shutdown_timeout_of_the_engine_is_respected(args, seconds):
    assert find_shutdown_timeout(args) == seconds


def test_finding_the_interpreter(monkeypatch, tmp_path):
    assert find_python("sh").name == "sh"
    with pytest.raises(UsageError, match="no such program"):
        find_python(str(tmp_path / "python"))
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no interpreter"):
        find_python(None)
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    assert find_python(None) == tmp_path / "python3"


def test_asking_an_interpreter(tmp_path):
    import os
    import sys

    facts = probe_interpreter(Path(sys.executable), os.environ)
    assert facts.versions["vllm-memprof"]
    assert facts.python.startswith("3.")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'cannot find libpython' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot find libpython"):
        probe_interpreter(broken, os.environ)


def test_an_interpreter_must_have_both_vllm_and_memprof():
    with pytest.raises(LaunchError, match="vLLM is not importable") as caught:
        require_engine(InterpreterFacts(PYTHON, "3.11"))
    assert "sim:910b" in str(caught.value.hint)
    with pytest.raises(LaunchError, match="memprof is not installed"):
        require_engine(InterpreterFacts(PYTHON, "3.11", engines={"vllm": ()}))
    require_engine(InterpreterFacts(PYTHON, "3.11", engines={"vllm": ("memprof",)}))
