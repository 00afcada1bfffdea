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
from typing import NamedTuple

from vllm_memprof.engines import ENGINES
from vllm_memprof.errors import UsageError
from vllm_memprof.options import long_name, options, setting

#: What starts an engine; its arguments follow.
_STARTS = [
    *(("vllm", "serve"), ("memprof", "serve"), ("-m", "vllm.entrypoints.openai.api_server")),
    *(row.server[:2] for row in ENGINES.values()),
]
#: A word as a shell reads it, and what ends a command; a folded text has no line ends.
_SHELL = re.compile(
    r"""(?P<gap>[ \t\r]+|\\\r?\n)|(?P<remark>\#[^\n]*)|(?P<end>[\n;&|()]+|\d*[<>]+)"""
    r"""|(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\\[^\n]"""
    r"""|[^\s;&|()<>'"\\`])+)|(?P<other>.)""",
    re.S,
)
_QUOTED = r""""(?:\\.|[^"\\])*"|'(?:''|[^'])*'"""
_LIST = re.compile(r"(?m)^(?P<before> *(?:- +)*)(?:command|args):(?P<flow> *\[)?")
_FLOW_ITEM = re.compile(
    rf"\s*(?:#.*\n\s*)*(?P<item>{_QUOTED}|[^\s,\]#][^,\]\n]*)?\s*(?P<end>[,\]])"
)
_ENTRY = re.compile(
    rf"(?m)^(?P<indent> *)(?P<dash>- +)?(?:(?P<key>{_QUOTED}|[\w.-]+) *:(?=\s|$))? *"
    rf"(?P<value>{_QUOTED}|[^\s#](?:[^#\n]|(?<! )#)*?)? *(?:(?<![^ \n])#.*)?\r?$"
)
_ELSEWHERE = re.compile(r"[$`]|\{\{")


