"""Synthetic tokenizers: bytes as tokens, and the special tokens of the real one at their real ids.

In: a table of ``data/presets/tokenizers``, or a model's configuration alone. Out: files of Hugging
Face's tokenizers. Text is one token per byte. Parsers of reasoning and of tool calls find their
marks (``data/tokenizer.json``), which no text becomes, at some id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_memprof.files import read_json
from vllm_memprof.sim.folders import JsonFiles

#: A file of ``data/presets/tokenizers``: class, plain_tokens (ids of text: the first 256 are the
#: bytes, the others never produced), special_tokens (the ids behind), first_tokens (those before),
#: reserved (numbered placeholders between plain and special tokens: name with {}, first, count),
#: message (text before and after one, in Jinja; the role is {{ role }}), and keys of
#: tokenizer_config.json.
TokenizerTable = Mapping[str, Any]

_DATA = Path(__file__).parent / "data"
_TURNS = (
    "{% for message in messages %}{% set role = message.role %}BEFORE"
    "{% if message.content is string %}{{ message.content }}{% elif message.content %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' or 'text' in part %}{{ part.text }}"
    "{% elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}AFTER{% endfor %}"
    "{% if add_generation_prompt %}{% set role = 'assistant' %}BEFORE{% endif %}"
)
#: Ids that a tokenizer needs besides special ones: a byte each.
_BYTES = 256


def load_tokenizer(name: str) -> TokenizerTable:
    """Read a file of ``data/presets/tokenizers``, with what it takes over from another."""
    table = read_json(_DATA / f"presets/tokenizers/{name}.json")
    base = table.pop("extends", None)
    return {**(load_tokenizer(base) if base else {}), **table}


def tokenizer_of_size(size: object) -> TokenizerTable | None:
    """Return a tokenizer for a size of the vocabulary; None where it is no usable one.

    Its special tokens lie behind all plain ones; which id ends a text is the configuration's, not
    the tokenizer's.
    """
    table = load_tokenizer("any")
    plain = size - len(table["special_tokens"]) if isinstance(size, int) else 0
    return {**table, "plain_tokens": plain} if plain >= _BYTES else None


def tokenizer_files(table: TokenizerTable) -> JsonFiles:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of a table."""
    before = table.get("first_tokens", [])
    reserved = table.get("reserved", {"name": "", "first": 0, "count": 0})
    behind = [reserved["name"].format(reserved["first"] + at) for at in range(reserved["count"])]
    behind += table["special_tokens"]
    first = len(before)
    numbered = {**dict(enumerate(before)), **dict(enumerate(behind, first + table["plain_tokens"]))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # A reader of the text is spared a special token; a tool call is shown.
    added = {
        number: {"content": text, **flags, "special": text.startswith(("<|", "<｜", "["))}
        for number, text in numbered.items()
    }
    # byte-level BPE: a byte is its own character, or one from U+0100 on if it does not print
    hidden = [*range(33), *range(127, 161), 173]
    plain = [chr(256 + hidden.index(b) if b in hidden else b) for b in range(_BYTES)]
    tokenizer = read_json(_DATA / "tokenizer.json")
    marks = [text for text in tokenizer["model"]["vocab"] if text not in numbered.values()]
    plain += marks[: table["plain_tokens"] - _BYTES]
    plain += [f"<unused{index}>" for index in range(len(plain), table["plain_tokens"])]
    # the library wants the ids of first tokens in the model too: it numbers from 0 without a hole
    vocabulary = {text: number for number, text in enumerate([*before, *plain])}
    tokenizer["added_tokens"] = [{"id": number, **token} for number, token in added.items()]
    tokenizer["model"]["vocab"] = vocabulary
    said = table["message"]
    names = ("bos_token", "eos_token", "pad_token", "model_max_length", "extra_special_tokens")
    config = {
        "tokenizer_class": table["class"],
        **{name: value for name, value in table.items() if name in names},
        "chat_template": _TURNS.replace("BEFORE", said["before"]).replace("AFTER", said["after"]),
        "added_tokens_decoder": {str(number): token for number, token in added.items()},
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
