"""Engine runs on the simulated device, started through the command line, and what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

MEMPROF = [sys.executable, "-m", "vllm_memprof"]
STACK = "vllm-ascend-0.23.0"
#: The engine before its budget became relative: absolute peak and device-wide use (equation E2).
OLD_STACK = "vllm-ascend-0.13.0"
#: The arguments of the recorded measurement on two Ascend 910B cards (Qwen3-VL-8B-Instruct).
REFERENCE_ARGS = [
    "--tensor-parallel-size=2",
    "--max-model-len=65536",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=32768",
    "--gpu-memory-utilization=0.95",
    "--mm-processor-cache-gb=0",
]
#: A server's processes are forks, as LLM() has them: each imports no engine of its own, which saves
#: ten seconds of a core. Without it ``vllm serve`` spawns them.
FORK = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
#: A start-up on a slow two-core machine, with room; a run that takes longer is stuck.
RUN_TIMEOUT_S = 240.0


def require_stack(name: str) -> str:
    """Return a stack that is set up, else skip, or fail where MEMPROF_REQUIRE_SIM is set."""
    from vllm_memprof.errors import SetupError
    from vllm_memprof.sim.runtime import prepare_runtime

    try:
        prepare_runtime("910b", name)
    except SetupError as error:
        if os.environ.get("MEMPROF_REQUIRE_SIM"):
            raise
        pytest.skip(f"no simulated stack: {error.message}")
    return name


@dataclass
class RunResult:
    """A finished ``memprof`` command: exit status, what it printed, and the run folder."""

    returncode: int
    output: str
    run_dir: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())

    @property
    def full(self) -> str:
        """Every section of its report, as one line."""
        command = [*MEMPROF, "report", str(self.run_dir), "--full"]
        return " ".join(subprocess.run(command, capture_output=True, text=True).stdout.split())

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text())

    @property
    def engine_log(self) -> str:
        return (self.run_dir / "engine.log").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return all whole event lines of a run, each with its file's name, in order of time."""
    events = []
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                events.append({"file": path.name, **json.loads(line)})
            except json.JSONDecodeError:
                continue
    return sorted(events, key=lambda event: event["t_ns"])


def start_memprof(args: list[str], run_dir: Path, **kwargs: Any) -> subprocess.Popen[str]:
    """``memprof ARGS`` in a session of its own, its output in ``<run_dir>.out``."""
    command = [*MEMPROF, *args[:1], "--run-dir", str(run_dir), *args[1:]]
    with Path(f"{run_dir}.out").open("w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **kwargs,
        )


def finish(
    process: subprocess.Popen[str], run_dir: Path, timeout_s: float = RUN_TIMEOUT_S
) -> RunResult:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        raise
    return RunResult(process.returncode, Path(f"{run_dir}.out").read_text(), run_dir)


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of ``condition``; polls every 20 ms."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def wait_for_server(process: subprocess.Popen[str], run_dir: Path, timeout_s: float) -> None:
    """Return when the server of ``start_memprof`` is ready; it must not end before."""

    def ready() -> bool:
        assert process.poll() is None, Path(f"{run_dir}.out").read_text()[-3000:]
        return any(
            event["kind"] == "ready" and event["what"] == "server" for event in read_events(run_dir)
        )

    wait_until(ready, timeout_s, "the server is ready")


def engine_pids(run_dir: Path) -> set[int]:
    """Every process that wrote events, as ``<host>-<pid>.jsonl`` names them."""
    return {int(path.stem.rsplit("-", 1)[1]) for path in (run_dir / "events").glob("*.jsonl")}


def assert_nothing_left(pids: set[int]) -> None:
    alive = [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    assert not alive, f"still running: {alive}"


def run_in_engine(
    runtime: Any, script: Path, *args: str, timeout_s: float = 200, **env: str
) -> tuple[dict[str, Any], str]:
    """Run a script in the engine's environment; return its RESULT line, and all it printed."""
    done = subprocess.run(
        [str(runtime.python), str(script), *args],
        env={
            **os.environ,
            **runtime.env,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stdout[-4000:]
    return json.loads(line.removeprefix("RESULT ")), done.stdout


def run_script(
    stack: str,
    folder: Path,
    source: str,
    *args: str,
    model: str = "memprof/tiny",
    device: str = "910b",
    env: dict[str, str] | None = None,
) -> RunResult:
    """A program of its own that uses vLLM, started and recorded by memprof's launcher."""
    import uuid

    from vllm_memprof.launch.engine import build_env
    from vllm_memprof.launch.live import PlainView, Shown
    from vllm_memprof.launch.run import EngineRun, Job
    from vllm_memprof.record.schema import RunInfo
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import ENV_STATE, prepare_runtime

    runtime, preset = prepare_runtime(device, stack), resolve_model(model, [])
    run_dir = folder / f"run{len(list(folder.iterdir()))}"
    script = folder / f"{run_dir.name}.py"
    script.write_text(source)
    run_dir.mkdir()
    # functions travel to the worker as they are; updates want weights in the plain format
    single = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_ENABLE_NZ": "0"}
    env = build_env(
        os.environ, run_dir, "offline", {**runtime.env, **preset.env, **single, **(env or {})}
    )
    env.setdefault(ENV_STATE, str(folder / "devices"))
    command = [str(runtime.python), str(script), preset.path, *args]
    info = RunInfo(uuid.uuid4().hex, "offline", model, command, device=device, simulated=True)
    EngineRun(Job(info, run_dir, command, env, 240.0), PlainView(Shown("script", 0))).run()
    done = subprocess.run([*MEMPROF, "report", str(run_dir), "--format", "json", "-o", str(run_dir / "report.json")],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunResult(0, done.stdout, run_dir)
