"""The run folder, private to its owner, and ``run.json``, replaced as a whole."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.files import replace_file
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import EVENTS_DIR, RUN_FILE, RunInfo
from vllm_memprof.redact import redact_data

DIR_MODE = 0o700
FILE_MODE = 0o600
#: Parent of run folders whose place the user does not give.
DEFAULT_PARENT = Path("reports")


def default_run_dir(model: str) -> Path:
    """Return ``reports/<time>-<model>``: local time, the model's last path component."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return DEFAULT_PARENT / f"{stamp}-{model_part(model, 80)}"


def model_part(model: str, most: int) -> str:
    """Return what the name of a folder has of a model: its last path component, made safe."""
    base = model.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip(".-")[:most] or "model"


def other_names(path: Path) -> Iterator[Path]:
    """Yield the names for a folder whose own is taken: with ``-2``, ``-3``..."""
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def create_run_dir(given: Path | None, name: str, inner: str = EVENTS_DIR) -> Path:
    """Make a run folder, and a folder within it.

    Args:
        given: where; None takes ``default_run_dir`` and, if that exists, the same with ``-2``,
            ``-3``...
        name: the model, for ``default_run_dir``.
        inner: name of the folder within.

    Returns:
        The absolute path.

    Raises:
        UsageError: the folder given has content already.
        LaunchError: it cannot be made.
    """
    path = (default_run_dir(name) if given is None else given.expanduser()).absolute()
    try:
        if given is not None:
            path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
            if any(path.iterdir()):
                what = "already holds a run" if (path / RUN_FILE).exists() else "is not empty"
                hint = "give a new folder, or leave --run-dir out"
                raise UsageError(f"run folder {path} {what}", hint)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            first = path
            for path in itertools.chain([first], other_names(first)):
                try:
                    path.mkdir(mode=DIR_MODE)  # another process may take the name meanwhile
                    break
                except FileExistsError:
                    continue
        path.chmod(DIR_MODE)
        (path / inner).mkdir(mode=DIR_MODE)
    except OSError as error:
        raise LaunchError(
            f"cannot make the run folder {given or DEFAULT_PARENT.absolute()}: {error.strerror}",
            "give a folder that you can write to with --run-dir DIR",
        ) from error
    return path


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Write ``run.json`` by atomic replacement, mode 0600, secrets replaced."""
    text = json.dumps(redact_data(to_json(info)), indent=2, ensure_ascii=False)
    replace_file(run_dir / RUN_FILE, text + "\n")
