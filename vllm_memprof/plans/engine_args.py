"""Arguments of an engine as lists of tokens: replaced one by one, counted in devices, compared.

The engine's own parser is not used (it takes seconds to import), so the rules are those that hold
without it: an option runs up to the next one, and a later one of the same name wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from vllm_memprof.compare.changes import SHORT_NAMES
from vllm_memprof.errors import UsageError

#: Engine -> options whose values multiply to the number of devices, 1 where none of its names is
#: given; with each the option under which it adds none.
#: (vllm/config/parallel.py::ParallelConfig, vLLM 0.23.0: world_size = pp x tp x pcp, times dp;
#: sglang/srt/server_args.py::compute_world_size, 0.5.23, which takes any beginning of a name)
DEVICE_OPTIONS: Mapping[str, tuple[tuple[tuple[str, ...], str | None], ...]] = {
    "vllm": (
        (("--tensor-parallel-size",), None),
        (("--pipeline-parallel-size",), None),
        (("--prefill-context-parallel-size",), None),
        (("--data-parallel-size",), None),
    ),
    "sglang": (
        (("--tp-size", "--tp", "--tensor-parallel-size"), None),
        (("--pp-size", "--pp", "--pipeline-parallel-size"), None),
        (("--dp-size", "--dp", "--data-parallel-size"), "--enable-dp-attention"),
    ),
}
#: Values by which a sweep switches an option that takes none.
ON, OFF = ("true", "on"), ("false", "off")

_NUMBER = re.compile(r"-\.?\d")


def long_name(token: str) -> str:
    """Return the long option: ``--max_model_len`` as ``--max-model-len``, ``-tp`` written out."""
    name = token.partition("=")[0]
    if not name.startswith("-"):
        name = f"--{name}"
    return name.replace("_", "-") if name.startswith("--") else SHORT_NAMES.get(name, name)


def options(tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (long name, its tokens as typed); tokens before the first option have the name ""."""
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
    """Return one list for all spellings of the same arguments.

    ``--a=b`` and ``--a b``, any order of the names, ``_`` and ``-``, short names, ``--no-x`` beside
    ``--x``, JSON however it is spaced. Options of one name keep their order.
    """
    rows = []
    for name, held in options(tokens):
        _, equals, value = held[0].partition("=")
        values = [value, *held[1:]] if equals and name else held[1:] if name else held
        for index, text in enumerate(values):
            if text.startswith(("{", "[")):
                try:
                    values[index] = json.dumps(json.loads(text), sort_keys=True)
                except ValueError:
                    pass  # not JSON: as it is
        positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        rows.append([positive, *(["no"] if positive != name else []), *values])
    return sorted(rows, key=lambda row: row[0])


def value_of(tokens: list[str], name: str) -> str | None:
    """Return an option's value, the last one given; None where there is none, "" for a flag."""
    found = None
    for other, held in options(tokens):
        if other == long_name(name):
            found = held[0].partition("=")[2] if "=" in held[0] else " ".join(held[1:])
    return found


def with_option(tokens: list[str], name: str, value: str, engine: str = "vllm") -> list[str]:
    """Return the arguments with one option set, in the place where it was given first, or last.

    ``true`` and ``false`` (``on``, ``off``) switch an option that takes no value: ``--x`` and
    ``--no-x``, which SGLang does not have: there the option is left out.
    """
    wanted = long_name(name)
    opposite = f"--no-{wanted[2:]}"
    if value.lower() in ON:
        made = [wanted]
    elif value.lower() in OFF:
        made = [opposite] if engine == "vllm" else []
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


def devices_of(tokens: list[str], engine: str = "vllm") -> int:
    """Return the number of devices of a plan.

    Args:
        tokens: arguments of the engine.
        engine: one of ``DEVICE_OPTIONS``.

    Raises:
        UsageError: a size that is no number.
    """
    count = 1
    for names, unless in DEVICE_OPTIONS[engine]:
        given = [name for name, _ in options(tokens) if name in names]
        if not given or (unless is not None and value_of(tokens, unless) is not None):
            continue
        text = value_of(tokens, given[-1]) or ""
        if not text.isdecimal() or not int(text):
            raise UsageError(f"{given[-1]} {text!r} is not a number of devices")
        count *= int(text)
    return count
