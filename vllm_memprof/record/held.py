"""Whether a run folder is being recorded: its launcher holds a lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_memprof.record.host import host_name


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Hold a run folder as the one who records it; the kernel lets go when this process ends.

    A shared lock (flock(2)) on the folder itself: no file is added to the run. Where the file
    system has no locks the folder is not held.
    """
    fd = None
    with contextlib.suppress(OSError):
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def is_held(run_dir: Path, host: str | None) -> bool | None:
    """Return whether a process records this run; None where it cannot be told.

    Args:
        run_dir: the run folder, or a file that its launcher locks likewise.
        host: that recorded it; of another host a lock need not be visible here.
    """
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False if host == host_name() else None
    finally:
        os.close(fd)
