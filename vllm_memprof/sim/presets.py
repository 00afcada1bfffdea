"""Model presets: what the engine reads of a model besides its weights, so that no hub is needed.

In: ``presets/*.json`` and the model that the user named. Out: `ResolvedModel`. Runs in the launcher's process.

A preset file holds ``name`` (as on the hub), ``title``, ``files`` (file name -> content, facts of the public model) and
``tokenizer``: a byte-level tokenizer is made from it, whose first 256 tokens are the bytes, filled up to
``plain_tokens``, with the real special tokens at their real ids behind. Text is therefore one token per byte; what
follows from the size of the vocabulary is as in the real model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import urllib.request
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_memprof.sim.stacks import cache_dir

PRESETS_DIR = Path(__file__).parent / "presets"
#: Seconds that a hub has to answer; without a network a start must not wait longer.
HUB_TIMEOUT_S = 3.0
#: Part of the key of a generated folder; raise it when the generator writes something else.
GENERATOR = 1
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% elif message.content %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' or 'text' in part %}{{ part.text }}"
    "{% elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ResolvedModel:
    """What the engine is given for the model that the user named."""

    name: str  # as the user typed it
    path: str  # what the engine gets
    source: str  # "folder", "hub" or "preset"
    extra_args: list[str]  # arguments to add, without those that the user gave
    env: dict[str, str]  # environment of the engine, additions
    note: str = ""  # why this source, where a person would ask; "" otherwise


@dataclass(frozen=True)
class Preset:
    """One model without weights."""

    name: str
    title: str
    files: dict[str, Any] = field(repr=False)  # file name -> JSON content
    tokenizer: dict[str, Any] = field(repr=False)
    digest: str = ""  # of the preset file and the generator

    @property
    def folder(self) -> Path:
        """Where the files are generated; another content is another folder."""
        return cache_dir() / "models" / f"{self.name.replace('/', '--')}-{self.digest[:12]}"


@cache
def list_presets() -> tuple[Preset, ...]:
    """Every preset, by name."""
    presets = []
    for path in sorted(PRESETS_DIR.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        digest = hashlib.sha256(f"{GENERATOR}\n{_CHAT_TEMPLATE}\n{text}".encode()).hexdigest()
        table = json.loads(text)
        presets.append(Preset(table["name"], table["title"], table["files"], table["tokenizer"], digest))
    return tuple(sorted(presets, key=lambda preset: preset.name.lower()))


def find_preset(name: str) -> Preset | None:
    """The preset of that name, in any case; None where there is none."""
    return next((preset for preset in list_presets() if preset.name.lower() == name.lower()), None)


def resolve_model(model: str, user_args: list[str]) -> ResolvedModel:
    """Chooses where the engine reads the model from: a local folder, a hub, a preset, in this order.

    A name that none of them knows is passed on as it is: the engine's own message says what is wrong.

    Args:
        model: a folder, or the name of a model on a hub.
        user_args: the engine arguments that the user gave; they are never overridden.
    """
    if os.path.isdir(os.path.expanduser(model)):
        folder = Path(model).expanduser()
        extra = [] if _has_weights(folder) else _missing(user_args, {"--load-format": "dummy"})
        note = "the folder has no weights: --load-format dummy" if extra else ""
        return ResolvedModel(model, str(folder), "folder", extra, {}, note)
    preset = find_preset(model)
    from_hub = None if model.startswith("memprof/") else _resolve_hub(model, user_args)
    if from_hub is not None:
        return from_hub
    if preset is None:
        return ResolvedModel(model, model, "hub", [], {}, "neither a folder nor a preset, and no hub answered for it")
    extra = _missing(user_args, {"--load-format": "dummy", "--served-model-name": model})
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_MODELSCOPE": "False"}
    note = "preset: the real architecture, a synthetic byte-level tokenizer, no weights"
    return ResolvedModel(model, str(generate_model(preset)), "preset", extra, env, note)


def generate_model(preset: Preset) -> Path:
    """The folder of a preset, generated on first use.

    The files appear all at once or not at all, also when several processes ask at the same time.
    """
    target = preset.folder
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, content in {**preset.files, **tokenizer_files(preset)}.items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def tokenizer_files(preset: Preset) -> dict[str, Any]:
    """``tokenizer.json`` and ``tokenizer_config.json`` of the Hugging Face tokenizers library."""
    table = preset.tokenizer
    first_special = table["plain_tokens"]
    symbols = [_byte_symbol(byte) for byte in range(256)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {f"<unused{index}>": index for index in range(256, first_special)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": first_special + index, "content": text, **flags, "special": text.startswith("<|")}
        for index, text in enumerate(table["special_tokens"])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
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
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": table["eos_token"],
        "pad_token": table["pad_token"],
        "model_max_length": table["model_max_length"],
        "chat_template": _CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _byte_symbol(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself where it prints, else one from U+0100 on."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
        return chr(byte)
    unprintable = [*range(33), *range(127, 161), 173]
    return chr(256 + unprintable.index(byte))


def _missing(user_args: list[str], wanted: dict[str, str]) -> list[str]:
    """Those of the options that the user did not give, as arguments. vLLM takes underscores for dashes."""
    given = {arg.partition("=")[0].replace("_", "-") for arg in user_args if arg.startswith("--")}
    return [word for option, value in wanted.items() if option not in given for word in (option, value)]


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def _is_true(value: str | None) -> bool:
    return (value or "").strip().lower() in {"1", "true", "yes", "on"}


def _resolve_hub(model: str, user_args: list[str]) -> ResolvedModel | None:
    """The model from a hub's cache on this machine, or from a hub that answers in time."""
    if _is_true(os.environ.get("VLLM_USE_MODELSCOPE")):
        # The stack has no ModelScope client; what its cache holds is a folder like any other.
        cached = _modelscope_folder(model)
        if cached is None:
            return None
        extra = [] if _has_weights(cached) else _missing(user_args, {"--load-format": "dummy"})
        extra += _missing(user_args, {"--served-model-name": model})
        return ResolvedModel(model, str(cached), "hub", extra, {"VLLM_USE_MODELSCOPE": "False"}, "ModelScope's cache")
    cached = _hf_snapshot(model)
    if cached is not None:
        extra = [] if _has_weights(cached) else _missing(user_args, {"--load-format": "dummy"})
        return ResolvedModel(model, model, "hub", extra, {}, "Hugging Face cache")
    if "/" not in model or _is_true(os.environ.get("HF_HUB_OFFLINE")) or not hub_answers(model):
        return None
    extra = _missing(user_args, {"--load-format": "dummy"})
    note = "configuration and tokenizer from the hub; weights are not downloaded" if extra else "hub"
    return ResolvedModel(model, model, "hub", extra, {}, note)


def _hf_snapshot(model: str) -> Path | None:
    """The newest cached snapshot of a model that has a config.json."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = Path(hub).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return configs[-1].parent if configs else None


def _modelscope_folder(model: str) -> Path | None:
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
    # ModelScope writes a dot of a name as three underscores.
    candidates = [root / "models" / model, root / model, root / "models" / model.replace(".", "___")]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def hub_answers(model: str, timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """Whether the hub has the model's configuration and says so within ``timeout_s`` seconds.

    The question runs in a thread of its own: name resolution knows no time limit.
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{model}/resolve/main/config.json", method="HEAD")
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    answer: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer.append(response.status == 200)
        except (OSError, ValueError):
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer == [True]
