"""Groups of processes, in miniature."""

from torch_npu import _C, npu


def maybe_init_distributed_environment_and_model_parallel(tp_size: int) -> None:
    npu.initialized = True  # as set_device does
    initialize_model_parallel(tensor_parallel_degree=tp_size)


def initialize_model_parallel(tensor_parallel_degree: int) -> None:
    _C.allocate(2)
