"""Plans that are forks of a warm process: the same figures as without one, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import (
    OLD_STACK,
    STACK,
    RunResult,
    finish,
    read_events,
    require_stack,
    start_memprof,
    wait_until,
)
from vllm_memprof.launch import warm

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

TINY = ("memprof/tiny", "--enforce-eager", "--max-model-len", "4096")
#: What two runs of one command cannot share: times, places, names, what is read by the clock, and
#: the host's memory.
_OF_A_RUN = ("_s", "_ns", "_seconds")
_OWN = {"run", "run_id", "seconds", "pid", "ppid", "other_processes", "samples", "growth"}
_OF_HOST = "host_"


@pytest.fixture
def own_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose warm processes are of this test alone, and gone after it."""
    before = {process.name for process in warm.list_warm()}
    yield {**os.environ, "OF_THIS_TEST": str(tmp_path)}
    for process in warm.list_warm():
        environ = psutil.Process(process.pid).environ() if process.name not in before else {}
        if environ.get("OF_THIS_TEST") == str(tmp_path):
            warm.stop(process.name)


def plan(run_dir: Path, env: dict[str, str], *args: str, stack: str = STACK) -> RunResult:
    command = ["plan", *args, "--device", "sim:910b", "--stack", stack]
    run = finish(start_memprof(command, run_dir, env=env), run_dir)
    assert run.returncode == 0, run.output[-3000:] + run.engine_log[-3000:]
    return run


def same_values(mine: Any, other: Any, path: str = "") -> int:
    """How many values are equal; fails at the first that is not."""
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), path
        names = [
            name
            for name in mine
            if not (name in _OWN or name.endswith(_OF_A_RUN) or name.startswith(_OF_HOST))
        ]
        return sum(same_values(mine[name], other[name], f"{path}.{name}") for name in names)
    if isinstance(mine, list):
        assert len(mine) == len(other), path
        pairs = enumerate(zip(_in_order(mine), _in_order(other), strict=True))
        return sum(same_values(*pair, f"{path}[{place}]") for place, pair in pairs)
    assert mine == other, path
    return 1


def _in_order(values: list[Any]) -> list[Any]:
    """Requests by their names: the scheduler ends those of one step in the order of a set. Phases
    up to the shutdown: of two workers either ends first."""
    of = values[0] if values and isinstance(values[0], dict) else {}
    if "output_tokens" in of:
        return sorted(values, key=lambda request: str(request["id"]))
    if "phase" in of:
        names = [value["phase"] for value in values]
        return values[: names.index("shutdown") if "shutdown" in names else len(names)]
    return values


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a test process that adopts orphans leaves them to no one who collects them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def parent_of_engine(run: RunResult) -> int:
    return int(next(event["ppid"] for event in read_events(run.run_dir) if "ppid" in event))


def test_a_plan_of_a_warm_process_has_the_figures_of_a_cold_one(
    own_env: dict[str, str], tmp_path: Path, sim_stack: str
) -> None:
    cold = plan(tmp_path / "cold", {**own_env, warm.ENV_NO_WARM: "1"}, *TINY)
    runs = [plan(tmp_path / name, own_env, *TINY) for name in ("first", "second")]
    servers = {parent_of_engine(run) for run in runs}
    assert len(servers) == 1
    assert servers <= {process.pid for process in warm.list_warm()}
    assert parent_of_engine(cold) not in servers
    for run in runs:
        assert same_values(cold.report, run.report) > 1500
        assert "Platform plugin ascend is activated" in run.engine_log  # printed by the import
    assert len(runs[1].engine_log.splitlines()) == len(cold.engine_log.splitlines())

    asked = start_memprof(["plan", *TINY, "--device", "sim:910b"], tmp_path / "ended", env=own_env)
    wait_until(lambda: list((tmp_path / "ended" / "events").glob("*")), 60, "the engine records")
    [server] = map(psutil.Process, servers)
    children = [*map(psutil.Process, [pid.pid for pid in server.children(recursive=True)])]
    asked.send_signal(signal.SIGINT)
    ended = finish(asked, tmp_path / "ended")
    assert ended.returncode == 130, ended.output
    wait_until(lambda: not is_alive(server), 30, "the warm process ends")
    assert not [child for child in children if is_alive(child)]


