"""Descriptions of quantized models that do not exist: the engine makes weights of real shapes.

In: the content of a config.json. Out: the content of quant_model_description.json, which
vllm-ascend reads with ``--quantization ascend``. A row says which weights take 8 bits and how their
activations are scaled: W8A8 by a scale of the checkpoint, W8A8_DYNAMIC by one per token. The choice
is that of the W8A8 models published for Ascend: a layer without a row stays as it is (embeddings,
output head, norms, routers, vision towers, layers for speculative decoding). Of a W4A8 model the
routed experts take 4 bits, with one scale per channel, those of layers for drafts what they have in
the W8A8 model (msmodelslim, lab_practice/: deepseek_v3, glm_5, qwen3_5_moe).

Keys of fused layers are those of their parts; of the experts the engine reads the first.
(vllm_ascend/quantization/modelslim_config.py::get_linear_quant_type in 0.23.0, quant_config.py in
0.13.0)
"""

from __future__ import annotations

import re

from vllm_memprof.layout import (
    ARCHITECTURES,
    QUANTIZED,
    ModelConfig,
    list_weights,
    text_config,
)

FILE_NAME = "quant_model_description.json"
#: model_type -> weights of a layer of the text model -> type; the others are FLOAT.
RULES: dict[str, dict[str, str]] = {
    kind: QUANTIZED[row["quantized"]] for kind, row in ARCHITECTURES.items() if "quantized" in row
}
#: A weight of the text model's layers; DeepSeek-V4's layer for drafts and InternVL's encoder are
#: quantized as well.
_LAYER = re.compile(
    r"(?:(?:(?:language_model\.)?model\.(?:language_model\.)?|vision_model\.encoder\.)?"
    r"layers\.(?P<layer>\d+)|mtp\.0)\.(?P<rest>.+)\.(?:weight|bias)"
)


def describe(config: ModelConfig, four_bits: bool = False) -> dict[str, object] | None:
    """Return the content of quant_model_description.json; None for a model type without rules.

    Args:
        config: of the model.
        four_bits: of the routed experts' weights.
    """
    kind = config.get("model_type", "")
    if kind not in RULES:
        return None
    draft = "quantized_draft" in ARCHITECTURES[kind]
    text = text_config(config)
    layers, rules = text["num_hidden_layers"], dict[str, str]()
    for pattern, rule in RULES[kind].items():
        type_, _, size = rule.partition(" of hidden_size ")
        if size in ("", str(text["hidden_size"])):
            rules[pattern] = type_
    types = {}
    for name in list_weights(config, draft=True) or ():
        if re.search(r"\.experts\.[1-9]\d*\.", name):
            continue
        types[name] = "FLOAT"
        match = _LAYER.fullmatch(name)
        if match and (draft or int(match["layer"] or 0) < layers):
            types[name] = next(
                (t for pattern, t in rules.items() if re.fullmatch(pattern, match["rest"])),
                "FLOAT",
            )
            of_model = int(match["layer"] or layers) < layers
            if four_bits and of_model and ".experts." in name and types[name] != "FLOAT":
                types[name] = "W4A8_DYNAMIC"
    # FLOAT < W8A8 < W8A8_DYNAMIC; without a size of groups, four bits have a scale per 256 values
    whole = {"model_quant_type": "W4A8_DYNAMIC", "group_size": 0} if four_bits else {}
    return {"model_quant_type": max(types.values()), "version": "1.0.0", **whole, **types}
