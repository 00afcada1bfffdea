"""Model presets: the files of a model besides its weights, so that no hub is needed.

In: ``data/presets/*.json`` and the model that the user named. Out: `ResolvedModel`. Runs in the
launcher's process. A preset file is a `Family` of models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypedDict, cast

from vllm_memprof.errors import UsageError
from vllm_memprof.options import options, value_of
from vllm_memprof.sim import hubs, processors
from vllm_memprof.sim.folders import JsonFiles, has_tokenizer, has_weights, write_folder
from vllm_memprof.sim.quantization import FILE_NAME as DESCRIPTION
from vllm_memprof.sim.quantization import RULES, describe
from vllm_memprof.sim.stacks import cache_dir
from vllm_memprof.sim.tokenizers import TokenizerTable, table_for, tokenizer_files
from vllm_memprof.sim.weights import ModelConfig

PRESETS_DIR = Path(__file__).parent / "data" / "presets"
#: End of the names of a processor's files.
_PROCESSOR = "processor_config.json"
#: Part of the key of a generated folder; raise it when the generator writes something else.
GENERATOR = 2
#: A generated folder is complete: nothing is asked of a hub.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_MODELSCOPE": "False"}
_GENERATED_DESCRIPTION = (
    f"{DESCRIPTION} was generated: W8A8 in the layers that models published for Ascend quantize"
)


class _Overrides(TypedDict, total=False):
    config: dict[str, object]  # the model's own values in config.json
    files: dict[str, dict[str, object]]  # and in the others
    tokenizer: str
    also: list[str]


class Model(_Overrides):
    """One model of a preset file."""

    name: str  # as on the hub
    what: str
    parameters: int | None


class _Note(TypedDict, total=False):
    note: str  # told with every plan
    source: str  # of the values of config.json


class Family(_Note):
    """The content of a preset file; ``files`` and ``tokenizer`` hold for all its models."""

    files: dict[str, dict[str, object]]  # file name -> content
    tokenizer: str  # a file of data/presets/tokenizers
    models: list[Model]


@dataclass(frozen=True)
class ResolvedModel:
    """The arguments and environment with which the engine gets the model that the user named."""

    name: str  # as the user typed it
    path: str  # the model argument of the engine
    source: str  # "folder", "hub" or "preset"
    extra_args: list[str]  # arguments to add, without those that the user gave
    env: dict[str, str]  # environment of the engine, additions
    note: str = ""  # why this source, where a person would ask; "" otherwise
    stand_ins: tuple[str, ...] = ()  # files that are not the model's own and decide sizes


@dataclass(frozen=True)
class Preset:
    """One model without weights."""

    name: str
    what: str  # kind of the model, in a few words
    parameters: int | None  # as published, of what is loaded; None for a model of this project
    files: JsonFiles = field(repr=False)
    tokenizer: TokenizerTable = field(repr=False)
    also: tuple[str, ...] = ()  # other names on the hub
    note: str = ""  # the difference from the public checkpoint

    @property
    def config(self) -> ModelConfig:
        """Content of config.json."""
        return cast(ModelConfig, self.files["config.json"])

    @property
    def digest(self) -> str:
        """Digest of everything that is generated."""
        return _digest([GENERATOR, self.files, self.tokenizer])

    @property
    def folder(self) -> Path:
        """Folder of the generated files; another content is another folder."""
        return cache_dir() / "models" / f"{self.name.replace('/', '--')}-{self.digest[:12]}"


@cache
def list_presets() -> tuple[Preset, ...]:
    """Return every preset, by name."""
    presets = []
    for path in PRESETS_DIR.glob("*.json"):
        family: Family = json.loads(path.read_text(encoding="utf-8"))
        for model in family["models"]:
            own = {**model.get("files", {}), "config.json": model.get("config", {})}
            files = _merged(family["files"], own)
            config = cast(ModelConfig, files["config.json"])
            preset = Preset(
                name=model["name"],
                what=model["what"],
                parameters=model["parameters"],
                files=cast(JsonFiles, {**processors.files_of(config), **files}),
                tokenizer=_tokenizer(model.get("tokenizer", family["tokenizer"])),
                also=tuple(model.get("also", ())),
                note=family.get("note", ""),
            )
            presets.append(preset)
    return tuple(sorted(presets, key=lambda preset: preset.name.lower()))


def _merged(base: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return the base with the other's values: tables are merged, everything else is replaced."""
    result = dict(base)
    for key, value in own.items():
        before = result.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merged(before, value)
        result[key] = value
    return result


