"""Stages of a pipeline, in miniature."""

from torch_npu import _C


class PipelineStage:
    def __call__(self, batch: object, server_args: object) -> object:
        return self.forward(batch)

    def forward(self, batch: object) -> object:
        _C.allocate(30, cached=10)
        _C.release(30)
        return batch


class TextEncodingStage(PipelineStage):
    pass


class DecodingStage(PipelineStage):
    pass
