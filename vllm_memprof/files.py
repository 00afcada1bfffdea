"""Files of memprof's own: replaced whole or not at all, readable by their owner alone.

Standard library only: open to every layer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
