"""Files of memprof's own: tables beside the code, and what is written, which is replaced whole or
not at all and readable by its owner alone.

Standard library only: open to every layer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_memprof.errors import MemprofError, RunRecordError


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Read a file or folder that a person named.

    Raises:
        RunRecordError: it cannot be read, and what to do about it.
    """
    try:
        yield
    except FileNotFoundError as exc:
        hint = "give a run folder, a report.json or a log; - reads standard input"
        raise RunRecordError(f"there is no file {path}", hint) from exc
    except PermissionError as exc:
        hint = "read it as its owner, or chmod it"
        raise RunRecordError(f"no permission to read {path}", hint) from exc
    except OSError as exc:
        raise RunRecordError(f"cannot read {path}: {exc.strerror or exc}") from exc


def read_table(path: Path) -> dict[str, Any]:
    """Return a table that stands beside the code, its lists as tuples.

    Args:
        path: TOML, or JSON where an engine's process reads it: it has the standard library of
            Python 3.10 alone. A name that begins with ``#`` is a comment.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        table = json.loads(text)
    else:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        table = tomllib.loads(text)
    return {name: _frozen(value) for name, value in table.items() if not name.startswith("#")}


def _frozen(value: Any) -> Any:
    """Return a value that can be compared and hashed, as far as it holds lists alone."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items() if not name.startswith("#")}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file in one step, mode 0600: a reader sees the old one or the new one.

    Args:
        path: the file.
        text: all of it, or its pieces in their order.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # after a failure; replaced, it is gone


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file as ``replace_file`` does.

    Raises:
        MemprofError: it cannot be written; nothing is left behind.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise MemprofError(
            f"cannot write {path}: {error.strerror}", hint="is the disk full, the folder yours?"
        ) from error


def from_here(path: Path) -> str:
    """Return a path as seen from the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
