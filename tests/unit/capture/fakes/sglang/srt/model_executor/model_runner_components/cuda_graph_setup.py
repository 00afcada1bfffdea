"""Graph capture, in miniature."""

from types import SimpleNamespace
from typing import Any

from torch_npu import _C

Phase = SimpleNamespace(DECODE="decode")
Backend = SimpleNamespace(DISABLED="disabled")
BACKEND = "full"


def check_cuda_graph_backend(phase: str, backend: str) -> bool:
    return backend == BACKEND


def capture_decode_graph(*, model_runner: Any) -> Any:
    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return SimpleNamespace(runner=None, memory_usage_gb=0)
    _C.allocate(10)
    return SimpleNamespace(
        runner=SimpleNamespace(capture_bs=[1, 2]), memory_usage_gb=10 / (1 << 30)
    )
