"""The weights that a model's configuration stands for: names as in a checkpoint, and shapes.

In: the content of a config.json. Out: name -> shape. No torch, no engine: the engine makes its own tensors, and what it
loads is measured there. These tables say how many parameters a preset has, and which layers a quantization names.
Experts are listed one by one, as quantized checkpoints store them; biases of the vision towers are included.

Read in transformers 4.57 and 5.5: the ``modeling_*.py`` of each model type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_Config = Mapping[str, Any]
_Weight = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    """How the weights of a model type are named and what a layer consists of."""

    attention: Callable[[_Config, int], Iterator[_Weight]]  # of a layer, names within it
    feed_forward: Callable[[_Config, int], Iterator[_Weight]]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    prefix: str = "model"  # of the text model
    tower: Callable[[_Config, _Config], Iterator[_Weight]] | None = (
        None  # of vision and text configuration
    )
    draft: Callable[[_Config], Iterator[_Weight]] | None = (
        None  # layers that only speculative decoding loads
    )


def list_weights(config: _Config, draft: bool = False) -> dict[str, tuple[int, ...]] | None:
    """Name and shape of every weight; None for a model type without a row in `ARCHITECTURES`.

    Args:
        config: content of config.json.
        draft: with the layers of multi-token prediction that lie in the same checkpoint.
    """
    architecture = ARCHITECTURES.get(config.get("model_type", ""))
    if architecture is None:
        return None
    text = {**config, **config.get("text_config", {})}
    weights = dict(_text_weights(architecture, text, tied=bool(config.get("tie_word_embeddings"))))
    if architecture.tower is not None:
        weights |= dict(architecture.tower(config["vision_config"], text))
    if draft and architecture.draft is not None:
        weights |= dict(architecture.draft(text))
    return weights


def count_parameters(config: _Config, draft: bool = False) -> int | None:
    """Parameters of a model; None for a model type without a row."""
    weights = list_weights(config, draft)
    return None if weights is None else sum(math.prod(shape) for shape in weights.values())


def _text_weights(architecture: Architecture, text: _Config, tied: bool) -> Iterator[_Weight]:
    hidden, vocabulary, prefix = text["hidden_size"], text["vocab_size"], architecture.prefix
    yield f"{prefix}.embed_tokens.weight", (vocabulary, hidden)
    for index in range(text["num_hidden_layers"]):
        for name, shape in _layer(architecture, text, index):
            yield f"{prefix}.layers.{index}.{name}", shape
    yield f"{prefix}.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocabulary, hidden)


def _layer(architecture: Architecture, text: _Config, index: int) -> Iterator[_Weight]:
    yield from architecture.attention(text, index)
    yield from architecture.feed_forward(text, index)
    for name in architecture.norms:
        yield f"{name}.weight", (text["hidden_size"],)


def _linear(name: str, out: int, into: int, bias: bool = False) -> Iterator[_Weight]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _grouped_attention(
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> Callable[[_Config, int], Iterator[_Weight]]:
    """Attention with fewer heads of keys and values than of queries; ``gated``: queries and a gate in one."""

    def weights(text: _Config, index: int) -> Iterator[_Weight]:
        hidden, heads, kv_heads = (
            text["hidden_size"],
            text["num_attention_heads"],
            text["num_key_value_heads"],
        )
        size = text.get("head_dim") or hidden // heads
        yield from _linear("self_attn.q_proj", heads * size * (2 if gated else 1), hidden, qkv_bias)
        yield from _linear("self_attn.k_proj", kv_heads * size, hidden, qkv_bias)
        yield from _linear("self_attn.v_proj", kv_heads * size, hidden, qkv_bias)
        yield from _linear("self_attn.o_proj", hidden, heads * size, out_bias)
        for name in ("q_norm", "k_norm") if head_norms else ():
            yield f"self_attn.{name}.weight", (size,)
        if sinks:
            yield "self_attn.sinks", (heads,)

    return weights


def _latent_attention(text: _Config, index: int) -> Iterator[_Weight]:
    """DeepSeek's attention over a compressed key and value (MLA)."""
    hidden, heads, rope = text["hidden_size"], text["num_attention_heads"], text["qk_rope_head_dim"]
    queries, latent, nope = text["q_lora_rank"], text["kv_lora_rank"], text["qk_nope_head_dim"]
    yield "self_attn.q_a_proj.weight", (queries, hidden)
    yield "self_attn.q_a_layernorm.weight", (queries,)
    yield "self_attn.q_b_proj.weight", (heads * (nope + rope), queries)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + text["v_head_dim"]), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * text["v_head_dim"])


