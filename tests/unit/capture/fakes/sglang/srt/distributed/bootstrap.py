"""Groups of processes, in miniature."""

from torch_npu import _C, npu


def init_parallel_runtime() -> None:
    npu.initialized = True  # as set_device does
    _init_parallel_groups()


def _init_parallel_groups() -> None:
    _C.allocate(2)
