"""What the runtime and its libraries take outside torch's allocator, with the real torch_npu on
top, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shim.conftest import Sim

MIB = 1 << 20
CONTEXT = 375_809_638

#: Figures of one moment: torch's reserved and peak, the operator workspaces that torch's snapshot
#: lists besides, memory outside torch beyond the context, and the runtime's counters.
FIGURES = """
import acl
npu = torch.npu
def figures():
    npu.synchronize()
    free, total = npu.mem_get_info()
    reserved = npu.memory_reserved()
    listed = sum(segment["total_size"] for segment in npu.memory_snapshot())
    outside = total - free - reserved - 375_809_638
    usage = acl.usage()
    peak = npu.max_memory_allocated()
    return {"reserved": reserved, "peak": peak, "workspace": listed - reserved,
            "outside": outside, "app": usage["APP"][0], "runtime": usage["RUNTIME"][0] - 27_332_608}
"""

#: Two products, the first with the smaller left matrix, then the smaller again, then empty_cache.
PRODUCTS = (
    FIGURES
    + """
small = torch.zeros(1 << 10, 1 << 10, dtype=torch.float16, device="npu")       # 2 MiB
large = torch.zeros(4 << 10, 1 << 10, dtype=torch.float16, device="npu")       # 8 MiB
held = torch.zeros(1 << 10, 8, dtype=torch.float16, device="npu")
bias = torch.zeros(8, dtype=torch.float16, device="npu")
steps = [figures()]
for left in (small, large, small):
    npu.reset_peak_memory_stats()
    out = torch.addmm(bias, left, held)
    steps.append(figures())
    del out
npu.empty_cache()
steps.append(figures())
print("RESULT", json.dumps({"steps": steps}))
"""
)

#: Eight times the largest tensor, the left matrix: 16 MiB for the small one; 40 MiB, capped, for
#: the large one.
RULE = "Addmm 0 8.0 41943040"


def growth(steps: list[dict[str, int]], key: str) -> list[int]:
    return [later[key] - steps[0][key] for later in steps[1:]]


def test_workspace_of_the_caching_allocator(sim: Sim, change_profile: Callable[..., None]) -> None:
    """Level 1 of the task queue: a workspace is a tensor of torch's allocator while its operator is
    launched."""
    change_profile(workspace=RULE, kernels_bytes=0, operator_binary_bytes=0)
    steps = sim.run_torch(PRODUCTS, TASK_QUEUE_ENABLE="1")["steps"]
    assert growth(steps, "outside") == [0, 0, 0, 0]
    assert [step["workspace"] for step in steps] == [0] * 5
    base = steps[0]["peak"]
    out = {"small": 1024 * 8 * 2 + 512, "large": 4096 * 8 * 2 + 512}
    workspace = {
        "small": 16 * MIB + 512,
        "large": 40 * MIB + 512,
    }  # 32 bytes more, in blocks of 512
    assert [step["peak"] - base for step in steps[1:4]] == [
        out[name] + workspace[name] for name in ("small", "large", "small")
    ]
    assert growth(steps, "reserved")[:3] == [
        18 * MIB,
        60 * MIB,
        60 * MIB,
    ]  # segments of its own, in steps of 2 MiB; kept
    assert steps[4]["reserved"] < steps[3]["reserved"]
    for step in steps:
        assert step["app"] == step["reserved"]


def test_workspace_of_the_stream(sim: Sim, change_profile: Callable[..., None]) -> None:
    """Level 2: one block per stream outside torch's figures. It grows, and only empty_cache gives
    it back."""
    change_profile(workspace=RULE, kernels_bytes=0, operator_binary_bytes=0)
    steps = sim.run_torch(PRODUCTS, TASK_QUEUE_ENABLE="2")["steps"]
    held = [0, 18 * MIB, 42 * MIB, 42 * MIB, 0]  # with 32 bytes more, in steps of 2 MiB
    assert [step["workspace"] for step in steps] == held
    assert [step["outside"] for step in steps] == held
    assert growth(steps, "reserved")[:3] == [0, 0, 0]
    for step in steps:
        assert (
            step["app"] == step["reserved"] + step["workspace"]
        )  # the counter does not tell them apart


ATTENTION = (
    FIGURES
    + """
key = torch.zeros(64, 8, 128, dtype=torch.float16, device="npu")
lengths = torch.tensor([64], dtype=torch.int32)
out = torch.empty_like(key)
steps = [figures()]
def attend():
    torch_npu._npu_flash_attention_unpad(
        query=key, key=key, value=key, seq_len=lengths, scale_value=1.0, num_heads=8,
        num_kv_heads=8, out=out)
for _ in range(2):
    attend()
    steps.append(figures())