def _hybrid_attention(text: _Config, index: int) -> Iterator[_Weight]:
    """Qwen3-Next: every so many layers gated attention, the others a gated delta net with a state of constant size."""
    if (index + 1) % text["full_attention_interval"] == 0:
        yield from _grouped_attention(head_norms=True, gated=True)(text, index)
        return
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    yield "linear_attn.in_proj_qkvz.weight", (2 * (keys + values), hidden)
    yield "linear_attn.in_proj_ba.weight", (2 * heads, hidden)
    yield "linear_attn.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (text["linear_value_head_dim"],)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _gated_mlp(name: str, hidden: int, inner: int, bias: bool = False) -> Iterator[_Weight]:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias)


def _dense(text: _Config, index: int) -> Iterator[_Weight]:
    yield from _gated_mlp("mlp", text["hidden_size"], text["intermediate_size"])


def _experts(text: _Config, index: int) -> Iterator[_Weight]:
    """Qwen's routed experts, and its shared one where the configuration has it."""
    hidden, count = text["hidden_size"], text["num_experts"]
    if index in text.get("mlp_only_layers", ()) or (index + 1) % text.get("decoder_sparse_step", 1):
        yield from _dense(text, index)
        return
    yield "mlp.gate.weight", (count, hidden)
    for expert in range(count):
        yield from _gated_mlp(f"mlp.experts.{expert}", hidden, text["moe_intermediate_size"])
    if text.get("shared_expert_intermediate_size"):
        yield from _gated_mlp("mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _deepseek_experts(text: _Config, index: int) -> Iterator[_Weight]:
    hidden, count, inner = (
        text["hidden_size"],
        text["n_routed_experts"],
        text["moe_intermediate_size"],
    )
    if index < text["first_k_dense_replace"]:
        yield from _dense(text, index)
        return
    yield "mlp.gate.weight", (count, hidden)
    yield "mlp.gate.e_score_correction_bias", (count,)
    for expert in range(count):
        yield from _gated_mlp(f"mlp.experts.{expert}", hidden, inner)
    yield from _gated_mlp("mlp.shared_experts", hidden, inner * text["n_shared_experts"])


def _gpt_oss_experts(text: _Config, index: int) -> Iterator[_Weight]:
    hidden, inner, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield from _linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * inner)
    yield "mlp.experts.down_proj", (count, inner, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)


def _qwen3_tower(vision: _Config, text: _Config) -> Iterator[_Weight]:
    """Qwen3-VL: blocks, a merger, and one merger per layer whose features go into the text model's first layers."""
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged, out = hidden * vision["spatial_merge_size"] ** 2, vision["out_hidden_size"]
    shape = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield "model.visual.patch_embed.proj.weight", shape
    yield "model.visual.patch_embed.proj.bias", (hidden,)
    yield "model.visual.pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for index in range(vision["depth"]):
        block = f"model.visual.blocks.{index}"
        for name in ("norm1", "norm2"):
            yield from _layer_norm(f"{block}.{name}", hidden)
        yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden, bias=True)
        yield from _linear(f"{block}.attn.proj", hidden, hidden, bias=True)
        yield from _linear(f"{block}.mlp.linear_fc1", inner, hidden, bias=True)
        yield from _linear(f"{block}.mlp.linear_fc2", hidden, inner, bias=True)
    mergers = {"model.visual.merger": hidden}
    for index in range(len(vision["deepstack_visual_indexes"])):
        mergers[f"model.visual.deepstack_merger_list.{index}"] = merged
    for merger, width in mergers.items():
        yield from _layer_norm(f"{merger}.norm", width)
        yield from _linear(f"{merger}.linear_fc1", merged, merged, bias=True)
        yield from _linear(f"{merger}.linear_fc2", out, merged, bias=True)


