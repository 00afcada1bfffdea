"""What strangers send: files that never end, that unpack to terabytes, that are no files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.unit.accounting.builders import DATA
from vllm_memprof.cli import main
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.files import ENV_LIMITS, limit
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.loader import size_of_records
from vllm_memprof.record.schema import MOST_SAMPLES_BYTES
from vllm_memprof.record.tail import EventTail

#: Bytes that ``memprof explain`` may have in memory, whatever it reads.
MOST_MEMORY = 600 << 20
FIGURE = b"INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 44.30 GiB\n"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail where a file is waited for."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def memprof(*args: object) -> tuple[int, str]:
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            code = main(list(map(str, args)))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue() + error.getvalue()


def a_socket(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


#: What stands in the place of a file -> what it is called.
NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "endless": (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
    "secret": (lambda path: path.symlink_to("/etc/passwd"), "a symbolic link"),
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (a_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(DATA / "graph_tp2", run)
    (run / "engine.log").write_bytes(FIGURE)
    return run


@pytest.mark.parametrize("name", NO_FILES)
@pytest.mark.parametrize(
    "file", ["run.json", "events/x-1.jsonl", "samples/*/0-9.jsonl", "oom/device_0_memUsageInfo_1.csv",
             "engine.log"],
)  # fmt: skip
def test_a_run_folder_holds_regular_files(run_dir, monkeypatch, name, file):
    monkeypatch.chdir(run_dir)
    make, kind = NO_FILES[name]
    events = next((run_dir / "events").glob("*.jsonl"))
    path = run_dir / file.replace("*", events.stem)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    code, said = memprof("report", run_dir)
    assert code == 3
    assert f"is {kind}, not a regular file" in " ".join(said.split())
    EventTail(run_dir).poll()  # a live view passes over it


def test_a_folder_of_a_run_is_no_link(run_dir, tmp_path):
    (run_dir / "events").rename(tmp_path / "events")
    (run_dir / "events").symlink_to(tmp_path / "events")
    code, said = memprof("report", run_dir)
    assert code == 3
    assert "events is a symbolic link" in " ".join(said.split())
    linked = tmp_path / "linked"  # a person may name a run by a link
    (run_dir / "events").unlink()
    (tmp_path / "events").rename(run_dir / "events")
    linked.symlink_to(run_dir)
    assert memprof("report", linked)[0] == 0


@pytest.mark.parametrize("command", ["explain", "diff"])
@pytest.mark.parametrize("name", NO_FILES)
def test_a_log_is_a_regular_file(tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    if name == "secret":
        pytest.skip("a person may name a log by a link")
    path = tmp_path / "a.log"
    NO_FILES[name][0](path)
    code, said = memprof(command, path, *([path] if command == "diff" else []))
    assert code == 3
    assert "not a regular file" in " ".join(said.split()) or name == "folder"


def test_a_file_that_is_too_large_is_named_with_what_raises_the_limit(run_dir, monkeypatch):
    events = next((run_dir / "events").glob("*.jsonl"))
    for limits, said in (
        ("file=1KiB", "has more than 1,024 bytes, the limit"),
        ("files=1", "events has more than 1 files, the limit"),
    ):
        monkeypatch.setenv(ENV_LIMITS, limits)
        code, printed = memprof("report", run_dir)
        assert code == 3
        assert said in " ".join(printed.split())
        assert ENV_LIMITS in printed
    monkeypatch.setenv(ENV_LIMITS, f"file={events.stat().st_size + (1 << 20)}, files=20")
    assert memprof("report", run_dir)[0] == 0


def test_limits_that_are_none(monkeypatch):
    for wrong in ("unpackd=1GiB", "line=much"):
        monkeypatch.setenv(ENV_LIMITS, wrong)
        with pytest.raises(UsageError, match=ENV_LIMITS):
            limit("line")


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_LIMITS, "line=2MiB")
    path = tmp_path / "a.log"
    path.write_bytes(FIGURE + b"x" * (3 << 20) + b"\n" + FIGURE)
    with pytest.raises(RunRecordError, match=r"line 2 has more than 2 MiB, the limit"):
        read_log(str(path))
    path.write_bytes((FIGURE + b"x" * (1 << 20) + b"\n") * 2)
    (run,) = read_log(str(path))
    assert run.processes[0].figures["kv_cache_bytes"]


# --- memory


def memory_of(
    path: Path, stdin: bool = False, command: str = "explain", form: str = "table", **env: str
) -> tuple[int, str]:
    """Return the most bytes that a command has in memory, and what it prints.

    Not ``ru_maxrss``: Linux lets a process begin with that of the one which started it.
    """
    code = (
        "import re, sys; from vllm_memprof.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1],"
        " file=sys.stderr)"
    )
    with open(os.devnull if path.is_dir() else path, "rb") as stream:
        done = subprocess.run(
            [sys.executable, "-c", code, command, "-" if stdin else str(path), "--format", form],
            stdin=stream, capture_output=True, text=True, timeout=300, env={**os.environ, **env},
        )  # fmt: skip
    *said, kib = done.stderr.splitlines()
    return int(kib) << 10, "\n".join([done.stdout, *said])


def bomb(path: Path, gib: int) -> None:
    member = gzip.compress(bytes(64 << 20), 1)
    path.write_bytes(member * (gib << 4))


def test_memory_of_what_unpacks_to_too_much(tmp_path):
    bomb(tmp_path / "bomb.gz", 10)
    held, said = memory_of(tmp_path / "bomb.gz", **{ENV_LIMITS: "line=2MiB"})
    assert "line 1 has more than 2 MiB" in said
    assert held < MOST_MEMORY


def zeros(path: Path) -> None:
    bomb(path, 10)


def a_long_line(path: Path) -> None:
    with path.open("wb") as stream:
        for _ in range(2000):
            stream.write(b"rror: token=" + b"x" * (1 << 20))


def newest_first(path: Path) -> None:
    with path.open("wb") as stream:
        for at in range(200):
            stream.write(f"07-{28 - at // 8:02} 12:00:00 x\n".encode() + b"\n" * (1 << 20))


def many_files(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(4000):
            archive.writestr(f"{number}.log", FIGURE * 50)


def failures(path: Path) -> None:
    text = "".join(
        f"vLLM API server version 0.{start}\n"
        + "".join(
            f"ERROR 01-01 00:00:00 [a.py:1] RuntimeError: {chr(97 + n % 26)}{n:b}".replace("1", "q")
            + "\U0001f600" * 1990
            + "\n"
            for n in range(300)
        )
        for start in range(60)
    )
    path.write_text(text)


def workers(path: Path) -> None:
    with path.open("w") as stream:
        for start in range(400):
            stream.write(f"vLLM API server version 0.{start}\n")
            for rank in range(1500):
                stream.write(f"(Worker_TP{rank} pid={rank}) INFO 01-01 00:00:00 [worker.py:1] "
                             f"Available KV cache memory: {start % 40 + 1}.30 GiB\n")  # fmt: skip


def steps(path: Path) -> None:
    with path.open("w") as stream:
        stream.write("x\n" * (3 << 20))
        for number in range(20_000):
            stream.write(f"torch reserved m {'y' * 30_000} {number})\n")


def nested(path: Path) -> None:
    inner = path.with_suffix(".inner")
    bomb(inner, 10)
    path.write_bytes(bz2.compress(inner.read_bytes()))


def a_million_lines(path: Path) -> None:
    """Real lines, each one spoilt in some place: cut, doubled, with a byte changed."""
    logs = [each for each in (DATA / "logs").rglob("*") if each.is_file()]
    lines = b"\n".join(each.read_bytes() for each in logs).split(b"\n")
    rng = random.Random(29)
    with path.open("wb") as stream:
        for _ in range(1_000_000):
            line = rng.choice(lines)[:2000]
            at = rng.randrange(len(line) + 1)
            piece = rng.choice((b"", b"\xff", b"\x1b[2J", b"9" * 30, b"-", b"\r", b"=", line))
            stream.write(line[:at] + piece + line[at + rng.randrange(3) :] + b"\n")


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [zeros, a_long_line, newest_first, many_files, failures, workers, steps, nested,
     a_million_lines],
)  # fmt: skip
@pytest.mark.parametrize("stdin", [False, True], ids=["file", "stdin"])
def test_memory_of_explain(tmp_path, make, stdin):
    signal.setitimer(signal.ITIMER_REAL, 300)
    path = tmp_path / "a.log"
    make(path)
    held, said = memory_of(path, stdin)
    print(f"{make.__name__}: {held >> 20} MiB: {said[:200]}")
    assert "Traceback (most" not in said
    assert held < MOST_MEMORY


def starts_of(path: Path, starts: int, ranks: int) -> None:
    with path.open("w") as stream:
        for start in range(starts):
            stream.write(f"vLLM API server version 0.{start}\n")
            for said in ("Loading model weights took 9.1948 GB",
                         f"Available KV cache memory: {start + 1}.30 GiB"):  # fmt: skip
                for rank in range(ranks):
                    stream.write(f"(Worker_TP{rank} pid={300 + rank}) INFO 01-01 00:00:00 "
                                 f"[worker.py:1] {said}\n")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("form", ["table", "json", "html", "csv"])
def test_memory_of_many_starts_with_many_workers(tmp_path, form):
    signal.setitimer(signal.ITIMER_REAL, 300)
    starts_of(tmp_path / "a.log", 20, 500)
    held, said = memory_of(tmp_path / "a.log", form=form)
    assert held < MOST_MEMORY
    if form == "json":
        assert [len(each["ranks"]) for each in json.loads(said)] == [500] * 20


def test_workers_of_a_log_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_LIMITS, "workers=20")
    starts_of(tmp_path / "a.log", 4, 12)
    runs = read_log(str(tmp_path / "a.log"))
    assert [len(run.processes) for run in runs] == [12, 12]
    assert runs[-1].notes[-1].endswith(f"left out: {ENV_LIMITS}=workers=40 reads more")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(3):
            archive.write(tmp_path / "a.log", f"{number}.log")
    with pytest.raises(RunRecordError, match="more than 20 workers, the limit") as refused:
        read_log(str(tmp_path / "a.zip"))
    assert f"{ENV_LIMITS}=workers=40" in str(refused.value.hint)
    monkeypatch.setenv(ENV_LIMITS, "workers=200")
    assert len(read_log(str(tmp_path / "a.log"))) == 4


def test_a_run_folder_that_is_too_large(run_dir, monkeypatch):
    monkeypatch.setenv(ENV_LIMITS, "folder=4KiB")
    code, printed = memprof("report", run_dir)
    assert code == 3
    assert "run has more than 4,096 bytes, the limit" in " ".join(printed.split())
    assert f"{ENV_LIMITS}=folder=8192" in printed


def test_samples_that_memprof_itself_may_write_are_no_part_of_it(run_dir):
    """17 processes of a week have 850 MiB of them."""
    folder = run_dir / "samples/node-a-1"
    folder.mkdir(parents=True)
    with (folder / "0-0.jsonl").open("wb") as stream:
        stream.truncate(MOST_SAMPLES_BYTES)
    events = sum(path.stat().st_size for path in (run_dir / "events").iterdir())
    assert size_of_records(run_dir) == events
    with (folder / "0-1.jsonl").open("wb") as stream:
        stream.truncate(1000)
    assert size_of_records(run_dir) == events + 1000


@pytest.mark.full
@pytest.mark.parametrize(("form", "mib"), [("table", 30), ("json", 6)])
def test_memory_of_a_run_folder_with_many_phases(run_dir, form, mib):
    """A communicator among every twelve of the phases."""
    signal.setitimer(signal.ITIMER_REAL, 600)
    path = max((run_dir / "events").iterdir(), key=lambda each: each.stat().st_size)
    lines = [line for line in path.read_text().splitlines() if '"snapshot"' in line]
    with path.open("a") as stream:
        while stream.tell() < mib << 20:
            stream.write("".join(f"{line}\n" for line in lines))
    held, said = memory_of(run_dir, command="report", form=form)
    assert "Traceback (most" not in said
    assert held < MOST_MEMORY
