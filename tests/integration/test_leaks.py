"""Leaks planted in the real engine: found, priced, named by process and by line of code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engine import RunResult

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

#: One token each: the shortest request that an engine serves.
ARGS = ["memprof/tiny", "--device", "sim:910b", "--enforce-eager", "--max-model-len", "2048"]
ARGS += ["--gpu-memory-utilization", "0.4", "--max-tokens", "1"]
NAME = "growth-while-serving"

#: A worker that keeps a tensor of 1 MiB for every request that has ended.
DEVICE_LEAK = """
def keep(runner, count):
    import torch
    kept = runner.kept = getattr(runner, "kept", [])
    for _ in range(count):
        kept.append(torch.empty(1 << 20, dtype=torch.uint8, device=runner.device))  # the leak

def register():
    def then(worker):
        def make(original):
            def execute_model(self, scheduler_output, *args, **kwargs):
                keep(self.model_runner, len(scheduler_output.finished_req_ids))
                return original(self, scheduler_output, *args, **kwargs)
            return execute_model
        wrap(worker, "execute_model", make)
    when_worker_is_there(then)
"""

#: An engine core that keeps 1 MiB of its own memory for every request.
HOST_LEAK = """
KEPT = []

def register():
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original):
        def _free_request(self, *args, **kwargs):
            KEPT.append(bytearray(b"x" * (1 << 20)))  # the leak
            return original(self, *args, **kwargs)
        return _free_request
    wrap(Scheduler, "_free_request", make)
"""


def prompts(folder: Path, count: int) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"request {n}"}) + "\n" for n in range(count)))
    return ["--prompts", str(path)]


def line_of_leak(folder: Path) -> str:
    lines = (folder / "planted.py").read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if "# the leak" in line]
    return f"planted.py:{number}"


def found(run: RunResult) -> list[dict]:
    return [finding for finding in run.report["findings"] if finding["id"] == NAME]