class Word(NamedTuple):
    """An argument as the engine gets it, and where it stands in the text, quotes included."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class Start:
    """A command that starts an engine, or the config of one."""

    kind: str  # shell | flow | block | config
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
    if re.search(r"(?m)^apiVersion:", text) and re.search(r"(?m)^kind:", text):
        found = list(_in_manifest(text))
    elif re.search(r"\.ya?ml$", name):
        words = list(_in_config(text))
        found = [Start("config", words, Word("", len(text), len(text)))] if words else []
    else:
        found = list(_in_shell(text, 0, len(text)))
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
        made, *values = setting(start.arguments, name, value)
        option, equals, inner = made.partition("=")
        values = [inner] if equals else values
        index, held = 0, None
        for other, words in options(start.arguments):
            if other == long_name(option):
                held = start.words[index : index + len(words)]
            index += len(words)
        if held is None:
            unknown = [word for word in start.words if re.search(r"\$[@*]|\[@\]", word.text)]
            _refuse(text, option, unknown)
            edits.append((start.last.end, start.last.end, _added(text, start, option, values)))
            continue
        _refuse(text, option, [word for word in held if _ELSEWHERE.search(word.text)])
        first, *others = held
        if len(others) > 1 or len(values) != len(others) + ("=" in first.text):
            where = f"line {_line(text, first)}"
            raise UsageError(f"{where}: {option} has not one value there; nothing is changed")
        for value in values:
            old = others[0] if others else first
            raw = text[old.begin : old.end]
            ahead = "" if others else raw.partition("=")[0].lstrip("\"'") + "="
            quote = raw[0] if raw[0] in "\"'" else raw.partition("=")[2][:1].strip("'\"") and ""
            edits.append((old.begin, old.end, _quoted(start.kind, ahead + value, quote)))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _refuse(text: str, option: str, words: list[Word]) -> None:
    for word in words:
        raise UsageError(
            f"line {_line(text, word)}: {word.text} decides on {option}; nothing is changed",
            f"set {option} where {word.text} comes from",
        )


def _line(text: str, word: Word) -> int:
    return text.count("\n", 0, word.begin) + 1


def _quoted(kind: str, word: str, quote: str = "") -> str:
    """Return a word as that kind of text has it, in the quotes that it had."""
    if re.fullmatch(r"[\w./:=+-]+", word):
        return f"{quote}{word}{quote}"
    return shlex.quote(word) if kind == "shell" else json.dumps(word)


def _added(text: str, start: Start, option: str, values: list[str]) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    line = text[text.rfind("\n", 0, start.last.begin) + 1 : start.last.begin]
    joined = "=".join([option, *values])
    if start.kind == "config":
        value = _quoted("config", *values) if values else "true"
        return f"{'' if text.endswith(newline) else newline}{option[2:]}: {value}{newline}"
    if start.kind == "flow":
        return f", {json.dumps(joined)}"
    if start.kind == "block":
        return f"{newline}{line[: len(line) - len(line.lstrip(' -'))]}{_quoted('block', joined)}"
    added = " ".join([option, *(_quoted("shell", value) for value in values)])
    broken = "\n" in text[start.words[0].begin : start.last.begin] if start.words else False
    indent = line[: len(line) - len(line.lstrip())]
    return f" \\{newline}{indent}{added}" if broken else f" {added}"


def _in_shell(text: str, begin: int, end: int, folded: bool = False) -> Iterator[Start]:
    command: list[Word] = []
    for match in _SHELL.finditer(text, begin, end):
        kind, raw = match.lastgroup, match[0]
        if kind == "word":
            try:
                plain = "".join(shlex.split(raw))
            except ValueError:
                plain = raw
            command.append(Word(plain, *match.span()))
        elif kind in ("end", "other") and not (folded and not raw.strip()):
            yield from _started("shell", command)
            command = []
    yield from _started("shell", command)


def _started(kind: str, command: list[Word]) -> Iterator[Start]:
    """Yield the engine that the words of a command start."""
    for index, word in enumerate(command[:-1]):
        names = word.text.rpartition("/")[2], command[index + 1].text
        if names in _STARTS:
            words = command[index + 2 :]
            yield Start(kind, words, command[-1], names[0])
            return


def _in_manifest(text: str) -> Iterator[Start]:
    """Yield the engines that the containers of a manifest start, each from its two lists."""
    containers: list[tuple[int, int, list[Start]]] = []  # column, end of a list, what is in them
    for match in _LIST.finditer(text):
        column, kind = len(match["before"]), "flow" if match["flow"] else "block"
        words = list((_flow if match["flow"] else _block)(text, match.end(), column))
        inner = [
            start
            for word in words
            for quote in [text[word.begin] in "\"'"]
            for start in _in_shell(
                text, word.begin + quote, word.end - quote, not text.startswith("|", word.begin)
            )
        ]
        starts = inner or [Start(kind, words, words[-1])] if words else []
        for other in [each for each in containers if each[0] == column][-1:]:
            between = text[other[1] : match.start()]
            if "-" not in match["before"] and not re.search(
                rf"\n {{0,{column - 1}}}[^ \n#]", between
            ):
                containers.remove(other)
                starts = [*other[2], *starts]
        containers.append((column, words[-1].end if words else match.end(), starts))
    for _, _, starts in containers:
        yield from (start for start in starts if start.kind == "shell")
        listed = sorted(
            (start for start in starts if start.kind != "shell"),
            key=lambda start: start.arguments[0].startswith("-"),
        )
        if words := [word for start in listed for word in start.words]:
            begun = list(_started(listed[-1].kind, words))
            if not begun and any(word.text.startswith("--model") for word in words):
                begun = [Start(listed[-1].kind, words, words[-1])]  # the image's own command
            yield from begun


def _flow(text: str, at: int, column: int) -> Iterator[Word]:
    while match := _FLOW_ITEM.match(text, at):
        at = match.end()
        if match["item"]:
            yield Word(_plain(match["item"].rstrip()), *match.span("item"))
        if match["end"] == "]":
            return


def _block(text: str, at: int, column: int) -> Iterator[Word]:
    item = re.compile(rf"(?:[^\n]*\n(?: *(?:#[^\n]*)?\n)*)(?P<indent> {{{column},}})- +")
    while match := item.match(text, at):
        deeper = len(match["indent"]) + 1
        body = re.compile(
            rf"[|>][^\n]*(?:\n(?: {{{deeper},}}[^\n]*|[ \r]*(?=\n)))*|{_QUOTED}|[^#\n]*"
        )
        found = body.match(text, match.end())
        assert found is not None
        raw = found[0].rstrip()
        at = found.start() + len(raw)
        yield Word(_plain(raw), found.start(), at)


def _plain(raw: str) -> str:
    """Return a scalar of YAML without its quotes."""
    if raw[:1] == "'":
        return raw[1:-1].replace("''", "'")
    try:
        return str(json.loads(raw)) if raw[:1] == '"' else raw
    except ValueError:
        return raw[1:-1]


def _in_config(text: str) -> Iterator[Word]:
    """Yield the entries of a YAML config as words; those of a mapping with dotted names."""
    path: list[tuple[int, str]] = []
    for match in _ENTRY.finditer(text):
        key, value = match["key"], match["value"] and _plain(match["value"].rstrip())
        if key is None:
            if match["dash"] and value:
                yield Word(value, *match.span("value"))
            continue
        path = [each for each in path if each[0] < len(match["indent"])]
        path.append((len(match["indent"]), _plain(key)))
        if value is None and not re.match(r"\s*(?:#.*\s+)*- ", text[match.end() :]):
            continue
        if (value or "").lower() in ("false", "null", "~"):
            continue  # as if it were not there
        name = ".".join(part for _, part in path)
        yield Word(long_name(f"--{name}"), *match.span("key"))
        if value and value.lower() != "true":
            bare = " ".join(value[1:-1].replace(",", " ").split()) if value[0] == "[" else value
            yield Word(bare, *match.span("value"))
