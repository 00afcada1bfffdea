"""Run by the engine's interpreter at the end of a setup: does the engine import, does the device
account?

Prints one line ``MEMPROF {json}`` with what it read; fails with a message otherwise.
"""

# ruff: noqa: TID251  (the one file of this layer that runs in the engine)
import importlib
import importlib.metadata
import json

import torch
import torch_npu

#: What a start of the engine imports; importing them once also compiles their Python files.
MODULES = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm_ascend.patch.worker",
    "vllm_ascend.worker.worker",
    "vllm_ascend.worker.model_runner_v1",
    "vllm_ascend.ops",
    "vllm_ascend.vllm_ascend_C",
    "torch._inductor.compile_fx",
    "torch_npu._inductor",
    "torch._functorch.aot_autograd",
    "torch._dynamo.convert_frame",
    "torch.onnx.operators",
    "transformers.models.qwen3_vl",
]

#: vLLM learns what a model class can do in a process of its own, 10 s of imports, and keeps the
#: answer in its cache: asked here, no first run has to wait for it.
ARCHITECTURES = ["Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"]

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

    for module in MODULES:
        importlib.import_module(module)
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON, "vLLM does not take the null Triton for a usable Triton"
    for architecture in ARCHITECTURES:
        ModelRegistry.models[architecture].inspect_model_cls()
    plugins = [
        entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
    ]
    assert "memprof" in plugins, f"memprof's plug-in is not registered: {plugins}"
    facts = {
        "device_total_bytes": total,
        "device_name": torch.npu.get_device_name(0),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "vllm_ascend": importlib.metadata.version("vllm_ascend"),
    }
    print("MEMPROF " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