def _tokenizer(name: str) -> TokenizerTable:
    table = json.loads((PRESETS_DIR / "tokenizers" / f"{name}.json").read_text(encoding="utf-8"))
    base = table.pop("extends", None)
    return cast(TokenizerTable, table if base is None else {**_tokenizer(base), **table})


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name, in any case; None where there is none."""
    for preset in list_presets():
        if name.lower() in [each.lower() for each in (preset.name, *preset.also)]:
            return preset
    return None


def resolve_model(model: str, user_args: list[str]) -> ResolvedModel:
    """Choose the source of the model: a local folder, a hub, a preset, in this order.

    Files that a model without weights lacks besides are generated in a folder of the cache: a
    synthetic tokenizer, and with ``--quantization ascend`` the description of the quantized
    weights. A name that none of them knows is passed on as it is: the engine's own message says
    what is wrong.

    Args:
        model: a folder, or the name of a model on a hub.
        user_args: the engine arguments that the user gave; they are never overridden.

    Raises:
        UsageError: a quantization is asked for that cannot be described for this kind of model.
    """
    if os.path.isdir(os.path.expanduser(model)):
        return _from_folder(model, Path(model).expanduser(), "folder", user_args)
    preset = find_preset(model)
    from_hub = None if model.startswith("memprof/") else _from_hub(model, user_args)
    if from_hub is not None:
        # The weights are to be quantized, and a hub's name alone has no place for a description.
        lacks = _is_quantized(user_args) and "--load-format" in from_hub.extra_args
        if preset is None or not lacks or from_hub.path != model:
            return from_hub
    if preset is None:
        return ResolvedModel(
            model, model, "hub", [], {}, "neither a folder nor a preset, and no hub answered for it"
        )
    extra = _missing(user_args, {"--load-format": "dummy", "--served-model-name": model})
    note = "preset: the real architecture, a synthetic byte-level tokenizer, no weights"
    stand_ins = [f"{preset.name}: {preset.note}"] if preset.note else []
    if _is_quantized(user_args):
        preset = replace(preset, files={**preset.files, **_description(preset.config, preset.name)})
        stand_ins.append(_GENERATED_DESCRIPTION)
    return ResolvedModel(
        model, str(generate_model(preset)), "preset", extra, _OFFLINE, note, tuple(stand_ins)
    )


def generate_model(preset: Preset) -> Path:
    """Return the folder of a preset, generated on first use."""
    if not preset.folder.is_dir():
        write_folder(preset.folder, {**preset.files, **tokenizer_files(preset.tokenizer)})
    return preset.folder


def _from_folder(model: str, folder: Path, source: str, user_args: list[str]) -> ResolvedModel:
    """Return a folder, or one in the cache with links to its files and those that it lacks."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None  # missing or damaged, which the engine says better
    if has_weights(folder) or not isinstance(content, dict):
        return ResolvedModel(model, str(folder), source, [], {})
    config = cast(ModelConfig, content)
    extra = _missing(user_args, {"--load-format": "dummy"})
    note = "the folder has no weights: --load-format dummy" if extra else ""
    stand_ins = []
    made: JsonFiles = {}
    tokenizer_options = {"--tokenizer", "--skip-tokenizer-init"}
    if not has_tokenizer(folder) and tokenizer_options.isdisjoint(dict(options(user_args))):
        made = _tokenizer_of(config, folder)
        extra += [] if made else ["--skip-tokenizer-init"]
        remedy = "a synthetic one was generated" if made else extra[-1]
        stand_ins.append(f"{model} has no tokenizer: {remedy}")
    processor, like = _processor_of(config)
    if processor and not processors.has_processor(folder):
        lacking = {name: file for name, file in processor.items() if not (folder / name).exists()}
        made = {**lacking, **made}
        stand_ins.append(
            f"{model} has no {', '.join(sorted(lacking))}: generated as for {like}; "
            "they decide how large the multimodal profile is"
        )
    if _is_quantized(user_args) and not (folder / DESCRIPTION).is_file():
        made = {**made, **_description(config, str(folder))}
        stand_ins.append(_GENERATED_DESCRIPTION)
    if not made:
        return ResolvedModel(model, str(folder), source, extra, {}, note, tuple(stand_ins))
    names = sorted(entry.name for entry in folder.iterdir())
    digest = _digest([GENERATOR, str(folder.resolve()), names, made])
    target = cache_dir() / "models" / f"{folder.resolve().name}-{digest[:12]}"
    extra += _missing(user_args, {"--served-model-name": model})
    path = write_folder(target, made, linked=folder)
    return ResolvedModel(model, str(path), source, extra, _OFFLINE, note, tuple(stand_ins))


