"""The loop of an offline run over its requests, with an engine that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.engines.vllm import driver
from vllm_memprof.engines.vllm.prompts import Request


class Engine:
    """Refuses prompts that say so."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def generate(self, prompts: list[str], sampling: object, use_tqdm: bool) -> list[Any]:
        self.batches.append(prompts)
        if "too long" in prompts:
            raise ValueError("the prompt is too long")
        return [
            SimpleNamespace(prompt_token_ids=[0] * 3, outputs=[SimpleNamespace(token_ids=[1])])
            for _ in prompts
        ]

    chat = generate


def run(
    texts: list[str], concurrency: int = 1, repeat: int = 1, at_once: bool = False,
    skip: bool = False,
) -> Engine:  # fmt: skip
    engine = Engine()
    requests = [Request(f"line {i}", {"prompt": text}) for i, text in enumerate(texts, start=1)]
    options = SimpleNamespace(at_once=at_once, concurrency=concurrency, repeat=repeat)
    driver._run_all(engine, requests, None, options, skip)  # type: ignore[arg-type]
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
    assert run(["a", "too long", "b"], skip=True).batches[-1] == ["b"]
    lines = capsys.readouterr().out.splitlines()
    assert "request 2/3: skipped (line 2): the prompt is too long" in lines
    assert lines[-1].startswith("request 3/3")


def test_chats_and_prompts_may_be_mixed() -> None:
    engine = Engine()
    chat = Request("chat", {"messages": [{"role": "user", "content": "hi"}]})
    outputs = driver._generate(engine, [Request("text", {"prompt": "a"}), chat], None)
    assert len(outputs) == 2
    assert engine.batches == [[[{"role": "user", "content": "hi"}]], ["a"]]
