"""What SGLang's ``empty_cache`` costs and gives: weight updates under load, pauses in place, readings
of free memory. The tables of docs/engines.md are what these tests print (``pytest -s``).

Public reports: sgl-project/sglang#22998 (weight update under load), #24854 (in-place pause), #24397
(readings that empty the cache). CI runs SGLang through `test_sglang.py`; this is part of make test-full.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_sglang import ARGS, STACK, offline, post
from tests.integration.test_tokens import ON_CPU
from tests.support.engine import (
    RunResult,
    finish,
    require_stack,
    run_in_engine,
    start_memprof,
    wait_for_server,
)
from tests.support.planted import plant
from tests.support.ports import free_port
from tests.support.streams import Streams
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

CYCLE_FINDINGS = {"residue-per-cycle", "reserved-grows-without-empty-cache"}
CYCLES = 20
CLIENTS = 4

#: What a model with weights that are derived from others does after each update (w_kc and w_vc of
#: DeepSeek's MLA, scales of FP8): a scratch tensor for a moment. Here each is 2 MiB larger than the
#: one before, so that no block in the cache can hold it. memprof/tiny derives nothing.
DERIVE = """
updates = 0

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def derive(original, *args, **kwargs):
        import torch
        global updates
        result = original(*args, **kwargs)
        scratch = torch.empty(({base} + 2 * updates) << 20, dtype=torch.uint8, device="npu")
        del scratch
        updates += 1
        return result

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater"
        ".WeightUpdater.update_weights_from_disk", derive, HookType.AROUND)
"""

#: Readings of free memory that leave the cache alone.
READ_ONLY = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def leave_alone(original, *args, **kwargs):
        return False

    HookRegistry.register(
        "sglang.srt.utils.common.empty_device_cache", leave_alone, HookType.AROUND)
"""


