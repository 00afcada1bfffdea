"""The commands as a user runs them: subprocesses, and a stand-in for vLLM that is the launcher tests' fake engine."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.unit.launch.test_run import FAKE
from vllm_memprof.cli import COMMANDS

MEMPROF = [sys.executable, "-m", "vllm_memprof"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``vllm.entrypoints.cli.main`` is the fake engine."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        f"import runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n"
    )
    (tmp_path / "cwd").mkdir()
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[3])])
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "VLLM_API_KEY": "s3cret"}


def call(args: list[str], env: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MEMPROF, *args], capture_output=True, text=True, env=env, cwd=tmp_path / "cwd", timeout=60
    )


def start_server(args: list[str], env: dict[str, str], tmp_path: Path) -> subprocess.Popen[str]:
    command = [*MEMPROF, "serve", "--python", sys.executable, "--run-dir", "run", *args]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=tmp_path / "cwd",
    )


def wait_until_ready(run_dir: Path) -> None:
    limit = time.monotonic() + 30
    while not (run_dir / "report.json").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)


#: What ``memprof --help`` cannot do without: the interpreter and the libraries that draw the help.
FLOOR = "import typer, rich.console, rich.panel, rich.table"


def seconds_of_cpu(command: list[str], env: dict[str, str]) -> float:
    """Of a process that ends by itself, user and system time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick_and_names_every_command(env, tmp_path):
    """0.3 s on an idle machine, 0.25 of them the floor's; a machine that is busy is slow with both."""
    done = call(["--help"], env, tmp_path)
    assert done.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^.{{8}}{name} ", done.stdout, re.MULTILINE)
    # Both with their bytecode, as after the first command of a user.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    floor, needed = [], []
    for _ in range(5):
        floor.append(seconds_of_cpu([sys.executable, "-c", FLOOR], env))
        needed.append(seconds_of_cpu([*MEMPROF, "--help"], env))
    assert min(needed) < 1.6 * min(floor), (needed, floor)


def test_help_loads_none_of_the_large_libraries(env):
    command = [sys.executable, "-X", "importtime", *MEMPROF[1:], "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "pandas", "numpy", "plotly", "jinja2", "scipy", "jsonschema"}


def test_version(env, tmp_path):
    done = call(["--version"], env, tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "memprof")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["serve"], 2, "MODEL is missing"),
        (["serve", "-q", "M"], 2, "--quiet"),
        (["plan", "M", "--device", "gpu"], 2, "--device 'gpu' is not known"),
        (
            ["plan", "M", "--format", "html"],
            2,
            "is not known\n  try: one of table, markdown, json",
        ),
        (["plan", "M", "--startup-timeout", "0"], 2, "Invalid value for '--startup-timeout'"),
        (["offline", "M", "--prompts", "nowhere.jsonl"], 2, "does not exist"),
        (["plan", "M", "--device", "cpu", "--python", "/no/python"], 2, "no such program"),
        (["plan", "M", "--stack", "x"], 2, "--stack names a simulated stack"),
        (["report", "nowhere"], 3, "there is no run folder and no file nowhere"),
        (["report", ".", "--format", "csv"], 3, "run.json"),
        (
            ["explain", "x.log", "--format", "trace"],
            2,
            "is not known\n  try: nearest: table; one of table, markdown, html, json, csv",
        ),
        (
            ["plan", "M", "--format", "trace"],
            2,
            "is not known\n  try: nearest: table; one of table, markdown, json",
        ),
        (["report", ".", "--format", "pdf"], 2, "not known"),
        (["nonsense"], 2, "nonsense"),
        (
            ["offline", "M", "--empty-cache-at", "warm_up,nowhere"],
            2,
            "no phase 'nowhere'\n  try: one of weight_load,",
        ),
        (["offline", "M", "--empty-cache-at", ""], 2, "no phase ''"),
        (["offline", "M", "--sleep-cycles=-1"], 2, "Invalid value for '--sleep-cycles'"),
    ],
)
def test_mistakes_get_a_message_a_hint_and_a_status(args, code, words, env, tmp_path):
    done = call(args, env, tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "cwd" / "reports").exists()


