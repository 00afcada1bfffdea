"""The driver's own arguments. Engines run in the integration tests."""

from __future__ import annotations

from argparse import Namespace
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


def test_swap_space_is_not_compared_with_the_machine_of_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    older, newer = Namespace(swap_space=16.0), Namespace()
    for args in (older, newer):
        driver._leave_out_swap_space(args)
    assert (older, newer) == (Namespace(swap_space=0), Namespace())
    assert "--swap-space 16 is not compared" in capsys.readouterr().out
