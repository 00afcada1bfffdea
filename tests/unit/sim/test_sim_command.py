"""``memprof sim``: what it prints, without a setup."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import sim
from vllm_memprof.errors import SetupError
from vllm_memprof.sim import setup
from vllm_memprof.sim.setup import SetupResult
from vllm_memprof.sim.stacks import load_stack


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
    def fake(name, prefix, progress, force):
        progress.step(1, 2, "install [torch]")
        progress.detail("Downloading torch (900 MB)")
        progress.detail("Downloading small.whl (90 kB)")
        progress.done(1.5)
        return SetupResult(load_stack(), tmp_path, True, 2.0)

    monkeypatch.setattr(setup, "setup_stack", fake)
    result = CliRunner().invoke(sim.app, ["setup"])
    assert result.exit_code == 0
    assert "[1/2] install [torch]" in result.output
    assert "Downloading torch (900 MB)" in result.output
    assert "small.whl" not in result.output
    assert f"vllm-ascend-0.23.0 set up in {tmp_path} (2.0 s)" in result.output
    quiet = CliRunner().invoke(sim.app, ["setup", "-q"])
    assert quiet.output.splitlines() == [f"vllm-ascend-0.23.0 set up in {tmp_path} (2.0 s)"]


def test_live_progress_survives_markup_and_ends(monkeypatch):
    progress = sim._LiveProgress()
    progress.detail("another setup is at work in [/tmp]")
    progress.step(1, 1, "check [this]")
    progress.detail("Collecting x[y]==1")
    progress.done(0.1)
    progress.close()


def test_errors_pass_through_to_the_one_place_that_prints_them(monkeypatch):
    def fail(*args, **kwargs):
        raise SetupError("no room", "free some")

    monkeypatch.setattr(setup, "setup_stack", fail)
    result = CliRunner().invoke(sim.app, ["setup"])
    assert isinstance(result.exception, SetupError)
