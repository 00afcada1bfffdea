"""Model presets: what the engine reads of a model besides its weights, so that no hub is needed.

In: ``presets/*.json`` and the model that the user named. Out: `ResolvedModel`. Runs in the launcher's process.

A preset file is a family. ``files`` (file name -> content) and ``tokenizer`` (a file of ``presets/tokenizers``) hold
for all its ``models``; a model adds its ``name`` as on the hub, what it is, the published number of its ``parameters``
(those that are loaded without speculative decoding), and what its files have otherwise: ``config`` for config.json,
``files`` for the others. ``note`` says where the preset differs from the public checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from vllm_memprof.errors import UsageError
from vllm_memprof.sim import hubs
from vllm_memprof.sim.folders import has_tokenizer, has_weights, write_folder
from vllm_memprof.sim.quantization import FILE_NAME as DESCRIPTION
from vllm_memprof.sim.quantization import RULES, describe
from vllm_memprof.sim.stacks import cache_dir
from vllm_memprof.sim.tokenizers import table_for, tokenizer_files

PRESETS_DIR = Path(__file__).parent / "data" / "presets"
#: Part of the key of a generated folder; raise it when the generator writes something else.
GENERATOR = 2
#: A generated folder is complete: nothing is asked of a hub.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_MODELSCOPE": "False"}
_GENERATED_DESCRIPTION = (
    f"{DESCRIPTION} was generated: W8A8 in the layers that models published for Ascend quantize"
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
    stand_ins: tuple[str, ...] = ()  # what is not the model's own and decides sizes; for the report


@dataclass(frozen=True)
class Preset:
    """One model without weights."""

    name: str
    what: str  # kind of the model, in a few words
    parameters: int | None  # as published, of what is loaded; None for a model of this project
    files: dict[str, Any] = field(repr=False)  # file name -> JSON content
    tokenizer: dict[str, Any] = field(repr=False)
    also: tuple[str, ...] = ()  # other names on the hub
    note: str = ""  # where it differs from the public checkpoint

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        content: dict[str, Any] = self.files["config.json"]
        return content

    @property
    def digest(self) -> str:
        """Of everything that is generated."""
        return _digest([GENERATOR, self.files, self.tokenizer])

    @property
    def folder(self) -> Path:
        """Where the files are generated; another content is another folder."""
        return cache_dir() / "models" / f"{self.name.replace('/', '--')}-{self.digest[:12]}"


@cache
def list_presets() -> tuple[Preset, ...]:
    """Every preset, by name."""
    presets = []
    for path in PRESETS_DIR.glob("*.json"):
        family = json.loads(path.read_text(encoding="utf-8"))
        for model in family["models"]:
            own = {**model.get("files", {}), "config.json": model.get("config", {})}
            preset = Preset(
                name=model["name"],
                what=model["what"],
                parameters=model["parameters"],
                files=_merged(family["files"], own),
                tokenizer=_tokenizer(model.get("tokenizer", family["tokenizer"])),
                also=tuple(model.get("also", ())),
                note=family.get("note", ""),
            )
            presets.append(preset)
    return tuple(sorted(presets, key=lambda preset: preset.name.lower()))


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The base with what the other has otherwise: tables are merged, everything else is replaced."""
    result = dict(base)
    for key, value in own.items():
        before = result.get(key)
        result[key] = (
            _merged(before, value)
            if isinstance(value, dict) and isinstance(before, dict)
            else value
        )
    return result


def _tokenizer(name: str) -> dict[str, Any]:
    table = json.loads((PRESETS_DIR / "tokenizers" / f"{name}.json").read_text(encoding="utf-8"))
    base = table.pop("extends", None)
    return table if base is None else {**_tokenizer(base), **table}


def find_preset(name: str) -> Preset | None:
    """The preset of that name, in any case; None where there is none."""
    wanted = name.lower()
    known = ((preset, (preset.name, *preset.also)) for preset in list_presets())
    return next(
        (preset for preset, names in known if wanted in (each.lower() for each in names)), None
    )


