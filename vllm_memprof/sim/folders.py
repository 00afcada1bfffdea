"""Folders of models in the cache: generated files, and links to files of the user.

The user's folders are only read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: File name -> JSON content.
JsonFiles = Mapping[str, Mapping[str, object]]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
    "*.tiktoken",
)


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds a file of weights."""
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder holds a tokenizer of any kind."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS)


def write_folder(target: Path, files: JsonFiles, linked: Path | None = None) -> Path:
    """Write a folder with these JSON files, and links to the other entries of another folder.

    The files appear all at once or not at all, also when several processes ask at the same time.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, content in files.items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for entry in () if linked is None else linked.resolve().iterdir():
            if entry.name not in files:
                (temporary / entry.name).symlink_to(entry)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
