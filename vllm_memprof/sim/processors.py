"""Files of a multimodal model's processor, for a folder that lacks them.

In: a model's configuration. Out: the files of ``data/processors`` for its kind, and where its
tokenizer's special tokens begin. What they say about images, audio and video decides how large the
engine's multimodal profile is. Runs in the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROCESSORS_DIR = Path(__file__).parent / "data" / "processors"
#: A folder with one of them has a processor of its own.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Keys of a preprocessor -> keys of the vision encoder's configuration that give their values.
_OF_THE_ENCODER = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


@dataclass(frozen=True)
class ProcessorFamily:
    """Kinds of models with one processor."""

    model_types: tuple[str, ...]
    tokenizer: str  # a file of data/presets/tokenizers
    token: str  # a special token of it, and where the configuration has its id
    token_id: tuple[str, ...]
    vision_config: tuple[str, ...]  # where the configuration describes the vision encoder
    files: dict[str, dict[str, object]]


@cache
def list_families() -> tuple[ProcessorFamily, ...]:
    """Return every family, by file name."""
    found = []
    for path in sorted(PROCESSORS_DIR.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        found.append(ProcessorFamily(**{**table, **lists}))
    return tuple(found)


def family_of(config: Mapping[str, Any]) -> ProcessorFamily | None:
    """Return the family of a model's kind; None for a kind without one."""
    kind = config.get("model_type")
    return next((family for family in list_families() if kind in family.model_types), None)


def has_processor(folder: Path) -> bool:
    """Return whether a folder has the files of a processor."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def processor_files(
    family: ProcessorFamily, config: Mapping[str, Any]
) -> dict[str, dict[str, object]]:
    """Return the family's files, with the patches of this model's vision encoder."""
    encoder = _at(config, family.vision_config)
    known = encoder if isinstance(encoder, dict) else {}
    own = {key: known[name] for key, name in _OF_THE_ENCODER.items() if name in known}
    return {name: {**content, **own} for name, content in family.files.items()}


def files_of(config: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Return the files for a model's kind; none for a kind without a family."""
    family = family_of(config)
    return {} if family is None else processor_files(family, config)


def first_special_id(
    family: ProcessorFamily, config: Mapping[str, Any], special_tokens: list[str]
) -> int | None:
    """Return the id at which special tokens begin so that one of them has the configuration's id.

    None where the configuration does not have it.
    """
    found = _at(config, family.token_id)
    return found - special_tokens.index(family.token) if isinstance(found, int) else None


def _at(config: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
