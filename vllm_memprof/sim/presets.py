"""Model presets: the files of a model besides its weights, so that no hub is needed.

In: ``data/presets/*.json`` and the model that the user named. Out: `ResolvedModel`. Runs in the
launcher's process.

A preset file is a family of models: ``files`` (file name -> content) and ``tokenizer`` (a file of
``data/presets/tokenizers``) of all of them, ``note`` (told with every plan), ``source`` (of the
values of config.json), and ``models``: each with ``name`` (as on the hub), ``what``, ``parameters``
(null for a model of this project), and what is its own: ``config`` (values of config.json),
``files``, ``tokenizer``, ``also`` (other names on the hub).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from vllm_memprof.errors import UsageError, nearest
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
        return self.files["config.json"]

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
        family = json.loads(path.read_text(encoding="utf-8"))
        for model in family["models"]:
            own = {**model.get("files", {}), "config.json": model.get("config", {})}
            files = _merged(family["files"], own)
            preset = Preset(
                name=model["name"],
                what=model["what"],
                parameters=model["parameters"],
                files={**processors.files_of(files["config.json"]), **files},
                tokenizer=_tokenizer(model.get("tokenizer", family["tokenizer"])),
                also=tuple(model.get("also", ())),
                note=family.get("note", ""),
            )
            presets.append(preset)
    return tuple(sorted(presets, key=lambda preset: preset.name.lower()))


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
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
    weights.

    Args:
        model: a folder, or the name of a model on a hub.
        user_args: the engine arguments that the user gave; they are never overridden.

    Raises:
        UsageError: none of them has the model, or a quantization is asked for that cannot be
            described for this kind of model.
    """
    asked = _Asked(model, user_args)
    if os.path.isdir(os.path.expanduser(model)):
        return asked.from_folder(Path(model).expanduser(), "folder")
    preset = find_preset(model)
    from_hub = None if model.startswith("memprof/") else asked.from_hub()
    if from_hub is not None:
        # The weights are to be quantized, and a hub's name alone has no place for a description.
        lacks = asked.quantized and "--load-format" in from_hub.extra_args
        if preset is None or not lacks or from_hub.path != model:
            return from_hub
    if preset is None:
        names = [name for each in list_presets() for name in (each.name, *each.also)]
        near = nearest(model, names, 3) or nearest(f"Qwen/{model}", names, 3)
        listed = f"nearest: {', '.join(near)}" if near else "`memprof sim list` has the presets"
        raise UsageError(
            f"no preset for {model}, and no hub answers that it has it",
            hint=f"{listed}; or give a folder with config.json",
        )
    note = "preset: the real architecture, a synthetic byte-level tokenizer, no weights"
    stand_ins = [f"{preset.name}: {preset.note}"] if preset.note else []
    if asked.quantized:
        preset = replace(preset, files={**preset.files, **_description(preset.config, preset.name)})
        stand_ins.append(_GENERATED_DESCRIPTION)
    path, extra = str(generate_model(preset)), [*asked.dummy(), *asked.named()]
    return ResolvedModel(model, path, "preset", extra, _OFFLINE, note, tuple(stand_ins))


def generate_model(preset: Preset) -> Path:
    """Return the folder of a preset, generated on first use."""
    return write_folder(preset.folder, {**preset.files, **tokenizer_files(preset.tokenizer)})


