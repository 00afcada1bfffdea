from __future__ import annotations

from torch_npu import _C


class LoRAModelRunnerMixin:
    def load_lora_model(self) -> None:
        _C.allocate(12)
