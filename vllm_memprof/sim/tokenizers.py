"""Synthetic tokenizers: bytes as tokens, and the special tokens of the real one at their real ids.

In: a table of ``presets/tokenizers``, or a model's configuration alone. Out: files of Hugging Face's tokenizers.

A table holds ``plain_tokens`` (how many ids belong to text: the first 256 of them are the bytes, the others are never
produced), ``special_tokens`` (the ids behind), and where the real tokenizer has them ``first_tokens`` (the ids before)
and ``reserved`` (numbered placeholders between plain and special tokens). Text is one token per byte.
"""

from __future__ import annotations

from typing import Any

_CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% elif message.content %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' or 'text' in part %}{{ part.text }}"
    "{% elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}"
)
#: Ids that a tokenizer needs besides special ones: a byte each.
_BYTES = 256


def tokenizer_files(table: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` and ``tokenizer_config.json`` of a table."""
    added = _added_tokens(table)
    first = len(table.get("first_tokens", []))
    symbols = [_byte_symbol(byte) for byte in range(_BYTES)]
    vocabulary = {symbol: first + index for index, symbol in enumerate(symbols)}
    vocabulary |= {
        f"<unused{index}>": first + index for index in range(_BYTES, table["plain_tokens"])
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        # the library wants the ids of first tokens in the model too: it numbers from 0 without a hole
        "vocab": {token["content"]: token["id"] for token in added if token["id"] < first}
        | vocabulary,
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    names = ("bos_token", "eos_token", "pad_token", "model_max_length")
    config = {
        "tokenizer_class": table["class"],
        **{name: table[name] for name in names if name in table},
        "chat_template": chat_template(table["message"]),
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def chat_template(message: dict[str, str]) -> str:
    """A Jinja template: what stands before a message of a ``{role}`` (or ``{Role}``), its text, what stands after."""
    before = message["before"].replace("{role}", "{{ message.role }}")
    before = before.replace("{Role}", "{{ message.role | capitalize }}")
    answer = message["before"].replace("{role}", "assistant").replace("{Role}", "Assistant")
    turns = "{% for message in messages %}" + before + _CONTENT + message["after"] + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}" + answer + "{% endif %}"


def table_for(config: dict[str, Any]) -> dict[str, Any] | None:
    """The table of a tokenizer for a model of which only the configuration is known; None without a usable size.

    Its special tokens lie behind all plain ones; which id ends a text is the configuration's, not the tokenizer's.
    """
    text = config.get("text_config") or config
    size = text.get("vocab_size")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if not isinstance(size, int) or size < _BYTES + len(special):
        return None
    return {
        "class": "PreTrainedTokenizerFast",
        "plain_tokens": size - len(special),
        "special_tokens": special,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "message": {"before": "<|im_start|>{role}\n", "after": "<|im_end|>\n"},
    }


def _added_tokens(table: dict[str, Any]) -> list[dict[str, Any]]:
    first = table.get("first_tokens", [])
    reserved = table.get("reserved", {"name": "", "first": 0, "count": 0})
    behind = [
        reserved["name"].format(reserved["first"] + index) for index in range(reserved["count"])
    ]
    behind += table["special_tokens"]
    numbered = [*enumerate(first), *enumerate(behind, len(first) + table["plain_tokens"])]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": text, **flags, "special": _is_special(text)}
        for number, text in numbered
    ]


def _is_special(text: str) -> bool:
    """Whether a reader of the text is spared it; a tool call is shown."""
    return text.startswith(("<|", "<｜", "["))


def _byte_symbol(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself where it prints, else one from U+0100 on."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
        return chr(byte)
    unprintable = [*range(33), *range(127, 161), 173]
    return chr(256 + unprintable.index(byte))
