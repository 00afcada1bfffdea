"""Prompts and images become requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_memprof.engines import prompts
from vllm_memprof.engines.driver import OptionError, Options
from vllm_memprof.engines.prompts import Request

PNG = b"\x89PNG not really"


@pytest.fixture(autouse=True)
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files that begin like an image for one: Pillow is in the engine's environment alone."""

    def check(path: Path) -> None:
        if not path.exists() or path.read_bytes()[:1] != b"\x89":
            raise OptionError(f"image {path} cannot be read")

    monkeypatch.setattr(prompts, "_check_image", check)


def load_requests(
    file: Path | None, texts: list[str], images: Path | None, skip: bool = False
) -> list[Request]:
    named = {"prompts_file": file, "images_dir": images}
    paths = {name: str(path) for name, path in named.items() if path is not None}
    on_error = "skip" if skip else "stop"
    return prompts.load_requests(Options("m", prompts=texts, on_error=on_error, **paths))  # type: ignore[arg-type]


def test_prompts_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"text": "c"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")

    assert [each.row() for each in load_requests(path, ["first"], None)] == [
        {"prompt": "first"},
        *lines[:2],
        {"prompt": "c"},
    ]


def test_an_image_becomes_a_chat_message(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": "what?", "image": "cat.png"}))

    [request] = load_requests(path, [], tmp_path)
    picture, text = request.row()["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "what?"}


def test_a_chat_may_name_image_files_beside_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "cat.webp").write_bytes(PNG)
    remote = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    local = {"type": "image_url", "image_url": {"url": "file://cat.webp", "detail": "low"}}
    chat = {"messages": [{"role": "user", "content": [remote, local]}]}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(chat))

    [request] = load_requests(path, [], None)
    first, second = request.row()["messages"][0]["content"]
    assert first == remote
    assert second["image_url"]["url"].startswith("data:image/webp;base64,")
    assert second["image_url"]["detail"] == "low"


def test_a_folder_of_images_alone_is_asked_about_in_natural_order(tmp_path: Path) -> None:
    for name in ("img10.png", "img9.jpg", "IMG1.webp", "notes.txt"):
        (tmp_path / name).write_bytes(PNG)

    requests = load_requests(None, [], tmp_path)
    assert [each.name for each in requests] == ["IMG1.webp", "img9.jpg", "img10.png"]
    content = requests[0].row()["messages"][0]["content"]
    assert "image/webp" in content[0]["image_url"]["url"]


def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": {"prompt_token_ids": [3, 4]}}')
    [request] = load_requests(path, [], None)
    assert request.row() == {"prompt": {"prompt_token_ids": [3, 4]}}


def test_nothing_given_is_one_short_prompt() -> None:
    assert [each.row() for each in load_requests(None, [], None)] == [{"prompt": "Hello"}]


BAD = [
    ("{]", "line 1: not JSON"),
    ('{"question": "?"}', "line 1: expected"),
    ('{"prompt": 3}', "line 1: 'prompt' is not a text"),
    ('{"messages": "a"}', "line 1: 'messages' is not a list"),
    ('{"text": "", "image": "no.png"}', "no.png"),
    ('{"text": "", "image": "text.png"}', "text.png cannot be read"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_prompts_say_where(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "text.png").write_text("hello")
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)

    with pytest.raises(OptionError, match=message):
        load_requests(path, [], None)


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_prompts_are_named_and_skipped_where_asked(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("hello")
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{content}\n{{"prompt": "good"}}\n')

    assert [each.row() for each in load_requests(path, [], None, skip=True)] == [{"prompt": "good"}]
    said = capsys.readouterr().err
    assert "skipped" in said
    assert message in said


@pytest.mark.parametrize("skip", [False, True])
def test_a_folder_without_an_image_is_refused(tmp_path: Path, skip: bool) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(OptionError, match="no image in it"):
        load_requests(None, [], tmp_path, skip=skip)


def test_nothing_left_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(OptionError, match="no request is left"):
        load_requests(None, [], tmp_path, skip=True)
