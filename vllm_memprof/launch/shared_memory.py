"""Shared memory that outlives its processes: noted while a run lasts, removed when nobody has it.

A ledger among the files of ``/dev/shm`` names what the processes of one run map to share, that its
user alone can open, and that was not there before. The launcher locks it (flock(2)): one that is
not locked is of a launcher that was killed. Only a file that no process of any user or container
has open or mapped can be leased (fcntl(2), F_SETLEASE); that alone is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_memprof.record.held import is_held
from vllm_memprof.record.host import host_name

SHM = Path("/dev/shm")
_LEDGER = "memprof-run-"
#: inode and path of what is mapped to share and to write. (proc_pid_maps(5))
_SHARED = re.compile(r"^\S+ .w.s \S+ \S+ (\d+) +(/.*)$", re.MULTILINE)
#: Looks at all processes for who maps a file; a new one is opened first.
_LOOKS = 2


class SharedMemory:
    """Notes the shared memory of a run; ``close`` removes what is left of it.

    Args:
        device_state: accounting of the run's own simulated devices.
        folder: of the files.
    """

    def __init__(self, device_state: Path | None = None, folder: Path = SHM) -> None:
        self._folder, self._changed, self._fd = folder, 0, -1
        self._looks = Counter(dict.fromkeys(_files(folder), _LOOKS))
        self._ledger = folder / f"{_LEDGER}{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # without it a run that is killed leaves its files
            self._fd = os.open(self._ledger, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        self._note(0, str(device_state or ""))

    def changed(self) -> bool:
        """Return whether files were made or removed since the last call."""
        before = self._changed
        with contextlib.suppress(OSError):
            self._changed = self._folder.stat().st_mtime_ns
        return before != self._changed

    def look(self, pids: Iterable[int], walked: bool = False) -> None:
        """Note the files that these processes map.

        Args:
            pids: of the run.
            walked: they are all of them.
        """
        fresh = [file for file in _files(self._folder) if self._looks[file] < _LOOKS]
        mapped = set[tuple[int, str]]()
        for pid in pids if fresh else ():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                mapped |= {(int(inode), path) for inode, path in _SHARED.findall(maps)}
        for file in fresh:
            self._looks[file] += walked
            if file in mapped:
                self._looks[file] = _LOOKS
                self._note(*file)

    def close(self) -> None:
        """Remove what is left; the processes of the run have ended."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        _left_of(self._ledger, remove=True)

    def _note(self, inode: int, path: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, f"{inode} {path}\n".encode())


def left_behind(remove: bool = False, folder: Path = SHM) -> list[Path]:
    """Return the files that killed runs of this user have left and that nobody has.

    Args:
        remove: and remove them.
        folder: of the files.
    """
    ledgers = [Path(path) for _, path in _files(folder, _LEDGER)]
    dead = [each for each in ledgers if is_held(each, host_name()) is False]
    return [path for ledger in dead for path in _left_of(ledger, remove)]


def _files(folder: Path, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield inode and path of the regular files that this user alone can open: memprof's own of a
    prefix, else those of others."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix or "memprof-") == bool(prefix):
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if about.st_uid == os.getuid() and about.st_mode & ~0o700 == stat.S_IFREG:
                        yield about.st_ino, entry.path


def _left_of(ledger: Path, remove: bool) -> list[Path]:
    """Return the files that a ledger names and nobody has; the ledger goes with the last of them.

    Args:
        ledger: that nobody writes.
        remove: and remove them.
    """
    found, kept = list[Path](), 0
    with contextlib.suppress(OSError):
        lines = ledger.read_text().splitlines()
        for line in lines:
            inode, _, path = line.partition(" ")
            kept += 1
            with contextlib.suppress(OSError):  # somebody has it
                if path and _take(Path(path), int(inode), remove):
                    found.append(Path(path))
                kept -= 1
        if remove and lines and not kept:  # an empty one is locked in a moment
            ledger.unlink()
    return found


def _take(path: Path, inode: int, remove: bool) -> bool:
    """Return whether a file is there still, the same and this user's.

    Raises:
        OSError: somebody has it; it was not removed.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        about = os.fstat(fd)
        if about.st_uid != os.getuid() or inode not in (0, about.st_ino):
            return False
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # of who opens it now; ignored by default
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if remove:
            path.unlink()
        return True
    finally:
        os.close(fd)