npu.empty_cache()
steps.append(figures())
attend()
steps.append(figures())
print("RESULT", json.dumps({"steps": steps}))
"""
)


@pytest.mark.parametrize(("blocks", "pool"), [("", 96 * MIB), ("64", 192 * MIB), ("7", 96 * MIB)])
def test_atb_takes_a_pool_and_a_workspace(
    sim: Sim, change_profile: Callable[..., None], blocks: str, pool: int
) -> None:
    """Pool at the first operation, by ATB's own variable (32 to 1024 blocks of 3 MiB); workspace
    always by stream."""
    change_profile(
        workspace="AtbSelfAttention 10485760 0 0", kernels_bytes=0, operator_binary_bytes=0
    )
    extra = {"ATB_DEVICE_TILING_BUFFER_BLOCK_NUM": blocks} if blocks else {}
    steps = sim.run_torch(ATTENTION, TASK_QUEUE_ENABLE="1", **extra)["steps"]
    assert [step["workspace"] for step in steps] == [0, 12 * MIB, 12 * MIB, 0, 12 * MIB]
    assert [step["outside"] for step in steps] == [
        0,
        pool + 12 * MIB,
        pool + 12 * MIB,
        pool,
        pool + 12 * MIB,
    ]
    for step in steps[1:]:
        assert (
            step["app"] == step["reserved"] + step["workspace"] + pool
        )  # a library's memory counts as the application's


def test_a_workspace_of_atb_may_grow_with_its_tensors(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    """The query of 64 tokens is 128 KiB; torch_npu asks for 32 bytes more, in pages of 2 MiB."""
    change_profile(workspace="AtbSelfAttention 0 64 0")
    steps = sim.run_torch(ATTENTION, TASK_QUEUE_ENABLE="1")["steps"]
    assert [step["workspace"] for step in steps] == [0, 10 * MIB, 10 * MIB, 0, 10 * MIB]


def test_kernels_are_loaded_by_the_first_operator_with_a_workspace(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    change_profile(workspace="Addmm 1048576 0 0", kernels_bytes=3 * MIB, operator_binary_bytes=0)
    steps = sim.run_torch(PRODUCTS, TASK_QUEUE_ENABLE="1")["steps"]
    assert [step["runtime"] for step in steps] == [
        0,
        4 * MIB,
        4 * MIB,
        4 * MIB,
        4 * MIB,
    ]  # in pages of 2 MiB
    assert [step["outside"] for step in steps] == [0, 4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]


BINARIES = (
    FIGURES
    + """
x = torch.ones(8, device="npu")
steps = [figures()]
for step in (torch.add, torch.add, torch.mul, torch.add):
    step(x, x)
    steps.append(figures())
npu.empty_cache()
steps.append(figures())
print("RESULT", json.dumps({"steps": steps}))
"""
)


def test_an_operator_takes_its_binary_at_its_first_launch(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    """All of them together in pages of 2 MiB, which empty_cache does not give back."""
    change_profile(operator_binary_bytes=3 * MIB)
    steps = sim.run_torch(BINARIES)["steps"]
    ones = 4 * MIB  # aclnnInplaceOne
    held = [ones, *[6 * MIB] * 2, *[10 * MIB] * 3]
    assert [step["runtime"] for step in steps] == held
    assert [step["outside"] for step in steps] == held


GROUPS = """
import os, acl, torch.distributed as dist
rank = int(os.environ["RANK"])
npu = torch.npu
npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.ones(8, device="npu")
def hccl():
    npu.synchronize()
    return acl.usage(rank).get("HCCL", (0, 0))[0]
options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
options.hccl_config = {"hccl_buffer_size": 50}
configured = dist.new_group([0, 1], pg_options=options)
steps = {"created": hccl()}
dist.all_reduce(x)
steps["world"] = hccl()
dist.all_reduce(x, group=configured)
steps["configured"] = hccl()
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x, 0)
steps["point to point"] = hccl()
y, other = torch.empty_like(x), 1 - rank
for sent in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
    sent.wait()
steps["sent together"] = hccl()
print("RESULT", json.dumps({"steps": steps}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("mode", "each"), [("HOST", 6), ("AIV", 6 + 40)])
def test_hccl_takes_a_base_with_the_first_collective_of_each_communicator(
    sim: Sim, change_profile: Callable[..., None], mode: str, each: int
) -> None:
    change_profile(hccl_base_bytes=6 * MIB)
    for result in sim.run_ranks(GROUPS, HCCL_OP_EXPANSION_MODE=mode):
        steps = result["steps"]
        assert list(steps.values())[1:] == [
            (400 + each) * MIB,
            (500 + each + each) * MIB,
            (540 + each + each) * MIB,  # a transfer's communicator has buffers alone
            (540 + each + each) * MIB,  # those that are sent together are the group's own
        ]


@pytest.mark.parametrize(
    ("extra", "world", "point_to_point"),
    [
        ({}, 200, 20),
        ({"HCCL_BUFFSIZE": "400"}, 400, 20),
        ({"P2P_HCCL_BUFFSIZE": "64"}, 200, 64),
        ({"P2P_HCCL_BUFFSIZE": "0"}, 200, 0),  # then transfers use the group's own communicator
    ],
    ids=["defaults", "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "no communicators of their own"],
)
def test_buffers_of_communicators(
    sim: Sim,
    change_profile: Callable[..., None],
    extra: dict[str, str],
    world: int,
    point_to_point: int,
) -> None:
    change_profile(hccl_base_bytes=0)
    for result in sim.run_ranks(GROUPS, **extra):
        steps = result["steps"]
        sizes = [0, world, world + 50, *[world + 50 + point_to_point] * 2]
        assert list(steps.values()) == [2 * size * MIB for size in sizes], steps
