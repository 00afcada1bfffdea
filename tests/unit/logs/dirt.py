"""What happens to a log between a terminal and a report: each kind of dirt is a function."""

from __future__ import annotations

import gzip
import html
import random
import re
from collections.abc import Callable

Dirt = Callable[[str, random.Random], "str | bytes"]

_WIDE = {
    ":": "\uff1a",
    ",": "\uff0c",
    "(": "\uff08",
    ")": "\uff09",
    ";": "\uff1b",
    "=": "\uff1d",
    "%": "\uff05",
}
_PREFIX = re.compile(r"^\(\w[^()]{0,60}pid=\d+[^()]{0,40}\) ")
_CHINESE = [
    "\u670d\u52a1\u65e5\u5fd7\u5982\u4e0b\uff1a",
    "\u8bf7\u95ee\u4e3a\u4ec0\u4e48\u663e\u5b58\u4e0d\u591f\uff1f",
    "\u8c22\u8c22\uff01",
]
_BARS = [
    "Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02,  1.33it/s]",
    " 10%|#         | 1/10 [00:00<00:05,  1.7it/s]",
]


def _lines(text: str) -> list[str]:
    return text.split("\n")


def colours(text: str, rng: random.Random) -> str:
    codes = ["\x1b[36m", "\x1b[0;0m", "\x1b[1;32m", "\x1b[0m", "\x1b[K"]
    return "\n".join(
        f"{rng.choice(codes)}{line}{rng.choice(codes)}" if line else line for line in _lines(text)
    )


def crlf(text: str, rng: random.Random) -> str:
    return text.replace("\n", "\r\n")


def byte_order_mark(text: str, rng: random.Random) -> bytes:
    return b"\xef\xbb\xbf" + text.encode()


def utf_16(text: str, rng: random.Random) -> bytes:
    return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-16-be"]))


def packed(text: str, rng: random.Random) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def fences(text: str, rng: random.Random) -> str:
    return f"My log:\n\n```{rng.choice(['', 'bash', 'text'])}\n{text.rstrip()}\n```\n\nThanks\n"


def quotes(text: str, rng: random.Random) -> str:
    mark = rng.choice(["> ", ">", "> > ", "&gt; "])
    return "\n".join(mark + line for line in _lines(text))


def entities(text: str, rng: random.Random) -> str:
    return (
        html.escape(text)
        .replace("'", "&#39;")
        .replace("/", "&#x2F;" if rng.random() < 0.5 else "/")
    )


def full_width(text: str, rng: random.Random) -> str:
    keep = rng.sample(sorted(_WIDE), rng.randrange(1, len(_WIDE) + 1))
    # a clock and a prefix keep theirs: nobody types those again
    return "\n".join(
        line
        if "pid=" in line[:40]
        else "".join(_WIDE[char] if char in keep else char for char in line)
        for line in _lines(text)
    )


def text_between(text: str, rng: random.Random) -> str:
    result = []
    for line in _lines(text):
        result.append(line)
        if rng.random() < 0.3 and not line.endswith("\\"):
            result += ["", rng.choice(_CHINESE), ""]
    return "\n".join(result)


def progress_bars(text: str, rng: random.Random) -> str:
    return "\n".join(
        "\r".join([*(rng.choice(_BARS) for _ in range(rng.randrange(1, 4))), line])
        if line and line[:2] != "--" and rng.random() < 0.5
        else line
        for line in _lines(text)
    )


def timestamps(text: str, rng: random.Random) -> str:
    prefix = rng.choice(
        [
            "2026-01-07T02:38:42.269Z ",
            "[2026-01-07 02:38:42] ",
            "engine-1  | ",
            "Jan 07 02:38:42 host vllm[9]: ",
        ]
    )
    return "\n".join(
        prefix + line if line and "#" not in line[:3] and "```" not in line else line
        for line in _lines(text)
    )


def trailing_spaces(text: str, rng: random.Random) -> str:
    return "\n".join(line + " " * rng.randrange(4) for line in _lines(text))


def wrapped(text: str, rng: random.Random) -> str:
    """As a terminal does it: at a column."""
    width = rng.randrange(64, 140)
    return "\n".join(
        piece
        for line in _lines(text)
        for piece in ([line[at : at + width] for at in range(0, len(line), width)] or [""])
    )


def wrapped_at_80(text: str, rng: random.Random) -> str:
    return "\n".join(
        piece
        for line in _lines(text)
        for piece in ([line[at : at + 80] for at in range(0, len(line), 80)] or [""])
    )


