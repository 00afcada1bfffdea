"""The requests of an offline run: files, texts and images enter, chat or plain prompts leave.

Images are opened once to see whether they can be read, and read again when their request runs: all
of them together may be larger than the host's memory.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
_DEFAULT_PROMPT = "Hello"
_DEFAULT_IMAGE_PROMPT = "Describe this image."
_SHAPES = '{"prompt"}, {"messages"} or {"text", "image"}'
#: Seen as a source that the engine itself reads.
_REMOTE = re.compile(r"(data|https?):")


class PromptError(Exception):
    """A file of prompts or images is missing, or has a line of an unknown shape."""


class PromptRow(TypedDict, total=False):
    """What the engine gets: ``prompt`` or ``messages``."""

    prompt: str
    messages: list[Any]


@dataclass(frozen=True)
class Request:
    """One request, before its images are read."""

    name: str  # for messages: the line or the file it comes from
    content: PromptRow
    images: tuple[Path, ...] = field(default=())  # that its messages name as files

    def row(self) -> PromptRow:
        """Return what the engine gets, with its images in it.

        Raises:
            PromptError: an image is no longer there.
        """
        if "messages" not in self.content:
            return self.content
        messages = self.content["messages"]
        return {"messages": [_with_urls(message, _as_data) for message in messages]}


def load_requests(
    prompts: Path | None, texts: Sequence[str], images: Path | None, skip: bool = False
) -> list[Request]:
    """Return the requests of an offline run.

    Args:
        prompts: JSON lines of ``{"prompt"}``, ``{"messages"}`` or ``{"text", "image"}``, or None.
        texts: prompts from the command line.
        images: folder that relative image paths start from; if no prompt names an image, each one
            in it is asked about, in natural order.
        skip: leave out what cannot be read, and say so, instead of raising.

    Raises:
        PromptError: a file is missing, a line has none of these shapes, an image cannot be read, or
            nothing is left.
    """
    problems: list[str] = []

    def problem(text: str) -> None:
        if not skip:
            raise PromptError(text)
        problems.append(text)
        print(f"memprof offline: skipped: {text}", file=sys.stderr, flush=True)

    folders = [folder for folder in (images, None if prompts is None else prompts.parent) if folder]
    rows: list[tuple[str, Mapping[str, Any]]] = [
        (f"--prompt {number}", {"prompt": text}) for number, text in enumerate(texts, start=1)
    ]
    if prompts is not None:
        rows += _read_lines(prompts, problem)
    if images is not None and not any("image" in row or "messages" in row for _, row in rows):
        asked = [row["prompt"] for _, row in rows if "prompt" in row] or [_DEFAULT_IMAGE_PROMPT]
        rows = [
            (path.name, {"text": text, "image": str(path)})
            for path in _image_files(images)
            for text in asked
        ]
    found = []
    for name, row in rows:
        request = _to_request(name, row, folders)
        bad = next((why for path in request.images if (why := _why_unreadable(path))), None)
        if bad is None:
            found.append(request)
        else:
            problem(f"{name}: {bad}")
    if not found and (rows or problems):
        raise PromptError(f"no request is left: {len(problems)} of {len(problems)} were skipped")
    return found or [Request("default prompt", {"prompt": _DEFAULT_PROMPT})]


def _image_files(folder: Path) -> list[Path]:
    try:
        listed = sorted(folder.iterdir(), key=_natural)
    except OSError as error:
        raise PromptError(f"--images {folder}: {error.strerror or error}") from error
    found = [path for path in listed if path.suffix.lower() in _IMAGE_SUFFIXES]
    if not found:
        raise PromptError(f"--images {folder}: no image in it ({', '.join(_IMAGE_SUFFIXES)})")
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key by which ``2.png`` comes before ``10.png``."""
    parts = re.split(r"(\d+)", path.name.lower())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _read_lines(path: Path, problem: Callable[[str], None]) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"--prompts {path}: {why}") from error
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"{path.name}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            problem(f"--prompts {path}, line {number}: not JSON ({error})")
            continue
        wrong = _why_wrong(row)
        if wrong:
            problem(f"--prompts {path}, line {number}: {wrong}")
        else:
            rows.append((name, row))
    return rows


def _why_wrong(row: Any) -> str | None:
    """Return what is wrong with a line; None: it has one of the shapes."""
    if not isinstance(row, dict) or not {"prompt", "messages", "text", "image"} & row.keys():
        return f"expected {_SHAPES}"
    tokens = row.get("prompt")
    if isinstance(tokens, dict):  # the engine's own form of a prompt
        ids = tokens.get("prompt_token_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
            return "'prompt' has no list of 'prompt_token_ids'"
        row = {**row, "prompt": ""}
    for name in ("prompt", "text", "image"):
        if name in row and not isinstance(row[name], str):
            return f"{name!r} is not a text"
    messages = row.get("messages")
    if "messages" in row and (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        return "'messages' is not a list of objects with a role"
    return None


def _to_request(name: str, row: Mapping[str, Any], folders: Sequence[Path]) -> Request:
    if "messages" in row:
        images: list[Path] = []

        def locate(url: str) -> str:
            images.append(_find(url.removeprefix("file://"), folders))
            return str(images[-1])

        messages = [_with_urls(message, locate) for message in row["messages"]]
        return Request(name, {"messages": messages}, tuple(images))
    if "image" not in row:
        return Request(name, {"prompt": row.get("prompt", row.get("text", ""))})
    text = row.get("text", row.get("prompt", _DEFAULT_IMAGE_PROMPT))
    path = _find(row["image"], folders)
    picture = {"type": "image_url", "image_url": {"url": str(path)}}
    content = [picture, {"type": "text", "text": text}]
    return Request(name, {"messages": [{"role": "user", "content": content}]}, (path,))


def _with_urls(message: Mapping[str, Any], change: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a message with every URL of an image that is a file here changed."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        image = part.get("image_url") if isinstance(part, dict) else None
        url = image.get("url") if isinstance(image, dict) else None
        if isinstance(url, str) and not _REMOTE.match(url):
            part = {**part, "image_url": {**part["image_url"], "url": change(url)}}
        parts.append(part)
    return {**message, "content": parts}


def _find(name: str, folders: Sequence[Path]) -> Path:
    path = Path(name)
    if path.is_absolute() or path.exists():
        return path
    return next((at for folder in folders if (at := folder / path).exists()), path)


def _as_data(name: str) -> str:
    path = Path(name)
    try:
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise PromptError(f"image {path}: {error.strerror or error}") from error
    return f"data:{mimetypes.guess_type(path.name)[0] or 'image/png'};base64,{content}"


def _why_unreadable(path: Path) -> str | None:
    """Return why an image cannot be read; None: it can. Without Pillow the engine will say."""
    try:
        with path.open("rb") as stream:
            try:
                from PIL import Image
            except ImportError:
                return None
            try:
                with Image.open(stream) as image:
                    image.verify()
            except Exception as error:  # Pillow raises what its decoders raise
                return f"image {path} cannot be read: {error}"
    except OSError as error:
        return f"image {path}: {error.strerror or error}"
    return None
