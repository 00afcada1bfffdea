"""The pool of the sleep mode in miniature: its memory is unmapped while the allocator goes on
counting it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch_npu
from torch_npu import _C


class CaMemAllocator:
    instance: CaMemAllocator | None = None
    sleep_persistent_tag = "sleep_persistent"

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}

    @staticmethod
    def get_instance() -> CaMemAllocator:
        if CaMemAllocator.instance is None:
            CaMemAllocator.instance = CaMemAllocator()
        return CaMemAllocator.instance

    def add(self, size: int, tag: str) -> None:
        address = len(self.pointer_to_data) + 1
        self.pointer_to_data[address] = SimpleNamespace(handle=(0, size, address, 0), tag=tag)

    def sleep(self, offload_tags: tuple[str, ...] = ()) -> None:
        for data in self.pointer_to_data.values():
            if data.tag != self.sleep_persistent_tag:
                _C.unmapped += data.handle[1]
        torch_npu.npu.empty_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        for data in self.pointer_to_data.values():
            if data.tag != self.sleep_persistent_tag and (tags is None or data.tag in tags):
                _C.unmapped -= data.handle[1]
