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
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, cast

from vllm_memprof.errors import RunRecordError
from vllm_memprof.logs.lines import CHUNK_BYTES

#: All that one packed file may become, files of an archive, an archive that cannot be sought in.
MOST_BYTES, MOST_FILES, MOST_PIPED_BYTES = 1 << 30, 1000, 256 << 20
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_HEAD_BYTES = 16


def _zstandard(stream: Any) -> Any:
    try:
        import zstandard  # only where used: an engine's environment may be without it
    except ImportError as exc:
        hint = "pip install zstandard, or unpack it with zstd -d"
        raise RunRecordError("reading zstandard data needs a package", hint) from exc
    return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)


#: First bytes of a packed stream -> its name, what unpacks it.
_FORMS: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda stream: gzip.GzipFile(fileobj=stream)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
    b"\x28\xb5\x2f\xfd": ("zstandard", _zstandard),
}
#: What reading a packed file that is damaged raises.
_DAMAGE = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, OSError, NotImplementedError)
#: What a packed file begins with.
PACKED = (*_ZIP, *_FORMS)


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
    left = MOST_BYTES

    def check(size: int) -> None:
        if size > left:
            raise RunRecordError(
                f"it unpacks to more than {MOST_BYTES >> 20:,} MiB",
                hint="unpack it if there is room, and pass the log of one start",
            )

    def unpacked(form: str, opened: Any) -> Iterator[bytes]:
        nonlocal left
        with _unpacking(form):
            while piece := opened.read1(CHUNK_BYTES):
                check(len(piece))
                left -= len(piece)
                yield piece

    def pieces(head: bytes, opened: Any, form: str = "") -> Iterator[bytes]:
        for magic, (packed_by, unpack) in _FORMS.items():
            if head.startswith(magic):
                return unpacked(packed_by, unpack(opened))
        return unpacked(form, opened) if form else iter(partial(opened.read, CHUNK_BYTES), b"")

    head = stream.peek(_HEAD_BYTES)
    if not head.startswith(_ZIP):
        yield name, pieces(head, stream)
        return
    with _unpacking("zip"):
        whole: BinaryIO = stream
        if not stream.seekable():
            data = stream.read(MOST_PIPED_BYTES)
            if len(data) == MOST_PIPED_BYTES:
                what = "the archive is too large for standard input"
                raise RunRecordError(what, hint="pass a file")
            whole = io.BytesIO(data)
        archive = zipfile.ZipFile(whole)
    # without what a Mac puts beside each file
    files = [
        each
        for each in archive.infolist()
        if not each.is_dir() and not each.filename.startswith("__MACOSX/")
    ]
    if len(files) > MOST_FILES:
        raise RunRecordError(f"{name} holds {len(files):,} files; at most {MOST_FILES:,} are read")
    check(sum(each.file_size for each in files))  # as they say themselves
    for each in files:
        inner = f"{name}/{each.filename}"
        if each.flag_bits & 1:
            raise RunRecordError(f"{inner} is encrypted", hint="unpack it and pass what comes out")
        head = b""
        with _unpacking("zip"):
            opened = cast(zipfile.ZipExtFile, archive.open(each))
            head = opened.peek(_HEAD_BYTES)
        if head.startswith(_ZIP):
            raise RunRecordError(f"{inner} is another archive", hint="unpack it and pass it")
        with opened:
            yield inner, pieces(head, opened, "zip")
