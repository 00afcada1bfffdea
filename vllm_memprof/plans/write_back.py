"""A setting in a file that starts an engine: its text and options enter, the changed text leaves.

Known are the command line in a shell script, ``command`` and ``args`` of a Kubernetes manifest, and
vLLM's YAML config (``vllm serve --config``). Only the characters of the option change: comments,
order, quotes and line ends stay. Where several commands could be meant, or the value comes from
elsewhere, nothing is changed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vllm_memprof.engines import ENGINES
from vllm_memprof.errors import UsageError
from vllm_memprof.options import long_name, options, setting

#: What starts an engine; its arguments follow.
_STARTS = [
    *(("vllm", "serve"), ("memprof", "serve"), ("-m", "vllm.entrypoints.openai.api_server")),
    *(row.server[:2] for row in ENGINES.values()),
]
_QUOTED = r"""'(?:[^']|'')*'|"(?:\\.|[^"\\])*\""""
#: Words as a shell reads them, and what ends a command.
_SHELL = re.compile(
    r"(?P<gap>[ \t\r]+|\\\r?\n)|#[^\n]*|(?P<end>[\n;&|()]+|\d*[<>]+)"
    rf"|(?P<word>(?:{_QUOTED}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\\[^\n]"
    r"""|[^\s;&|()<>'"\\`])+)|.""",
    re.S,
)
#: The same in YAML, where a key ends it, and a text of several lines begins behind a mark.
_YAML = re.compile(
    r"(?P<gap>\s+(?:- +)*|[\[\],]|args:(?=\s))|#[^\n]*|(?P<end>[^\s\[\],\"'{]+:(?=\s))"
    r"|(?P<body>[|>][+-]?[ \r]*\n(?P<indent> *).*\n?(?:(?P=indent).*\n?|\s*\n)*)"
    rf"|(?P<word>{_QUOTED}|[^\s\[\],]+)"
)
_ENTRY = re.compile(
    rf"(?m)^(?P<indent> *)(?P<dash>- +)?(?:(?P<key>{_QUOTED}|[\w.-]+) *:(?=\s|$))? *"
    rf"(?P<value>{_QUOTED}|[^\s#](?:[^#\n]|(?<! )#)*?)? *(?:(?<![^ \n])#.*)?\r?$"
)
#: Values that are made elsewhere; words that may be any options.
_ELSEWHERE, _ANY = re.compile(r"[$`]|\{\{"), re.compile(r"\$[@*]|\[@\]")
_QUOTES = ("'", '"', "")


