"""A rank of a world in which no other rank runs: what peers would have said, and device groups that
need none."""

from __future__ import annotations

from tests.shim.conftest import Sim

MIB = 1 << 20

ALONE = """
import torch.distributed as dist
from vllm_memprof.engines.vllm.absent_peers import leave_peers_out, NoPeerError
leave_peers_out()
torch.npu.set_device(5)
dist.init_process_group("hccl", init_method="tcp://127.0.0.1:1", world_size=32, rank=21)

def reduced(values, **how):
    tensor = torch.tensor(values)
    dist.all_reduce(tensor, group=host, **how)
    return tensor.tolist()

def refused(call):
    try:
        call()
    except NoPeerError as error:
        return str(error)

host = dist.new_group([20, 21, 22], backend="gloo")
gathered = [None] * 3
dist.all_gather_object(gathered, {"rank": 21}, group=host)
flat = torch.empty(6, dtype=torch.int64)
dist.all_gather_into_tensor(flat, torch.tensor([1, 2]), group=host)
dist.barrier(group=host)
own = ["own"]
dist.broadcast_object_list(own, src=21, group=host)

def used():
    free, total = torch.npu.mem_get_info()
    return total - free

device = dist.new_group([20, 21, 22], backend="hccl")
tensor = torch.ones(4, device="npu")
before = used()
dist.all_reduce(tensor, group=device)
torch.npu.synchronize()
print("RESULT", json.dumps({
    "elsewhere": dist.new_group([0, 1], backend="gloo") == dist.GroupMember.NON_GROUP_MEMBER,
    "world": [dist.get_rank(), dist.get_world_size(), dist.get_rank(host),
              dist.get_process_group_ranks(host)],
    "minimum": reduced([7, 3], op=dist.ReduceOp.MIN),
    "sum": reduced([7, 3]),
    "sum of slots": reduced([[0, 9, 0], [0, 4, 0]]),
    "sum of a full row": reduced([1, 9, 0]),
    "sum of slots and a flag": reduced([0, 9, 0, 1]),
    "sum of slots, a flag, slots": reduced([0, 9, 0, 1, 0, 2, 0]),
    "sum with a full row": reduced([0, 9, 0, 1, 0, 2, 5]),
    "gathered": gathered,
    "flat": flat.tolist(),
    "own": own,
    "refused": refused(lambda: dist.broadcast_object_list([None], src=20, group=host)),
    "buffers": used() - before,
}))
"""


def test_a_rank_without_peers(sim: Sim, change_profile) -> None:
    change_profile(hccl_base_bytes=0)
    result = sim.run_torch(ALONE)
    assert result["world"] == [21, 32, 1, [20, 21, 22]]
    assert result["elsewhere"]
    assert result["minimum"] == [7, 3]
    assert result["sum"] == [21, 9]
    assert result["sum of slots"] == [[9, 9, 9], [4, 4, 4]]
    assert result["sum of a full row"] == [3, 27, 0]
    assert result["sum of slots and a flag"] == [9, 9, 9, 3]
    assert result["sum of slots, a flag, slots"] == [9, 9, 9, 3, 2, 2, 2]
    assert result["sum with a full row"] == [0, 27, 0, 3, 0, 6, 15]
    assert result["gathered"] == [{"rank": 21}] * 3
    assert result["flat"] == [1, 2] * 3
    assert result["own"] == ["own"]
    assert "rank 0 of its group would have sent it something" in result["refused"]
    assert "--ranks all" in result["refused"]
    assert result["buffers"] == 2 * 200 * MIB
