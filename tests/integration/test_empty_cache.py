"""The audit of empty_cache on the real engine: every call once, and each finding with and without a cause."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.engine import RunResult, finish, start_memprof
from tests.support.planted import plant
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

TINY = [
    "memprof/tiny",
    "--device",
    "sim:910b",
    "--max-model-len",
    "2048",
    "--gpu-memory-utilization",
    "0.4",
]
EAGER = [*TINY, "--enforce-eager"]
FINDINGS = {
    "empty-cache-in-hot-path",
    "observation-empties-cache",
    "empty-cache-refilled",
    "reserved-grows-without-empty-cache",
    "residue-per-cycle",
}

#: Writes down every call of the allocator's function, with the whole stack: what the audit is held
#: against. Its code passes for a file of torch's, so that it is no caller in the audit's eyes,
#: whoever is wrapped around the other.
COUNT = """
import json, os, sys
from pathlib import Path

FOLDER = Path(__file__).parent

def note_call(frame):
    stack = []
    while frame is not None:
        stack.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    with open(FOLDER / f"calls-{os.getpid()}", "a") as out:
        out.write(json.dumps(stack) + "\\n")

WRAPPER = '''
def make(original):
    def empty_cache(*args):
        note_call(sys._getframe(1))
        return original(*args)
    return empty_cache
'''

def register():
    import torch_npu

    exec(compile(WRAPPER, "/torch/counted.py", "exec"), globals())
    wrap(torch_npu._C, "_npu_emptyCache", make)
"""

#: A step that takes 64 MiB for a moment and empties the cache, as a serving loop does that fears
#: fragmentation.
EMPTY_IN_STEP = """
def register():
    def then(worker):
        def make(original):
            def execute_model(self, *args, **kwargs):
                import torch
                result = original(self, *args, **kwargs)
                scratch = torch.empty(64 << 20, dtype=torch.uint8, device=self.device)
                del scratch
                torch.npu.empty_cache()
                return result
            return execute_model
        wrap(worker, "execute_model", make)
    when_worker_is_there(then)
"""

#: vLLM's CUDA platform empties the cache before it reads memory around the weight load; its Ascend
#: platform does not.
EMPTY_IN_READING = """
def register():
    from vllm_ascend.platform import NPUPlatform
    original = NPUPlatform.get_current_memory_usage.__func__

    def get_current_memory_usage(cls, device=None):
        import torch
        torch.npu.empty_cache()
        return original(cls, device)

    NPUPlatform.get_current_memory_usage = classmethod(get_current_memory_usage)
