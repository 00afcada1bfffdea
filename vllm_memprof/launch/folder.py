"""The run folder: made private to its owner, ``run.json`` replaced as a whole so that a reader
never sees half."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.files import replace_file
from vllm_memprof.record.schema import EVENTS_DIR, RUN_FILE, RunInfo

DIR_MODE = 0o700
FILE_MODE = 0o600
#: Parent of run folders whose place the user does not give.
DEFAULT_PARENT = Path("reports")


def default_run_dir(model: str, now: time.struct_time | None = None) -> Path:
    """``reports/<time>-<model>``, local time, the model's last path component made safe for a file
    name."""
    stamp = time.strftime("%Y%m%d-%H%M%S", now or time.localtime())
    base = model.rstrip("/").rsplit("/", 1)[-1]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip(".-")[:80] or "model"
    return DEFAULT_PARENT / f"{stamp}-{safe}"


def create_run_dir(run_dir: Path | None, model: str) -> Path:
    """Make the run folder and its ``events`` folder.

    Args:
        run_dir: where; None takes ``default_run_dir`` and, if that exists, the same with ``-2``,
            ``-3``...

    Returns:
        The absolute path.

    Raises:
        UsageError: the folder given holds something already.
        LaunchError: it cannot be made.
    """
    try:
        if run_dir is not None:
            path = run_dir.expanduser().absolute()
            path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
            if any(path.iterdir()):
                what = "already holds a run" if (path / RUN_FILE).exists() else "is not empty"
                hint = "give a new folder, or leave --run-dir out"
                raise UsageError(f"run folder {path} {what}", hint=hint)
        else:
            path = _make_fresh(default_run_dir(model).absolute())
        path.chmod(DIR_MODE)
        (path / EVENTS_DIR).mkdir(mode=DIR_MODE)
    except OSError as error:
        raise LaunchError(
            f"cannot make the run folder {run_dir or DEFAULT_PARENT.absolute()}: {error.strerror}",
            hint="give a folder that you can write to with --run-dir DIR",
        ) from error
    return path


def _make_fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(mode=DIR_MODE)
        except FileExistsError:
            continue
        return candidate
    raise LaunchError(f"no free name for a run folder next to {path}")


def write_run_info(run_dir: Path, info: RunInfo) -> None:
    """Write ``run.json`` by atomic replacement, mode 0600."""
    text = json.dumps(info.to_json(), indent=2, ensure_ascii=False)
    replace_file(run_dir / RUN_FILE, text + "\n")