def worker_prefixes(text: str, rng: random.Random) -> str:
    """As an executor puts them before the lines of its workers."""
    name = rng.choice(
        [
            "Worker_TP0",
            "Worker_PP1_TP3",
            "EngineCore",
            "EngineCore_DP0",
            "VllmWorkerProcess",
            "APIServer",
        ]
    )
    prefix = f"({name} pid={rng.randrange(2, 10**6)}) "
    return "\n".join(prefix + line if _bare(line) else line for line in _lines(text))


def without_prefixes(text: str, rng: random.Random) -> str:
    return "\n".join(_PREFIX.sub("", line) for line in _lines(text))


def _bare(line: str) -> bool:
    return (
        bool(line.strip())
        and "pid=" not in line
        and not line.lstrip().startswith(("#", "`", "-", ">", "="))
    )


#: These lose nothing.
HARMLESS: dict[str, Dirt] = {
    function.__name__: function
    for function in (
        colours,
        crlf,
        byte_order_mark,
        utf_16,
        packed,
        fences,
        quotes,
        entities,
        full_width,
        text_between,
        progress_bars,
        trailing_spaces,
    )
}


#: In this order: what escapes comes after what changes characters, and before what adds markup of
#: its own.
_PLACES = {
    "text_between": -2,
    "progress_bars": -1,
    "full_width": 0,
    "entities": 1,
    "quotes": 3,
    "crlf": 4,
}
_WRAPPED = {
    "wrapped": 1.5,
    "wrapped_at_80": 1.5,
    "wrapped_at_spaces": 1.5,
}  # nobody writes between their pieces
_LAST = {"byte_order_mark": 5, "utf_16": 5, "packed": 6}


def in_order(kinds: list[str]) -> list[str]:
    """Kinds of dirt in an order in which they can befall a log: what loses lines or names comes
    first.
    """
    places = {**dict.fromkeys([*RENAMING, *LOSSY], -3), **_PLACES, **_WRAPPED, **_LAST}
    return sorted(kinds, key=lambda kind: places.get(kind, 2))


#: These change who is taken to have printed a line, and no figure.
RENAMING: dict[str, Dirt] = {
    function.__name__: function for function in (worker_prefixes, without_prefixes)
}


def cut_lines(text: str, rng: random.Random) -> str:
    width = rng.randrange(20, 200)
    return "\n".join(line[:width] for line in _lines(text))


def cut_at_random(text: str, rng: random.Random) -> str:
    return "\n".join(
        line[: rng.randrange(len(line) + 1)] if rng.random() < 0.3 else line
        for line in _lines(text)
    )


def cut_short(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def lost_lines(text: str, rng: random.Random) -> str:
    return "\n".join(line for line in _lines(text) if rng.random() < 0.7)


def lost_beginnings(text: str, rng: random.Random) -> str:
    return "\n".join(
        line[rng.randrange(30) :] if rng.random() < 0.3 else line for line in _lines(text)
    )


def repeated_lines(text: str, rng: random.Random) -> str:
    return "\n".join(line for line in _lines(text) for _ in range(rng.choice([1, 1, 1, 2])))


def shuffled_lines(text: str, rng: random.Random) -> str:
    lines = _lines(text)
    rng.shuffle(lines)
    return "\n".join(lines)


def wrapped_at_spaces(text: str, rng: random.Random) -> str:
    """As a mail program does it."""
    width = rng.randrange(64, 120)
    result = []
    for line in _lines(text):
        while len(line) > width and " " in line[1:width]:
            at = line.rindex(" ", 1, width)
            result.append(line[:at])
            line = line[at + 1 :]
        result.append(line)
    return "\n".join(result)


def noise(text: str, rng: random.Random) -> bytes:
    """Bytes that belong nowhere: never inside a number, which nothing could tell from a number."""
    data = bytearray()
    for byte in text.encode():
        if (
            rng.random() < 0.01
            and not (data[-1:].isdigit() or data[-1:] in (b".", b",", b"-"))
            and not chr(byte).isdigit()
        ):
            data.append(rng.choice([0, 7, 0x1B, 0x80, 0xFF, 0xC3, 0x9F, 0x22]))
        data.append(byte)
    return bytes(data)


#: These may lose facts, and may make no new ones.
LOSSY: dict[str, Dirt] = {
    function.__name__: function
    for function in (
        cut_lines,
        cut_at_random,
        cut_short,
        lost_lines,
        lost_beginnings,
        repeated_lines,
        shuffled_lines,
        timestamps,
        wrapped,
        wrapped_at_80,
        wrapped_at_spaces,
        noise,
    )
}
