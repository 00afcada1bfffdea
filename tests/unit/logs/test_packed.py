"""Packed logs are unpacked within bounds."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import ENV_LIMITS
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.to_record import NoMemoryLines, read_log

TEXT = "INFO Loading model weights took 9.1948 GB\nINFO Available KV cache memory: {} GiB\n"
LOG = TEXT.format("43.40").encode()


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").compress(data))


def zipped(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return held.getvalue()


PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstandard": zstd}


def xz_with_a_dictionary_of(size: int) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": size}]
    return lzma.compress(LOG, filters=filters)


ENCODINGS = ("utf-8", "utf-16")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", PACKERS)
def test_a_packed_log_is_read_as_the_plain_one(tmp_path: Path, form: str, encoding: str) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(PACKERS[form](LOG.decode().encode(encoding)))
    (run,) = read_log(str(path))
    path.write_bytes(LOG)
    (plain,) = read_log(str(path))
    assert run.processes == plain.processes


def test_without_the_package_of_zstandard_only_its_logs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = zstd(b"a line\n")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for form in ("gzip", "bzip2", "xz"):
        stream = io.BufferedReader(io.BytesIO(PACKERS[form](b"a line\n")))  # type: ignore[arg-type]
        ((_, pieces),) = logs_in(stream, "x.log")
        assert b"".join(pieces) == b"a line\n"
    damaged = io.BufferedReader(io.BytesIO(gzip.compress(b"a line\n")[:-8] + b"\0" * 8))  # type: ignore[arg-type]
    ((_, pieces),) = logs_in(damaged, "x.log")
    with pytest.raises(RunRecordError, match="damaged gzip data"):
        list(pieces)
    packed_log = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    with pytest.raises(RunRecordError, match="needs a package"):
        list(logs_in(packed_log, "x.log"))


def test_each_file_of_an_archive_is_a_log(tmp_path: Path) -> None:
    path = tmp_path / "logs.zip"
    path.write_bytes(
        zipped(
            {
                "node0/server.log": LOG,
                "node0/": b"",
                "__MACOSX/node0/._server.log": LOG,
                "node1.log.gz": gzip.compress(TEXT.format("44.30").encode()),
                "screen.png": os.urandom(2000),
            }
        )
    )
    runs = read_log(str(path))
    assert [run.info.id for run in runs] == ["logs.zip/node0/server.log", "logs.zip/node1.log.gz"]
    assert [run.processes[0].figures["kv_cache_bytes"] >> 30 for run in runs] == [43, 44]


def test_an_archive_without_a_log(tmp_path: Path) -> None:
    path = tmp_path / "logs.zip"
    path.write_bytes(zipped({"a.txt": b"hello\n", "b.txt": b"you\n"}))
    with pytest.raises(NoMemoryLines, match="any of the 2 files in"):
        read_log(str(path))


@pytest.mark.parametrize("form", ["gzip", "xz", "zstandard"])  # bzip2 has blocks of 900 kB
def test_what_precedes_a_cut_counts(form: str) -> None:
    data = PACKERS[form](LOG + os.urandom(300_000))
    ((_, pieces),) = logs_in(io.BufferedReader(io.BytesIO(data[:-1000])), "x")
    assert b"".join(pieces)[: len(LOG)] == LOG


@pytest.mark.parametrize("form", [*PACKERS, "zip"])
def test_what_unpacks_to_too_much_is_refused(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENV_LIMITS, "unpacked=1MiB")
    zeros = bytes(3 << 19)
    path = tmp_path / "bomb"
    # the bound is that of the file: two files of an archive share it
    halves = {"a": zeros[: 3 << 18], "b": zeros[: 3 << 18]}
    path.write_bytes(zipped(halves) if form == "zip" else PACKERS[form](zeros))
    with pytest.raises(RunRecordError, match="bomb unpacks to more than 1 MiB, the limit"):
        read_log(str(path))


def test_archives_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "logs.zip"

    def refused(data: bytes, why: str) -> None:
        path.write_bytes(data)
        with pytest.raises(RunRecordError, match=why) as raised:
            read_log(str(path))
        assert raised.value.exit_code == 3

    refused(zipped({"inner.zip": zipped({"a.log": LOG})}), "another archive")
    locked = bytearray(zipped({"a.log": LOG}))
    locked[6] |= 1
    locked[locked.rindex(b"PK\x01\x02") + 8] |= 1
    refused(bytes(locked), "is encrypted")
    refused(zipped({"a.log": LOG})[:-30], "damaged zip")
    torn = bytearray(zipped({"a.log": LOG}))
    torn[45:60] = b"\xff" * 15
    refused(bytes(torn), "damaged zip")
    refused(b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 500, "damaged gzip")
    refused(xz_with_a_dictionary_of(1 << 30), "damaged xz data: Memory usage limit exceeded")
    many = zipped({"a.log": LOG, **{f"{number}{'x' * 60_000}": b"" for number in range(150)}})
    refused(many, "its list of files has 9,")
    monkeypatch.setenv(ENV_LIMITS, "files=1")
    refused(zipped({"a.log": LOG, "b.log": LOG}), "logs.zip has more than 1 files, the limit")


def test_an_archive_through_a_pipe() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as sink:
        sink.write(zipped({"a.log": LOG}))
    with os.fdopen(read, "rb") as source:
        ((name, stream),) = ((name, b"".join(log)) for name, log in logs_in(source, "stdin"))
    assert (name, stream) == ("stdin/a.log", LOG)


def test_a_named_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunRecordError, match="is a named pipe, not a regular file"):
        read_log(str(tmp_path / "pipe"))
    with pytest.raises(RunRecordError, match="is a device, not a regular file"):
        read_log("/dev/zero")
