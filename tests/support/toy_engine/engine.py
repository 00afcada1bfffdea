"""The engine itself: it knows nothing of memprof but the entry point that it calls."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30
TOTAL, CONTEXT, WEIGHTS, STEP, TOKEN = 64 * GIB, GIB, 8 * GIB, GIB // 2, 1 << 20
_held = {"current": 0, "peak": 0}


def take(size: int) -> None:
    _held["current"] += size
    _held["peak"] = max(_held.values())


def free() -> int:
    return TOTAL - CONTEXT - _held["current"]


class Toy:
    """Serves a model whose weights are 8 GiB, with 1 MiB of KV cache for a token."""

    def __init__(self, share: float) -> None:
        self.share, self.tokens, self.ready = share, 0, False
        self.be_torch_npu()
        for plugin in entry_points(group="toy_engine.plugins"):
            plugin.load()()
        self.init_device()
        self.load_weights()
        sys.modules["torch_npu._C"]._npu_emptyCache()
        self.allocate()
        print("Toy is ready", flush=True)

    def be_torch_npu(self) -> None:
        """Put in place what an observer reads of torch_npu."""

        def statistics(device: int) -> dict[str, Any]:
            return {key: {"all": dict(_held)} for key in ("allocated_bytes", "reserved_bytes")}

        bare, module = ModuleType("torch_npu._C"), ModuleType("torch_npu")
        vars(bare).update(
            _npu_getDevice=lambda: 0, _npu_memoryStats=statistics, _npu_emptyCache=lambda: None,
            _npu_resetPeakMemoryStats=lambda device: None,
        )  # fmt: skip
        vars(module).update(_C=bare, npu=SimpleNamespace(
            is_initialized=lambda: self.ready, is_current_stream_capturing=lambda: False,
            memory_snapshot=list,
            mem_get_info=lambda device: (free(), TOTAL), get_device_name=lambda device: "ToyNPU",
        ))  # fmt: skip
        sys.modules.update({"torch_npu": module, "torch_npu._C": bare})

    def init_device(self) -> None:
        self.ready = True

    def load_weights(self) -> None:
        self.free_before = free()
        take(WEIGHTS)
        print(f"Toy: weights take {WEIGHTS / GIB:.2f} GiB", flush=True)

    def allocate(self) -> None:
        size, before = int(self.free_before * self.share) - WEIGHTS, self.free_before / GIB
        self.tokens = size // TOKEN
        take(size)
        print(f"Toy: free before loading {before:.2f} GiB, share {self.share} of it")
        print(f"Toy: KV cache {size / GIB:.2f} GiB, {self.tokens} tokens", flush=True)

    def answer(self, prompt: str) -> tuple[int, int]:
        """Return the prompt's and the output's tokens."""
        take(STEP)
        take(-STEP)
        return len(prompt.split()), 4
