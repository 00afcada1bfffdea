"""Logs inside a file: unpacked from gzip, bzip2, xz, zstandard, or each file of a zip archive.

What a packed file may become is bounded: a small file can hold terabytes of zeros.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from vllm_memprof.errors import RunRecordError

#: All that one packed file may become, files of an archive, an archive that cannot be sought in.
MOST_BYTES, MOST_FILES, MOST_PIPED_BYTES = 1 << 30, 1000, 256 << 20
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_HEAD_BYTES = 16


def _zstandard(stream: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError as exc:
        hint = "pip install zstandard, or unpack it with zstd -d"
        raise RunRecordError("reading zstandard data needs a package", hint=hint) from exc
    return cast(
        BinaryIO, zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    )


#: First bytes of a packed stream -> its name, what unpacks it.
_FORMS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda stream: gzip.GzipFile(fileobj=stream)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
    b"\x28\xb5\x2f\xfd": ("zstandard", _zstandard),
}

#: What a packed file begins with.
PACKED = (*_ZIP, *_FORMS)


class _Budget:
    """Bytes that may still be unpacked."""

    def __init__(self) -> None:
        self._left = MOST_BYTES

    def spend(self, said: int, unpacked: int) -> None:
        """Take off what was unpacked; what a file says that it will unpack to has to fit as well.

        Raises:
            RunRecordError: it is more than may be unpacked.
        """
        self._left -= unpacked
        if self._left < said:
            raise RunRecordError(
                f"it unpacks to more than {MOST_BYTES >> 20:,} MiB",
                hint="unpack it where there is room, and pass the log of one start",
            )


class _Prefixed(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._stream.read(size)
        if size < 0:
            size = MOST_BYTES
        piece, self._head = self._head[:size], self._head[size:]
        return piece + self._stream.read(size - len(piece)) if len(piece) < size else piece


class _Unpacked:
    """An unpacked stream: what precedes a cut is passed on, damage and excess are errors."""

    def __init__(self, form: str, stream: Any, budget: _Budget) -> None:
        self._form = form
        self._stream = stream
        self._budget = budget
        self._ended = False

    def read(self, size: int) -> bytes:
        """Return that many bytes; fewer only at the end."""
        pieces: list[bytes] = []
        left = size
        while left > 0 and not self._ended:
            try:
                piece = self._stream.read1(left)
            except EOFError:  # the file was cut short
                piece = b""
            except Exception as exc:
                if not _is_damage(exc):
                    raise
                raise RunRecordError(
                    f"damaged {self._form} data: {exc}",
                    hint=f"unpack it with a tool for {self._form} and pass what comes out",
                ) from exc
            self._ended = not piece
            self._budget.spend(0, len(piece))
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def _is_damage(exc: Exception) -> bool:
    known = (zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, OSError)
    return isinstance(exc, known) or type(exc).__name__ == "ZstdError"


def logs_in(stream: BinaryIO, name: str) -> Iterator[tuple[str, BinaryIO]]:
    """Yield (name, stream) of the logs in a file: one, or each file of an archive.

    Raises:
        RunRecordError: damaged, encrypted or too large when unpacked.
    """
    budget = _Budget()
    head = stream.read(_HEAD_BYTES)
    if not head.startswith(_ZIP):
        yield name, _unpacked(head, stream, budget)
        return
    archive = _archive(head, stream)
    files = [each for each in archive.infolist() if not _is_none(each)]
    if len(files) > MOST_FILES:
        raise RunRecordError(f"{name} holds {len(files):,} files; at most {MOST_FILES:,} are read")
    budget.spend(sum(each.file_size for each in files), 0)
    for each in files:
        inner = f"{name}/{each.filename}"
        if each.flag_bits & 1:
            raise RunRecordError(f"{inner} is encrypted", hint="unpack it and pass what comes out")
        try:
            opened = archive.open(each)
        except (zipfile.BadZipFile, NotImplementedError) as exc:
            raise RunRecordError(f"cannot unpack {inner}: {exc}") from exc
        with opened:
            part = cast(BinaryIO, _Unpacked("zip", opened, budget))
            first = part.read(_HEAD_BYTES)
            if first.startswith(_ZIP):
                raise RunRecordError(f"{inner} is another archive", hint="unpack it and pass it")
            yield inner, _unpacked(first, part, budget)


def _unpacked(head: bytes, stream: BinaryIO, budget: _Budget) -> BinaryIO:
    """Return a stream with its head again, unpacked where the head is that of a packed one."""
    whole = cast(BinaryIO, _Prefixed(head, stream))
    for magic, (form, unpack) in _FORMS.items():
        if head.startswith(magic):
            return cast(BinaryIO, _Unpacked(form, unpack(whole), budget))
    return whole


def _archive(head: bytes, stream: BinaryIO) -> zipfile.ZipFile:
    if not stream.seekable():
        rest = stream.read(MOST_PIPED_BYTES)
        if len(rest) == MOST_PIPED_BYTES:
            raise RunRecordError("the archive is too large for standard input", hint="pass a file")
        stream = io.BytesIO(head + rest)
    try:
        return zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, OSError) as exc:
        raise RunRecordError(f"damaged zip data: {exc}") from exc


def _is_none(each: zipfile.ZipInfo) -> bool:
    """Whether it is a folder, or what a Mac puts beside each file."""
    return each.is_dir() or each.filename.startswith("__MACOSX/")
