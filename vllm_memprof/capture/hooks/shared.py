"""Rows below every engine: the allocator's own empty_cache, and the collectives of torch.

Data; no engine module is imported.
"""

from __future__ import annotations

from vllm_memprof.capture import communicators, empty_cache
from vllm_memprof.capture.hook import OPTIONAL, Hook
from vllm_memprof.capture.hooks.rows import CUDA, NPU, phase

#: Collectives of a process group, below torch.distributed's functions: by-name imports, functional
#: wrappers and compiled regions all arrive here, and replacing these does not change what the
#: compiler sees.
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)

# fmt: off
#: Whatever name an engine calls it under (torch.npu, torch.cuda through transfer_to_npu): it is
#: this function that the call ends in.
EMPTY_CACHE_NPU: tuple[Hook, ...] = (
    phase("leaf.empty_cache", "empty_cache", "torch_npu._C:_npu_emptyCache",
          enter=empty_cache.enter, leave=empty_cache.leave,
          backends=NPU, after="torch_npu", least_calls=1, engine=None, versions=""),
)
EMPTY_CACHE_CUDA: tuple[Hook, ...] = (
    phase("cuda.leaf.empty_cache", "empty_cache",
          "torch._C:_cuda_emptyCache", "torch._C:_accelerator_emptyCache",
          enter=empty_cache.enter, leave=empty_cache.leave,
          backends=CUDA, after="torch", engine=None, versions=""),
)
# fmt: on


def first_collectives(engine: str, prefix: str, until: str) -> tuple[Hook, Hook]:
    """Return the rows of the first collective of each device group.

    Args:
        engine: whose rows they are.
        prefix: of their ids.
        until: moment at which they come off: until then each collective costs some microseconds.
    """
    return (
        phase(
            f"{prefix}.collective",
            "communicator",
            *(f"torch.distributed:ProcessGroup.{name}" for name in COLLECTIVES),
            enter=communicators.enter,
            leave=communicators.leave,
            need=OPTIONAL,
            after="torch.distributed",
            until=until,
            engine=engine,
            versions="",
        ),
        # torch_npu sends batched point-to-point operations straight to the backend.
        phase(
            f"{prefix}.batch_p2p",
            "communicator",
            "torch_npu._C._distributed_c10d:ProcessGroupHCCL.batch_isend_irecv",
            enter=communicators.enter,
            leave=communicators.leave,
            need=OPTIONAL,
            backends=NPU,
            after="torch_npu",
            until=until,
            engine=engine,
            versions="",
        ),
    )
