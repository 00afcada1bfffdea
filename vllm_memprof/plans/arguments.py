"""The engine's arguments as a plan needs them: replaced one by one, counted in devices, written in
one normal form.

Lists of tokens as typed enter. The engine's own parser is not asked (it takes seconds to import),
so what is here is what can be told without it: an option runs up to the next one, and a later one
of the same name wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from vllm_memprof.compare.changes import SHORT_NAMES
from vllm_memprof.errors import UsageError

#: Options whose values multiply to the number of devices; 1 where one is not given.
#: (vllm/config/parallel.py::ParallelConfig, vLLM 0.23.0: world_size = pp x tp x pcp, times dp)
DEVICE_OPTIONS = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--prefill-context-parallel-size",
    "--data-parallel-size",
)
#: Values by which a sweep switches an option that takes none.
ON, OFF = ("true", "on"), ("false", "off")

_NUMBER = re.compile(r"-\.?\d")


def long_name(token: str) -> str:
    """``--max_model_len`` and ``max-model-len`` as ``--max-model-len``, ``-tp`` as
    ``--tensor-parallel-size``.
    """
    name = token.partition("=")[0]
    if not name.startswith("-"):
        name = f"--{name}"
    return name.replace("_", "-") if name.startswith("--") else SHORT_NAMES.get(name, name)


def options(tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(long name, its tokens as typed) in their order; tokens before the first option have the name
    "".
    """
    name, held = "", list[str]()
    for token in tokens:
        if token.startswith("-") and token not in ("-", "--") and not _NUMBER.match(token):
            if held:
                yield name, held
            name, held = long_name(token), []
        held.append(token)
    if held:
        yield name, held


def normal_form(tokens: list[str]) -> list[list[str]]:
    """The same list for arguments that say the same: ``--a=b`` and ``--a b``, any order of the
    names, ``_`` and ``-``, short names, ``--no-x`` beside ``--x``, JSON however it is spaced.
    Options of one name keep their order.
    """
    rows = []
    for name, held in options(tokens):
        _, equals, value = held[0].partition("=")
        values = [value, *held[1:]] if equals and name else held[1:] if name else held
        positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        rows.append([positive, *(["no"] if positive != name else []), *map(_plain, values)])
    return sorted(rows, key=lambda row: row[0])


def _plain(value: str) -> str:
    if value.startswith(("{", "[")):
        try:
            return json.dumps(json.loads(value), sort_keys=True)
        except ValueError:
            return value
    return value


def value_of(tokens: list[str], name: str) -> str | None:
    """The value of an option, the last one where it is given twice; None where it is not given, ""
    for a flag.
    """
    found = None
    for other, held in options(tokens):
        if other == long_name(name):
            found = held[0].partition("=")[2] if "=" in held[0] else " ".join(held[1:])
    return found


def with_option(tokens: list[str], name: str, value: str) -> list[str]:
    """The arguments with one option set, in the place where it was given first, else at the end.

    ``true`` and ``false`` (``on``, ``off``) switch an option that takes no value: ``--x`` and
    ``--no-x``.
    """
    wanted = long_name(name)
    opposite = f"--no-{wanted[2:]}"
    if value.lower() in ON:
        made = [wanted]
    elif value.lower() in OFF:
        made = [opposite]
    else:
        made = [f"{wanted}={value}"] if value.startswith("-") else [wanted, value]
    result: list[str] = []
    placed = False
    for other, held in options(tokens):
        if other not in (wanted, opposite):
            result += held
        elif not placed:
            result += made
            placed = True
    return result if placed else [*result, *made]


def devices_of(tokens: list[str]) -> int:
    """How many devices a plan is for.

    Raises:
        UsageError: a size that is no number.
    """
    count = 1
    for name in DEVICE_OPTIONS:
        text = value_of(tokens, name)
        if text is None:
            continue
        if not text.isdecimal() or not int(text):
            raise UsageError(f"{name} {text!r} is not a number of devices")
        count *= int(text)
    return count
