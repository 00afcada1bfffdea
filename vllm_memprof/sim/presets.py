"""Model presets: the files of a model besides its weights, so that no hub is needed.

In: ``data/presets/*.json`` and the model that the user named. Out: `ResolvedModel`. Runs in the
launcher's process.

A preset file is a family of models: ``files`` (file name -> content) and ``tokenizer`` (a file of
``data/presets/tokenizers``) of all of them, ``note`` (told with every plan), ``source`` (of the
values of config.json), and ``models``: each with ``name`` (as on the hub), ``what``, ``parameters``
(null for a model of this project), and what is its own: ``config`` (values of config.json),
``files``, ``tokenizer``, ``also`` (other names, and those of models with the same configuration; a
name with W8A8 or W4A8 is started with ``--quantization ascend``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_memprof.errors import UsageError, nearest
from vllm_memprof.files import read_json
from vllm_memprof.layout import ModelConfig, text_config
from vllm_memprof.options import given_options, options, value_of
from vllm_memprof.sim import hubs
from vllm_memprof.sim.folders import (
    PROCESSORS,
    TOKENIZERS,
    WEIGHTS,
    JsonFiles,
    holds,
    write_folder,
)
from vllm_memprof.sim.quantization import FILE_NAME as DESCRIPTION
from vllm_memprof.sim.quantization import RULES, describe
from vllm_memprof.sim.runtime import ENV_ALIKE
from vllm_memprof.sim.stacks import cache_dir
from vllm_memprof.sim.tokenizers import (
    TokenizerTable,
    load_tokenizer,
    tokenizer_files,
    tokenizer_of_size,
)

PRESETS_DIR = Path(__file__).parent / "data/presets"
#: Part of the key of a generated folder; raise it when the generator writes something else.
GENERATOR = 5
#: A folder of the cache is complete: nothing is asked of a hub.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_MODELSCOPE": "False"}
#: A draft's output head is the model's in the checkpoint (DeepSeek-V3, README_WEIGHTS.md) and in
#: dummy weights (vLLM's initialize_dummy_weights: by shape); not where msmodelslim has rotated the
#: model's. vllm_ascend 0.23.0 compares them (llm_base_proposer.py::_maybe_share_lm_head).
_ALIKE = {ENV_ALIKE: "1"}
#: Names of models whose weights msmodelslim has quantized.
QUANTIZED = re.compile("w([48])a8", re.IGNORECASE)
#: What msmodelslim's quantization adds to a name in lower case.
_QUANTIZING = re.compile("-(w[48]a8|bf16)(mix)?(-(float)?(mtp|rot|quarot))*$")
#: Keys of a preprocessor -> keys of the vision encoder's configuration that give their values.
_OF_THE_ENCODER = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}

#: How weights are read; the loader of dummy ones refuses it.
_LOADER = "--model-loader-extra-config"
#: What a draft model of EAGLE-3 has of the model that it drafts for, and what is its own.
_SHAPES = re.compile("(hidden|intermediate|vocab)_size|num_.*_heads|head_dim|max_pos|rope|rms")
_DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}

#: What sizes a model, by its names in most of configurations.
_SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
#: A class of a model's configuration that has the fields of config.json and no defaults. A part of
#: it is of its own type: of an encoder of images, or of that name, or with its fields alone.
_CONFIGURATION = """\
from transformers import CONFIG_MAPPING, PretrainedConfig


def part(value):
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    kind = value["model_type"]
    names = (kind + "_vision_model", kind, None)
    found = next(name for name in names if name in CONFIG_MAPPING or name is None)
    return (CONFIG_MAPPING[found] if found else PretrainedConfig)(**value)


class {name}(PretrainedConfig):
    model_type = {model_type!r}

    def __init__(self, **fields):
        fields = {{key: part(value) for key, value in fields.items()}}
        self.__dict__.update(fields)  # the base class reads some of them
        super().__init__(**fields)
