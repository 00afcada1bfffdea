"""What ``verify.py`` asks of SGLang."""

#: What a start of the engine imports; importing them once also compiles their Python files.
MODULES = [
    "sglang",
    "sglang.launch_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.hardware_backend.npu.attention.ascend_backend",
    "sglang.srt.hardware_backend.npu.graph_runner.npu_graph_runner",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.qwen3_vl",
]
PACKAGES = ["sglang", "transformers"]
PLUGINS = "sglang.srt.plugins"


def check() -> None:
    """Ask for the platform, a name of a stand-in with a body, one without, and an operator."""
    import sgl_kernel_npu.norm.split_qkv_rmsnorm_rope as with_body
    import torch  # noqa: TID251
    from sgl_kernel_npu.kvcacheio import transfer_kv_dim_exchange
    from sglang.srt.utils import is_npu

    assert is_npu(), "SGLang does not take the simulated device for an NPU"
    assert callable(with_body.split_qkv_rmsnorm_rope)
    said = ""
    try:
        transfer_kv_dim_exchange()
    except NotImplementedError as error:
        said = str(error)
    assert "transfer_kv_dim_exchange" in said, "a kernel without a body did not fail by its name"

    # a mask that allows two tokens of each 32, over a vocabulary that needs padding
    logits = torch.zeros(2, 300, device="npu")
    mask = torch.full((2, 10), 0b101, dtype=torch.int32, device="cpu").to("npu")
    torch.ops.npu.apply_token_bitmask(logits, mask)
    allowed = [token for token, value in enumerate(logits[1].cpu().tolist()) if value == 0.0]
    expected = [token for token in range(300) if token % 32 in (0, 2)]
    assert allowed == expected, "apply_token_bitmask did not mask the logits"
