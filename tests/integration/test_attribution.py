"""Non-torch memory by owner on the real engine: the books close at every edge, and each owner moves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import RunResult, finish, read_events, start_memprof
from tests.support.planted import plant
from tests.unit.accounting.builders import device_memory, remainders_in
from vllm_memprof.record.schema import SAMPLES_DIR
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

TINY = ["memprof/tiny", "--max-model-len", "2048", "--gpu-memory-utilization", "0.4"]
EAGER = [*TINY, "--device", "sim:910b", "--enforce-eager"]
TWO_GRAPHS = ["--compilation-config", json.dumps({"cudagraph_capture_sizes": [1, 2]})]
BUFFERS = 2 * 200 * MIB
#: What HCCL takes beside the buffers, with a communicator's first collective: ``hccl_base_bytes`` of
#: the profile, in a page of 2 MiB.
HCCL_BASE = 2 * MIB

#: Appends a line per call of the runtime's function, in the process that makes it.
COUNT_CALLS = """
import os
from pathlib import Path

def register():
    from vllm_memprof.capture import owners

    def make(original):
        def loaded_library(*names):
            library = original(*names)
            function = getattr(library, "aclrtGetMemUsageInfo", None)
            if function is None:
                return library
            def counted(*args):
                with open(Path(__file__).parent / f"calls-{os.getpid()}", "a") as out:
                    out.write("1\\n")
                return function(*args)
            class Counting:
                aclrtGetMemUsageInfo = staticmethod(counted)
                def __getattr__(self, name):
                    return getattr(library, name)
            return Counting()
        return loaded_library

    wrap(owners, "loaded_library", make)
"""

#: A collective on torch's default group, which vllm-ascend gives no buffer size, inside the profile
#: run.
DEFAULT_GROUP = """
def register():
    def then(worker):
        from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

        def make(original):
            def profile_run(self, *args, **kwargs):
                import torch
                torch.distributed.all_reduce(torch.ones(8, device="npu"))
                return original(self, *args, **kwargs)
            return profile_run

        wrap(NPUModelRunner, "profile_run", make)
    when_worker_is_there(then)
"""

#: 96 MiB straight from ACL, after the profile run. (aclrtMalloc adds 32 bytes, then takes whole
#: pages.)
PAST_TORCH = """
def register():
    def then(worker):
        def make(original):
            def determine_available_memory(self):
                import ctypes
                granted = original(self)
                pointer = ctypes.c_void_p()
                acl = ctypes.CDLL("libascendcl.so")
                assert acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t((96 << 20) - 32), 0) == 0
                return granted
            return determine_available_memory

        wrap(worker, "determine_available_memory", make)
    when_worker_is_there(then)
"""


def run(folder: Path, name: str, command: str, *args: str, env: dict[str, str]) -> RunResult:
    result = finish(
        start_memprof([command, *args], folder / name, env={**os.environ, **env}), folder / name
    )
    assert result.returncode == 0, result.output[-3000:]
    return result


def device(report: dict[str, Any], rank: int = 0) -> list[dict[str, Any]]:
    memory: list[dict[str, Any]] = device_memory(report["ranks"][rank])
    return memory


def rows(memory: dict[str, Any]) -> dict[str, int | None]:
    found = {row["component"]: row["bytes"] for row in memory["owners"]}
    return {**found, **remainders_in(memory)}


def at(report: dict[str, Any], phase: str, edge: str, rank: int) -> dict[str, int | None]:
    return rows(next(m for m in device(report, rank) if (m["phase"], m["edge"]) == (phase, edge)))


def after(report: dict[str, Any], phase: str, rank: int = 0) -> dict[str, int | None]:
    return at(report, phase, "after", rank)


def findings(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["id"] == name]


@pytest.fixture(scope="module")
def two_ranks(sim_stack: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """TP=2 with graphs, on a profile whose operators ask for workspace; the runtime's function counted."""
    from vllm_memprof.sim.profiles import PROFILES_DIR

    folder = tmp_path_factory.mktemp("two_ranks")
    text = (PROFILES_DIR / "ascend910b.toml").read_text()
    profile = folder / "with_workspace.toml"
    profile.write_text(text.replace('name = "ascend910b"', 'name = "with_workspace"').replace(
        'aliases = ["910b", "a2"]', 'aliases = []') + f'"*" = {24 * MIB}\n')  # fmt: skip
    planted = plant(folder / "plugin", COUNT_CALLS)
    args = [*TINY, "--device", f"sim:{profile}", "--tensor-parallel-size", "2", *TWO_GRAPHS]
    return run(folder, "run", "offline", *args, env=planted), folder / "plugin"


