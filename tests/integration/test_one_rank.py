"""One rank of N, run alone, has the figures that it has among the others: to the byte, in every row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import OLD_STACK, STACK, RunResult, finish, require_stack, start_memprof
from vllm_memprof.sim.profiles import PROFILES_DIR

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

ARGS = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.5"]
#: Not of the device: clocks, processes and what the host holds for them.
NOT_COMPARED = {
    "pid",
    "ppid",
    "roles",
    "host",
    "seconds",
    "t_ns",
    "start_t_ns",
    "end_t_ns",
    "host_memory",
    "host_rss_bytes",
    "host_shared_bytes",
    "other_processes",
    "non_torch_read_after_seconds",
    "chain",  # callers of empty_cache: an executor in this process, or a worker of its own
}
TINY, EXPERTS = "memprof/tiny", "memprof/tiny-moe"
EP = "--enable-expert-parallel"
#: Name of a case -> model, arguments, what is run of it, as options. With graphs where the name
#: says so.
CASES = {
    "tp2": (TINY, ["--tensor-parallel-size=2"], ["--rank=0"]),
    # a rank alone goes into the graph with copies of its layers, ranks among others do not
    "tp2-graphs": (
        "Qwen/Qwen3-0.6B",
        ["--tensor-parallel-size=2", '--hf-overrides={"num_hidden_layers": 8}'],
        ["--rank=0"],
    ),
    "tp2-other": (TINY, ["--tensor-parallel-size=2"], ["--rank=1"]),
    "tp2-ep": (EXPERTS, ["--tensor-parallel-size=2", EP], ["--rank=1"]),
    "tp4": (TINY, ["--tensor-parallel-size=4"], ["--rank=3"]),
    "tp4-dcp2": (
        EXPERTS,
        ["--tensor-parallel-size=4", "--decode-context-parallel-size=2", EP],
        ["--rank=2"],
    ),
    "pcp2": (TINY, ["--prefill-context-parallel-size=2"], ["--rank=1"]),
    "pp2": (TINY, ["--pipeline-parallel-size=2"], ["--ranks=edges"]),
    "pp2-tp2": (
        TINY,
        ["--pipeline-parallel-size=2", "--tensor-parallel-size=2"],
        ["--ranks=edges"],
    ),
    "dp2": (TINY, ["--data-parallel-size=2"], ["--rank=1"]),
    "dp2-of-0.13": (EXPERTS, ["--data-parallel-size=2", EP, f"--stack={OLD_STACK}"], ["--rank=0"]),
    "tp2-ep-of-0.30-graphs": (
        "Qwen/Qwen1.5-MoE-A2.7B",
        ["--tensor-parallel-size=2", EP, "--stack=vllm-ascend-0.30.0rc2"],
        ["--rank=0"],
    ),
    "dp2-tp2-ep": (
        EXPERTS,
        ["--data-parallel-size=2", "--tensor-parallel-size=2", EP],
        ["--ranks=edges"],
    ),
}
#: Shown by CI; the others come through the same code.
DEFAULT = ["tp2-ep", "tp2-graphs"]


class Plans:
    """Runs of this module, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # without binaries of operators: what is loaded while a communicator's memory is awaited is
        # in the growth that is read then
        text = (PROFILES_DIR / "ascend910b.toml").read_text()
        device = folder / "device.toml"
        device.write_text(
            re.sub(r"(?m)^operator_binary_bytes = \w+", "operator_binary_bytes = 0", text)
        )
        self._device = f"sim:{device}"
        self._made: dict[tuple[str, ...], RunResult] = {}

    def __call__(self, model: str, *args: str) -> RunResult:
        key = (model, *args)
        if key not in self._made:
            run_dir = self._folder / f"run{len(self._made)}"
            result = finish(
                start_memprof(["plan", model, "--device", self._device, *ARGS, *args], run_dir),
                run_dir,
            )
            assert result.returncode == 0, result.output + result.engine_log[-3000:]
            self._made[key] = result
        return self._made[key]