"""
_KIMI = {"kimi_k25_vision_processing.py": "from memprof_processors import KimiK25VisionProcessor\n"}
#: By model_type: the module of a class that vLLM asks how large images are.
_PROCESSORS = {
    "kimi_k25": _KIMI,
    "kimi_k3": _KIMI,
    "minicpmv": {"processing_minicpmv.py": "from memprof_processors import *\n"},
    "paddleocr_vl": {"image_processing.py": "from memprof_paddleocr import *\n"},
}


@dataclass(frozen=True)
class ResolvedModel:
    """The arguments and environment with which the engine gets the model that the user named."""

    path: str  # the model argument of the engine
    extra_args: list[str]  # arguments to add, without those that the user gave
    env: dict[str, str]  # environment of the engine, additions
    stand_ins: tuple[str, ...] = ()  # files that are not the model's own and decide sizes


@dataclass(frozen=True)
class Preset:
    """One model without weights."""

    name: str
    what: str  # kind of the model, in a few words
    parameters: int | None  # as published, of what is loaded; None for a model of this project
    files: JsonFiles = field(repr=False)
    tokenizer: TokenizerTable = field(repr=False)
    also: Sequence[str] = ()  # other names
    note: str = ""  # the difference from the public checkpoint
    source: str = ""  # of the values of config.json

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which it is found."""
        return (self.name, *self.also)

    @property
    def config(self) -> ModelConfig:
        """Content of config.json."""
        return self.files["config.json"]

    @property
    def folder(self) -> Path:
        """Folder of the generated files; another content is another folder."""
        return _cached(self.name.replace("/", "--"), [GENERATOR, self.files, self.tokenizer])


