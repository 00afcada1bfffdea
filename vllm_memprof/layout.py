"""The weights that a model's configuration stands for: names as in a checkpoint, and shapes.

In: the content of a config.json, ``layout.toml``. Out: name -> shape. No torch, no engine:
the engine makes its own tensors, and the loaded bytes are measured there. These tables say how many
parameters a preset has, and which layers a quantization names. Experts are listed one by one, as
quantized checkpoints store them; biases of the vision towers are included.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_memprof.files import read_own
from vllm_memprof.units import known_items

#: The content of a config.json.
ModelConfig = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

_TABLE = read_own(__file__, "layout.toml")
#: By ``model_type`` of config.json; the file explains its keys.
ARCHITECTURES: dict[str, dict[str, Any]] = _TABLE["types"]
#: Ways to quantize a model type, by the name that its row has: weights of a layer -> type.
QUANTIZED: dict[str, dict[str, str]] = _TABLE["quantized"]
_LINE = re.compile(r"(@?)([^:\s]+)(?:: (.+?))?(?: if (not )?(\w+))?")


def list_weights(config: ModelConfig, draft: bool = False) -> Shapes | None:
    """Return name and shape of every weight; None for a model type that is not in `ARCHITECTURES`.

    Args:
        config: content of config.json.
        draft: with the layers of multi-token prediction that lie in the same checkpoint.
    """
    row = ARCHITECTURES.get(config.get("model_type", ""))
    if row is None:
        return None
    text, prefix = text_config(config), row.get("prefix", "model.layers.")
    whole = {**sizes_of(text, 0), "tie_word_embeddings": config.get("tie_word_embeddings")}
    layers = whole["num_hidden_layers"]
    weights = _expand(row.get("model", ["@ends"]), whole)
    for index in range(layers):
        weights |= _expand(row["layer"], sizes_of(text, index), f"{prefix}{index}.")
    for kind in {"vision", "audio"} & row.keys():
        sizes = {"text_hidden_size": text["hidden_size"]}
        weights |= _expand(row[kind], sizes | sizes_of(text[f"{kind}_config"], 0))
    if draft and "draft" in row:
        of_layer, beside, line = row["draft"]
        count = text.get("num_nextn_predict_layers", 0) if "{layer}" in of_layer else 1
        for index in range(layers, layers + count):
            # of the hybrid models it is a layer with attention
            alike = text.get("full_attention_interval", index + 1) - 1
            weights |= _expand(row["layer"], sizes_of(text, alike), of_layer.format(layer=index))
            weights |= _expand([line], whole, beside.format(layer=index))
    return weights


def text_config(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration of the text model, which may be a table of its own."""
    found = dict(config)
    for part in ("thinker_config", "text_config", "llm_config"):
        found |= known_items(found.get(part, {}))
    return found


def sizes_of(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Return a configuration with the words that follow from it, some of them by layer."""
    known = known_items(config)
    for name, other in _TABLE["also"].items():
        if other in known:
            known.setdefault(name, known[other])
    get = known.get
    heads, hidden = get("num_attention_heads", 1), get("hidden_size", 0)
    head = get("head_dim") or hidden // heads
    ratios = get("compress_ratios", ())
    ratio = ratios[layer] if ratios else 0
    return {
        **known,
        **dict.fromkeys(get("architectures", ()), True),
        "head": head,
        "value_head": get("v_head_dim") or hidden // heads,
        "full": "sliding_attention" not in get("layer_types", ())[layer : layer + 1]
        and (layer + 1) % get("full_attention_interval", 1) == 0,
        "dense": layer < get("first_k_dense_replace", 0)
        or layer in get("mlp_only_layers", ())
        or (layer + 1) % get("decoder_sparse_step", 1) != 0,
        "ratio": ratio,
        "overlapping": ratio == 4,
        "windows": 1 + (ratio == 4),
        "group_width": heads * head // get("o_groups", 1),
        "hashed": layer < get("num_hash_layers", 0),
        "merged": hidden * get("spatial_merge_size", 1) ** 2,
        # some layers choose tokens as the layer before does
        "indexed": "shared" not in get("indexer_types", ())[layer : layer + 1],
        "deepstack": len(get("deepstack_visual_indexes", ())),
    }


def _expand(lines: Iterable[str], sizes: Mapping[str, Any], prefix: str = "") -> Shapes:
    """Return the weights of the lines of a part."""
    found: Shapes = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match is not None, line
        part, name, shape, without, word = match.groups()
        if word and bool(sizes.get(word)) == bool(without):
            continue
        if part:
            found |= _expand(_TABLE["parts"][name].strip().split("\n"), sizes, prefix)
            continue
        size = tuple(_sum(text, sizes) for text in shape.split(", "))
        alternatives = [
            map(str, range(sizes[text[3:]])) if text.startswith("0..") else text.split(",")
            for text in re.split(r"[{}]", name)
        ]
        for words in itertools.product(*alternatives):
            weight = "".join(words)
            found[prefix + weight] = size[:1] if weight.endswith(".bias") else size
    return found


def _sum(text: str, sizes: Mapping[str, Any]) -> int:
    """Return a size: a sum of products of numbers and words."""
    return sum(
        math.prod(int(word) if word.isdigit() else sizes[word] for word in product.split("*"))
        for product in text.split("+")
    )
