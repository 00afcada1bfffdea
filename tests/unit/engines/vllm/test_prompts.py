"""Prompts and images become requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_memprof.engines.vllm.prompts import PromptError, load_requests

PNG = b"\x89PNG not really"


def test_prompts_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"text": "c"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")

    assert load_requests(path, ["first"], None) == [
        {"prompt": "first"},
        *lines[:2],
        {"prompt": "c"},
    ]


def test_an_image_becomes_a_chat_message(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": "what?", "image": "cat.png"}))

    [request] = load_requests(path, [], tmp_path)
    picture, text = request["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "what?"}


def test_a_folder_of_images_alone_is_asked_about(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.png", "notes.txt"):
        (tmp_path / name).write_bytes(PNG)

    requests = load_requests(None, [], tmp_path)
    assert len(requests) == 2
    assert "image/png" in requests[0]["messages"][0]["content"][0]["image_url"]["url"]


def test_nothing_given_is_one_short_prompt() -> None:
    assert load_requests(None, [], None) == [{"prompt": "Hello"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]", "line 1: not JSON"),
        ('{"question": "?"}', "line 1: expected"),
        ('{"text": "", "image": "no.png"}', "no.png"),
    ],
)
def test_bad_prompts_say_where(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)

    with pytest.raises(PromptError, match=message):
        load_requests(path, [], None)
