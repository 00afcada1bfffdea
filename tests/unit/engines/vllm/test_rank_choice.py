"""Which ranks of a plan are run, and which they stand for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_memprof.engines.driver import OptionError, Options
from vllm_memprof.engines.vllm.rank_choice import (
    EXPERTS,
    WORKER_HOST_BYTES,
    Choice,
    World,
    choose,
    layer_kinds,
)
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.schema import PlannedRanks

DENSE = "/dense"
FREE = 1 << 40


def pick(
    world: World,
    mode: str,
    rank: int | None = None,
    devices: int | None = 8,
    host: int | None = FREE,
    cores: int = 16,
) -> Choice:
    return choose(world, Options("m", ranks=mode, rank=rank, devices=devices), host, cores)


def test_auto_runs_every_rank_where_they_fit():
    choice = pick(World(tensor=8), "auto")
    assert (choice.mode, sorted(choice.alike), choice.not_run) == ("all", list(range(8)), [])
    assert [*choice.replicas.values()] == [{rank: [rank] for rank in range(8)}]


def test_auto_runs_one_rank_beyond_the_devices():
    choice = pick(World(tensor=16), "auto")
    assert (choice.mode, choice.why) == ("one", "16 ranks, and this machine has 8 devices")
    assert choice.alike == {0: list(range(1, 16))}
    assert choice.replicas[0] == {0: list(range(16))}


def test_auto_runs_one_rank_beyond_the_host_memory():
    assert pick(World(tensor=4), "auto", host=4 * WORKER_HOST_BYTES).mode == "all"
    choice = pick(World(tensor=4), "auto", host=4 * WORKER_HOST_BYTES - 1)
    assert choice.mode == "one"
    assert choice.why == "4 processes of about 1.2 GiB each, and 4.8 GiB of host memory are free"


def test_auto_runs_one_rank_where_all_would_wait_for_few_cores():
    assert pick(World(tensor=4), "auto", cores=2).mode == "all"
    choice = pick(World(tensor=8, data=2), "auto", devices=16, cores=2)
    assert (choice.mode, choice.why) == ("one", "16 processes, and this machine has 2 cores")
    assert pick(World(tensor=8, data=2), "all", devices=16, cores=2).mode == "all"


def test_on_hardware_every_rank_runs():
    assert pick(World(tensor=16), "auto", devices=None, host=None, cores=1).mode == "all"


def test_a_rank_is_picked_by_its_number_over_all_replicas():
    choice = pick(World(tensor=4, data=2, experts=8), "one", rank=5)
    assert choice.replicas == {1: {1: [0, 1, 2, 3]}}
    assert choice.alike == {5: [0, 1, 2, 3, 4, 6, 7]}


def test_one_rank_says_nothing_of_other_pipeline_stages():
    choice = pick(World(tensor=2, pipeline=2, stages=((DENSE,), (DENSE,))), "one")
    assert choice.alike == {0: [1]}
    assert choice.not_run == [2, 3]
    assert choice.replicas == {0: {0: [0, 1, 2, 3]}}


def test_edges_of_a_pipeline_are_its_ends_and_each_other_kind_of_stage():
    stages = ((DENSE,) * 7, (DENSE,) * 7, (DENSE,) * 8, (DENSE,) * 8, (DENSE,) * 7)
    choice = pick(World(tensor=2, pipeline=5, stages=stages), "edges")
    assert choice.alike == {0: [1], 2: [3], 4: [5, 6, 7], 8: [], 9: []}
    assert choice.not_run == []
    assert choice.replicas[0] == {0: [0, 1], 2: [2, 3], 4: [4, 5, 6, 7], 8: [8], 9: [9]}


def test_edges_of_tensor_parallel_ranks_are_the_first_and_the_last():
    assert pick(World(tensor=32), "edges").alike == {0: list(range(1, 31)), 31: []}


def test_experts_that_do_not_divide_make_ranks_differ():
    choice = pick(World(tensor=2, data=2, experts=10), "edges")  # 3, 3, 2, 2 experts
    assert choice.alike == {0: [], 1: [], 2: [], 3: []}
    assert [*choice.replicas] == [0, 1]
    alone = pick(World(tensor=2, data=2, experts=10), "one")
    assert (alone.alike, alone.not_run) == ({0: [1]}, [2, 3])


def test_replicas_that_are_alike_are_run_at_the_ends():
    choice = pick(World(tensor=2, data=4), "edges")
    assert [*choice.replicas] == [0, 3]
    assert choice.alike == {0: [2, 3, 4, 5], 1: [], 6: [], 7: []}


@pytest.mark.parametrize(("mode", "rank"), [("one", 4), ("one", -1), ("all", 0), ("edges", 0)])
def test_a_rank_that_the_run_does_not_have(mode, rank):
    with pytest.raises(OptionError, match=f"--rank {rank}"):
        pick(World(tensor=4), mode, rank)


def test_every_rank_is_accounted_for_once():
    for world in (
        World(4, 3, 2, 2, ((DENSE,), (DENSE,) * 2, (DENSE,)), 30),
        World(tensor=3, data=5, experts=17),
    ):
        for mode in ("one", "edges", "all"):
            choice = pick(world, mode)
            others = [rank for ranks in choice.alike.values() for rank in ranks]
            assert sorted([*choice.alike, *others, *choice.not_run]) == list(range(world.size))
            for stands_for in choice.replicas.values():
                answered = sorted(rank for ranks in stands_for.values() for rank in ranks)
                assert answered == list(range(world.replica_size))
            event = choice.to_event()
            assert to_json(from_json(PlannedRanks, event)) == to_json(event)


def test_a_rank_beside_a_crowd_is_like_no_rank_elsewhere():
    world = World(tensor=8, data=2)
    apart = pick(world, "one", rank=3, devices=4).with_fuller_devices(0, 4)
    assert (apart.alike[3], apart.not_run) == (
        [1, 2, 5, 6, 7, 9, 10, 11, 13, 14, 15],
        [0, 4, 8, 12],
    )
    crowded = pick(world, "one", rank=0, devices=4)
    assert crowded.with_fuller_devices(0, 4) == crowded  # what it grants, the others can


def test_ranks_that_hold_more_are_named_with_what_they_add():
    world = World(
        tensor=2, pipeline=2, stages=((DENSE,), (DENSE,) * 2), head_bytes=300, expert_bytes=7
    )
    event = pick(world, "one").to_event()
    last = [
        {"what": "lm_head", "count": None, "bytes": 300},
        {"what": "layers", "count": 1, "bytes": None},
    ]
    assert event["more"] == {2: last, 3: last}
    backwards = pick(world, "one", rank=3).to_event()["more"]
    first = [{"what": "token_embedding", "count": None, "bytes": 300}]
    assert backwards == {0: first, 1: first}
    # 3, 3, 2, 2 experts in each of three layers, two of which have some
    kinds = ((DENSE, EXPERTS, EXPERTS),)
    uneven = World(tensor=2, data=2, experts=10, stages=kinds, expert_bytes=7)
    fuller = [{"what": "experts", "count": 1, "bytes": 14}]
    assert pick(uneven, "one", rank=2).to_event()["more"] == {0: fuller, 1: fuller}
    assert pick(uneven, "one").to_event()["more"] == {}
    crowd = pick(World(tensor=4), "one", rank=1).with_fuller_devices(0, 8)
    contexts = {"what": "contexts", "count": 3, "bytes": None}
    assert crowd.to_event()["more"] == {0: [contexts]}


def test_kinds_of_layers():
    deepseek = SimpleNamespace(first_k_dense_replace=3, moe_layer_freq=1)
    assert layer_kinds(deepseek, 5) == ("/dense",) * 3 + ("/experts",) * 2
    hybrid = SimpleNamespace(full_attention_interval=4, mlp_only_layers=[], decoder_sparse_step=1)
    assert layer_kinds(hybrid, 4) == ("linear/experts",) * 3 + ("full/experts",)
    named = SimpleNamespace(layer_types=["sliding", "full"], decoder_sparse_step=2)
    assert layer_kinds(named, 2) == ("sliding/dense", "full/experts")