@pytest.fixture(autouse=True)
def stack() -> str:
    return require_stack(STACK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """memprof/tiny with random weights in its folder: an update from disk takes nothing else."""
    folder = tmp_path_factory.mktemp("checkpoint")
    runtime = prepare_runtime("910b", require_stack(STACK))
    model = folder / "model"
    shutil.copytree(resolve_model("memprof/tiny", []).path, model)
    (folder / "write.py").write_text(ON_CPU)
    job = json.dumps({"prompts": [], "new_tokens": 0})
    run_in_engine(
        runtime, folder / "write.py", str(model), "bfloat16", job, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    return str(model)


class Server:
    """A server of the model that is asked things, and the run once it has ended."""

    def __init__(self, model: str, run_dir: Path, env: dict[str, str]) -> None:
        self.model, self.port, self._dir = model, free_port(), run_dir
        self.run: RunResult | None = None
        args = ["serve", model, *ARGS, "--max-running-requests", "16", "--disable-cuda-graph"]
        args += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._process = start_memprof(args, run_dir, env={**os.environ, **env})
        wait_for_server(self._process, run_dir, 200)

    def ask(self, path: str, **body: Any) -> float:
        """Post; return the seconds until the answer, which must be a success."""
        began = time.monotonic()
        status, answer = post(self.port, path, body)
        assert status == 200, answer
        return time.monotonic() - began

    def update(self, **body: Any) -> float:
        return self.ask("/update_weights_from_disk", model_path=self.model, **body)

    def requests(self, count: int) -> None:
        answers = Streams(self.port, CLIENTS, 8, limit=count).start().wait()
        assert (answers.requests, answers.failures) == (count, [])

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self.run = finish(self._process, self._dir, 90)


@contextmanager
def serve(model: str, run_dir: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(model, run_dir, env or {})
    try:
        yield server
    finally:
        server.end()


def rank_of(server: Server) -> dict[str, Any]:
    assert server.run is not None
    assert server.run.info["status"] == "ok", server.run.engine_log[-3000:]
    [rank] = server.run.report["ranks"]
    return dict(rank)


def findings(server: Server) -> dict[str, dict[str, Any]]:
    assert server.run is not None
    return {finding["id"]: finding for finding in server.run.report["findings"]}


# --- pauses in place --------------------------------------------------------------------------------


def cycle(server: Server, emptied: bool) -> None:
    """Pause in place, update, continue; an update that flushes is refused while requests run."""
    server.ask("/pause_generation", mode="in_place")
    server.update(flush_cache=False)
    server.ask("/continue_generation", torch_empty_cache=emptied)


def run_cycles(
    checkpoint: str, tmp_path: Path, emptied: bool, base_mib: int | None
) -> tuple[Server, dict[str, Any]]:
    env = {}
    if base_mib is not None:
        source = DERIVE.replace("{base}", str(base_mib))
        env = plant(tmp_path / "plugin", source, "sglang.srt.plugins")
    with serve(checkpoint, tmp_path / "run", env) as server:
        load = Streams(server.port, CLIENTS, 64).start()
        for _ in range(CYCLES):
            cycle(server, emptied)
            time.sleep(0.05)
        answers = load.stop()
        assert answers.failures == []
    rank = rank_of(server)
    cycles = rank["cycles"]
    assert [each["kind"] for each in cycles] == ["pause"] * CYCLES
    reserved = [each["reserved_bytes"] / MIB for each in cycles]
    freed = [call for call in rank["empty_cache"] if call["phase"] == "continue"]
    print(
        f"\nemptied={emptied} scratch={base_mib} MiB: reserved {reserved}; free at the end "
        f"{cycles[-1]['free_bytes'] / MIB:.0f} MiB; calls {len(freed)}, "
        f"{sum(call['seconds'] for call in freed) * 1000:.2f} ms, freed "
        f"{[round(call['freed_bytes'] / MIB, 1) for call in freed]}; longest gap "
        f"{max(answers.gaps_s):.3f} s"
    )
    return server, rank


def test_pauses_leave_what_each_update_took_where_nothing_empties(
    checkpoint: str, tmp_path: Path
) -> None:
    server, rank = run_cycles(checkpoint, tmp_path, False, 256)
    assert [call for call in rank["empty_cache"] if call["phase"] == "continue"] == []
    growth = [each["cached_residue_bytes"] / MIB for each in rank["cycles"]][1:]
    for number, size in enumerate(growth, start=1):
        assert abs(size - (256 + 2 * number)) < 24, "a scratch each time, less or more of a segment"
    finding = findings(server)["reserved-grows-without-empty-cache"]
    assert "no empty_cache in between" in finding["evidence"]
    assert "torch_empty_cache of /continue_generation" in finding["action"]
    left = rank["cycles"][-1]["free_bytes"] // MIB
    assert f"full after {left // sorted(growth)[len(growth) // 2]:.0f} more" in finding["evidence"]


def test_pauses_that_empty_the_cache_leave_nothing(checkpoint: str, tmp_path: Path) -> None:
    server, rank = run_cycles(checkpoint, tmp_path, True, 256)
    calls = [call for call in rank["empty_cache"] if call["phase"] == "continue"]
    assert len(calls) == CYCLES
    assert all(call["freed_cached_bytes"] >= 256 * MIB for call in calls)
    assert not any(call["while_serving"] for call in calls), "nothing runs while it is paused"
    reserved = [each["reserved_bytes"] for each in rank["cycles"]]
    assert max(reserved) - min(reserved[1:]) < 32 * MIB
    assert not CYCLE_FINDINGS & findings(server).keys()


# --- weight updates under load ----------------------------------------------------------------------


def test_weight_updates_under_load(checkpoint: str, tmp_path: Path) -> None:
    """Updates with and without ``torch_empty_cache``: the server waits for the requests that run;
    then the same with a pause that puts them back into the queue. Fifty requests after each.
    """
    order = [False, True] * 2
    asked: list[tuple[str, bool, float, float, float]] = []
    with serve(checkpoint, tmp_path / "run") as server:
        for paused in (False, True):
            for emptied in order:
                load = Streams(server.port, CLIENTS, 48).start()
                time.sleep(1)
                if paused:
                    server.ask("/pause_generation", mode="retract")
                seconds = server.update(torch_empty_cache=emptied)
                if paused:
                    server.ask("/continue_generation", torch_empty_cache=False)
                answers = load.stop()
                assert answers.failures == []
                stall = max(answers.gaps_s)
                name = "paused" if paused else "waits"
                asked.append((name, emptied, seconds, stall, max(answers.first_s)))
                server.requests(50)
        server.ask("/pause_generation", mode="in_place")
    rank = rank_of(server)
    phases = rank["phases"]
    updates = [phase for phase in phases if phase["phase"] == "weight_update"]
    assert [phase["detail"]["torch_empty_cache"] for phase in updates] == order * 2
    assert all(phase["detail"]["success"] for phase in updates)
    for number, (update, row) in enumerate(zip(updates, asked, strict=True)):
        emptied = row[1]
        freed = {name: less(update, name) for name in CLASSES}
        later = updates[number + 1 :] or [phases[-1]]
        back = {name: later[0]["before"][name] - update["after"][name] for name in CLASSES}
        print(
            f"\n{row[0]} emptied={emptied}: call {row[2]:.3f} s, in the scheduler "
            f"{update['seconds'] * 1000:.1f} ms, freed MiB {in_mib(freed)}, back after 50 requests "
            f"{in_mib(back)}, longest gap {row[3]:.3f} s, longest first token {row[4]:.3f} s"
        )
        assert update["seconds"] < row[2]
        if not emptied:
            assert freed["reserved_bytes"] <= 0, "nothing is given back"
            continue
        assert freed["reserved_bytes"] >= 2 * MIB
        assert freed["npu_workspace_bytes"] > 0
        assert update["after"]["npu_workspace_bytes"] == 0
        # all of it is taken again, to the byte: the requests need what they needed before
        assert {name: back[name] for name in CLASSES} == freed
    calls = [call for call in rank["empty_cache"] if call["phase"] == "flush_cache"]
    assert len(calls) == 2 * order.count(True)
    assert {call["function"] for call in calls} == {"Scheduler.flush_cache"}
    # the server waited, or was paused: a call of empty_cache met no request that ran
    assert not any(call["while_serving"] for call in calls)
    assert "flush-frees-nothing" not in findings(server)


CLASSES = ("reserved_bytes", "npu_workspace_bytes", "non_torch_bytes")


def less(phase: dict[str, Any], name: str) -> int:
    return int(phase["before"][name]) - int(phase["after"][name])


def in_mib(sizes: dict[str, int]) -> dict[str, float]:
    return {name: round(size / MIB, 1) for name, size in sizes.items()}


# --- the flush --------------------------------------------------------------------------------------


#: The platform as it is in 0.5.14 to 0.5.18: the function that the flush calls does nothing.
EMPTY_FUNCTION = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def nothing(original, *args, **kwargs):
        return None

    HookRegistry.register(
        "sglang.srt.platforms.npu.NPUDeviceMixin.empty_cache", nothing, HookType.AROUND)
"""


@pytest.mark.parametrize("works", [True, False], ids=["as it is", "as before 0.5.20"])
def test_a_flush_frees_what_it_says_or_is_found(
    checkpoint: str, tmp_path: Path, works: bool
) -> None:
    env = {} if works else plant(tmp_path / "plugin", EMPTY_FUNCTION, "sglang.srt.plugins")
    with serve(checkpoint, tmp_path / "run", env) as server:
        server.requests(12)
        time.sleep(0.5)
        server.ask("/flush_cache")
    rank = rank_of(server)
    [flush] = [phase for phase in rank["phases"] if phase["phase"] == "flush_cache"]
    freed = {name: less(flush, name) for name in CLASSES}
    print(f"\nworks={works}: freed MiB {in_mib(freed)}")
    assert "Cache flushed successfully!" in server.run.engine_log
    finding = findings(server).get("flush-frees-nothing")
    if works:
        assert finding is None
        assert freed["npu_workspace_bytes"] > 0
        assert freed["reserved_bytes"] >= 2 * MIB
    else:
        assert set(freed.values()) == {0}
        after = flush["after"]
        cached = after["reserved_bytes"] - after["allocated_bytes"]
        assert finding["bytes"] == cached + after["npu_workspace_bytes"]


# --- readings that empty the cache ------------------------------------------------------------------


def readings(log: str) -> list[tuple[str, float]]:
    """Return the figures of free memory in a log, in GiB, in their order."""
    found = re.findall(r"(avail mem|available_gpu_mem)=([\d.]+)", log)
    return [(name, float(value)) for name, value in found]


def test_readings_of_free_memory_that_empty_the_cache(tmp_path: Path) -> None:
    """Beside a run in which the same readings leave the cache alone.

    In 0.5.23 they find nothing to free: the load of the weights and the capture of each graph call
    ``empty_cache`` themselves just before. Both runs print the same figures.
    """
    args = ["memprof/tiny", *ARGS, "--max-running-requests", "16"]
    args += ["--cuda-graph-max-bs-decode", "4", "--prompt", "one"]
    run = offline(tmp_path / "run", *args)
    assert run.returncode == 0, run.output[-3000:]
    env = plant(tmp_path / "plugin", READ_ONLY, "sglang.srt.plugins")
    process = start_memprof(["offline", *args], tmp_path / "other", env={**os.environ, **env})
    other = finish(process, tmp_path / "other")
    assert other.returncode == 0, other.output[-3000:]
    [rank], [without] = run.report["ranks"], other.report["ranks"]
    calls = [call for call in rank["empty_cache"] if is_reading(call)]
    for call in calls:
        print(
            f"\n{call['phase']} {call['site']} {call['function']}: {call['seconds'] * 1e3:.3f} ms, "
            f"cached {call['freed_cached_bytes']}, workspace {call['freed_npu_workspace_bytes']}, "
            f"other {call['freed_other_bytes']}"
        )
    print(f"\n{readings(run.engine_log)}\n{readings(other.engine_log)}")
    [finding] = [f for f in run.report["findings"] if f["id"] == "observation-empties-cache"]
    print(finding["evidence"])
    assert "sglang's reading of free memory, also for its log lines" in finding["evidence"]
    assert f"{len(calls)} calls" in finding["evidence"]
    assert finding["bytes"] == sum(call["freed_bytes"] for call in calls) == 0
    sites = {call["site"].partition(":")[0] for call in calls}
    assert sites == {
        "bootstrap.py", "model_runner.py", "kv_cache_configurator.py", "cuda_graph_setup.py",
    }  # fmt: skip
    assert len(readings(run.engine_log)) > 4
    assert readings(run.engine_log) == readings(other.engine_log)
    granted = [row["budget"]["engine_kv_cache_bytes"] for row in (rank, without)]
    assert granted[0] == granted[1]
    assert not [call for call in without["empty_cache"] if is_reading(call)]
    assert "observation-empties-cache" not in {f["id"] for f in other.report["findings"]}


def is_reading(call: dict[str, Any]) -> bool:
    return any(entry.endswith(":get_available_gpu_memory") for entry in call["chain"])
