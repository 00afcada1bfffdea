"""The requests of an offline run: files, texts and images enter, chat or plain prompts leave."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
_DEFAULT_PROMPT = "Hello"
_DEFAULT_IMAGE_PROMPT = "Describe this image."


class PromptError(Exception):
    """A file of prompts or images is missing, or has a line of an unknown shape."""


class Row(TypedDict, total=False):
    """One line of a file of prompts: ``prompt``, ``messages``, or ``text`` and ``image``."""

    prompt: str
    messages: list[object]
    text: str
    image: str


def load_requests(prompts: Path | None, texts: Sequence[str], images: Path | None) -> list[Row]:
    """Return the requests of an offline run: ``{"prompt": text}`` or ``{"messages": [...]}``.

    Args:
        prompts: JSON lines of ``{"prompt"}``, ``{"messages"}`` or ``{"text", "image"}``, or None.
        texts: prompts from the command line.
        images: folder that relative image paths start from; if no prompt names an image, each one
            in it is asked about.

    Raises:
        PromptError: a file is missing or a line has none of these shapes.
    """
    rows: list[Row] = [{"prompt": text} for text in texts]
    if prompts is not None:
        rows += _read_lines(prompts)
    if images is not None and not any("image" in row or "messages" in row for row in rows):
        try:
            listed = sorted(images.iterdir())
        except OSError as error:
            raise PromptError(f"--images {images}: {error.strerror or error}") from error
        found = [path for path in listed if path.suffix.lower() in _IMAGE_SUFFIXES]
        if not found:
            raise PromptError(f"--images {images}: no image in it ({', '.join(_IMAGE_SUFFIXES)})")
        rows = [
            {"text": row["prompt"], "image": str(path)}
            for path in found
            for row in rows or [{"prompt": _DEFAULT_IMAGE_PROMPT}]
        ]
    return [_to_request(row, images) for row in rows or [{"prompt": _DEFAULT_PROMPT}]]


def _read_lines(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptError(f"--prompts {path}: {error.strerror or error}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PromptError(f"--prompts {path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not {"prompt", "messages", "text", "image"} & row.keys():
            raise PromptError(
                f"--prompts {path}, line {number}: expected "
                '{"prompt"}, {"messages"} or {"text", "image"}'
            )
        rows.append(cast(Row, row))
    return rows


def _to_request(row: Row, images: Path | None) -> Row:
    if "image" not in row:
        return row if "messages" in row else {"prompt": row.get("prompt", row.get("text", ""))}
    text = row.get("text", row.get("prompt", _DEFAULT_IMAGE_PROMPT))
    path = Path(row["image"])
    if images is not None and not path.is_absolute() and not path.exists():
        path = images / path
    try:
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise PromptError(f"image {path}: {error.strerror or error}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    picture = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}
    return {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]}
