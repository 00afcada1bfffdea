"""Rows below every engine: the allocator's own functions, and the collectives of torch.

Data; no engine module is imported.
"""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture import communicators, empty_cache
from vllm_memprof.capture.actions import fold_peak
from vllm_memprof.capture.hook import OPTIONAL, Hook
from vllm_memprof.capture.hooks.rows import CUDA, NPU, marker, phase

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
EMPTY_CACHE: tuple[Hook, ...] = (
    phase("leaf.empty_cache", "empty_cache", "torch_npu._C:_npu_emptyCache",
          enter=empty_cache.enter, leave=empty_cache.leave,
          backends=NPU, after="torch_npu", least_calls=1, engine=None, versions=""),
    phase("cuda.leaf.empty_cache", "empty_cache",
          "torch._C:_cuda_emptyCache", "torch._C:_accelerator_emptyCache",
          enter=empty_cache.enter, leave=empty_cache.leave,
          backends=CUDA, after="torch", engine=None, versions=""),
)


def shared_rows(
    engine: str, until: str, prefix: str = "", need: str = OPTIONAL, least_resets: int = 0
) -> tuple[Hook, ...]:
    """Return the rows of empty_cache, of resets of the peaks, and of first collectives.

    Args:
        engine: whose rows they are.
        until: moment at which those of collectives come off: until then each costs some
            microseconds.
        prefix: of their ids.
        need: of the resets.
        least_resets: that an NPU has seen when the model is ready.
    """
    reset: dict[str, Any] = {
        "enter": fold_peak, "need": need, "engine": engine, "versions": "",
    }
    collective: dict[str, Any] = {
        "enter": communicators.enter, "leave": communicators.leave, "need": OPTIONAL,
        "until": until, "engine": engine, "versions": "",
    }
    return (
        *EMPTY_CACHE,
        marker(f"{prefix}leaf.reset_peak", "torch_npu._C:_npu_resetPeakMemoryStats",
               backends=NPU, after="torch_npu", least_calls=least_resets, **reset),
        marker(f"{prefix}cuda.leaf.reset_peak",
               "torch._C:_cuda_resetPeakMemoryStats", "torch._C:_accelerator_resetPeakStats",
               backends=CUDA, after="torch", **reset),
        phase(f"{prefix}pg.collective", "communicator",
              *(f"torch.distributed:ProcessGroup.{name}" for name in COLLECTIVES),
              after="torch.distributed", **collective),
        # torch_npu sends batched point-to-point operations straight to the backend
        phase(f"{prefix}pg.batch_p2p", "communicator",
              "torch_npu._C._distributed_c10d:ProcessGroupHCCL.batch_isend_irecv",
              backends=NPU, after="torch_npu", **collective),
    )
# fmt: on
