"""A plan waits at a moment while it is asked to, and not otherwise."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from vllm_memprof.engines.vllm.wait_for_go import hold
from vllm_memprof.record.schema import ENV_HOLD, MOMENTS, READY, SERVED


def test_it_waits_until_its_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_HOLD, str(tmp_path))
    (tmp_path / "ready.hold").touch()
    waiting = threading.Thread(target=hold, args=(READY,))
    waiting.start()
    held = tmp_path / "ready.held"
    deadline = time.monotonic() + 20
    while not held.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held.exists()
    assert not (tmp_path / "ready.hold").exists()
    waiting.join(0.3)
    assert waiting.is_alive()
    held.unlink()
    waiting.join(20)
    assert not waiting.is_alive()


def test_it_does_not_wait_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_HOLD, raising=False)
    for moment in MOMENTS:
        hold(moment)
    monkeypatch.setenv(ENV_HOLD, str(tmp_path))
    (tmp_path / "ready.hold").touch()
    hold(SERVED)
    assert [path.name for path in tmp_path.iterdir()] == ["ready.hold"]
