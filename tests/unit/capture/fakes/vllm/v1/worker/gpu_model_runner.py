from __future__ import annotations

from typing import Any

from torch_npu import _C

from .lora_model_runner_mixin import LoRAModelRunnerMixin


class GPUModelRunner(LoRAModelRunnerMixin):
    max_num_tokens = 64

    def _get_mm_dummy_batch(self, modality: str, count: int) -> dict[str, Any]:
        return {}

    def profile_run(self) -> None:
        self._dummy_run(8)  # a smaller one, before the encoder
        self._get_mm_dummy_batch("image", 2)
        _C.allocate(200)  # encoder
        _C.release(150)
        self._dummy_run(self.max_num_tokens)
        _C.release(50)

    def _dummy_run(self, num_tokens: int) -> None:
        raise NotImplementedError
