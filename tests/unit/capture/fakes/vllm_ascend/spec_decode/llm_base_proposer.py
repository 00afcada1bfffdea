from __future__ import annotations

from torch_npu import _C


class AscendSpecDecodeBaseProposer:
    def load_model(self, model: object) -> None:
        _C.allocate(30)
