"""Requests as vLLM takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_memprof.engines.prompts import Request
from vllm_memprof.engines.vllm import driver


class Engine:
    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def generate(self, prompts: list[str], sampling: object, use_tqdm: bool) -> list[Any]:
        self.batches.append(prompts)
        answer = SimpleNamespace(token_ids=[1])
        return [SimpleNamespace(prompt_token_ids=[0] * 3, outputs=[answer]) for _ in prompts]

    chat = generate


def test_chats_and_prompts_may_be_mixed() -> None:
    engine = Engine()
    chat = Request("chat", {"messages": [{"role": "user", "content": "hi"}]})
    said = driver.generate(engine, [Request("text", {"prompt": "a"}), chat], None)
    assert said == ["3 prompt tokens, 1 output tokens"] * 2
    assert engine.batches == [[[{"role": "user", "content": "hi"}]], ["a"]]
