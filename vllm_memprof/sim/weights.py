"""The weights that a model's configuration stands for: names as in a checkpoint, and shapes.

In: the content of a config.json. Out: name -> shape. No torch, no engine: the engine makes its own
tensors, and the loaded bytes are measured there. These tables say how many parameters a preset has,
and which layers a quantization names. Experts are listed one by one, as quantized checkpoints store
them; biases of the vision towers are included.

Read in transformers 4.57 and 5.5: the ``modeling_*.py`` of each model type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast


class VisionConfig(TypedDict, total=False):
    """The keys of a vision tower's configuration that decide shapes."""

    depth: int
    hidden_size: int
    in_channels: int
    in_chans: int
    intermediate_size: int
    num_position_embeddings: int
    out_hidden_size: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    deepstack_visual_indexes: Sequence[int]


class AudioConfig(TypedDict, total=False):
    """The keys of an audio encoder's configuration that decide shapes."""

    d_model: int
    encoder_ffn_dim: int
    encoder_layers: int
    num_mel_bins: int
    output_dim: int


class TextConfig(TypedDict, total=False):
    """The keys of a text model's configuration that decide shapes."""

    decoder_sparse_step: int
    compress_ratios: Sequence[int]
    first_k_dense_replace: int
    full_attention_interval: int
    hc_mult: int
    head_dim: int | None
    hidden_size: int
    index_head_dim: int
    index_n_heads: int
    intermediate_size: int
    kv_lora_rank: int
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    mlp_only_layers: Sequence[int]
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_attention_heads: int
    num_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    num_hidden_layers: int
    num_key_value_heads: int
    num_local_experts: int
    num_nextn_predict_layers: int
    o_groups: int
    o_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    shared_expert_intermediate_size: int
    use_qk_norm: bool
    v_head_dim: int
    vocab_size: int


class ModelConfig(TextConfig, total=False):
    """The content of a config.json, as far as it is read here."""

    audio_config: AudioConfig
    model_type: str
    text_config: TextConfig
    thinker_config: ModelConfig  # of a model that thinks and talks: the part that is loaded
    tie_word_embeddings: bool
    vision_config: VisionConfig


_Weights = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Architecture:
    """Names of the weights of a model type, and the parts of a layer."""

    attention: Callable[[TextConfig, int], _Weights]  # of a layer, names within it
    feed_forward: Callable[[TextConfig, int], _Weights]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    prefix: str = "model."  # of the layers
    model: Callable[[TextConfig], _Weights] | None = None  # beside layers and ends
    tower: Callable[[VisionConfig], _Weights] | None = None
    audio: Callable[[AudioConfig], _Weights] | None = None
    draft: Callable[[TextConfig], _Weights] | None = None  # loaded by speculative decoding only
    #: Of the embedding, the last norm and the output head.
    ends: tuple[str, str, str] = ("model.embed_tokens", "model.norm", "lm_head")


def list_weights(config: ModelConfig, draft: bool = False) -> dict[str, tuple[int, ...]] | None:
    """Return name and shape of every weight; None for a model type that is not in `ARCHITECTURES`.

    Args:
        config: content of config.json.
        draft: with the layers of multi-token prediction that lie in the same checkpoint.
    """
    architecture = ARCHITECTURES.get(config.get("model_type", ""))
    if architecture is None:
        return None
    text = text_config(config)
    hidden, vocabulary, prefix = text["hidden_size"], text["vocab_size"], architecture.prefix
    embedding, norm, head = architecture.ends
    weights: dict[str, tuple[int, ...]] = {f"{embedding}.weight": (vocabulary, hidden)}
    for index in range(text["num_hidden_layers"]):
        for name, shape in _layer(architecture, text, index):
            weights[f"{prefix}layers.{index}.{name}"] = shape
    weights[f"{norm}.weight"] = (hidden,)
    if architecture.model is not None:
        weights |= dict(architecture.model(text))
    if not config.get("tie_word_embeddings"):
        weights[f"{head}.weight"] = (vocabulary, hidden)
    parts = config.get("thinker_config", config)
    if architecture.tower is not None:
        weights |= dict(architecture.tower(parts["vision_config"]))
    if architecture.audio is not None:
        weights |= dict(architecture.audio(parts["audio_config"]))
    if draft and architecture.draft is not None:
        weights |= dict(architecture.draft(text))
    return weights


