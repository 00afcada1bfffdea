"""A pipeline of two parts and two stages."""

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    VAELoader,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.base import (
    DecodingStage,
    TextEncodingStage,
)


class Pipeline:
    def __init__(self) -> None:
        ComponentLoader().load("/model/transformer", None, component_name="transformer")
        VAELoader().load("/model/vae", None, "vae")
        self.stages = [TextEncodingStage(), DecodingStage()]

    def forward(self, batch: object) -> object:
        for stage in self.stages:
            batch = stage(batch, None)
        return batch


def build_pipeline(server_args: object) -> Pipeline:
    return Pipeline()