class Word(NamedTuple):
    """An argument as the engine gets it, and where it stands in the text, quotes included."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class Start:
    """A command that starts an engine, or the config of one."""

    words: list[Word]  # arguments, the model among them
    last: Word  # behind which an option can be added
    program: str = "vllm"

    @property
    def arguments(self) -> list[str]:
        return [word.text for word in self.words]


def find_start(text: str, name: str) -> Start:
    """Return what starts an engine in a file.

    Args:
        text: of the file.
        name: of the file, whose ending tells a YAML config from a script.

    Raises:
        UsageError: nothing does, or more than one command.
    """
    manifest = re.search(r"(?m)^apiVersion:", text) and re.search(r"(?m)^kind:", text)
    if re.search(r"\.ya?ml$", name) and not manifest:
        words = list(config_words(text))
        found = [Start(words, Word("", len(text), len(text)))] if words else []
    else:
        found = list(_commands(text, 0, len(text), _YAML if manifest else _SHELL))
    if len(found) == 1:
        return found[0]
    lines = ", ".join(str(_line(text, start.last)) for start in found)
    what = f"several engines are started, in lines {lines}" if found else "no engine is started"
    raise UsageError(
        f"{name}: {what}; nothing is changed",
        "a file with one `vllm serve` or `memprof serve`, or the YAML of `vllm serve --config`",
    )


def write_back(text: str, start: Start, settings: Mapping[str, str]) -> str:
    """Return the text with options set in it, in their places or behind the others.

    Raises:
        UsageError: the value in the file comes from elsewhere, or is several.
    """
    edits = []
    for name, value in settings.items():
        words = setting(start.arguments, name, value)
        option, equals, inner = words[0].partition("=")
        values = [inner] if equals else words[1:]
        index, held = 0, list[Word]()
        for other, found in options(start.arguments):
            if other == long_name(option):
                held = start.words[index : index + len(found)]
            index += len(found)
        for word in held or start.words:
            if (_ELSEWHERE if held else _ANY).search(word.text):
                raise UsageError(
                    f"line {_line(text, word)}: {word.text} decides on {option}; nothing changed",
                    f"set {option} where {word.text} comes from",
                )
        if not held:
            edits.append((start.last.end, start.last.end, _added(text, start, option, values)))
        elif values or held[1:]:
            old = held[-1]
            if len(held) - 1 + ("=" in held[0].text) != 1 or not values:
                where = f"line {_line(text, old)}"
                raise UsageError(f"{where}: {option} has not one value there; nothing is changed")
            raw = text[old.begin : old.end]
            head, tail = ("", raw) if held[1:] else re.split("(?<==)", raw, maxsplit=1)
            if raw[0] in _QUOTES:
                head, tail, value = "", raw, head[1:] + values[0]
            edits.append((old.begin, old.end, head + _quoted(value, tail[:1])))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _line(text: str, word: Word) -> int:
    return text.count("\n", 0, word.begin) + 1


def _quoted(word: str, quote: str = "") -> str:
    """Return a word as a shell and YAML have it, if possible in the quotes that it had."""
    plain = re.fullmatch(r"[\w./:=+-]+", word)
    return f"{quote}{word}{quote}" if plain and quote in _QUOTES else shlex.quote(word)


def _added(text: str, start: Start, option: str, values: list[str]) -> str:
    """Return what is inserted behind the last word of a command, or at the end of a config."""
    newline, at = "\r\n" if "\r\n" in text else "\n", start.last.begin
    line, joined = text[:at].rpartition("\n")[2], "=".join([option, *values])
    if at == len(text):
        value = _quoted(*values) if values else "true"
        return f"{newline if line else ''}{option[2:]}: {value}{newline}"
    if re.fullmatch(" *- +", line):
        return f"{newline}{line}{_quoted(joined)}"
    if text[:at].rstrip()[-1:] in ("[", ","):
        return f", {json.dumps(joined)}"
    added = " ".join([option, *map(_quoted, values)])
    broken = start.words and "\n" in text[start.words[0].begin : at]
    return f" \\{newline}{line[: -len(line.lstrip()) or None]}{added}" if broken else f" {added}"


def _commands(
    text: str, begin: int, end: int, lexer: re.Pattern[str], folded: bool = False
) -> Iterator[Start]:
    """Yield the commands of a text that start an engine.

    Args:
        text: of the file.
        begin: of the part that is read.
        end: of it.
        lexer: ``_SHELL`` or ``_YAML``.
        folded: a new line does not end a command.
    """
    command: list[Word] = []
    while begin <= end:
        match = lexer.match(text, begin, end)
        kind, raw = ("end", "") if match is None else (match.lastgroup, match[0])
        at, begin = begin, end + 1 if match is None else match.end()
        if kind == "word":
            inner = lexer is _YAML and list(_commands(text, at + 1, begin - 1, _SHELL, folded=True))
            if inner:
                yield from inner
            else:
                command.append(Word(_plain(raw), at, begin))
        elif lexer is _YAML and raw[:1] in ("|", ">"):
            yield from _commands(text, at + 1, begin, _SHELL, raw[0] == ">")
        elif kind == "end" and not (folded and raw and not raw.strip()):
            yield from _started(command, lexer is _YAML)
            command = []


def _started(command: list[Word], in_list: bool) -> Iterator[Start]:
    """Yield the engine that the words of a command start, in a list maybe the image's own."""
    for index, (word, following) in enumerate(pairwise(command)):
        names = word.text.rpartition("/")[2], following.text
        if names in _STARTS:
            yield Start(command[index + 2 :], command[-1], names[0])
            return
    options = [word for word in command if word.text.startswith("-")]
    if in_list and any(word.text.startswith("--model") for word in options):
        yield Start(command[command.index(options[0]) :], command[-1])


def _plain(raw: str) -> str:
    """Return a word without its quotes."""
    try:
        return "".join(shlex.split(raw))
    except ValueError:
        return raw


def config_words(text: str) -> Iterator[Word]:
    """Yield the entries of a YAML config as words; those of a mapping with dotted names."""
    path: list[tuple[int, str]] = []
    for match in _ENTRY.finditer(text):
        key, value = match["key"], (match["value"] or "").rstrip()
        value = _plain(value) if value[:1] in ("'", '"') else value
        if key is None:
            if match["dash"] and value:
                yield Word(value, *match.span("value"))
            continue
        path = [each for each in path if each[0] < len(match["indent"])]
        path.append((len(match["indent"]), _plain(key)))
        if not value and not re.match(r"\s*(?:#.*\s+)*- ", text[match.end() :]):
            continue
        if value.lower() in ("false", "null", "~"):
            continue  # as if it were not there
        name = ".".join(part for _, part in path)
        yield Word(long_name(f"--{name}"), *match.span("key"))
        if value and value.lower() != "true":
            bare = " ".join(value[1:-1].replace(",", " ").split()) if value[0] == "[" else value
            yield Word(bare, *match.span("value"))