def count_parameters(config: ModelConfig, draft: bool = False) -> int | None:
    """Return the number of a model's parameters; None for a model type without a row."""
    weights = list_weights(config, draft)
    return None if weights is None else sum(math.prod(shape) for shape in weights.values())


def text_config(config: ModelConfig) -> TextConfig:
    """Return the configuration of the text model, which may be a table of its own."""
    outer = config.get("thinker_config", config)
    return cast(TextConfig, {**outer, **outer.get("text_config", {})})


def _layer(architecture: Architecture, text: TextConfig, index: int) -> _Weights:
    yield from architecture.attention(text, index)
    yield from architecture.feed_forward(text, index)
    for name in architecture.norms:
        yield f"{name}.weight", (text["hidden_size"],)


def _linear(name: str, out: int, into: int, bias: bool = False) -> _Weights:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _grouped_attention(
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> Callable[[TextConfig, int], _Weights]:
    """Return attention with fewer key and value heads; ``gated``: queries with a gate."""

    def weights(text: TextConfig, index: int) -> _Weights:
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        kv_heads = text["num_key_value_heads"]
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


def _latent_attention(text: TextConfig, index: int) -> _Weights:
    """DeepSeek's attention over a compressed key and value (MLA), MiniCPM3's too."""
    hidden, heads, rope = text["hidden_size"], text["num_attention_heads"], text["qk_rope_head_dim"]
    queries, latent, nope = text["q_lora_rank"], text["kv_lora_rank"], text["qk_nope_head_dim"]
    value = text.get("v_head_dim") or hidden // heads
    yield "self_attn.q_a_proj.weight", (queries, hidden)
    yield "self_attn.q_a_layernorm.weight", (queries,)
    yield "self_attn.q_b_proj.weight", (heads * (nope + rope), queries)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)


def _hybrid_attention(joined: bool) -> Callable[[TextConfig, int], _Weights]:
    """Return Qwen3-Next's: every so many layers gated attention, else a gated delta net.

    ``joined``: Qwen3-Next's checkpoints join the projections that Qwen3.5's keep apart.
    """

    def weights(text: TextConfig, index: int) -> _Weights:
        if (index + 1) % text["full_attention_interval"] == 0:
            yield from _grouped_attention(head_norms=True, gated=True)(text, index)
            return
        hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = heads * text["linear_value_head_dim"]
        if joined:
            yield "linear_attn.in_proj_qkvz.weight", (2 * (keys + values), hidden)
            yield "linear_attn.in_proj_ba.weight", (2 * heads, hidden)
        else:
            yield "linear_attn.in_proj_qkv.weight", (2 * keys + values, hidden)
            yield "linear_attn.in_proj_z.weight", (values, hidden)
            yield "linear_attn.in_proj_b.weight", (heads, hidden)
            yield "linear_attn.in_proj_a.weight", (heads, hidden)
        yield "linear_attn.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
        yield "linear_attn.A_log", (heads,)
        yield "linear_attn.dt_bias", (heads,)
        yield "linear_attn.norm.weight", (text["linear_value_head_dim"],)
        yield "linear_attn.out_proj.weight", (hidden, values)

    return weights


def _glm4_moe_attention(text: TextConfig, index: int) -> _Weights:
    """GLM-4.5: norms of a head's queries and keys in the larger model only."""
    norms = text.get("use_qk_norm", False)
    yield from _grouped_attention(qkv_bias=True, head_norms=norms)(text, index)


def _minimax_attention(text: TextConfig, index: int) -> _Weights:
    """MiniMax-M2: norms over all heads of the queries, and of the keys, at once."""
    yield from _grouped_attention()(text, index)
    size = text["head_dim"] or 0
    yield "self_attn.q_norm.weight", (text["num_attention_heads"] * size,)
    yield "self_attn.k_norm.weight", (text["num_key_value_heads"] * size,)


def _minimax_experts(text: TextConfig, index: int) -> _Weights:
    hidden, count, inner = text["hidden_size"], text["num_local_experts"], text["intermediate_size"]
    yield "block_sparse_moe.gate.weight", (count, hidden)
    yield "block_sparse_moe.e_score_correction_bias", (count,)
    for expert in range(count):
        for part in ("w1", "w3"):
            yield f"block_sparse_moe.experts.{expert}.{part}.weight", (inner, hidden)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (hidden, inner)


