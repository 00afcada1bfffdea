from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_npu import _C


class DeviceMemoryProfiler:
    def __enter__(self) -> DeviceMemoryProfiler:
        self.initial_memory = _C.allocated
        return self

    def __exit__(self, *error: object) -> None:
        self.consumed_memory = _C.allocated - self.initial_memory


@dataclass
class MemoryProfilingResult:
    torch_peak_increase: int = 0
    non_torch_increase: int = 0
    before_profile: Any = None
    after_profile: Any = None
