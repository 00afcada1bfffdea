"""Arguments of an engine as lists of tokens: replaced one by one, counted in devices, compared.

The engine's own parser is not used (it takes seconds to import), so the rules are those that hold
without it: an option runs up to the next one, and a later one of the same name wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from vllm_memprof.accounting.engine_options import SHORT_NAMES
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
    ``--no-x``, which SGLang does not have: there the option is left out. ``option.key`` sets a key
    of an option whose value is JSON, see ``setting``.
    """
    made = setting(tokens, name, value, engine)
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


def setting(tokens: list[str], name: str, value: str, engine: str = "vllm") -> list[str]:
    """Return the tokens by which one option is set beside the others; see ``with_option``.

    ``option.key`` becomes ``--option.key value``, which the engine reads as JSON and merges with
    its other dotted keys. Beside ``--option {...}`` it would replace the whole of it: there the key
    is set within the JSON.
    """
    wanted = long_name(name)
    option, dot, key = wanted.partition(".")
    whole = value_of(tokens, option) if dot else None
    if whole is not None and not _has_dotted(tokens, option):
        return [option, _with_key(whole, key.split("."), value, option)]
    if not dot and value.lower() in ON:
        return [wanted]
    if not dot and value.lower() in OFF:
        return [f"--no-{wanted[2:]}"] if engine == "vllm" else []
    return [f"{wanted}={value}"] if value.startswith("-") else [wanted, value]


def _has_dotted(tokens: list[str], option: str) -> bool:
    return any(name.startswith(f"{option}.") for name, _ in options(tokens))


def _with_key(whole: str, keys: list[str], value: str, option: str) -> str:
    """Return a JSON object as text with one key set.

    Raises:
        UsageError: what is given is no JSON object.
    """
    try:
        data = json.loads(whole)
    except ValueError:
        data = None
    inner = data
    for key in keys[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
    if not isinstance(data, dict) or not isinstance(inner, dict):
        hint = f"{option} {json.dumps({keys[0]: 1})}"
        raise UsageError(f"{option} {whole!r} is no JSON object to set {'.'.join(keys)} in", hint)
    try:
        inner[keys[-1]] = json.loads(value)
    except ValueError:
        inner[keys[-1]] = value
    return json.dumps(data)


def devices_of(tokens: list[str], engine: str = "vllm") -> int:
    """Return the number of devices of a plan.

    Args:
        tokens: arguments of the engine.
        engine: of ``DEVICE_OPTIONS``; another one cannot be planned.

    Raises:
        UsageError: a size that is no number.
    """
    count = 1
    for names, unless in DEVICE_OPTIONS.get(engine, ()):
        given = [name for name, _ in options(tokens) if name in names]
        if not given or (unless is not None and value_of(tokens, unless) is not None):
            continue
        text = value_of(tokens, given[-1]) or ""
        if not text.isdecimal() or not int(text):
            raise UsageError(f"{given[-1]} {text!r} is not a number of devices")
        count *= int(text)
    return count
