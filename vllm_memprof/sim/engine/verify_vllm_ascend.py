"""What ``verify.py`` asks of vllm-ascend."""

# ruff: noqa: TID251
#: What a start of the engine imports; importing them once also compiles their Python files.
MODULES = [
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm_ascend.patch.worker",
    "vllm_ascend.worker.model_runner_v1",
    "vllm_ascend.ops",
    "vllm_ascend.vllm_ascend_C",
    "torch._inductor.compile_fx",
    "torch_npu._inductor",
    "torch._functorch.aot_autograd",
    "torch.onnx.operators",
    "transformers.models.qwen3_vl",
]
PACKAGES = ["vllm", "vllm_ascend"]
PLUGINS = "vllm.general_plugins"
#: vLLM learns what a model class can do in a process of its own, 10 s of imports, and keeps the
#: answer in its cache: asked here, no first run has to wait for it.
ARCHITECTURES = ["Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"]


def check() -> None:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON, "vLLM does not take the null Triton for a usable Triton"
    for architecture in ARCHITECTURES:
        ModelRegistry.models[architecture].inspect_model_cls()
