"""Files and folders that appear as a whole; folders of models in the cache.

A folder of a model holds generated files, and links to files of the user, whose own folders are
only read.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

#: File name -> JSON content.
JsonFiles = Mapping[str, Mapping[str, object]]

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
    "*.tiktoken",
)
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def holds(folder: Path, patterns: Iterable[str]) -> bool:
    """Return whether the folder holds a file of one of the patterns."""
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def write_folder(
    target: Path, files: JsonFiles, linked: Path | None = None, code: Mapping[str, str] = {}
) -> Path:
    """Write a folder with these JSON files and modules, and links to all else of another folder.

    The files appear all at once or not at all, also when several processes ask at the same time.
    """
    if not target.is_dir():
        with new_folder(target) as folder:
            for name, content in files.items():
                write_file(folder / name, json.dumps(content, ensure_ascii=False))
            for name, text in code.items():
                write_file(folder / name, text)
            for entry in () if linked is None else linked.resolve().iterdir():
                if entry.name not in files:
                    (folder / entry.name).symlink_to(entry)
    return target


@contextmanager
def new_folder(target: Path, mode: int = 0o755) -> Iterator[Path]:
    """Yield a folder that takes the target's name at the end; one that is there by then stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(mode)
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Write a file at once or not at all; one that says the same stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text("utf-8") == text:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
