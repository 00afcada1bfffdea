"""Descriptions of quantized models that do not exist: the engine makes weights of real shapes.

In: the content of a config.json. Out: the content of quant_model_description.json, which
vllm-ascend reads with ``--quantization ascend``. A row says which weights take 8 bits and how their
activations are scaled: W8A8 by a scale of the checkpoint, W8A8_DYNAMIC by one per token. The choice
is that of the W8A8 models published for Ascend: a layer without a row stays as it is (embeddings,
output head, norms, routers, vision towers, layers for speculative decoding).

Keys of fused layers are those of their parts; of the experts the engine reads the first.
(vllm_ascend/quantization/modelslim_config.py::get_linear_quant_type in 0.23.0, quant_config.py in
0.13.0)
"""

from __future__ import annotations

import re

from vllm_memprof.sim.weights import ModelConfig, list_weights, text_config

FILE_NAME = "quant_model_description.json"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_MLP = r"mlp\.(gate|up|down)_proj"
_EXPERTS = r"mlp\.(experts\.\d+|shared_experts?)\.(gate|up|down)_proj"

_DENSE = {_ATTENTION: "W8A8", _MLP: "W8A8"}
_MOE = {_ATTENTION: "W8A8", _MLP: "W8A8_DYNAMIC", _EXPERTS: "W8A8_DYNAMIC"}
_LATENT = {
    r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)": "W8A8",
    _MLP: "W8A8_DYNAMIC",
    _EXPERTS: "W8A8_DYNAMIC",
}

#: All activations per token; of the delta net the input projections, as vllm-ascend's own example
#: of Qwen3-Next quantizes them (docs/source/developer_guide/Design_Documents/quantization.md).
_HYBRID = {
    r"linear_attn\.in_proj_(qkvz|qkv|z)": "W8A8_DYNAMIC",
    _ATTENTION: "W8A8_DYNAMIC",
    _MLP: "W8A8_DYNAMIC",
    _EXPERTS: "W8A8_DYNAMIC",
}

#: model_type -> weights of a layer of the text model -> type; the others are FLOAT.
RULES: dict[str, dict[str, str]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen2_5_vl": _DENSE,
    "qwen3_vl": _DENSE,
    "glm4": _DENSE,
    "qwen3_moe": _MOE,
    "qwen3_vl_moe": _MOE,
    "glm4_moe": _MOE,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    # as DeepSeek-V3; of the indexer nothing
    "glm_moe_dsa": _LATENT,
    # W8A8_DYNAMIC throughout, with MTP; which modules stay was chosen by the loaded bytes that were
    # published (27.17 GiB, TP2 EP16)
    "deepseek_v4": {
        r"attn\.(wq_a|wq_b|wkv)": "W8A8_DYNAMIC",
        r"attn\.indexer\.wq_b": "W8A8_DYNAMIC",
        r"ffn\.(experts\.\d+|shared_experts)\.w[123]": "W8A8_DYNAMIC",
    },
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "minimax_m2": {
        _ATTENTION: "W8A8_DYNAMIC",
        r"block_sparse_moe\.experts\.\d+\.w[123]": "W8A8_DYNAMIC",
    },
    "qwen3_next": _HYBRID,
}
#: A weight of the text model's layers; DeepSeek-V4's layer for drafts is quantized as well.
_LAYER = re.compile(
    r"(?:(?:model\.(?:language_model\.)?)?layers\.(?P<layer>\d+)|mtp\.0)\."
    r"(?P<rest>.+)\.(?:weight|bias)"
)


def describe(config: ModelConfig) -> dict[str, str] | None:
    """Return the content of quant_model_description.json; None for a model type without rules."""
    rules = RULES.get(config.get("model_type", ""))
    weights = None if rules is None else list_weights(config, draft=True)
    if rules is None or weights is None:
        return None
    layers = text_config(config)["num_hidden_layers"]
    types = {}
    for name in weights:
        if re.search(r"\.experts\.[1-9]\d*\.", name):
            continue
        types[name] = "FLOAT"  # only layers of the text model are quantized
        match = _LAYER.fullmatch(name)
        if match is not None and int(match["layer"] or 0) < layers:
            given = (t for pattern, t in rules.items() if re.fullmatch(pattern, match["rest"]))
            types[name] = next(given, "FLOAT")
    whole = "W8A8" if "W8A8_DYNAMIC" not in types.values() else "W8A8_DYNAMIC"
    return {"model_quant_type": whole, "version": "1.0.0", **types}
