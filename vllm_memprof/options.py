"""The one reader of an engine's options, in every form in which they are given.

Words of a command line, a log's line of arguments (``{...}``, ``Namespace(...)``,
``ServerArgs(...)``), a mapping of a YAML file or of Python's keyword arguments enter; typed values
or the words themselves, set anew, leave. The engine's own parser is not used (it takes seconds to
import), so the rules are those that hold without it: an option runs up to the next one, a later one
of the same name wins, ``_`` is ``-``. Standard library alone: open to every layer. Which options
matter is a table of the engine (``engines/<name>/row.json``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from vllm_memprof.errors import UsageError
from vllm_memprof.files import read_own

SHORT_NAMES: dict[str, str] = read_own(__file__, "short_options.json")
#: Values by which an option that takes none is switched.
ON, OFF = ("true", "on"), ("false", "off")
_NUMBER = re.compile(r"-\.?\d")

#: What torch_npu refuses beside segments that grow. (2.10, NPUAllocatorConfig.cpp::parseArgs)
_FIXED_SEGMENTS = ("max_split_size_mb", "garbage_collection_threshold")

Kind = type[str] | type[int] | type[float] | type[bool]
Value = str | int | float | bool | None
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Option:
    """An option that matters: its long name without dashes, what it takes, its other names."""

    name: str
    kind: Kind = str
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"--{name}" for name in (self.name, *self.also))

    @property
    def field(self) -> str:
        """The name of Python and of log lines: ``max_model_len``."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class DeviceFactor:
    """An option whose value is a factor of the number of devices, 1 where it is not given."""

    names: tuple[str, ...]
    unless: str | None = None  # an option beside which it adds no device


def long_name(token: str) -> str:
    """Return the long option: ``--max_model_len`` as ``--max-model-len``, ``-tp`` written out.

    What follows the first dot names a key of a JSON value and stays as it is.
    (vllm 0.13.0 and 0.23.0, vllm/utils/argparse_utils.py::FlexibleArgumentParser.parse_args)
    """
    name = token.partition("=")[0]
    if not name.startswith("-"):
        name = f"--{name}"
    option, dot, key = name.partition(".")
    if not option.startswith("--"):
        return SHORT_NAMES.get(option, option) + dot + key
    return option.replace("_", "-") + dot + key


