"""A process group whose first collective takes device memory, a moment after the call has
returned."""

from __future__ import annotations

from typing import Any


class Device:
    def __init__(self, kind: str) -> None:
        self.type = kind


class Tensor:
    def __init__(self, kind: str) -> None:
        self.device = Device(kind)


class ProcessGroup:
    def __init__(self, backend: str, on_first: Any = None) -> None:
        self.backend = backend
        self.on_first = on_first
        self.group_name = "7"
        self.group_desc = "undefined"
        self.calls = 0

    def name(self) -> str:
        return self.backend

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> str:
        self.calls += 1
        if (
            self.on_first and self.calls == 2
        ):  # queued: the buffers are there when the second call is made
            self.on_first()
        return "work"

    def barrier(self, options: Any = None) -> str:
        return "work"


def get_process_group_ranks(group: ProcessGroup) -> list[int]:
    return [0, 1]
