"""Files: those of others are read within limits, memprof's own are replaced whole or not at all and
readable by their owner alone.

What comes from outside is a regular file, and within a run folder no link; ``MEMPROF_LIMITS`` names
its limits. Standard library only: open to every layer.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_memprof.errors import MemprofError, RunRecordError, UsageError, require_known
from vllm_memprof.units import format_size, parse_size

ENV_LIMITS = "MEMPROF_LIMITS"
#: What is read of strangers' files at most, in bytes but for files: all that a packed file unpacks
#: to, a line of a log, a file of a run folder or a report.json, an archive in a pipe; files of an
#: archive or of a run folder; workers of a log, which take 4 ms and 30 kB each;
#: events of a run folder, of which memory takes the tenfold, and samples beyond what is written;
#: objects of a pickle.
_LIMITS = {"unpacked": 1 << 30, "line": 256 << 20, "file": 256 << 20, "pipe": 256 << 20,
           "folder": 256 << 20, "files": 5_000, "workers": 10_000, "objects": 4 << 20}  # fmt: skip
#: What is no text, or may wait for ever or never end.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def limit(name: str) -> int:
    """Return a limit of ``_LIMITS``, as ``MEMPROF_LIMITS=unpacked=4GiB,files=20000`` has it.

    Raises:
        UsageError: the variable names no limit, or no size.
    """
    found = dict(_LIMITS)
    for part in filter(None, os.environ.get(ENV_LIMITS, "").split(",")):
        known, _, size = (each.strip() for each in part.partition("="))
        require_known(ENV_LIMITS, known, found)
        try:
            found[known] = parse_size(size)
        except ValueError as exc:
            raise UsageError(f"{ENV_LIMITS}: {part!r} is not a size", f"{known}=4GiB") from exc
    return found[name]


def check_limit(name: str, size: int, what: str) -> None:
    """Refuse what is above a limit.

    Raises:
        RunRecordError: ``what`` it is, the limit, and what raises it.
    """
    if size > (most := limit(name)):
        told = f"{most:,} {name}" if name in ("files", "workers", "objects") else format_size(most)
        hint = f"if it is to be trusted: {ENV_LIMITS}={name}={2 * most}"
        raise RunRecordError(f"{what} more than {told}, the limit", hint)


def open_file(path: Path | str, within: Path | None = None) -> BufferedReader:
    """Open a file of somebody else.

    Args:
        path: of the file.
        within: the run folder that it is in: no link below it is followed.

    Raises:
        RunRecordError: it is not a regular file. What a shell opened, as of ``<(...)``, may be.
        OSError: it cannot be read.
    """

    def check(mode: int, what: object = path) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode))
        if kind is not None and not str(path).startswith("/dev/fd/"):
            hint = f"of a run folder: memprof report {path}"
            if kind != "a folder":
                hint = "pass the log's text; - reads standard input"
            raise RunRecordError(f"{what} is {kind}, not a regular file", hint)

    below = (
        [] if within is None else [each for each in Path(path).parents if within in each.parents]
    )
    for folder in filter(Path.is_symlink, below):
        check(stat.S_IFLNK, folder)
    check(os.stat(path, follow_symlinks=within is None).st_mode)
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if within is None else os.O_NOFOLLOW)
    if not str(path).startswith("/dev/fd/"):
        flags |= os.O_NONBLOCK  # another file may have taken its place
    stream = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115
    check(os.fstat(stream.fileno()).st_mode)
    return stream


def read_file(path: Path, within: Path | None) -> bytes:
    """Return all of a file of somebody else, as ``open_file`` opens it.

    Raises:
        RunRecordError: it is not a regular file, or too large.
        OSError: it cannot be read.
    """
    with open_file(path, within) as stream:
        data = stream.read(limit("file") + 1)
    check_limit("file", len(data), f"{path} has")
    return data


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder of somebody else, by name.

    Raises:
        RunRecordError: there are too many.
    """
    found = list(islice(folder.glob(pattern), limit("files") + 1))
    check_limit("files", len(found), f"{folder} has")
    return sorted(found)


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
    parse = json.loads if path.suffix == ".json" else parse_toml
    frozen: dict[str, Any] = _frozen(parse(path.read_text("utf-8")))
    return frozen


def parse_toml(text: str) -> Any:
    """Return what a TOML text holds.

    Raises:
        ValueError: it is none.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of memprof, of an engine or of a model.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    return json.loads(path.read_text("utf-8"))


def read_own(module: str, name: str) -> dict[str, Any]:
    """Return the table of that name beside a module, which says ``__file__``."""
    return read_table(Path(module).with_name(name))


def _frozen(value: Any) -> Any:
    """Return a value that can be compared and hashed, as far as it holds lists alone."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items() if not name.startswith("#")}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def replace_file(path: Path, text: str | Iterable[str], mode: int = 0o600) -> None:
    """Replace a file in one step: a reader sees the old one or the new one.

    Args:
        path: the file.
        text: all of it, or its pieces in their order.
        mode: of the new one.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # after a failure; replaced, it is gone


def write_atomically(path: Path, text: str | Iterable[str], mode: int = 0o600) -> None:
    """Replace a file as ``replace_file`` does.

    Raises:
        MemprofError: it cannot be written; nothing is left behind.
    """
    try:
        replace_file(path, text, mode)
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