def _qwen25_tower(vision: _Config, text: _Config) -> Iterator[_Weight]:
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    yield (
        "visual.patch_embed.proj.weight",
        (hidden, vision["in_chans"], vision["temporal_patch_size"], patch, patch),
    )
    for index in range(vision["depth"]):
        block = f"visual.blocks.{index}"
        for name in ("norm1", "norm2"):
            yield f"{block}.{name}.weight", (hidden,)
        yield from _linear(f"{block}.attn.qkv", 3 * hidden, hidden, bias=True)
        yield from _linear(f"{block}.attn.proj", hidden, hidden, bias=True)
        yield from _gated_mlp(f"{block}.mlp", hidden, inner, bias=True)
    yield "visual.merger.ln_q.weight", (hidden,)
    yield from _linear("visual.merger.mlp.0", merged, merged, bias=True)
    yield from _linear("visual.merger.mlp.2", vision["out_hidden_size"], merged, bias=True)


def _layer_norm(name: str, width: int) -> Iterator[_Weight]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _deepseek_draft(text: _Config) -> Iterator[_Weight]:
    """Layers for multi-token prediction; they share embedding and output head with the model."""
    hidden, first = text["hidden_size"], text["num_hidden_layers"]
    for index in range(first, first + text.get("num_nextn_predict_layers", 0)):
        for name, shape in _layer(ARCHITECTURES["deepseek_v3"], text, index):
            yield f"model.layers.{index}.{name}", shape
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"model.layers.{index}.{name}.weight", (hidden,)
        yield f"model.layers.{index}.eh_proj.weight", (hidden, 2 * hidden)


def _qwen3_next_draft(text: _Config) -> Iterator[_Weight]:
    """One layer for multi-token prediction, with gated attention."""
    hidden = text["hidden_size"]
    for name, shape in _layer(
        ARCHITECTURES["qwen3_next"], text, text["full_attention_interval"] - 1
    ):
        yield f"mtp.layers.0.{name}", shape
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", (hidden,)
    yield "mtp.fc.weight", (hidden, 2 * hidden)


_QWEN3 = _grouped_attention(head_norms=True)
_FOUR_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)

#: By ``model_type`` of config.json.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_grouped_attention(), _dense),
    "qwen2": Architecture(_grouped_attention(qkv_bias=True), _dense),
    "qwen3": Architecture(_QWEN3, _dense),
    "qwen3_moe": Architecture(_QWEN3, _experts),
    "qwen3_next": Architecture(_hybrid_attention, _experts, draft=_qwen3_next_draft),
    "qwen2_5_vl": Architecture(_grouped_attention(qkv_bias=True), _dense, tower=_qwen25_tower),
    "qwen3_vl": Architecture(_QWEN3, _dense, prefix="model.language_model", tower=_qwen3_tower),
    "qwen3_vl_moe": Architecture(
        _QWEN3, _experts, prefix="model.language_model", tower=_qwen3_tower
    ),
    "deepseek_v3": Architecture(_latent_attention, _deepseek_experts, draft=_deepseek_draft),
    "glm4": Architecture(_grouped_attention(), _dense, norms=_FOUR_NORMS),
    "gpt_oss": Architecture(
        _grouped_attention(qkv_bias=True, out_bias=True, sinks=True), _gpt_oss_experts
    ),
}
