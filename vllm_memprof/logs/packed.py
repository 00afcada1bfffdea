"""Logs inside a file: unpacked from gzip, bzip2, xz, zstandard, or each file of a zip archive.

What a packed file may become is bounded, a small file can hold terabytes of zeros, and so is the
memory that unpacking it takes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, cast

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import check_limit, limit
from vllm_memprof.logs.lines import CHUNK_BYTES
from vllm_memprof.version import pip_install

#: Memory of an unpacker; of a list of an archive's files, which is read whole.
_MEMORY, _LIST_BYTES = 128 << 20, 8 << 20
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_HEAD_BYTES = 16


def _zstandard(stream: Any) -> Any:
    try:
        import zstandard  # only where used: an engine's environment may be without it
    except ImportError as exc:
        hint = f"{pip_install('zstandard')}, or unpack it with zstd -d"
        raise RunRecordError("reading zstandard data needs a package", hint) from exc
    unpacker = zstandard.ZstdDecompressor(max_window_size=_MEMORY)
    return unpacker.stream_reader(stream, read_across_frames=True)


class _Xz:
    """Bounds the memory: a dictionary of xz may have 4 GiB, and ``LZMAFile`` sets no bound."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unpacker = lzma.LZMADecompressor(memlimit=_MEMORY)

    def read1(self, size: int) -> bytes:
        piece, more = b"", b""
        while not piece:
            if self._unpacker.eof:  # another stream may follow, behind padding
                more = (self._unpacker.unused_data or self._stream.read(CHUNK_BYTES)).lstrip(b"\0")
                if not more:
                    return b""
                self._unpacker = lzma.LZMADecompressor(memlimit=_MEMORY)
            elif self._unpacker.needs_input:
                more = self._stream.read(CHUNK_BYTES)
                if not more:
                    raise EOFError
            piece, more = self._unpacker.decompress(more, size), b""
        return piece


class _Archive:
    """The file of an archive: its list of files, which is read at once, is bounded."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if size > _LIST_BYTES:
            raise zipfile.BadZipFile(f"its list of files has {size:,} bytes")
        return self._stream.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


#: First bytes of a packed stream -> its name, what unpacks it.
FORMS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda stream: gzip.GzipFile(fileobj=stream)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", _Xz),
    b"\x28\xb5\x2f\xfd": ("zstandard", _zstandard),
}
#: What reading a packed file that is damaged raises.
_DAMAGE = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, OSError, NotImplementedError)


@contextmanager
def _unpacking(form: str) -> Iterator[None]:
    """Refuse what is damaged; where a file was cut short, what precedes the cut counts."""
    try:
        yield
    except EOFError:
        pass
    except Exception as exc:
        # that of zstandard by its name, so that the others do not need the package
        if not isinstance(exc, _DAMAGE) and type(exc).__name__ != "ZstdError":
            raise
        hint = f"unpack it with a tool for {form} and pass what comes out"
        raise RunRecordError(f"damaged {form} data: {exc}", hint) from exc


def logs_in(stream: io.BufferedReader, name: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield (name, its pieces) of the logs in a file: one, or each file of an archive.

    Raises:
        RunRecordError: damaged, encrypted or too large when unpacked.
    """
    read = 0

    def unpacked(form: str, opened: Any) -> Iterator[bytes]:
        nonlocal read
        with _unpacking(form):
            while piece := opened.read1(CHUNK_BYTES):
                read += len(piece)
                check_limit("unpacked", read, f"{name} unpacks to")
                yield piece

    def pieces(head: bytes, opened: Any, form: str = "") -> Iterator[bytes]:
        for magic, (packed_by, unpack) in FORMS.items():
            if head.startswith(magic):
                return unpacked(packed_by, unpack(opened))
        return unpacked(form, opened) if form else iter(partial(opened.read, CHUNK_BYTES), b"")

    head = stream.peek(_HEAD_BYTES)
    if not head.startswith(ZIP):
        yield name, pieces(head, stream)
        return
    with _unpacking("zip"):
        whole: BinaryIO = stream
        if not stream.seekable():
            data = stream.read(limit("pipe") + 1)
            check_limit("pipe", len(data), f"{name} is an archive and has")
            whole = io.BytesIO(data)
        archive = zipfile.ZipFile(cast(BinaryIO, _Archive(whole)))
    # without what a Mac puts beside each file
    files = [
        each
        for each in archive.infolist()
        if not each.is_dir() and not each.filename.startswith("__MACOSX/")
    ]
    check_limit("files", len(files), f"{name} has")
    said = sum(each.file_size for each in files)
    check_limit("unpacked", said, f"{name} unpacks to")
    for each in files:
        inner = f"{name}/{each.filename}"
        if each.flag_bits & 1:
            raise RunRecordError(f"{inner} is encrypted", hint="unpack it and pass what comes out")
        head = b""
        with _unpacking("zip"):
            opened = cast(zipfile.ZipExtFile, archive.open(each))
            head = opened.peek(_HEAD_BYTES)
        if head.startswith(ZIP):
            raise RunRecordError(f"{inner} is another archive", hint="unpack it and pass it")
        with opened:
            yield inner, pieces(head, opened, "zip")