def options(tokens: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (long name, its tokens as typed); tokens of no option have the name ""."""
    name, held = "", list[str]()
    for token in tokens:
        if token == "--" or (token.startswith("-") and token != "-" and not _NUMBER.match(token)):
            if held:
                yield name, held
            name, held = "" if token == "--" else long_name(token), []
        held.append(token)
    if held:
        yield name, held


def given_options(command: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line by their long names: (name, value), "given" for a flag.

    Options of memprof are among them. One that was given again comes again.
    """
    for name, held in options(command):
        if name:  # with a value -q is the engine's quantization
            yield "--quiet" if held == ["-q"] else name, _value(held) or "given"


def _value(held: Sequence[str]) -> str:
    """Return what the tokens of an option say of it; "" for a flag."""
    return held[0].partition("=")[2] if "=" in held[0] else " ".join(held[1:])


def value_of(tokens: Iterable[str], *names: str) -> str | None:
    """Return an option's value, the last one given; None where there is none, "" for a flag.

    Args:
        tokens: of a command.
        names: of the option, any spelling. ``--option.key`` is found in ``--option {"key": ...}``
            too, where the value is a JSON object.
    """
    wanted = {long_name(name) for name in names}
    found: str | None = None
    for other, held in options(tokens):
        value = _value(held)
        for name in wanted:
            option, dot, path = name.partition(".")
            if other == name:
                found = value
            elif dot and other == option:
                inner = _json(value)
                for key in path.split("."):
                    inner = inner.get(key) if isinstance(inner, dict) else None
                found = found if inner is None else word_of(inner)
    return found


def typed(text: str, kind: Kind) -> Value:
    """Return a value as Python prints it, or as it is typed; None where it is no such value."""
    bare = text.strip().strip("'\"")
    if text.strip() == "None" or not bare:
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(bare.lower())
    try:
        return kind(bare)
    except ValueError:
        return None


def read_options(tokens: Iterable[str], table: Iterable[Option]) -> dict[str, Value]:
    """Return the options of a table that the words give: field -> value; the last one given counts.

    What is no value of its kind is left out: the engine refuses it.
    """
    by_name = {name: option for option in table for name in option.names}
    found: dict[str, Value] = {}
    for name, held in options(tokens):
        option = by_name.get(name) or by_name.get(name.replace("--no-", "--", 1))
        if option is None:
            continue
        _, equals, said = held[0].partition("=")
        if option.kind is bool:
            found[option.field] = name in option.names and said.lower() not in OFF
            continue
        value = typed(said if equals else "".join(held[1:2]), option.kind)
        if value is not None:
            found[option.field] = value
    return found


def read_option(tokens: Iterable[str], name: str, kind: type[_Number]) -> _Number | None:
    """Return the number that an option has in a command; None where it is not given."""
    found = read_options(tokens, [Option(name, kind)])
    return cast("_Number | None", next(iter(found.values()), None))


def is_on(tokens: Iterable[str], name: str) -> bool:
    """Return whether an option that takes no value is on, as the last one given says."""
    option = Option(name.lstrip("-"), bool)
    return bool(read_options(tokens, [option]).get(option.field))


def devices_of(tokens: Sequence[str], sizes: Iterable[DeviceFactor]) -> int:
    """Return the number of devices that arguments ask for: the product of an engine's sizes.

    Raises:
        UsageError: a size that is no number.
    """
    count = 1
    for size in sizes:
        text = value_of(tokens, *size.names)
        if text is None or (size.unless is not None and is_on(tokens, size.unless)):
            continue
        if not text.isdecimal() or not int(text):
            raise UsageError(f"{size.names[0]} {text!r} is not a number of devices")
        count *= int(text)
    return count


def words_of(values: Mapping[str, object]) -> list[str]:
    """Return options by their Python names as a command has them; None is left out.

    ``max_model_len=4096`` is ``--max-model-len 4096``, True ``--enforce-eager``, False
    ``--no-enforce-eager``; a mapping is written as JSON, a list as several values.
    """
    words: list[str] = []
    for name, value in values.items():
        option = f"--{name.lstrip('-').replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (list, tuple)):
            words += [option, *map(word_of, value)]
        elif value is not None:
            words += _set(option, word_of(value))
    return words


def word_of(value: object) -> str:
    """Return a value of Python as a word of a command line."""
    as_json = isinstance(value, (bool, Mapping, list, tuple))
    return json.dumps(value) if as_json else str(value)


def _set(option: str, word: str) -> list[str]:
    """Return an option with a value, which may be a negative number."""
    return [f"{option}={word}"] if word.startswith("-") else [option, word]


def normal_form(tokens: Iterable[str]) -> list[list[str]]:
    """Return one list for all spellings of the same arguments.

    ``--a=b`` and ``--a b``, any order of the names, ``_`` and ``-``, short names, ``--no-x`` beside
    ``--x``, JSON however it is spaced. Options of one name keep their order.
    """
    rows = []
    for name, (first, *values) in options(tokens):
        if not name or "=" in first:
            values.insert(0, first.partition("=")[2] if name else first)
        for index, text in enumerate(values):
            content = _json(text)
            if isinstance(content, (dict, list)):
                values[index] = json.dumps(content, sort_keys=True)
        negated = name.startswith("--no-")
        rows.append([name.replace("--no-", "--", 1), *(["no"] if negated else []), *values])
    return sorted(rows, key=lambda row: row[0])


def with_option(tokens: Sequence[str], name: str, value: str, negatable: bool = True) -> list[str]:
    """Return the arguments with one option set, in the place where it was given first, or last.

    ``true`` and ``false`` (``on``, ``off``) switch an option that takes no value; ``option.key``
    sets a key of an option whose value is JSON. See ``setting``.
    """
    made = setting(tokens, name, value, negatable)
    wanted = long_name(name)
    replaced = (wanted, f"--no-{wanted[2:]}", made[0] if "." in wanted else wanted)
    result: list[str] = []
    placed = False
    for other, held in options(tokens):
        if other not in replaced:
            result += held
        elif not placed:
            result += made
            placed = True
    return result if placed else [*result, *made]


def setting(tokens: Sequence[str], name: str, value: str, negatable: bool = True) -> list[str]:
    """Return the tokens by which one option is set beside the others; see ``with_option``.

    ``option.key`` becomes ``--option.key value``, which the engine reads as JSON and merges with
    its other dotted keys. Beside ``--option {...}`` it would replace the whole of it: there the key
    is set within the JSON.

    Args:
        tokens: the others.
        name: of the option, any spelling.
        value: of the option.
        negatable: the engine has ``--no-x`` beside ``--x``; else what is off is left out.

    Raises:
        UsageError: a key of what is no JSON object.
    """
    wanted = long_name(name)
    option, dot, path = wanted.partition(".")
    whole = value_of(tokens, option) if dot else None
    if whole is not None and not any(each.startswith(f"{option}.") for each, _ in options(tokens)):
        *keys, last = path.split(".")
        data = inner = _json(whole)
        for key in keys:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            hint = f"{option} {json.dumps({(*keys, last)[0]: 1})}"
            raise UsageError(f"{option} {whole!r} is no JSON object to set {path} in", hint)
        content = _json(value)
        inner[last] = value if content is None else content
        return [option, json.dumps(data)]
    if not dot and value.lower() in ON:
        return [wanted]
    if not dot and value.lower() in OFF:
        return [f"--no-{wanted[2:]}"] if negatable else []
    return _set(wanted, value)


def _json(text: str) -> object:
    """Return the content of a JSON text; None where it is none."""
    try:
        content: object = json.loads(text)
    except ValueError:
        return None
    return content


def is_expandable(variable: str | None) -> bool:
    """Return whether an allocator's variable lets its segments grow; None: it is not set."""
    return _allocator_settings(variable or "").get("expandable_segments") == "true"


def refused_beside_expandable(variable: str) -> list[str]:
    """Return the settings of ``PYTORCH_NPU_ALLOC_CONF`` that segments that grow exclude."""
    settings = _allocator_settings(variable)
    return [name for name in _FIXED_SEGMENTS if name in settings and is_expandable(variable)]


def _allocator_settings(variable: str) -> dict[str, str]:
    """Read a variable as torch does: blanks do not count."""
    return dict(each.partition(":")[::2] for each in "".join(variable.lower().split()).split(","))