@cache
def list_presets() -> tuple[Preset, ...]:
    """Return every preset, by name."""
    presets = []
    for path in PRESETS_DIR.glob("*.json"):
        family = read_json(path)
        for model in family.pop("models"):
            files = {**model.pop("files", {}), "config.json": model.pop("config", {})}
            row = _merged(family, {**model, "files": files})
            presets.append(Preset(**{**row, "tokenizer": load_tokenizer(row["tokenizer"])}))
    return tuple(sorted(presets, key=lambda preset: preset.name.lower()))


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base with the other's values: tables are merged, everything else is replaced."""
    tables = {
        key: _merged(base[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **own, **tables}


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name, in any case, or that which a folder is named after.

    Of ``/models/Qwen3_32B-w8a8`` the owner does not count, nor how the words are joined, nor how
    msmodelslim quantized the weights; None where there is none.
    """
    asked, presets = name.lower(), _by_name()
    alike = _words(asked)
    return presets.get(asked) or presets.get(alike) or presets.get(_QUANTIZING.sub("", alike))


@cache
def _by_name() -> dict[str, Preset]:
    named = {n.lower(): each for each in list_presets() for n in each.names}
    return {_words(name): preset for name, preset in named.items()} | named


def _words(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", Path(name).name)


def resolve_model(model: str, user_args: list[str], method: str = "ascend") -> ResolvedModel:
    """Choose the source of the model: a local folder, a hub, a preset, in this order.

    Files that a model without weights lacks besides are generated in a folder of the cache: a
    synthetic tokenizer, a multimodal model's processor, and with ``--quantization`` and ``method``
    the description of the quantized weights.

    Args:
        model: a folder, or the name of a model on a hub.
        user_args: the engine arguments that the user gave; they are never overridden.
        method: what the engine calls weights of msmodelslim (``EngineRow.quantization``).

    Raises:
        UsageError: none of them has the model, or a quantization is asked for that cannot be
            described for this kind of model.
    """
    given = dict(given_options(user_args))
    quantized = given.get("--quantization") == method
    dummy = [] if "--load-format" in given else ["--load-format", "dummy"]
    named = QUANTIZED.search(model)
    env = {} if (quantized or named) and given.get("--load-format") != "dummy" else _ALIKE
    typed, stand_ins = Path(model).expanduser(), list[str]()
    folder: Path | None = typed
    if not typed.is_dir():
        preset, own = find_preset(model), model.startswith("memprof/")
        folder = None if own else hubs.cached_folder(model)
        if not own and not hubs.uses_modelscope():
            weights = folder is not None and holds(folder, WEIGHTS)
            # A hub's name alone has no place for the description of quantized weights.
            described = quantized and not weights and (folder or (preset and dummy))
            if not described and (folder or hubs.hub_answers(model)):
                return ResolvedModel(model, [] if weights else dummy, env)
        if folder is None and preset is not None:
            folder = generate_model(preset)
            if named and "--quantization" not in given:
                quantized, dummy = True, [*dummy, "--quantization", method]
            # what begins with bfloat16 is said of the model that is not quantized
            if preset.note and not (quantized and preset.note.startswith("bfloat16")):
                stand_ins.append(f"{preset.name}: {preset.note}")
            if model.lower() not in map(str.lower, preset.names):
                stand_ins.append(f"{model} is not on this machine: {preset.name} by its name")
    if folder is None:
        names = [name for each in list_presets() for name in each.names]
        near = nearest(model, names, 3) or nearest(f"Qwen/{model}", names, 3)
        listed = f"nearest: {', '.join(near)}" if near else "`memprof sim list` has the presets"
        raise UsageError(
            f"no preset for {model}, and no hub answers that it has it",
            f"{listed}; or give a folder with config.json",
        )
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        config = None  # missing or damaged, which the engine says better
    path, extra = folder, list[str]()
    if isinstance(config, dict) and not holds(folder, WEIGHTS):
        extra = dummy
        made: dict[str, Mapping[str, object]] = {}
        if code := _missing_code(folder, config):
            extra = [*extra, *({"--trust-remote-code"} - given.keys())]
            stand_ins.append(
                f"{model} has no {', '.join(code)}: generated; a configuration has the fields of "
                "config.json and no defaults of its own, a processor of images sizes them alike"
            )
        sizes = text_config(config)
        absent = [name for name in _SIZES if name not in sizes]
        if len(absent) == 1:
            stand_ins.append(
                f"config.json of {model} has no {absent[0]}: the engine takes the default of "
                "its class, which another model may not have"
            )
        like = _preset_like(config)
        if not given.keys() & {"--tokenizer", "--skip-tokenizer-init"} and not holds(
            folder, TOKENIZERS
        ):
            size = sizes.get("vocab_size")
            if table := _table_like(like, config) if like else tokenizer_of_size(size):
                made |= tokenizer_files(table)
            else:
                extra = [*extra, "--skip-tokenizer-init"]
            remedy = "a synthetic one was generated" if made else extra[-1]
            stand_ins.append(f"{model} has no tokenizer: {remedy}")
        if like and not holds(folder, PROCESSORS):
            # the patches are those of the model's own vision encoder
            encoder = sizes.get("vision_config", {})
            patches = {
                key: encoder[name] for key, name in _OF_THE_ENCODER.items() if name in encoder
            }
            lacking = {
                name: {**file, **patches}
                for name, file in like.files.items()
                if name.endswith("processor_config.json") and not (folder / name).exists()
            }
            made |= lacking
            if lacking:
                stand_ins.append(
                    f"{model} has no {', '.join(sorted(lacking))}: generated as for {like.name}; "
                    "they decide how large the multimodal profile is"
                )
        if quantized and not (folder / DESCRIPTION).is_file():
            bits = int(named[1]) if named else 8
            description = describe(config, bits == 4)
            if description is None:
                raise UsageError(
                    f"--quantization {method}: {model} has no "
                    f"{DESCRIPTION}, and none can be generated for model_type "
                    f"{config.get('model_type')!r}",
                    "put the quantized model's own file next to config.json; "
                    f"generated for: {', '.join(sorted(RULES))}",
                )
            made[DESCRIPTION] = description
            stand_ins.append(
                f"{DESCRIPTION} was generated: W{bits}A8 in the layers that models published for "
                "Ascend quantize"
            )
        if made or code:
            whole = folder.resolve()
            there = sorted(entry.name for entry in whole.iterdir())
            path = _cached(whole.name, [GENERATOR, str(whole), there, made, code])
            write_folder(path, made, linked=folder, code=code)
    if path == typed:
        return ResolvedModel(str(path), extra, env, tuple(stand_ins))
    extra += [] if "--served-model-name" in given else ["--served-model-name", model]
    return ResolvedModel(str(path), extra, env | OFFLINE, tuple(stand_ins))


def fit_args(user_args: list[str], model: ResolvedModel) -> tuple[list[str], list[str]]:
    """Return the arguments that fit a model without weights, and notes.

    The loader of dummy weights takes no options. A draft model that is not there is a preset, or
    generated: those of EAGLE-3 are one layer with the shapes of the model that they draft for.
    """
    if "dummy" in model.extra_args:
        given = options(user_args)
        user_args = [word for name, held in given if name != _LOADER for word in held]
    name = value_of(user_args, "--speculative-config.model", "--speculative-draft-model-path") or ""
    path = Path(model.path, "config.json")
    if Path(name).is_dir() or hubs.cached_folder(name) or not path.is_file():
        return user_args, []
    if preset := find_preset(name):
        folder, note = generate_model(preset), f"the draft model is {preset.name}"
    elif "eagle3" in str(user_args).lower():
        own = text_config(read_json(path))
        config = {key: own[key] for key in own if _SHAPES.match(key)} | _DRAFT
        folder = write_folder(_cached("eagle3", config), {"config.json": config})
        note = "a draft model was generated, with the shapes that those of EAGLE-3 have"
    else:
        return user_args, []
    return [each.replace(name, str(folder)) for each in user_args], [f"{name}: {note}"]


def _missing_code(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Return the modules that a model's files name for its own classes, if the folder has no code.

    Fields are all that an engine needs which has the model itself; nothing else is run of it.
    """
    kind = config.get("model_type")
    code = dict(_PROCESSORS.get(str(kind), {}))
    match = re.fullmatch(r"(\w+)\.(\w+)", str((config.get("auto_map") or {}).get("AutoConfig")))
    if match:
        code[f"{match[1]}.py"] = _CONFIGURATION.format(name=match[2], model_type=kind)
    return {} if holds(folder, ["*.py"]) else code


def generate_model(preset: Preset) -> Path:
    """Return the folder of a preset, generated on first use. Models share their tokenizers."""
    tokenizer = _cached("of", [GENERATOR, preset.tokenizer], "tokenizers")
    if not tokenizer.is_dir():
        write_folder(tokenizer, tokenizer_files(preset.tokenizer))
    return write_folder(preset.folder, preset.files, linked=tokenizer)


def _cached(name: str, content: object, kind: str = "models") -> Path:
    """Return the folder of the cache for a content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return cache_dir() / kind / f"{name}-{digest[:12]}"


def _preset_like(config: ModelConfig) -> Preset | None:
    """Return a preset of a model's kind: of its vocabulary, or where images have a token too."""
    kind, size = config.get("model_type"), text_config(config).get("vocab_size")
    alike = [preset for preset in list_presets() if preset.config.get("model_type") == kind]
    same = [each for each in alike if text_config(each.config).get("vocab_size") == size]
    public = [each for each in alike if each.parameters and _image_token(config) is not None]
    return next(iter(same or public), None)


def _image_token(config: ModelConfig) -> int | None:
    """Return the id of the token that stands for an image; None for a model without images."""
    text = text_config(config)
    found = text.get("image_token_id", text.get("image_token_index"))
    return found if isinstance(found, int) else None


def _table_like(preset: Preset, config: ModelConfig) -> TokenizerTable:
    """Return a preset's tokenizer, its special tokens moved so that images have the model's id."""
    theirs, own = _image_token(preset.config), _image_token(config)
    moved = 0 if theirs is None or own is None else own - theirs
    return {**preset.tokenizer, "plain_tokens": preset.tokenizer["plain_tokens"] + moved}
