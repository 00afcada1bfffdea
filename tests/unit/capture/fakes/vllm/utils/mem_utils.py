from __future__ import annotations

from torch_npu import _C


class DeviceMemoryProfiler:
    def __enter__(self) -> DeviceMemoryProfiler:
        self.initial_memory = _C.allocated
        return self

    def __exit__(self, *error: object) -> None:
        self.consumed_memory = _C.allocated - self.initial_memory
