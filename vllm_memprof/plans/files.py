"""Files of sweeps: whole or not at all, readable by their owner alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from vllm_memprof.errors import MemprofError


def write_private(path: Path, text: str) -> None:
    """Replaces a file in one step, mode 0600.

    Raises:
        MemprofError: it cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise MemprofError(
            f"cannot write {path}: {error.strerror}", hint="is the disk full, the folder yours?"
        ) from error


def copy_folder(source: Path, target: Path) -> bool:
    """Copies a folder so that it is there as a whole or not at all; False where another process was
    first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", dir=target.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        temporary.chmod(0o700)
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True
