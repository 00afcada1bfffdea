"""A miniature engine (fakes/) in a process of its own, and the events that capture writes about
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FAKES = Path(__file__).parent / "fakes"
ROOT = Path(__file__).parents[3]

#: A whole start-up in one process, as with TP=1: plugin, worker, engine core.
START_UP = """
import vllm.version, torch, torch_npu
from vllm_memprof.capture.plugin import register
register()
from types import SimpleNamespace
from vllm.v1.worker.worker_base import WorkerWrapperBase
from vllm.v1.engine.core import EngineCore

wrapper = WorkerWrapperBase()

def executor():
    wrapper.init_worker([{}])
    wrapper.init_device()
    worker = wrapper.worker
    worker.load_model()
    def initialize(plan):
        worker.initialize_from_config(plan[0])
        worker.compile_or_warm_up_model()
    return SimpleNamespace(
        determine_available_memory=lambda: [worker.determine_available_memory()],
        initialize_from_config=initialize,
        shutdown=worker.shutdown,
    )
"""


@dataclass
class Recorded:
    """What a process printed and what was recorded about it."""

    code: int
    out: str
    err: str
    files: dict[str, list[dict[str, Any]]]  # event file -> events

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for events in self.files.values() for event in events]

    def kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def edges(self, phase: str) -> list[dict[str, Any]]:
        return [event for event in self.kind("phase") if event["phase"] == phase]

    def outline(self) -> list[str]:
        return [f"{event['phase']} {event['edge']}" for event in self.kind("phase")]


Run = Callable[..., Recorded]


def fake_torch(
    monkeypatch: pytest.MonkeyPatch,
    stats: Callable[[int], dict[str, Any]],
    mem_info: Callable[[int], tuple[int, int]] = lambda device: (0, 0),
    name: str = "npu",
    package: str = "torch_npu",
) -> Any:
    """Put a package in the place of torch's for a device, which is initialised and current."""
    functions = {f"_{name}_memoryStats": stats, f"_{name}_getDevice": lambda: 0}
    runtime = SimpleNamespace(
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        mem_get_info=mem_info,
    )
    module = SimpleNamespace(_C=SimpleNamespace(**functions), **{name: runtime})
    monkeypatch.setitem(sys.modules, package, module)  # type: ignore[arg-type]
    return runtime


@pytest.fixture
def run_engine(tmp_path: Path) -> Run:
    """Runs code against the miniature engine with capture switched on."""

    def run(code: str, record: bool = True, **extra_env: str) -> Recorded:
        env = {key: value for key, value in os.environ.items() if not key.startswith("MEMPROF_")}
        env |= {"PYTHONPATH": f"{FAKES}{os.pathsep}{ROOT}", **extra_env}
        if record:
            env["MEMPROF_RUN_DIR"] = str(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        files = {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted((tmp_path / "events").glob("*.jsonl"))
        }
        return Recorded(done.returncode, done.stdout, done.stderr, files)

    return run
