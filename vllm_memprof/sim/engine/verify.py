"""Run by the engine's interpreter at the end of a setup: does the engine import, does the device
account?

Argument: the engine of the stack. Prints one line ``MEMPROF {json}`` with what it read; fails with
a message otherwise.
"""

# ruff: noqa: TID251  (it runs in the engine, as the other files of this folder)
import importlib
import importlib.metadata
import json
import sys

import torch
import torch_npu

GIB = 1 << 30
#: torch_npu pads a block by 32 bytes and asks the device for whole segments.
ROUNDING = 64 << 20


def main() -> None:
    free_before, total = torch.npu.mem_get_info()
    tensor = torch.empty(GIB, dtype=torch.uint8, device="npu")
    free_after, _ = torch.npu.mem_get_info()
    allocated = torch.npu.memory_allocated()
    assert GIB <= allocated <= GIB + ROUNDING, f"allocated {allocated} bytes instead of {GIB}"
    fell = free_before - free_after
    assert GIB <= fell <= GIB + ROUNDING, f"free memory fell by {fell} bytes"
    del tensor
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == 0, "empty_cache gave nothing back"

    engine = importlib.import_module(f"verify_{sys.argv[1].replace('-', '_')}")
    for module in engine.MODULES:
        importlib.import_module(module)
    engine.check()
    plugins = [entry.name for entry in importlib.metadata.entry_points(group=engine.PLUGINS)]
    assert "memprof" in plugins, f"memprof's plug-in is not registered: {plugins}"
    facts = {
        "device_total_bytes": total,
        "device_name": torch.npu.get_device_name(0),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        **{name: importlib.metadata.version(name) for name in engine.PACKAGES},
    }
    print("MEMPROF " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