def _gated_mlp(name: str, hidden: int, inner: int, bias: bool = False) -> _Weights:
    yield from _linear(f"{name}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{name}.up_proj", inner, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias)


def _dense(text: TextConfig, index: int) -> _Weights:
    yield from _gated_mlp("mlp", text["hidden_size"], text["intermediate_size"])


def _experts(text: TextConfig, index: int) -> _Weights:
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


def _deepseek_experts(text: TextConfig, index: int) -> _Weights:
    hidden, count = text["hidden_size"], text["n_routed_experts"]
    inner = text["moe_intermediate_size"]
    if index < text["first_k_dense_replace"]:
        yield from _dense(text, index)
        return
    yield "mlp.gate.weight", (count, hidden)
    yield "mlp.gate.e_score_correction_bias", (count,)
    for expert in range(count):
        yield from _gated_mlp(f"mlp.experts.{expert}", hidden, inner)
    yield from _gated_mlp("mlp.shared_experts", hidden, inner * text["n_shared_experts"])


def _gpt_oss_experts(text: TextConfig, index: int) -> _Weights:
    hidden, inner, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield from _linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * inner)
    yield "mlp.experts.down_proj", (count, inner, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)


def _qwen3_tower(vision: VisionConfig) -> _Weights:
    """Qwen3-VL: blocks, a merger, and a merger per layer that feeds the text model."""
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
    for index in range(len(vision.get("deepstack_visual_indexes", ()))):
        mergers[f"model.visual.deepstack_merger_list.{index}"] = merged
    for merger, width in mergers.items():
        yield from _layer_norm(f"{merger}.norm", width)
        yield from _linear(f"{merger}.linear_fc1", merged, merged, bias=True)
        yield from _linear(f"{merger}.linear_fc2", out, merged, bias=True)


def _qwen25_tower(vision: VisionConfig) -> _Weights:
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


def _omni_tower(vision: VisionConfig) -> _Weights:
    """Qwen2.5-VL's tower, with queries, keys and values apart."""
    hidden = vision["hidden_size"]
    for name, shape in _qwen25_tower({**vision, "in_chans": vision["in_channels"]}):
        name = f"thinker.{name}"
        if ".attn.qkv." not in name:
            yield name, shape
            continue
        for part in "qkv":
            yield name.replace(".qkv.", f".{part}."), (hidden, *shape[1:])


def _omni_audio(audio: AudioConfig) -> _Weights:
    """Whisper's encoder; its keys have no bias, its positions no weights."""
    width, inner = audio["d_model"], audio["encoder_ffn_dim"]
    yield "thinker.audio_tower.conv1.weight", (width, audio["num_mel_bins"], 3)
    yield "thinker.audio_tower.conv1.bias", (width,)
    yield "thinker.audio_tower.conv2.weight", (width, width, 3)
    yield "thinker.audio_tower.conv2.bias", (width,)
    for index in range(audio["encoder_layers"]):
        layer = f"thinker.audio_tower.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{part}", width, width, part != "k_proj")
        yield from _linear(f"{layer}.fc1", inner, width, bias=True)
        yield from _linear(f"{layer}.fc2", width, inner, bias=True)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield from _layer_norm(f"{layer}.{name}", width)
    yield from _layer_norm("thinker.audio_tower.ln_post", width)
    yield "thinker.audio_tower.audio_bos_eos_token.weight", (2, audio["output_dim"])
    yield from _linear("thinker.audio_tower.proj", audio["output_dim"], width, bias=True)


def _layer_norm(name: str, width: int) -> _Weights:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _deepseek_draft(kind: str) -> Callable[[TextConfig], _Weights]:
    """Return layers for multi-token prediction; embedding and output head are the model's."""

    def weights(text: TextConfig) -> _Weights:
        hidden, first = text["hidden_size"], text["num_hidden_layers"]
        for index in range(first, first + text.get("num_nextn_predict_layers", 0)):
            for name, shape in _layer(ARCHITECTURES[kind], text, index):
                yield f"model.layers.{index}.{name}", shape
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"model.layers.{index}.{name}.weight", (hidden,)
            yield f"model.layers.{index}.eh_proj.weight", (hidden, 2 * hidden)

    return weights


def _hybrid_draft(kind: str) -> Callable[[TextConfig], _Weights]:
    """Return one layer for multi-token prediction, with gated attention."""

    def weights(text: TextConfig) -> _Weights:
        hidden = text["hidden_size"]
        index = text["full_attention_interval"] - 1
        for name, shape in _layer(ARCHITECTURES[kind], text, index):
            yield f"mtp.layers.0.{name}", shape
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", (hidden,)
        yield "mtp.fc.weight", (hidden, 2 * hidden)

    return weights


