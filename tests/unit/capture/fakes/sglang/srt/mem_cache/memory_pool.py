"""Pools, in miniature."""

from types import SimpleNamespace

from torch_npu import _C


class ReqToTokenPool:
    def __init__(self, size: int) -> None:
        _C.allocate(size)


class MHATokenToKVPool:
    layer_num, head_num, head_dim = 1, 1, 1
    dtype = SimpleNamespace(itemsize=1)

    def __init__(self, tokens: int, page: int) -> None:
        _C.allocate((tokens + page) * 2)