def _tokenizer_of(config: ModelConfig, folder: Path) -> JsonFiles:
    """Return a tokenizer's files by a model's kind, or by the size of its vocabulary alone.

    With those of a preset comes what else it has and the folder lacks, its processor aside.
    """
    preset, family = _preset_like(config), processors.family_of(config)
    if family is not None:
        table = _tokenizer(family.tokenizer)
        first = processors.first_special_id(family, config, table["special_tokens"])
        if first is not None:
            return tokenizer_files({**table, "plain_tokens": first})
    if preset is not None:
        others = {
            name: file
            for name, file in preset.files.items()
            if not name.endswith(_PROCESSOR) and not (folder / name).exists()
        }
        return {**others, **tokenizer_files(preset.tokenizer)}
    by_size = table_for(config)
    return {} if by_size is None else tokenizer_files(by_size)


def _processor_of(config: ModelConfig) -> tuple[JsonFiles, str]:
    """Return the processor's files of a model's kind, or none, and whose they are."""
    preset, family = _preset_like(config), processors.family_of(config)
    if family is not None:
        return processors.processor_files(family, config), ", ".join(family.model_types)
    if preset is not None:
        names = [name for name in preset.files if name.endswith(_PROCESSOR)]
        return {name: preset.files[name] for name in names}, preset.name
    return {}, ""


def _preset_like(config: ModelConfig) -> Preset | None:
    """Return the first preset of a model's kind and vocabulary."""

    def kind(table: ModelConfig) -> tuple[str | None, int | None]:
        return table.get("model_type"), (table.get("text_config") or table).get("vocab_size")

    return next((preset for preset in list_presets() if kind(preset.config) == kind(config)), None)


def _description(config: ModelConfig, name: str) -> JsonFiles:
    description = describe(config)
    if description is None:
        kind = config.get("model_type")
        raise UsageError(
            f"--quantization ascend: {name} has no {DESCRIPTION}, "
            f"and none can be generated for model_type {kind!r}",
            hint="put the quantized model's own file beside config.json; "
            f"generated for: {', '.join(sorted(RULES))}",
        )
    return {DESCRIPTION: description}


def _from_hub(model: str, user_args: list[str]) -> ResolvedModel | None:
    """Return the model of a hub's cache on this machine, or of a hub that answers in time."""
    if hubs.uses_modelscope():
        # The stack has no ModelScope client; what its cache holds is a folder like any other.
        cached = hubs.modelscope_folder(model)
        if cached is None:
            return None
        extra = [] if has_weights(cached) else _missing(user_args, {"--load-format": "dummy"})
        extra += _missing(user_args, {"--served-model-name": model})
        return ResolvedModel(
            model, str(cached), "hub", extra, {"VLLM_USE_MODELSCOPE": "False"}, "ModelScope's cache"
        )
    cached = hubs.hf_snapshot(model)
    if cached is not None and not has_weights(cached) and _is_quantized(user_args):
        return _from_folder(model, cached, "hub", user_args)
    if cached is not None:
        extra = [] if has_weights(cached) else _missing(user_args, {"--load-format": "dummy"})
        return ResolvedModel(model, model, "hub", extra, {}, "Hugging Face cache")
    if "/" not in model or hubs.is_offline() or not hubs.hub_answers(model):
        return None
    extra = _missing(user_args, {"--load-format": "dummy"})
    note = (
        "configuration and tokenizer from the hub; weights are not downloaded" if extra else "hub"
    )
    return ResolvedModel(model, model, "hub", extra, {}, note)


def _is_quantized(user_args: list[str]) -> bool:
    """Return True if the user asks for vllm-ascend's own quantization."""
    return value_of(user_args, "--quantization") == "ascend"


def _missing(user_args: list[str], wanted: dict[str, str]) -> list[str]:
    """Return those of the options that the user did not give, as arguments."""
    given = dict(options(user_args))
    return [
        word for option, value in wanted.items() if option not in given for word in (option, value)
    ]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
