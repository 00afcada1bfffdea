"""The engine itself: it knows nothing of memprof but the entry point that it calls."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30
TOTAL, CONTEXT, WEIGHTS, STEP, TOKEN = 64 * GIB, GIB, 8 * GIB, GIB // 2, 1 << 20
_held = {"allocated": 0, "peak": 0, "ready": False}


def _allocate(size: int) -> None:
    _held["allocated"] += size
    _held["peak"] = max(_held["peak"], _held["allocated"])


def _statistics(device: int) -> dict[str, Any]:
    known = {"all": {"current": _held["allocated"], "peak": _held["peak"]}}
    return {"allocated_bytes": known, "reserved_bytes": known}


def free() -> int:
    return TOTAL - CONTEXT - _held["allocated"]


def _make_device() -> None:
    """Put in place what stands for torch_npu: the functions of it that an observer reads."""
    bare, module = ModuleType("torch_npu._C"), ModuleType("torch_npu")
    vars(bare).update(
        _npu_getDevice=lambda: 0,
        _npu_memoryStats=_statistics,
        _npu_emptyCache=lambda: None,
        _npu_resetPeakMemoryStats=lambda device: None,
    )
    npu = SimpleNamespace(
        is_initialized=lambda: _held["ready"],
        is_current_stream_capturing=lambda: False,
        mem_get_info=lambda device: (free(), TOTAL),
        memory_snapshot=list,
        get_device_name=lambda device: "ToyNPU",
    )
    vars(module).update(_C=bare, npu=npu)
    sys.modules.update({"torch_npu": module, "torch_npu._C": bare})


class Toy:
    """Serves a model whose weights are 8 GiB, with 1 MiB of KV cache for a token."""

    def __init__(self, share: float) -> None:
        self.share, self.tokens = share, 0
        _make_device()
        for plugin in entry_points(group="toy_engine.plugins"):
            plugin.load()()
        self.init_device()
        self.load_weights()
        sys.modules["torch_npu._C"]._npu_emptyCache()
        self.allocate_kv_cache()
        print("Toy is ready", flush=True)

    def init_device(self) -> None:
        _held["ready"] = True

    def load_weights(self) -> None:
        self.free_before = free()
        _allocate(WEIGHTS)
        print(f"Toy: weights take {WEIGHTS / GIB:.2f} GiB", flush=True)

    def allocate_kv_cache(self) -> None:
        size = int(self.free_before * self.share) - WEIGHTS
        self.tokens = size // TOKEN
        _allocate(size)
        print(
            f"Toy: free before loading {self.free_before / GIB:.2f} GiB, share {self.share} of it"
        )
        print(f"Toy: KV cache {size / GIB:.2f} GiB, {self.tokens} tokens", flush=True)

    def answer(self, prompt: str) -> tuple[int, int]:
        """Return the prompt's and the output's tokens."""
        _allocate(STEP)
        _allocate(-STEP)
        return len(prompt.split()), 4

    def close(self) -> None:
        _held["ready"] = False
