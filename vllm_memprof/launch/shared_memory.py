"""Shared memory that outlives its processes: noted while a run lasts, removed when nobody has it.

A ledger among the files of ``/dev/shm`` names what the processes of one run map to share, that its
user alone can open, and that was not there before. The launcher locks it (flock(2)): one that is
not locked is of a launcher that was killed. Only a file that no process of any user or container
has open or mapped can be leased (fcntl(2), F_SETLEASE); that alone is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vllm_memprof.record.held import is_held
from vllm_memprof.record.host import host_name

SHM = Path("/dev/shm")
_LEDGER = "memprof-run-"
#: Inode of a file that is mapped to share and to write; its name may have been another, as of a
#: semaphore, which sem_open makes under one of its own. (proc_pid_maps(5))
_SHARED = r"^\S+ .w.s \S+ \S+ (\d+) +{}/"
#: Looks at all processes for who maps a file; a new one is opened first.
_LOOKS = 2


class SharedMemory:
    """Notes the shared memory of a run; ``close`` removes what is left of it.

    Args:
        device_state: accounting of its own simulated devices.
        folder: of the files.
    """

    def __init__(self, device_state: Path | None, folder: Path = SHM) -> None:
        self._folder, self._changed, self._fd = folder, 0, -1
        self._looks = Counter(dict.fromkeys(_files(folder), _LOOKS))
        self._ledger = folder / f"{_LEDGER}{os.urandom(8).hex()}"
        with suppress(OSError):  # without it a run that is killed leaves its files
            self._fd = os.open(self._ledger, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._note(0, device_state or "")

    def look(self, living: Callable[[], Iterable[int]], walked: bool) -> None:
        """Note the files that the processes of the run map, if there are others than before.

        Args:
            living: their ids.
            walked: those are all.
        """
        before = self._changed
        with suppress(OSError):
            self._changed = self._folder.stat().st_mtime_ns
        listed = _files(self._folder) if walked or self._changed != before else ()
        # memprof's own are noted by those who make them, or are shared
        fresh = [
            file for file in listed if self._looks[file] < _LOOKS and "/memprof-" not in file[1]
        ]
        mapped = set[str]()
        for pid in living() if fresh else ():
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                mapped.update(re.findall(_SHARED.format(self._folder), maps, re.MULTILINE))
        for file in fresh:
            self._looks[file] += walked
            if str(file[0]) in mapped:
                self._looks[file] = _LOOKS
                self._note(*file)

    def close(self) -> bool:
        """Remove what is left, the processes of the run having ended; return whether that was all.

        Threads of a process may end after its first one, and have its memory until then.
        """
        with suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        _left_of(self._ledger, remove=True)
        return not self._ledger.exists()

    def _note(self, inode: int, path: object) -> None:
        with suppress(OSError):
            os.write(self._fd, f"{inode} {path}\n".encode())


def left_behind(remove: bool = False, folder: Path = SHM) -> list[Path]:
    """Return the files that killed runs of this user have left and that nobody has.

    Args:
        remove: and remove them.
        folder: of the files.
    """
    return [
        left
        for _, path in _files(folder)
        if f"/{_LEDGER}" in path and is_held(Path(path), host_name()) is False
        for left in _left_of(Path(path), remove)
    ]


def _files(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield inode and path of the regular files that this user alone can open."""
    for path in folder.glob("*"):
        with suppress(OSError):
            about = path.lstat()
            if about.st_uid == os.getuid() and about.st_mode & ~0o700 == stat.S_IFREG:
                yield about.st_ino, str(path)


def _left_of(ledger: Path, remove: bool) -> list[Path]:
    """Return the files that a ledger names and nobody has; the ledger goes with the last of them.

    Args:
        ledger: that nobody writes.
        remove: and remove them.
    """
    found = dict[Path, bool | None]()
    with suppress(OSError, ValueError):
        lines = ledger.read_text().splitlines()
        for inode, path in (line.split(" ", 1) for line in lines):
            found[Path(path)] = _is_free(path, int(inode), remove)
        if remove and lines and False not in found.values():  # an empty one is locked in a moment
            ledger.unlink()
    return [path for path, free in found.items() if free]


def _is_free(path: str, inode: int, remove: bool) -> bool | None:
    """Return whether nobody has a file; None: it is gone, or another's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if inode not in (0, os.fstat(fd).st_ino):
            return None
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # when it is opened now; ignored by default
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if remove:
            os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
