"""A worker, in miniature."""

from torch_npu import _C


class TpModelWorker:
    def forward_batch_generation(self) -> None:
        _C.allocate(4)
