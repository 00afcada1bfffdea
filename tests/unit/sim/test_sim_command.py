"""``memprof sim``: what it prints, without a setup."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli.commands import sim
from vllm_memprof.errors import MemprofError, RunRecordError, SetupError, UsageError
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sim.setup import SetupResult
from vllm_memprof.sim.stacks import load_stack

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")


def test_list_shows_stacks_devices_and_models():
    result = CliRunner().invoke(sim.app, ["list"])
    assert result.exit_code == 0
    for text in (
        "vllm-ascend-0.23.0",
        "not set up",
        "ascend910b",
        "910b",
        "60.96",
        "Qwen/Qwen3-30B-A3B",
        "memprof/tiny",
    ):
        assert text in result.output


def test_setup_prints_steps_as_plain_lines(monkeypatch, tmp_path):
    def fake(name, prefix, progress, force, offline):
        progress.step(1, 2, "install [torch]")
        progress.detail("Downloading torch (900 MB)")
        progress.detail("Downloading small.whl (90 kB)")
        progress.done(1.5)
        return SetupResult(load_stack(), tmp_path, True, 2.0)

    monkeypatch.setattr(sim, "setup_stack", fake)
    result = CliRunner().invoke(sim.app, ["setup"])
    assert result.exit_code == 0
    assert "[1/2] install [torch]" in result.output
    assert "Downloading torch (900 MB)" in result.output
    assert "small.whl" not in result.output
    assert f"vllm-ascend-0.23.0 set up in {tmp_path} (2.0 s)" in result.output
    quiet = CliRunner().invoke(sim.app, ["setup", "-q"])
    assert quiet.output.splitlines() == [f"vllm-ascend-0.23.0 set up in {tmp_path} (2.0 s)"]


def test_live_progress_survives_markup_and_ends(monkeypatch):
    progress = sim._SetupProgress(live=True)
    progress.detail("another setup is at work in [/tmp]")
    progress.step(1, 1, "check [this]")
    progress.detail("Collecting x[y]==1")
    progress.done(0.1)
    progress.close()


def test_errors_pass_through_to_the_one_place_that_prints_them(monkeypatch):
    def fail(*args, **kwargs):
        raise SetupError("no room", "free some")

    monkeypatch.setattr(sim, "setup_stack", fail)
    result = CliRunner().invoke(sim.app, ["setup"])
    assert isinstance(result.exception, SetupError)


def test_calibrate_writes_a_profile_and_says_what_is_whose(tmp_path):
    target = tmp_path / "mine.toml"
    result = CliRunner().invoke(
        sim.app, ["calibrate", str(DATA / "recorded_023_tp2"), "-o", str(target)]
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert (
        "context_bytes              375,809,638  modelled: TP0, before empty_cache, "
        "with what the runtime counts" in lines
    )
    assert (
        lines[-1]
        == f"written: {target}; everything else is from ascend910b. Use it: --device sim:{target}"
    )
    profile = load_profile(str(target))
    assert profile.name == "mine"
    assert profile.title == (
        "as in recorded_023_tp2: Qwen/Qwen3-VL-8B-Instruct, vllm-ascend 0.23.0, "
        "Ascend910B3 (simulated)"
    )
    other = CliRunner().invoke(
        sim.app, ["calibrate", str(DATA / "recorded_tp2"), "-o", str(target), "--from", "a3"]
    )
    assert other.exit_code == 0, other.output
    assert load_profile(str(target)).device.soc_name == "Ascend910_9391"
    assert "from ascend910_93; documented: 2 MiB pages" in target.read_text()


@pytest.mark.parametrize(
    ("run", "target", "more", "error", "message"),
    [
        ("recorded_tp2", "mine.txt", [], UsageError, "is no .toml file"),
        ("recorded_tp2", "no/where.toml", [], MemprofError, "is not a folder"),
        (
            "recorded_tp2",
            "mine.toml",
            ["--from", "920"],
            UsageError,
            "no device profile named '920'",
        ),
        ("nowhere", "mine.toml", [], RunRecordError, "nowhere"),
    ],
)
def test_calibrate_refuses(tmp_path, run, target, more, error, message):
    result = CliRunner().invoke(
        sim.app, ["calibrate", str(DATA / run), "-o", str(tmp_path / target), *more]
    )
    assert isinstance(result.exception, error)
    assert message in result.exception.message
    assert not (tmp_path / target).exists()