def _hunyuan_attention(text: TextConfig, index: int) -> _Weights:
    """Norms of a head's queries and keys have names of their own."""
    yield from _grouped_attention()(text, index)
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    for name in ("query_layernorm", "key_layernorm"):
        yield f"self_attn.{name}.weight", (size,)


def _hunyuan_experts(text: TextConfig, index: int) -> _Weights:
    hidden, count, inner = text["hidden_size"], text["num_experts"], text["intermediate_size"]
    yield "mlp.gate.wg.weight", (count, hidden)
    for expert in range(count):
        yield from _gated_mlp(f"mlp.experts.{expert}", hidden, inner)
    yield from _gated_mlp("mlp.shared_mlp", hidden, inner)


def _sparse_latent_attention(text: TextConfig, index: int) -> _Weights:
    """Latent attention with an indexer that chooses the tokens (DSA)."""
    yield from _latent_attention(text, index)
    hidden, size, heads = text["hidden_size"], text["index_head_dim"], text["index_n_heads"]
    yield "self_attn.indexer.wq_b.weight", (heads * size, text["q_lora_rank"])
    yield "self_attn.indexer.wk.weight", (size, hidden)
    yield from _layer_norm("self_attn.indexer.k_norm", size)
    yield "self_attn.indexer.weights_proj.weight", (heads, hidden)


def _compressor(name: str, hidden: int, ratio: int, size: int) -> _Weights:
    """DeepSeek-V4's compression of so many tokens into one; by four, windows overlap."""
    width = size * (2 if ratio == 4 else 1)
    yield f"{name}.ape", (ratio, width)
    yield f"{name}.wkv.weight", (width, hidden)
    yield f"{name}.wgate.weight", (width, hidden)
    yield f"{name}.norm.weight", (size,)


def _compressed_attention(text: TextConfig, index: int) -> _Weights:
    """DeepSeek-V4: one key and value head, compressed by the layer's ratio; an indexer at four."""
    hidden, heads, size = text["hidden_size"], text["num_attention_heads"], text["head_dim"] or 0
    queries, groups, latent = text["q_lora_rank"], text["o_groups"], text["o_lora_rank"]
    yield "attn.attn_sink", (heads,)
    yield "attn.wq_a.weight", (queries, hidden)
    yield "attn.q_norm.weight", (queries,)
    yield "attn.wq_b.weight", (heads * size, queries)
    yield "attn.wkv.weight", (size, hidden)
    yield "attn.kv_norm.weight", (size,)
    yield "attn.wo_a.weight", (groups * latent, heads * size // groups)
    yield "attn.wo_b.weight", (hidden, groups * latent)
    ratio = text["compress_ratios"][index]
    if ratio:
        yield from _compressor("attn.compressor", hidden, ratio, size)
    if ratio == 4:
        inner, count = text["index_head_dim"], text["index_n_heads"]
        yield from _compressor("attn.indexer.compressor", hidden, ratio, inner)
        yield "attn.indexer.wq_b.weight", (count * inner, queries)
        yield "attn.indexer.weights_proj.weight", (count, hidden)


def _hashed_experts(text: TextConfig, index: int) -> _Weights:
    """DeepSeek-V4: the first layers choose experts by token, the others by a gate; and streams."""
    hidden, count = text["hidden_size"], text["n_routed_experts"]
    yield "ffn.gate.weight", (count, hidden)
    if index < text["num_hash_layers"]:
        yield "ffn.gate.tid2eid", (text["vocab_size"], text["num_experts_per_tok"])
    else:
        yield "ffn.gate.bias", (count,)
    names = [f"ffn.experts.{expert}" for expert in range(count)]
    for name in [*names, "ffn.shared_experts"]:
        for part in ("w1", "w3"):
            yield f"{name}.{part}.weight", (text["moe_intermediate_size"], hidden)
        yield f"{name}.w2.weight", (hidden, text["moe_intermediate_size"])
    streams = text["hc_mult"]
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", ((2 + streams) * streams, streams * hidden)
        yield f"hc_{part}_base", ((2 + streams) * streams,)
        yield f"hc_{part}_scale", (3,)


def _joined_streams(text: TextConfig) -> _Weights:
    """DeepSeek-V4: what joins the residual streams before the output head."""
    streams, hidden = text["hc_mult"], text["hidden_size"]
    yield "hc_head_fn", (streams, streams * hidden)
    yield "hc_head_base", (streams,)
    yield "hc_head_scale", (1,)


def _deepseek_v4_draft(text: TextConfig) -> _Weights:
    """One layer for multi-token prediction, with copies of embedding and output head."""
    hidden, index = text["hidden_size"], text["num_hidden_layers"]
    for name, shape in _layer(ARCHITECTURES["deepseek_v4"], text, index):
        yield f"mtp.0.{name}", shape
    for name in ("e_proj", "h_proj"):
        yield f"mtp.0.{name}.weight", (hidden, hidden)
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", (hidden,)
    for name, shape in _joined_streams(text):
        yield f"mtp.0.{name}", shape
    for name in ("head", "emb.tok_emb"):
        yield f"mtp.0.{name}.weight", (text["vocab_size"], hidden)


_QWEN3 = _grouped_attention(head_norms=True)
_FOUR_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)

