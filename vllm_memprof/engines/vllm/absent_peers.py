"""Answers in place of the other ranks, for a rank that runs without them.

``join_alone`` makes one process the rank K of a world of N ranks of which no other runs. Device
groups are the real ones of the engine's backend (HCCL on the simulated device needs no peer, and
takes its buffers as ever). Their rendezvous, and the groups on the host, are answered here, on the
assumption that every peer holds what this rank holds:

* a key that a peer would have set in the store: the root of a communicator, which the simulated
HCCL does not read;
* a reduction: minimum and maximum of equal values are the value; a sum is N times it, or, for a
  tensor with one slot per rank of which this rank has filled its own, the value in every slot;
* a gathered object: a copy of this rank's for every peer;
* the queues over which rank 0 of a group sends to the others: nothing is sent before the first
request.

What only another rank can know, the content of a broadcast, is not made up: such a call raises
NoPeerError with the place that made it. Imports torch and vLLM: for the plan driver alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "memprof_alone"
#: Bytes of HcclRootInfo (hccl/hccl_types.h: HCCL_ROOT_INFO_BYTES), which torch_npu reads from the
#: store.
_ROOT_INFO_BYTES = 4108


class NoPeerError(RuntimeError):
    """A collective whose result only a rank that does not run could give."""

    def __init__(self, what: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
            ("torch.", __name__)
        ):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        super().__init__(
            f"one rank is planned alone, and {what}, at {where}; --ranks all runs every rank"
        )


class LoneStore(dist.Store):  # type: ignore[misc]
    """A store in which every peer has already done its part."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(_ROOT_INFO_BYTES))

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= {*keys}

    def wait(self, *_: Any, **__: Any) -> None:
        return None

    set_timeout = wait


class _Done(dist._Work):  # type: ignore[misc]
    """Work that is over."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class LoneGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A group on the host whose other ranks hold what this one holds."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own, self._count = rank, size

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        kind = getattr(opts, "reduceOp", None)
        if kind is None or kind == dist.ReduceOp.SUM:
            for tensor in tensors:
                add_up(tensor, self._own, self._count)
        return _Done(tensors)

    reduce = allreduce

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        for copies, own in zip(outputs, inputs, strict=False):  # who gathers nothing has no outputs
            for copy in copies:
                copy.copy_(own)
        return _Done(outputs)

    gather = allgather

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        output.copy_(own.reshape(-1).repeat(self._count).reshape(output.shape))
        return _Done(output)

    def barrier(self, *_: Any, **__: Any) -> Any:
        return _Done()

    send = barrier

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Any:
        root = getattr(opts, "rootRank", 0)
        return _Done(tensors) if root == self._own else self.recv(tensors, root)

    def recv(self, tensors: list[Any], sender: int, tag: int = 0) -> Any:
        raise NoPeerError(f"rank {sender} of its group would have sent it something")


class LoneQueue:
    """The message queue of a group whose other ranks do not run."""

    def enqueue(self, *_: Any, **__: Any) -> None:
        return None

    wait_until_ready = shutdown = enqueue

    def dequeue(self, *_: Any, **__: Any) -> Any:
        raise NoPeerError("rank 0 of its group would have sent it a message")

    def broadcast_object(self, item: Any = None) -> Any:
        return self.dequeue() if item is None else item


def add_up(tensor: Any, own: int, count: int) -> None:
    """Add up over ranks, in place.

    Over slots, one per rank, of which this rank has filled its own; else N times the value.

    Slots are what the engine sums where every rank reports about itself: the token counts of
    data-parallel ranks, and which ranks share a machine. Along the last dimension stand the slots
    alone (vllm-ascend 0.23.0, ``NPUModelRunner._sync_metadata_across_dp``), slots and a flag
    (0.18.0), or slots, a flag, and slots again (0.13.0).
    """
    for layout in (count,), (count, 1), (count, 1, count):
        if not tensor.dim() or sum(layout) != tensor.shape[-1]:
            continue
        parts = tensor.split(layout, dim=-1)
        slots = [part for part in parts if part.shape[-1] == count]
        if all(part.count_nonzero() == part[..., own].count_nonzero() for part in slots):
            for part in parts:
                if part.shape[-1] == count:
                    part.copy_(part[..., own : own + 1].expand(part.shape).clone())
                else:
                    part.mul_(count)
            return
    tensor.mul_(count)


def join_alone() -> None:
    """From now on, the distributed environment of this process starts without peers.

    Nothing installed is edited.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast

    leave_peers_out()
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * int(group.size())
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(
        lambda *_, **__: LoneQueue()
    )


def leave_peers_out() -> None:
    """Set up torch's part of ``join_alone``: the store of the world, and groups on the host."""
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: LoneGroup(rank, size), devices=["cpu"]
    )
    init_process_group, new_group = dist.init_process_group, dist.new_group
    store = LoneStore()

    def init_alone(*args: Any, **kwargs: Any) -> Any:
        for rendezvous in ("init_method", "store"):  # vllm 0.30 makes the store itself
            kwargs.pop(rendezvous, None)
        return init_process_group(*args, **kwargs, store=dist.PrefixStore("default_pg", store))

    def new_group_alone(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = BACKEND
        return new_group(*args, **kwargs)

    dist.init_process_group, dist.new_group = init_alone, new_group_alone
