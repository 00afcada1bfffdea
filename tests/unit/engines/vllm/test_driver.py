"""The driver's own arguments. Engines run in the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_memprof.engines.vllm import driver


def test_missing_prompt_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driver.main(["offline", "--model", "m", "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err


def test_engine_arguments_are_everything_behind_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(
        driver, "run_plan", lambda options, args: given.append((options.model, args))
    )
    driver.main(["plan", "--model", "m", "--", "-tp", "2", "--", "x"])
    assert given == [("m", ["-tp", "2", "--", "x"])]
