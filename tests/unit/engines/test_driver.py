"""The loop of an offline run over its requests, with an engine that only counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.engines.driver import Options, run_driver
from vllm_memprof.engines.prompts import Request, load_requests, run_all, tokens_said


class Engine:
    """Refuses prompts that say so."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def generate(self, requests: Any) -> list[str]:
        prompts = [request.row()["prompt"] for request in requests]
        self.batches.append(prompts)
        if "too long" in prompts:
            raise ValueError("the prompt is too long")
        return [tokens_said(3, 1) for _ in prompts]


def run(texts: list[str], **options: Any) -> Engine:
    engine = Engine()
    requests = [Request(f"line {i}", {"prompt": text}) for i, text in enumerate(texts, start=1)]
    run_all(engine.generate, requests, Options("m", **options))
    return engine


def test_one_after_the_other_by_default_and_as_often_as_asked() -> None:
    assert run(["a", "b"], repeat=2).batches == [["a"], ["b"], ["a"], ["b"]]


def test_some_together() -> None:
    assert run(["a", "b", "c"], concurrency=2).batches == [["a", "b"], ["c"]]
    assert run(["a", "b", "c"], at_once=True).batches == [["a", "b", "c"]]


def test_progress_is_counted_over_all_repetitions(capsys: pytest.CaptureFixture[str]) -> None:
    run(["a", "b"], repeat=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == "requests to run: 4"
    assert [line.split(":")[0] for line in lines] == [f"request {i}/4" for i in (1, 2, 3, 4)]
    assert all(line.endswith(" s left") for line in lines)


def test_a_refused_request_ends_the_run_or_is_named_and_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="too long"):
        run(["a", "too long", "b"])
    capsys.readouterr()
    assert run(["a", "too long", "b"], on_error="skip").batches[-1] == ["b"]
    lines = capsys.readouterr().out.splitlines()
    assert "request 2/3: skipped (line 2): the prompt is too long" in lines
    assert lines[-1].startswith("request 3/3")


def test_options_are_json_and_engine_arguments_are_the_rest() -> None:
    given: list[object] = []

    def plan(options: Options, args: list[str]) -> int:
        given.append((options, args))
        return 0

    options = json.dumps({"model": "m", "devices": 8})
    assert run_driver({"plan": plan}, ["plan", options, "-tp", "2", "--", "x"]) == 0
    assert given == [(Options("m", devices=8), ["-tp", "2", "--", "x"])]


def test_a_missing_prompt_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = json.dumps({"model": "m", "prompts_file": str(tmp_path / "none.jsonl")})
    modes = {"offline": lambda options, _: len(load_requests(options))}
    assert run_driver(modes, ["offline", options]) == 2
    said = capsys.readouterr().err
    assert "memprof offline: error: --prompts" in said
    assert "No such file" in said
