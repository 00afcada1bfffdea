"""The hook table: the rows below every engine, those of each, and the rows in force for one."""

from __future__ import annotations

from importlib import import_module

from vllm_memprof.capture import communicators, empty_cache
from vllm_memprof.capture.actions import fold_peak
from vllm_memprof.capture.attributes import NAMES, Fields
from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.hooks.rows import CUDA, NPU, marker, phase
from vllm_memprof.capture.versions import in_range
from vllm_memprof.engines import ENGINES

_EMPTY_CACHE: Fields = {"enter": empty_cache.enter, "leave": empty_cache.leave}
#: They come off once every communicator has been used: until then each call costs microseconds.
_COLLECTIVE: Fields = {"enter": communicators.enter, "leave": communicators.leave,
               "need": "optional", "until": "first_steps"}  # fmt: skip

# fmt: off
HOOKS: tuple[Hook, ...] = (
    # Whatever name an engine calls it under (torch.npu, torch.cuda through transfer_to_npu): it is
    # this function that the call ends in. vllm-ascend replaces torch.accelerator.* after plugins
    # ran; these survive that.
    phase("leaf.empty_cache", "empty_cache", "torch_npu._C:_npu_emptyCache",
          backends=NPU, after="torch_npu", least_calls=1, **_EMPTY_CACHE),
    phase("cuda.leaf.empty_cache", "empty_cache",
          "torch._C:_cuda_emptyCache", "torch._C:_accelerator_emptyCache",
          backends=CUDA, after="torch", **_EMPTY_CACHE),
    marker("leaf.reset_peak", "torch_npu._C:_npu_resetPeakMemoryStats",
           enter=fold_peak, backends=NPU, after="torch_npu"),
    marker("cuda.leaf.reset_peak",
           "torch._C:_cuda_resetPeakMemoryStats", "torch._C:_accelerator_resetPeakStats",
           enter=fold_peak, backends=CUDA, after="torch"),
    phase("pg.collective", "communicator",
          *(f"torch.distributed:ProcessGroup.{name}" for name in NAMES["collectives"]),
          after="torch.distributed", **_COLLECTIVE),
    # torch_npu sends batched point-to-point operations straight to the backend
    phase("pg.batch_p2p", "communicator",
          "torch_npu._C._distributed_c10d:ProcessGroupHCCL.batch_isend_irecv",
          backends=NPU, after="torch_npu", **_COLLECTIVE),
    *(hook for row in ENGINES.values() for hook in import_module(row.hooks).HOOKS),
)
# fmt: on


def rows_in_force(
    backend: str, version: str | None, sampling: bool = False, engine: str = "vllm"
) -> tuple[Hook, ...]:
    """Return the rows in force.

    Args:
        backend: of the process; "": rows of every backend.
        version: of the engine; None: all.
        sampling: also rows that are called in every step.
        engine: whose rows; those of every engine are among them.
    """
    return tuple(
        hook
        for hook in HOOKS
        if hook.engine in (None, engine)
        and (backend in hook.backends if backend else len(hook.backends) > 1)
        and in_range(version, hook.versions)
        and (sampling or not hook.sampling)
    )