class _Asked:
    """The model and the options that the user gave."""

    def __init__(self, model: str, user_args: list[str]) -> None:
        self.model = model
        self.given = dict(options(user_args))
        #: vllm-ascend's own quantization is asked for.
        self.quantized = value_of(user_args, "--quantization") == "ascend"

    def dummy(self, folder: Path | None = None) -> list[str]:
        """Return the arguments for weights that are not there, if the user gave none."""
        has = "--load-format" in self.given or (folder is not None and has_weights(folder))
        return [] if has else ["--load-format", "dummy"]

    def named(self) -> list[str]:
        name = ["--served-model-name", self.model]
        return [] if name[0] in self.given else name

    def from_folder(self, folder: Path, source: str) -> ResolvedModel:
        """Return a folder, or one in the cache with links to its files and those that it lacks."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = None  # missing or damaged, which the engine says better
        model = self.model
        if has_weights(folder) or not isinstance(config, dict):
            return ResolvedModel(model, str(folder), source, [], {})
        extra = self.dummy()
        note = "the folder has no weights: --load-format dummy" if extra else ""
        stand_ins = []
        made: JsonFiles = {}
        given = {"--tokenizer", "--skip-tokenizer-init"} & self.given.keys()
        if not has_tokenizer(folder) and not given:
            made = _tokenizer_of(config, folder)
            extra += [] if made else ["--skip-tokenizer-init"]
            remedy = "a synthetic one was generated" if made else extra[-1]
            stand_ins.append(f"{model} has no tokenizer: {remedy}")
        processor, like = _processor_of(config)
        if processor and not processors.has_processor(folder):
            lacking = {n: file for n, file in processor.items() if not (folder / n).exists()}
            made = {**lacking, **made}
            stand_ins.append(
                f"{model} has no {', '.join(sorted(lacking))}: generated as for {like}; "
                "they decide how large the multimodal profile is"
            )
        if self.quantized and not (folder / DESCRIPTION).is_file():
            made = {**made, **_description(config, str(folder))}
            stand_ins.append(_GENERATED_DESCRIPTION)
        path, env = folder, {}
        if made:
            names = sorted(entry.name for entry in folder.iterdir())
            digest = _digest([GENERATOR, str(folder.resolve()), names, made])
            path = cache_dir() / "models" / f"{folder.resolve().name}-{digest[:12]}"
            write_folder(path, made, linked=folder)
            extra, env = extra + self.named(), _OFFLINE
        return ResolvedModel(model, str(path), source, extra, env, note, tuple(stand_ins))

    def from_hub(self) -> ResolvedModel | None:
        """Return the model of a hub's cache on this machine, or of a hub that answers in time."""
        model = self.model
        if hubs.uses_modelscope():
            # The stack has no ModelScope client; what its cache holds is a folder like any other.
            cached = hubs.modelscope_folder(model)
            if cached is None:
                return None
            extra, env = [*self.dummy(cached), *self.named()], {"VLLM_USE_MODELSCOPE": "False"}
            return ResolvedModel(model, str(cached), "hub", extra, env, "ModelScope's cache")
        cached = hubs.hf_snapshot(model)
        if cached is not None and not has_weights(cached) and self.quantized:
            return self.from_folder(cached, "hub")
        if cached is None and (
            "/" not in model or hubs.is_offline() or not hubs.hub_answers(model)
        ):
            return None
        extra, note = self.dummy(cached), "Hugging Face cache"
        if cached is None:
            note = "configuration and tokenizer from the hub; weights are not downloaded"
            note = note if extra else "hub"
        return ResolvedModel(model, model, "hub", extra, {}, note)


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
        files = preset.files.items()
        return {name: file for name, file in files if name.endswith(_PROCESSOR)}, preset.name
    return {}, ""


def _preset_like(config: ModelConfig) -> Preset | None:
    """Return the first preset of a model's kind and vocabulary."""

    def kind(table: ModelConfig) -> tuple[object, object]:
        return table.get("model_type"), (table.get("text_config") or table).get("vocab_size")

    return next((preset for preset in list_presets() if kind(preset.config) == kind(config)), None)


def _description(config: ModelConfig, name: str) -> JsonFiles:
    description = describe(config)
    if description is None:
        raise UsageError(
            f"--quantization ascend: {name} has no {DESCRIPTION}, "
            f"and none can be generated for model_type {config.get('model_type')!r}",
            hint="put the quantized model's own file beside config.json; "
            f"generated for: {', '.join(sorted(RULES))}",
        )
    return {DESCRIPTION: description}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