_VL_ENDS = ("model.language_model.embed_tokens", "model.language_model.norm", "lm_head")

#: By ``model_type`` of config.json.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_grouped_attention(), _dense),
    "qwen2": Architecture(_grouped_attention(qkv_bias=True), _dense),
    "qwen3": Architecture(_QWEN3, _dense),
    "qwen3_moe": Architecture(_QWEN3, _experts),
    "qwen3_next": Architecture(
        _hybrid_attention(joined=True), _experts, draft=_hybrid_draft("qwen3_next")
    ),
    "qwen3_5": Architecture(
        _hybrid_attention(joined=False),
        _dense,
        prefix="model.language_model.",
        ends=_VL_ENDS,
        tower=_qwen3_tower,
        draft=_hybrid_draft("qwen3_5"),
    ),
    "qwen3_5_moe": Architecture(
        _hybrid_attention(joined=False),
        _experts,
        prefix="model.language_model.",
        ends=_VL_ENDS,
        tower=_qwen3_tower,
        draft=_hybrid_draft("qwen3_5_moe"),
    ),
    "qwen2_5_vl": Architecture(_grouped_attention(qkv_bias=True), _dense, tower=_qwen25_tower),
    "qwen3_vl": Architecture(
        _QWEN3, _dense, prefix="model.language_model.", ends=_VL_ENDS, tower=_qwen3_tower
    ),
    "qwen3_vl_moe": Architecture(
        _QWEN3, _experts, prefix="model.language_model.", ends=_VL_ENDS, tower=_qwen3_tower
    ),
    "deepseek_v3": Architecture(
        _latent_attention, _deepseek_experts, draft=_deepseek_draft("deepseek_v3")
    ),
    "kimi_k2": Architecture(_latent_attention, _deepseek_experts),
    "glm4_moe": Architecture(
        _glm4_moe_attention, _deepseek_experts, draft=_deepseek_draft("glm4_moe")
    ),
    "minimax_m2": Architecture(_minimax_attention, _minimax_experts),
    "minicpm3": Architecture(_latent_attention, _dense),
    "qwen2_5_omni": Architecture(
        _grouped_attention(qkv_bias=True),
        _dense,
        prefix="thinker.model.",
        ends=("thinker.model.embed_tokens", "thinker.model.norm", "thinker.lm_head"),
        tower=_omni_tower,
        audio=_omni_audio,
    ),
    "glm_moe_dsa": Architecture(
        _sparse_latent_attention, _deepseek_experts, draft=_deepseek_draft("glm_moe_dsa")
    ),
    "deepseek_v4": Architecture(
        _compressed_attention,
        _hashed_experts,
        norms=("attn_norm", "ffn_norm"),
        prefix="",
        model=_joined_streams,
        draft=_deepseek_v4_draft,
        ends=("embed", "norm", "head"),
    ),
    "hunyuan_v1_moe": Architecture(_hunyuan_attention, _hunyuan_experts),
    "qwen2_moe": Architecture(_grouped_attention(qkv_bias=True), _experts),
    "glm4": Architecture(_grouped_attention(), _dense, norms=_FOUR_NORMS),
    "gpt_oss": Architecture(
        _grouped_attention(qkv_bias=True, out_bias=True, sinks=True), _gpt_oss_experts
    ),
}
