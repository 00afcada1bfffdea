"""Fixtures of the tests of the real engine: one simulated stack, runs of the command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.support.engine import (
    RUN_TIMEOUT_S,
    STACK,
    RunResult,
    finish,
    require_stack,
    start_memprof,
)
from vllm_memprof.launch.warm import list_warm, stop
from vllm_memprof.sim.stacks import cache_dir

# A deadline is of the wall clock: on a busy machine any example may take a second.
settings.register_profile("memprof", deadline=None)
settings.load_profile("memprof")

#: A variable by which the warm processes of a test process are known.
OF_THE_TESTS = "OF_THE_TESTS_OF"


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test processes that run side by side are told the terminal's width, which a table obeys."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_configure() -> None:
    """Test processes that run side by side have devices, and compiled models, of their own.

    What vLLM notes of a model's class is shared: a file written whole, ten seconds to make.
    """
    os.environ[OF_THE_TESTS] = str(os.getpid())
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        place = (
            Path(tempfile.gettempdir())
            / f"memprof-test-{os.environ['PYTEST_XDIST_TESTRUNUID']}-{worker}"
        )
        place.mkdir(exist_ok=True)
        os.environ["MEMPROF_SIM_STATE"] = str(place / "devices")
        os.environ["VLLM_CACHE_ROOT"] = str(place / "vllm")
        shared = cache_dir() / "test-modelinfos"
        shared.mkdir(parents=True, exist_ok=True)
        (place / "vllm").mkdir(exist_ok=True)
        (place / "vllm" / "modelinfos").symlink_to(shared)


def pytest_unconfigure() -> None:
    for process in list_warm():  # of this environment; others are of somebody else's plans
        with contextlib.suppress(psutil.Error):
            if psutil.Process(process.pid).environ().get(OF_THE_TESTS) == str(os.getpid()):
                stop(process.name)
    if "PYTEST_XDIST_WORKER" in os.environ:
        shutil.rmtree(Path(os.environ["MEMPROF_SIM_STATE"]).parent, ignore_errors=True)


@pytest.fixture(scope="session")
def sim_stack() -> str:
    return require_stack(STACK)


@pytest.fixture
def run_memprof(sim_stack: str, tmp_path: Path) -> Callable[..., RunResult]:
    """Runs ``memprof`` to its end: ``run_memprof("offline", MODEL, ...)``."""

    def run(
        *args: str, timeout_s: float = RUN_TIMEOUT_S, env: dict[str, str] | None = None
    ) -> RunResult:
        run_dir = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        process = start_memprof(list(args), run_dir, env={**os.environ, **(env or {})})
        return finish(process, run_dir, timeout_s)

    return run


@pytest.fixture
def cleanup_processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands appended here are ended when the test is over, whatever happened."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