def test_an_interpreter_without_vllm(env, tmp_path):
    env["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = call(["plan", "M", "--device", "cpu", "--python", sys.executable], env, tmp_path)
    if "vLLM is not importable" not in done.stderr:
        pytest.skip("the tests' own interpreter has vLLM")
    assert done.returncode == 1
    assert "try: --python PATH" in done.stderr


def test_serve_passes_arguments_and_ends_on_ctrl_c(env, tmp_path):
    engine_args = [
        "M",
        "--api-key",
        "s3cret",
        "-tp",
        "2",
        "--foo=bar",
        "-q",
        "awq",
        "--",
        "--device",
        "npu",
    ]
    process = start_server(["--device", "cpu", *engine_args], env, tmp_path)
    run_dir = tmp_path / "cwd" / "run"
    wait_until_ready(run_dir)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "TP0" in out  # the report is on stdout
    assert "fake engine starts" in err  # the engine's output is not
    assert "fake engine starts" not in out
    info = json.loads((run_dir / "run.json").read_text())
    assert info["status"] == "ok"
    start = info["engine_command"].index("serve")
    assert info["engine_command"][start:] == (
        ["serve", "M", "--api-key", "***", "-tp", "2", "--foo=bar", "-q", "awq", "--device", "npu"]
    )
    assert info["command"][:2] == ["memprof", "serve"]
    assert info["env"]["VLLM_API_KEY"] == "***"
    for path in run_dir.iterdir():
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert "s3cret" not in (run_dir / "run.json").read_text()
    assert "s3cret" not in (run_dir / "report.json").read_text()
    assert json.loads((run_dir / "report.json").read_text())["run"]["status"] == "ok"
    pids = [int(path.stem.rsplit("-", 1)[1]) for path in (run_dir / "events").glob("*.jsonl")]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_worker_still_gives_the_tables(env, tmp_path):
    process = start_server(
        ["M", "--kill-in=profile_run", "--pace=0.2", "--format", "json"], env, tmp_path
    )
    out, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "worker TP1 (pid" in err
    assert "in profile_run" in err
    report = json.loads(out)
    assert report["run"]["status"] == "failed"
    assert {rank["label"] for rank in report["ranks"]} == {"TP0", "TP1"}
    again = call(["report", "run", "--format", "json"], env, tmp_path)
    assert json.loads(again.stdout) == report


def test_quiet_shows_phases_but_no_engine_output(env, tmp_path):
    process = start_server(["M", "--fail=4", "--quiet"], env, tmp_path)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 4
    assert err.index("last lines of engine.log:") < err.index("No available memory")


def test_report_to_a_file(env, tmp_path):
    start_server(["M", "--kill-in=profile_run"], env, tmp_path).communicate(timeout=40)
    done = call(["report", "run", "--format", "markdown", "-o", "r.md"], env, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "cwd" / "r.md").read_text().startswith("#")
    done = call(["report", "run", "-o", "r.txt"], env, tmp_path)
    text = (tmp_path / "cwd" / "r.txt").read_text()
    assert "TP1" in text
    assert "\x1b" not in text
    assert call(["report", "run", "-o", "no/r.txt"], env, tmp_path).returncode == 1


def test_doctor_on_a_machine_with_nothing(env, tmp_path):
    (tmp_path / "empty").mkdir()
    bare = {**env, "PYTHONPATH": str(Path(__file__).parents[3]), "PATH": str(tmp_path / "empty")}
    bare |= {
        "MEMPROF_CACHE_DIR": str(tmp_path / "empty"),
        "VLLM_PLUGINS": "ascend",
        "COLUMNS": "120",
    }
    bare["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True,max_split_size_mb:64"
    done = call(["doctor"], bare, tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
    assert ("no way to run yet" in done.stdout) == (done.returncode == 1)
    for words in (
        "C++ compiler",
        "none of g++",
        "memprof sim setup",
        "VLLM_PLUGINS",
        "max_split_size_mb",
        "/dev/shm",
    ):
        assert words in done.stdout
