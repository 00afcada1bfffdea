"""The requests of an offline run: files, texts and images enter, chat or plain prompts leave; and
the loop that runs them, whose lines ``launch.requests`` reads.

Images are opened once to see whether they can be read, and read again when their request runs: all
of them together may be larger than the host's memory.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_memprof.engines.driver import OptionError, Options

_Made = TypeVar("_Made")
Row = Mapping[str, Any]

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
_DEFAULT_IMAGE_PROMPT = "Describe this image."
#: Keys of a line, the types of their values, and these in words.
_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt": ((str, dict), "a text"),  # or the engine's own form, {"prompt_token_ids"}
    "messages": ((list,), "a list of objects with a role"),
    "text": ((str,), "a text"),
    "image": ((str,), "a text"),
}
_SHAPES = '{"prompt"}, {"messages"} or {"text", "image"}'
#: Seen as a source that the engine itself reads.
_REMOTE = re.compile(r"(data|https?):")


@dataclass(frozen=True)
class Request:
    """One request, before its images are read."""

    name: str  # for messages: the line or the file it comes from
    content: Row  # ``prompt`` or ``messages``, whose image files are named by their paths

    def row(self) -> Row:
        """Return what the engine gets, with its images in it.

        Raises:
            OptionError: an image is no longer there.
        """
        return _with_images(self.content, lambda name: _data_of(Path(name)))


#: Runs some requests together; returns what is said of each.
Generate = Callable[[Sequence[Request]], list[str]]


def load_requests(options: Options) -> list[Request]:
    """Return the requests of an offline run.

    Relative paths of images start from the folder of images, or from that of the prompts. If no
    prompt names an image, each one in the folder is asked about, in natural order.

    Raises:
        OptionError: a file is missing, a line has none of the known shapes or an image cannot be
            read, and the run does not skip it; or nothing is left.
    """
    prompts, images = (
        None if path is None else Path(path) for path in (options.prompts_file, options.images_dir)
    )
    skipped = 0

    def attempt(make: Callable[..., _Made], *args: Any) -> list[_Made]:
        nonlocal skipped
        try:
            return [make(*args)]
        except OptionError as error:
            if not options.skips:
                raise
            skipped += 1
            print(f"memprof offline: skipped: {error}", file=sys.stderr, flush=True)
            return []

    rows: list[tuple[str, Row]] = [
        (f"--prompt {number}", {"prompt": text})
        for number, text in enumerate(options.prompts, start=1)
    ]
    try:
        lines = [] if prompts is None else prompts.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompts {prompts}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows += attempt(_row_of, f"{prompts}, line {number}", line)
    if images is not None and not any("image" in row or "messages" in row for _, row in rows):
        asked = [row["prompt"] for _, row in rows if "prompt" in row] or [_DEFAULT_IMAGE_PROMPT]
        rows = [
            (path.name, {"text": text, "image": str(path)})
            for path in _image_files(images)
            for text in asked
        ]
    folders = [folder for folder in (images, None if prompts is None else prompts.parent) if folder]
    found = [request for row in rows for request in attempt(_to_request, *row, folders)]
    if not found and (rows or skipped):
        raise OptionError(f"no request is left: {skipped} of {skipped} were skipped")
    return found or [Request("default prompt", {"prompt": "Hello"})]


def _image_files(folder: Path) -> list[Path]:
    def natural(path: Path) -> str:  # "2.png" before "10.png"
        return re.sub(r"\d+", lambda number: number[0].zfill(20), path.name.lower())

    try:
        listed = sorted(folder.iterdir(), key=natural)
    except OSError as error:
        raise OptionError(f"--images {folder}: {error.strerror}") from error
    found = [path for path in listed if path.suffix.lower() in _IMAGE_SUFFIXES]
    if not found:
        raise OptionError(f"--images {folder}: no image in it ({', '.join(_IMAGE_SUFFIXES)})")
    return found


def _row_of(name: str, line: str) -> tuple[str, Row]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{name}: not JSON ({error})") from error
    if not isinstance(row, dict) or not _KEYS.keys() & row.keys():
        raise OptionError(f"{name}: expected {_SHAPES}")
    for key in _KEYS.keys() & row.keys():
        types, words = _KEYS[key]
        if not isinstance(row[key], types):
            raise OptionError(f"{name}: {key!r} is not {words}")
    return name, row


def _to_request(name: str, row: Row, folders: Sequence[Path]) -> Request:
    def located(url: str) -> str:
        path = Path(url.removeprefix("file://"))
        if not path.exists():
            path = next((at for folder in folders if (at := folder / path).exists()), path)
        _check_image(path)
        return str(path)

    if "messages" not in row and "image" not in row:
        return Request(name, {"prompt": row.get("prompt", row.get("text", ""))})
    messages = row.get("messages")
    if messages is None:
        text = row.get("text", row.get("prompt", _DEFAULT_IMAGE_PROMPT))
        picture = {"type": "image_url", "image_url": {"url": row["image"]}}
        messages = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
    return Request(name, _with_images({"messages": messages}, located))


def _with_images(content: Row, change: Callable[[str], str]) -> Row:
    """Return a request with every URL of an image that is a file here changed."""

    def changed(part: Any) -> Any:
        match part:
            case {"image_url": {"url": str(url)}} if not _REMOTE.match(url):
                return {**part, "image_url": {**part["image_url"], "url": change(url)}}
            case {"content": list(parts)}:
                return {**part, "content": [changed(each) for each in parts]}
        return part

    if "messages" not in content:
        return content
    return {"messages": [changed(message) for message in content["messages"]]}


def _data_of(path: Path) -> str:
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise OptionError(f"image {path}: {error.strerror}") from error
    return f"data:{mimetypes.guess_type(path.name)[0] or 'image/png'};base64,{data}"


def _check_image(path: Path) -> None:
    """Refuse an image that cannot be read. Without Pillow the engine will say.

    Raises:
        OptionError: it cannot.
    """
    try:
        with path.open("rb") as stream:
            try:
                from PIL import Image
            except ImportError:
                return
            with Image.open(stream) as image:
                image.verify()
    except Exception as error:  # Pillow raises what its decoders raise
        raise OptionError(f"image {path} cannot be read: {error}") from error


def tokens_said(prompt: int, output: int) -> str:
    """Return what is said of a request that was answered."""
    return f"{prompt} prompt tokens, {output} output tokens"


def run_all(generate: Generate, requests: Sequence[Request], options: Options) -> None:
    """Run the requests, some together, and say of each how it went."""
    together = len(requests) if options.at_once else options.concurrency
    total = len(requests) * options.repeat
    number, began = 0, time.perf_counter()
    print(f"requests to run: {total}", flush=True)
    for _ in range(options.repeat):
        for first in range(0, len(requests), together):
            batch = requests[first : first + together]
            started = time.perf_counter()
            try:
                answers = generate(batch)
            except (ValueError, OptionError) as error:  # a prompt that is too long, an image gone
                if not options.skips:
                    raise
                names = ", ".join(request.name for request in batch)
                number += len(batch)
                print(f"request {number}/{total}: skipped ({names}): {error}", flush=True)
                continue
            now = time.perf_counter()
            for said in answers:
                number += 1
                left = (now - began) / number * (total - number)
                took = f"{now - started:.2f} s, {left:.0f} s left"
                print(f"request {number}/{total}: {said}, {took}", flush=True)