def test_every_phase_has_every_owner_and_nothing_is_left_over(
    two_ranks: tuple[RunResult, Path],
) -> None:
    report = two_ranks[0].report
    owners = {"allocated", "reserved_not_allocated", "npu_workspace", "context", "communicator:tp", "atb", "graph", "runtime", "other",
              "other_processes", "free"}  # fmt: skip
    for rank in (0, 1):
        read = [
            memory for memory in device(report, rank) if memory["unexplained_bytes"] is not None
        ]
        assert {memory["phase"] for memory in read} >= {
            "device_init", "hccl_init", "weight_load", "profile_run", "communicator", "kv_cache_alloc", "warm_up",
            "graph_capture", "atb_warm_up", "empty_cache", "shutdown"}  # fmt: skip
        assert (
            len(device(report, rank)) - len(read) == 1
        )  # the edge before the worker has chosen its device
        total = report["ranks"][rank]["device_total_bytes"]
        for memory in read:
            found = rows(memory)
            inside_capture = (
                "npu_workspace_and_other" in found
            )  # the workspace is not read between captured graphs
            assert set(found) >= owners - ({"other"} if inside_capture else set()), memory["phase"]
            assert found["rest"] == 0, (memory["phase"], memory["edge"])
            assert (
                sum(size for name, size in found.items() if size and name != "free")
                == total - found["free"]
            )


def test_owners_are_what_the_device_s_profile_says(two_ranks: tuple[RunResult, Path]) -> None:
    report = two_ranks[0].report
    for rank in (0, 1):
        start, end = after(report, "hccl_init", rank), after(report, "warm_up", rank)
        assert start["context"] + start["runtime"] == 375_809_638
        assert start["communicator:tp"] == start["atb"] == start["graph"] == 0
        assert end["communicator:tp"] == BUFFERS
        assert end["atb"] == 96 * MIB
        # Some ten graphs of some ten tasks: a page of 2 MiB holds 50 KiB of each. One more for
        # operators that run first while graphs are captured.
        assert end["graph"] == 4 * MIB
        # The warm-up queues its last operators and returns; after a request their workspace is
        # there for certain.
        assert at(report, "shutdown", "before", rank)["npu_workspace"] >= 24 * MIB
        assert (end["other"], end["other_processes"], end["context"]) == (0, 0, start["context"])
        assert end["communicators_unnamed"] == HCCL_BASE
    assert not findings(report, "allocation-outside-torch")
    assert not findings(report, "co-tenant")
    assert not findings(report, "communicator-buffers")