@pytest.fixture(scope="module")
def plan(sim_stack, tmp_path_factory) -> Plans:
    return Plans(tmp_path_factory.mktemp("plans"))


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(entry, names) for key, entry in value.items() if key not in names}
    return [without(entry, names) for entry in value] if isinstance(value, list) else value


def rows(result: RunResult) -> dict[str, Any]:
    """What a report says of each rank, by its label."""
    ranks = [without(rank, NOT_COMPARED) for rank in result.report["ranks"]]
    for rank in ranks:  # vLLM prints its plan for the first rank of a machine, which may not run;
        kv = rank["kv"]
        del kv["poorest"]  # nor has a rank its label that does not
        kv["checks"] = [check for check in kv["checks"] if "engine printed" not in check["name"]]
    return {rank["label"]: rank for rank in ranks}


def number_of_figures(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(number_of_figures, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, int) and not isinstance(value, bool))


def assert_alone_as_among_all(plan: Plans, case: str) -> None:
    model, args, what = CASES[case]
    args = args if case.endswith("-graphs") else [*args, "--enforce-eager"]
    everyone = rows(plan(model, *args, "--ranks=all"))
    result = plan(model, *args, *what)
    alone = rows(result)
    for label, rank in alone.items():
        assert number_of_figures(rank) > 400
        assert rank == everyone[label]
    ranks = result.info["ranks"]
    assert [list(everyone)[rank] for rank in ranks["run"]] == list(alone)
    others = [other for alike in ranks["alike"].values() for other in alike]
    assert sorted([*ranks["run"], *others, *ranks["not_run"]]) == list(range(len(everyone)))


@pytest.mark.parametrize("case", DEFAULT)
def test_a_rank_alone_is_as_among_all(plan, case):
    assert_alone_as_among_all(plan, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case not in DEFAULT])
def test_a_rank_alone_is_as_among_all_in_other_worlds(plan, case):
    assert_alone_as_among_all(plan, case)


@pytest.mark.parametrize("stack", [STACK, OLD_STACK])
def test_replicas_of_more_ranks_than_a_machine_has_devices(plan, stack):
    """Two replicas of 16 ranks, on machines of eight devices; the rank belongs to the second.

    Each was refused: the engine counts devices where it has data parallelism, and 0.13.0 compares
    its swap space, 64 GiB, with the memory of this machine, and gets the replicas' token counts in
    a form of its own.
    """
    config = '{"num_attention_heads": 16, "num_experts": 64}'
    sizes = ["--data-parallel-size=2", "--tensor-parallel-size=16", EP, "--hf-overrides", config]
    args = ["--enforce-eager", "--stack", require_stack(stack), "--rank=17"]
    result = plan(EXPERTS, *sizes, *args)
    [rank] = result.report["ranks"]
    assert rank["budget"]["residual_bytes"] == 0
    assert result.info["ranks"]["world_size"] == 32
    fuller = [0, 8, 16, 24] if stack == OLD_STACK else []  # the first devices of machines
    assert result.info["ranks"]["not_run"] == fuller


@pytest.mark.full
def test_a_rank_where_all_leave_a_context_is_like_no_other(plan):
    """Every worker of this release leaves a context on the first device: rank 0 has less, and decides.

    Readings of that device depend on what its peers do just then; the budget does not.
    """
    args = ["--tensor-parallel-size=2", "--enforce-eager", "--stack", require_stack(OLD_STACK)]
    everyone = rows(plan(TINY, *args, "--ranks=all"))
    first, other = plan(TINY, *args, "--rank=0"), plan(TINY, *args, "--rank=1")
    for label, alone in (("TP0", first), ("TP1", other)):
        granted = alone.report["ranks"][0]["budget"]["engine_kv_cache_bytes"]
        assert granted == everyone[label]["budget"]["engine_kv_cache_bytes"]
    assert rows(first)["TP0"]["kv"] == everyone["TP0"]["kv"]  # of the rank with the least
    assert first.info["ranks"]["alike"] == {"0": [1]}
    assert (other.info["ranks"]["alike"], other.info["ranks"]["not_run"]) == ({}, [0])
    said = " ".join(other.output.split())  # at this width a line ends within it
    assert "1 of 2 ranks differ and were not run" in said