def resolve_model(model: str, user_args: list[str]) -> ResolvedModel:
    """Chooses where the engine reads the model from: a local folder, a hub, a preset, in this order.

    What a model without weights lacks besides is generated in a folder of the cache: a synthetic tokenizer, and with
    ``--quantization ascend`` the description of the quantized weights. A name that none of them knows is passed on
    as it is: the engine's own message says what is wrong.

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
    if from_hub is not None and (preset is None or not _lacks_description(from_hub, user_args)):
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
    """The folder of a preset, generated on first use."""
    if not preset.folder.is_dir():
        write_folder(preset.folder, {**preset.files, **tokenizer_files(preset.tokenizer)})
    return preset.folder


def _from_folder(model: str, folder: Path, source: str, user_args: list[str]) -> ResolvedModel:
    """A folder as it is; where it lacks a tokenizer or a description, one in the cache with links to its files."""
    config = _read_config(folder)
    if has_weights(folder) or config is None:
        return ResolvedModel(model, str(folder), source, [], {})
    extra = _missing(user_args, {"--load-format": "dummy"})
    note = "the folder has no weights: --load-format dummy" if extra else ""
    stand_ins = []
    made: dict[str, Any] = {}
    if not has_tokenizer(folder) and not _given(user_args) & {
        "--tokenizer",
        "--skip-tokenizer-init",
    }:
        made = _stand_ins(config, folder)
        extra += [] if made else ["--skip-tokenizer-init"]
        stand_ins.append(
            f"{model} has no tokenizer: " + ("a synthetic one was generated" if made else extra[-1])
        )
    if _is_quantized(user_args) and not (folder / DESCRIPTION).is_file():
        made |= _description(config, str(folder))
        stand_ins.append(_GENERATED_DESCRIPTION)
    if not made:
        return ResolvedModel(model, str(folder), source, extra, {}, note, tuple(stand_ins))
    names = sorted(entry.name for entry in folder.iterdir())
    digest = _digest([GENERATOR, str(folder.resolve()), names, made])
    target = cache_dir() / "models" / f"{folder.resolve().name}-{digest[:12]}"
    extra += _missing(user_args, {"--served-model-name": model})
    path = write_folder(target, made, linked=folder)
    return ResolvedModel(model, str(path), source, extra, _OFFLINE, note, tuple(stand_ins))


def _read_config(folder: Path) -> dict[str, Any] | None:
    """Content of config.json; None where it is not there or damaged, which the engine says better."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _stand_ins(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tokenizer and preprocessor files that a folder lacks: those of a preset of its kind, else of its vocabulary."""

    def kind(table: Mapping[str, Any]) -> tuple[Any, Any]:
        return table.get("model_type"), (table.get("text_config") or table).get("vocab_size")

    preset = next(
        (preset for preset in list_presets() if kind(preset.config) == kind(config)), None
    )
    if preset is not None:
        others = {
            name: content for name, content in preset.files.items() if not (folder / name).exists()
        }
        return {**others, **tokenizer_files(preset.tokenizer)}
    table = table_for(config)
    return {} if table is None else tokenizer_files(table)


def _description(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    description = describe(config)
    if description is None:
        kind = config.get("model_type")
        raise UsageError(
            f"--quantization ascend: {name} has no {DESCRIPTION}, and none can be generated for model_type {kind!r}",
            hint=f"put the quantized model's own file beside config.json; generated for: {', '.join(sorted(RULES))}",
        )
    return {DESCRIPTION: description}


def _from_hub(model: str, user_args: list[str]) -> ResolvedModel | None:
    """The model from a hub's cache on this machine, or from a hub that answers in time."""
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


def _lacks_description(model: ResolvedModel, user_args: list[str]) -> bool:
    """Whether a hub's name is all there is of weights that are to be quantized: no place for a description."""
    return (
        _is_quantized(user_args)
        and model.path == model.name
        and "--load-format" in model.extra_args
    )


def _is_quantized(user_args: list[str]) -> bool:
    """Whether the user asks for vllm-ascend's own quantization."""
    for index, arg in enumerate(user_args):
        name, equals, value = arg.partition("=")
        if name == "--quantization":
            return (value if equals else "".join(user_args[index + 1 : index + 2])) == "ascend"
    return False


def _given(user_args: list[str]) -> set[str]:
    """Names of the options that the user gave. vLLM takes underscores for dashes."""
    return {arg.partition("=")[0].replace("_", "-") for arg in user_args if arg.startswith("--")}


def _missing(user_args: list[str], wanted: dict[str, str]) -> list[str]:
    """Those of the options that the user did not give, as arguments."""
    given = _given(user_args)
    return [
        word for option, value in wanted.items() if option not in given for word in (option, value)
    ]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