"""


def found(run: RunResult) -> set[str]:
    return {finding["id"] for finding in run.report["findings"]} & FINDINGS


def finding(run: RunResult, name: str) -> dict:
    [one] = [finding for finding in run.report["findings"] if finding["id"] == name]
    return one


@pytest.fixture(scope="module")
def counted(sim_stack: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """A clean run on two ranks with a counter of its own."""
    folder = tmp_path_factory.mktemp("counted")
    env = {**os.environ, **plant(folder / "plugin", COUNT)}
    args = ["offline", *EAGER, "-tp", "2", "--prompt", "hi", "--prompt", "ho"]
    run = finish(start_memprof(args, folder / "run", env=env), folder / "run")
    assert run.returncode == 0, run.output[-3000:]
    return run, folder / "plugin"


def scanned_scopes(package: Path) -> set[str]:
    """``module:function`` of every function of an installed package that calls something named empty_cache."""
    scopes: set[str] = set()

    def visit(node: ast.AST, module: str, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                visit(child, module, (*names, child.name))
                continue
            if isinstance(child, ast.Call):
                called = child.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                if name.endswith("empty_cache"):
                    scopes.add(f"{module}:{'.'.join(names)}")
            visit(child, module, names)

    for path in package.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "empty_cache" in text:
            module = ".".join([package.name, *path.relative_to(package).with_suffix("").parts])
            visit(ast.parse(text), module, ())
    return scopes


def test_every_call_of_a_run_is_listed_once(counted: tuple[RunResult, Path]) -> None:
    run, folder = counted
    for rank in run.report["ranks"]:
        lines = (folder / f"calls-{rank['pid']}").read_text().splitlines()
        stacks = [json.loads(line) for line in lines]
        calls = rank["empty_cache"]
        assert len(calls) == len(stacks) > 3, rank["label"]
        assert all(call["site"] in stack for call, stack in zip(calls, stacks, strict=True))
    counted_by = {int(path.name.split("-")[1]) for path in folder.glob("calls-*")}
    assert counted_by == {rank["pid"] for rank in run.report["ranks"]}  # no other process called


def test_a_start_up_makes_the_calls_that_its_source_shows(
    counted: tuple[RunResult, Path], sim_stack: str
) -> None:
    """vllm-ascend 0.23.0, eager, dense: at device init and around the profile; then those of the shutdown."""
    from vllm_memprof.sim.runtime import prepare_runtime

    run, _ = counted
    [packages] = list(
        (prepare_runtime("910b", sim_stack).python.parents[1] / "lib").glob("python*/site-packages")
    )
    scopes = scanned_scopes(packages / "vllm") | scanned_scopes(packages / "vllm_ascend")
    assert "vllm_ascend.worker.worker:NPUWorker._init_device" in scopes
    for rank in run.report["ranks"]:
        start_up = [
            call for call in rank["empty_cache"] if not call["after_ready"] and not call["at_end"]
        ]
        assert Counter((call["phase"], call["function"]) for call in start_up) == {
            ("device_init", "NPUWorker._init_device"): 1,
            ("profile_run", "NPUWorker.determine_available_memory"): 2,
        }
        for call in rank["empty_cache"]:
            assert scopes & set(call["chain"]), call


def test_a_clean_run_finds_nothing(counted: tuple[RunResult, Path]) -> None:
    run, _ = counted
    assert found(run) == set()
    assert "non-torch-read-after-empty-cache" not in {
        finding["id"] for finding in run.report["findings"]
    }
    for rank in run.report["ranks"]:
        assert not any(call["while_serving"] for call in rank["empty_cache"])
        assert {call["by"] for call in rank["empty_cache"]} == {"engine"}
        assert rank["reclaim"]["calls"] == 3
        assert sum(call["at_end"] for call in rank["empty_cache"]) == len(rank["empty_cache"]) - 3
        assert rank["cycles"] == []


@pytest.mark.full
def test_graph_mode_counts_each_call_once(run_memprof, tmp_path: Path) -> None:
    env = plant(tmp_path / "plugin", COUNT)
    run = run_memprof("offline", *TINY, "--prompt", "hi", env=env)
    assert run.returncode == 0, run.output[-3000:]
    [rank] = run.report["ranks"]
    lines = (tmp_path / "plugin" / f"calls-{rank['pid']}").read_text().splitlines()
    assert len(rank["empty_cache"]) == len(lines)
    assert any(call["phase"] == "graph_capture" for call in rank["empty_cache"])
    assert found(run) == set()


def test_a_call_in_each_step_is_found(run_memprof, tmp_path: Path) -> None:
    env = plant(tmp_path / "plugin", EMPTY_IN_STEP)
    run = run_memprof("offline", *EAGER, "--prompt", "hi", "--max-tokens", "8", env=env)
    assert run.returncode == 0, run.output[-3000:]
    [rank] = run.report["ranks"]
    serving = [call for call in rank["empty_cache"] if call["while_serving"]]
    assert len(serving) >= 8  # one for each token
    assert {call["requests"] for call in serving} <= {0, 1}
    assert all(call["freed_npu_workspace_bytes"] is None for call in serving if call["requests"])
    hot = finding(run, "empty-cache-in-hot-path")
    assert f"{len(serving)} call(s) at planted.py:" in hot["evidence"]
    assert hot["severity"] == "warning"
    freed = [call["freed_bytes"] for call in serving]
    assert (
        hot["bytes"] == max(freed) == 3 * 20 * MIB
    )  # of 64 MiB, in expandable segments of 20 MiB, three are unused
    again = finding(run, "empty-cache-refilled")
    taken = sum(call["refilled_bytes"] for call in serving)
    assert f"freed {sum(freed):,} bytes, {taken:,} of them reallocated" in again["evidence"]
    assert taken == sum(freed[:-1])  # by the next step; there is none after the last
    assert rank["reclaim"]["calls_while_serving"] == len(serving)
    assert f"{len(serving)} call(s) while requests ran: waited" in run.full


@pytest.mark.full  # CI: a call in each step, which is planted in the same way
def test_a_reading_that_empties_the_cache_is_found(run_memprof, tmp_path: Path) -> None:
    env = plant(tmp_path / "plugin", EMPTY_IN_READING)
    run = run_memprof("offline", *EAGER, "--prompt", "hi", env=env)
    assert run.returncode == 0, run.output[-3000:]
    assert found(run) == {"observation-empties-cache"}
    seen = finding(run, "observation-empties-cache")
    assert "get_current_memory_usage" in seen["evidence"]
    assert "2 calls in weight_load" in seen["evidence"]


@pytest.mark.full
def test_an_experiment_adds_calls_that_are_memprof_s(run_memprof) -> None:
    run = run_memprof(
        "offline",
        *EAGER,
        "--prompt",
        "hi",
        "--empty-cache-at",
        "weight_load,profile_run,warm_up,graph_capture",
    )
    assert run.returncode == 0, run.output[-3000:]
    [rank] = run.report["ranks"]
    own = [call for call in rank["empty_cache"] if call["by"] == "memprof"]
    assert [call["at"] for call in own] == ["weight_load", "profile_run", "warm_up"]
    assert rank["reclaim"]["calls"] == 3  # the engine's own, as without the experiment
    assert [row["at"] for row in rank["empty_cache"] if row["by"] == "memprof"] == [
        "weight_load",
        "profile_run",
        "warm_up",
    ]
    assert all(row["seconds"] > 0 for row in rank["empty_cache"] if row["by"] == "memprof")
    assert rank["budget"]["balanced"] is True
    assert run.info["empty_cache_at"] == ["weight_load", "profile_run", "warm_up", "graph_capture"]
    assert "memprof itself called empty_cache" in run.output
    assert "never reached: graph_capture" in run.output
    assert found(run) == set()


def test_workspace_that_the_budget_missed(run_memprof, tmp_path: Path) -> None:
    """Operators ask for workspace: the profile's last call clears it, and the engine reads non-torch after that."""
    from vllm_memprof.sim.profiles import PROFILES_DIR

    text = (PROFILES_DIR / "ascend910b.toml").read_text()
    named = text.replace('name = "ascend910b"', 'name = "with_workspace"').replace(
        '["910b", "a2"]', "[]"
    )
    profile = tmp_path / "with_workspace.toml"
    profile.write_text(named + f'"*" = {24 * MIB}\n')
    args = [*EAGER[1:2], f"sim:{profile}", *EAGER[3:]]
    env = {
        "TASK_QUEUE_ENABLE": "2"
    }  # workspace from an allocator of its own; by default it is cached like a tensor
    run = run_memprof("offline", EAGER[0], *args, "--prompt", "hi", env=env)
    assert run.returncode == 0, run.output[-3000:]
    [rank] = run.report["ranks"]
    last = [call for call in rank["empty_cache"] if call["phase"] == "profile_run"][-1]
    assert (
        last["freed_npu_workspace_bytes"] == 24 * MIB + 2 * MIB
    )  # one stream; a page of 2 MiB for 32 bytes more
    missed = finding(run, "non-torch-read-after-empty-cache")
    assert missed["bytes"] == last["freed_npu_workspace_bytes"]
    assert "the equation does not subtract it, serving allocates it again" in run.full