def test_the_runtime_is_asked_at_phase_edges_and_never_between(
    two_ranks: tuple[RunResult, Path],
) -> None:
    result, plugin = two_ranks
    by_pid: dict[str, int] = {}
    read_later: set[tuple[str, int]] = (
        set()
    )  # an edge whose bytes came late is read twice; edges that waited, together
    for event in read_events(result.run_dir):
        snapshot = event.get("snapshot") or {}
        if snapshot.get("components") is not None:
            pid = event["file"].removesuffix(".jsonl").rsplit("-", 1)[1]
            by_pid[pid] = by_pid.get(pid, 0) + 1 + (snapshot["read_again"] or 0)
            if (
                waited_s := (event["detail"] or {}).get("non_torch_read_after_seconds")
            ) is not None:
                read_later.add((pid, snapshot["t_ns"] + round(waited_s * 1e9)))
    assert read_later
    for pid, _ in read_later:
        by_pid[pid] += 1
    # every two seconds while no step is under way
    for path in (result.run_dir / SAMPLES_DIR).glob("*/*.jsonl"):
        pid = path.parent.name.rsplit("-", 1)[1]
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        asked = [each for each in samples if any(name.startswith("runtime.") for name in each)]
        if asked:
            by_pid[pid] = by_pid.get(pid, 0) + len(asked)
    calls = {
        path.name.removeprefix("calls-"): len(path.read_text().splitlines())
        for path in plugin.glob("calls-*")
    }
    assert calls == by_pid
    assert len(calls) == 2  # the workers


def test_the_growth_of_a_phase_has_owners(two_ranks: tuple[RunResult, Path]) -> None:
    text = two_ranks[0].full
    growth = text[text.index("Growth by owner") :]
    assert " tp " in growth
    assert "+400.0" in growth


@pytest.fixture(scope="module")
def by_size(sim_stack: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The same plan with HCCL's default and with HCCL_BUFFSIZE=400, a communicator of torch's default group in use."""
    folder = tmp_path_factory.mktemp("by_size")
    planted = plant(folder / "plugin", DEFAULT_GROUP)
    args = [*EAGER, "--tensor-parallel-size", "2"]
    small = run(folder, "default", "plan", *args, env=planted)
    large = run(folder, "larger", "plan", *args, env={**planted, "HCCL_BUFFSIZE": "400"})
    return {200: small.report, 400: large.report}


@pytest.mark.full
def test_hccl_buffsize_moves_the_communicators_that_it_sizes_and_the_kv_cache(
    by_size: dict[int, dict[str, Any]],
) -> None:
    for rank in (0, 1):
        small, large = (after(by_size[size], "profile_run", rank) for size in (200, 400))
        moved = {name: large[name] - small[name] for name in small if large[name] != small[name]}
        assert moved == {"communicator:default_pg": BUFFERS, "free": -BUFFERS}
        granted = [
            by_size[size]["ranks"][rank]["budget"]["engine_kv_cache_bytes"] for size in (200, 400)
        ]
        assert granted[0] - granted[1] == BUFFERS
        # vllm-ascend gives its own groups 200 MiB each, whatever the environment says
        assert small["communicator:tp"] == large["communicator:tp"] == BUFFERS


@pytest.mark.full
def test_larger_buffers_are_a_finding(by_size: dict[int, dict[str, Any]]) -> None:
    assert not findings(by_size[200], "communicator-buffers")
    for finding in findings(by_size[400], "communicator-buffers"):
        assert finding["bytes"] == BUFFERS
        assert "HCCL_BUFFSIZE=200" in finding["action"]
    assert len(findings(by_size[400], "communicator-buffers")) == 2


def test_memory_past_torch_is_found_named_and_priced(sim_stack: str, tmp_path: Path) -> None:
    report = run(
        tmp_path, "run", "offline", *EAGER, env=plant(tmp_path / "plugin", PAST_TORCH)
    ).report

    [finding] = findings(report, "allocation-outside-torch")
    kv = report["ranks"][0]["kv"]
    assert finding["bytes"] == 96 * MIB
    assert finding["severity"] == "warning"
    assert "between profile_run and kv_cache_alloc" in finding["evidence"]
    assert finding["kv_tokens"] == 96 * MIB // kv["bytes_per_block"] * kv["block_size"]
    granted = report["ranks"][0]["budget"]["engine_kv_cache_bytes"]
    assert f"--kv-cache-memory-bytes {granted - 96 * MIB}" in finding["action"]
    end = after(report, "warm_up")
    assert (end["other"], end["atb"]) == (96 * MIB, 96 * MIB)
    assert after(report, "profile_run")["other"] == 0
