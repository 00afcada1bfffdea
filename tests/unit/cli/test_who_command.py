"""The arguments of ``memprof who``, and what it says on a machine without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.holders.test_look import listed
from vllm_memprof.cli.commands.who import (
    TIMED_OUT,
    app,
    parse_numbers,
    parse_seconds,
    parse_wait,
    source_of,
)
from vllm_memprof.errors import UsageError
from vllm_memprof.holders import look

GIB = 1 << 30


def test_times_sizes_and_numbers() -> None:
    assert [parse_seconds(text) for text in ("90", "90s", "1.5m", "2h", "0s")] == [
        90, 90, 90, 7200, 0,
    ]  # fmt: skip
    assert parse_wait("FREE=50GiB") == parse_wait("free=50g") == 50 * GIB
    assert parse_numbers(None) == []
    assert parse_numbers("2, 0,2") == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--wait", "50GiB"], "--wait: not FREE=SIZE: '50GiB'"),
        (["--wait", "FREE=50GB"], "--wait: not a size: '50GB'"),
        (["--wait", "USED=50GiB"], "--wait: not FREE=SIZE"),
        (["--timeout", "5m"], "--timeout means nothing without --wait"),
        (["--wait", "FREE=1GiB", "--timeout", "soon"], "--timeout 'soon' is no time"),
        (["--wait", "FREE=1GiB", "--timeout=-1s"], "--timeout '-1s' is no time"),
        (["--only", "0,x"], "--only '0,x' is no list of numbers"),
        (["--device", "cuda"], "the processes of --device cuda are not read"),
        (["--device", "tpu"], "--device 'tpu' is not known"),
        (["--stack", "x"], "--stack names a simulated stack"),
        (["--format", "csv"], "--format 'csv' is not known"),
        (["--format", "json", "--lang", "zh"], "--lang zh is not there for --format json"),
    ],
)
def test_mistakes(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)
    assert done.stdout == ""


def test_the_default_is_the_npus_of_this_machine() -> None:
    assert source_of("npu", None).name == "npu"
    assert not source_of("npu", None).simulated


def test_a_machine_without_a_device(tmp_path: Path) -> None:
    if Path("/usr/local/dcmi/libdcmi.so").exists():
        pytest.skip("this machine has an NPU's driver")
    root = Path(__file__).parents[3]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_memprof", "who"],
        env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("memprof: no device can be read: no libdcmi.so here")
    assert "try: --device sim:910b needs no NPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_status_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        look,
        "read_driver",
        lambda source: [listed(0, [])],
    )
    free, busy = ("FREE=44GiB", 0), ("FREE=45GiB", TIMED_OUT)
    for wanted, status in (free, busy):
        done = CliRunner().invoke(app, ["--wait", wanted, "--timeout", "0s", "--lang", "zh"])
        assert done.exit_code == status
        assert ("并非" in done.stdout) == (status != 0)