@pytest.mark.alone  # others' warm processes would end this one: there are few at a time
def test_plans_of_a_sweep_are_forks_of_memprof_too(
    own_env: dict[str, str], tmp_path: Path, sim_stack: str
) -> None:
    def sweep(name: str, env: dict[str, str], values: str) -> Path:
        folder = tmp_path / name
        command = ["sweep", *TINY, "--over", f"max-num-seqs={values}", "-o", str(folder)]
        command += ["--no-cache", "--device", "sim:910b", "-q"]
        memprof = [sys.executable, "-m", "vllm_memprof", *command]
        subprocess.run(memprof, env=env, check=True, capture_output=True, timeout=300)
        return folder

    cold = sweep("cold", {**own_env, warm.ENV_NO_WARM: "1"}, "8")
    hot = sweep("warm", own_env, "4,8")
    [alone], both = (
        json.loads((folder / "sweep.json").read_text())["rows"] for folder in (cold, hot)
    )
    assert [row["status"] for row in (alone, *both)] == ["ok"] * 3
    assert same_values(alone, both[1]) > 10
    for other in (cold / "plans").iterdir():
        [mine] = (hot / "plans").glob("*" + other.name.partition("-")[2])
        reports = [json.loads((each / "report.json").read_text()) for each in (mine, other)]
        assert same_values(*reports) > 1500
        said = (mine / "memprof.log").read_text()
        assert "recorded in" in said
        assert "Equation" not in said  # the report is not printed
    commands = [" ".join(psutil.Process(each.pid).cmdline()) for each in warm.list_warm()]
    assert any("vllm_memprof.cli.warm" in command for command in commands)


CASES = {
    "graphs": ("memprof/tiny", "--max-model-len", "4096"),
    "vl-tp2": ("memprof/tiny-vl", "--enforce-eager", "--tensor-parallel-size", "2"),
    "moe-one": ("Qwen/Qwen3-30B-A3B", "--enforce-eager", "--tensor-parallel-size", "2",
                "--ranks", "one", "--max-model-len", "32768"),
    "mla-tp32": ("deepseek-ai/DeepSeek-V3", "--enforce-eager", "--tensor-parallel-size", "32",
                 "--max-model-len", "32768"),
    "hybrid": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "--enforce-eager", "--tensor-parallel-size",
               "4", "--ranks", "one", "--max-model-len", "32768"),
    "ready": (*TINY, "--until", "ready"),
    "ready-graphs-tp2": ("memprof/tiny", "--tensor-parallel-size", "2", "--max-model-len", "4096",
                         "--until", "ready"),
    "ready-moe-ep": ("memprof/tiny-moe", "--enforce-eager", "--tensor-parallel-size", "2",
                     "--enable-expert-parallel", "--until", "ready"),
    "ready-vl": ("memprof/tiny-vl", "--enforce-eager", "--until", "ready"),
    "ready-one": ("Qwen/Qwen3-30B-A3B", "--enforce-eager", "--tensor-parallel-size", "2",
                  "--ranks", "one", "--max-model-len", "32768", "--until", "ready"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_warm_and_cold_are_equal(
    own_env: dict[str, str], tmp_path: Path, sim_stack: str, case: str
) -> None:
    cold_env = {**own_env, warm.ENV_NO_WARM: "1"}
    plan(tmp_path / "compiled", cold_env, *CASES[case])  # for the engine's own cache
    cold = plan(tmp_path / "cold", cold_env, *CASES[case])
    hot = plan(tmp_path / "warm", own_env, *CASES[case])
    assert same_values(cold.report, hot.report) > 1000


def test_requests_of_a_warm_process_have_their_tokens(
    own_env: dict[str, str], tmp_path: Path, sim_stack: str
) -> None:
    """The engine has by then put another class in the place of its scheduler."""
    hot = plan(tmp_path / "warm", own_env, *TINY, "--until", "ready")
    assert parent_of_engine(hot) in {process.pid for process in warm.list_warm()}
    [rank] = hot.report["ranks"]
    assert len(rank["requests"]) > 2
    assert all(request["output_tokens"] for request in rank["requests"])


@pytest.mark.full
def test_what_would_differ_is_started_cold(own_env: dict[str, str], tmp_path: Path) -> None:
    require_stack(OLD_STACK)
    before = {process.name for process in warm.list_warm()}
    plan(tmp_path / "run", own_env, *TINY, stack=OLD_STACK)
    assert {process.name for process in warm.list_warm()} <= before


@pytest.mark.full
def test_a_launcher_that_is_killed_takes_its_engine_with_it(
    own_env: dict[str, str], tmp_path: Path, sim_stack: str
) -> None:
    first = plan(tmp_path / "first", own_env, *TINY)
    server = psutil.Process(parent_of_engine(first))
    asked = start_memprof(["plan", *TINY, "--device", "sim:910b"], tmp_path / "killed", env=own_env)
    wait_until(lambda: server.children(), 60, "the fork is there")
    forks = server.children(recursive=True)
    asked.kill()
    asked.wait()
    wait_until(lambda: not [fork for fork in forks if is_alive(fork)], 40, "the fork ends")
    assert server.is_running()
    again = plan(tmp_path / "again", own_env, *TINY)
    assert parent_of_engine(again) == server.pid

    asked = start_memprof(
        ["plan", *TINY, "--device", "sim:910b"], tmp_path / "without", env=own_env
    )
    wait_until(lambda: server.children(), 60, "the fork is there")
    forks = server.children(recursive=True)
    server.kill()
    ended = finish(asked, tmp_path / "without")
    assert ended.returncode == 128 + signal.SIGKILL, ended.output
    assert "was killed by SIGKILL" in ended.output
    wait_until(lambda: not [fork for fork in forks if is_alive(fork)], 40, "the fork ends")
    assert server.pid not in {process.pid for process in warm.list_warm()}
