"""What a plan takes from the engine's configuration and from its machine."""

from __future__ import annotations

import multiprocessing
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.host_files import write_host
from vllm_memprof.engines.vllm import kv_plan_run
from vllm_memprof.engines.vllm.kv_plan_run import (
    become_replica,
    free_host_bytes,
    world_of,
)
from vllm_memprof.engines.vllm.rank_choice import World
from vllm_memprof.record.host import read_limits

MIB = 1 << 20


def config(experts=0, text=None, **parallel):
    sizes = {
        f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context")
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | parallel),
        model_config=SimpleNamespace(get_num_experts=lambda: experts, hf_text_config=text),
    )


def test_the_sizes_of_a_run():
    found = world_of(
        config(tensor_parallel_size=8, data_parallel_size=4, prefill_context_parallel_size=2)
    )
    assert found == World(tensor=8, data=4, prefill_context=2)
    assert found.size == 64


@pytest.mark.parametrize(
    ("experts", "asked", "found"), [(128, True, 128), (128, False, None), (0, True, None)]
)
def test_experts_count_where_they_are_shared_out(experts, asked, found):
    assert (
        world_of(config(experts, tensor_parallel_size=4, enable_expert_parallel=asked)).experts
        == found
    )


def test_a_size_for_each_layer_counts_as_the_largest():
    text = SimpleNamespace(hidden_size=8, moe_intermediate_size=[16, 32, 16], num_hidden_layers=3)
    settings = config(4, text, enable_expert_parallel=True)
    settings.model_config.dtype = SimpleNamespace(itemsize=2)
    assert world_of(settings).expert_bytes == 3 * 8 * 32 * 2


def test_experts_by_the_model_s_own_word():
    """Of a release whose ModelConfig does not count them."""
    given = config(enable_expert_parallel=True, text=SimpleNamespace(n_routed_experts=256))
    del given.model_config.get_num_experts
    assert world_of(given).experts == 256
    given.model_config.hf_text_config = SimpleNamespace(num_experts=None)
    assert world_of(given).experts is None


@pytest.mark.parametrize(
    ("limit", "free"),
    [("max", 900 * MIB), (str(700 * MIB), 500 * MIB), (str(4000 * MIB), 900 * MIB)],
)
def test_free_host_memory(tmp_path, monkeypatch, limit, free):
    write_host(tmp_path, {
        "proc/meminfo": f"MemTotal: {2000 * 1024} kB\nMemAvailable: {900 * 1024} kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/memory.current": f"{600 * MIB}",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {400 * MIB}",
    })  # fmt: skip
    monkeypatch.setattr(kv_plan_run, "read_limits", partial(read_limits, tmp_path))
    assert free_host_bytes() == free


def test_a_machine_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_plan_run, "read_limits", partial(read_limits, tmp_path))
    assert free_host_bytes() is None


@pytest.mark.parametrize(
    ("devices", "tensor", "index", "local"),
    [(None, 1, 5, 5), (8, 1, 5, 5), (8, 2, 5, 1), (8, 4, 5, 1), (8, 16, 5, 0)],
)
def test_a_replica_is_numbered_on_its_own_machine(devices, tensor, index, local, monkeypatch):
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_name", process.name)  # put back after the test
    world = World(tensor=tensor, data=16)
    given = config(experts=8, tensor_parallel_size=tensor, data_parallel_size=16)
    become_replica(given, world, index, devices)
    parallel = given.parallel_config
    assert (parallel.data_parallel_rank_local, parallel.data_parallel_rank) == (local, index)
