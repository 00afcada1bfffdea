from __future__ import annotations

from types import SimpleNamespace

from torch_npu import _C


class AscendSpecDecodeBaseProposer:
    def __init__(self) -> None:
        compilation = SimpleNamespace(static_forward_context={"model.layers.0.attn": object()})
        self.vllm_config = SimpleNamespace(compilation_config=compilation)

    def load_model(self, model: object) -> None:
        _C.allocate(30)
        self.vllm_config.compilation_config.static_forward_context["mtp.0.attn"] = object()
