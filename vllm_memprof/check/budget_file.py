"""The budget file of ``memprof check``: text enters, limits leave, or all mistakes in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.check.limits import BUDGET, FAIL_ON, KEYS, REGRESSION, TOKENS, LimitKey
from vllm_memprof.errors import UsageError, nearest
from vllm_memprof.files import parse_toml
from vllm_memprof.units import MIB, one_line, parse_size

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_LARGEST = 1 << 63
#: Name of every key -> its table.
_TABLES = {**{key.name: key.table for key in KEYS}, FAIL_ON: BUDGET}


class Limit(NamedTuple):
    """A key of the file with its value."""

    key: LimitKey
    amount: int | None  # bytes or tokens; None where a percentage is given
    percent: Fraction | None
    written: str  # as in the file: text without its quotes, numbers with separators
    line: int | None = None


@dataclass(frozen=True)
class BudgetFile:
    """The limits and the forbidden findings of a budget file."""

    name: str
    limits: list[Limit]
    fail_on: dict[str, int] = field(default_factory=dict)  # finding -> line

    @property
    def needs_baseline(self) -> bool:
        return any(limit.key.table == REGRESSION for limit in self.limits)


def parse_budget(text: str, name: str) -> BudgetFile:
    """Read the limits of a budget file.

    Args:
        text: TOML.
        name: of the file, for messages.

    Raises:
        UsageError: it is not TOML, has an unknown key, a value of a wrong type or unit, or no
            limit; every mistake is named with its line.
    """
    try:
        data = parse_toml(text)
    except ValueError as exc:
        hint = 'a value with a unit is text: "43.5GiB", "1%"'
        raise UsageError(f"{name} is not TOML: {exc}", hint) from exc
    budget, lines = BudgetFile(name, []), text.splitlines()
    mistakes = []
    for names, value in _entries(data):
        line = 1  # on which the last of the names stands
        for each in names:
            word = re.compile(rf"(?<![\w-]){re.escape(each)}(?![\w-])")
            below = range(line, len(lines) + 1)
            line = next((at for at in below if word.search(lines[at - 1].partition("#")[0])), line)
        try:
            if len(names) < 3:
                budget.limits.append(_limit(names, value)._replace(line=line))
            elif value in list(FINDINGS):
                budget.fail_on[value] = line
            else:
                meant = _meant(names[-1], FINDINGS)
                raise ValueError(f"{FAIL_ON}: unknown finding {value!r}{meant}")
        except ValueError as exc:
            mistakes.append(f"{name}, line {line}: {exc}")
    if mistakes:
        head = [f"{len(mistakes)} mistakes in {name}"] if len(mistakes) > 1 else []
        said = "\n  ".join([*head, *mistakes])
        raise UsageError(said, f"keys: {', '.join(_TABLES)}" if "unknown key" in said else None)
    if not budget.limits and not budget.fail_on:
        raise UsageError(f"{name} sets no limit", "memprof check --init RUN proposes one")
    return budget


def parse_option(name: str, typed: str) -> Limit:
    """Return a limit of ``[budget]`` that was given as an option.

    Raises:
        UsageError: not a value of this limit.
    """
    try:
        counted = any(key.name == name and key.figure.unit == TOKENS for key in KEYS)
        return _limit((BUDGET, name), int(typed) if counted and typed.isdecimal() else typed)
    except ValueError as exc:
        option = name.replace("_", "-")
        raise UsageError(f"--{option}{str(exc).removeprefix(name)}") from exc


def _entries(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what stands in the file, with the names that lead to it."""
    for table, values in data.items():
        if table not in (BUDGET, REGRESSION) or not isinstance(values, dict):
            yield (table,), values
            continue
        for name, value in values.items():
            if (table, name) == (BUDGET, FAIL_ON) and isinstance(value, list):
                yield from (((table, name, str(item)), item) for item in value)
            else:
                yield (table, name), value


def _limit(names: Sequence[str], value: Any) -> Limit:
    """Return the limit of a key.

    Raises:
        ValueError: there is no such key, or the value is neither an amount in its unit nor a
            percentage that it takes.
    """
    table, name, shown = names[0], names[-1], one_line(repr(value), 40)
    if table in _TABLES.values() and len(names) == 1:
        raise ValueError(f"{table}: {shown} is no table, [{table}]")
    if len(names) == 1 and isinstance(value, dict):
        raise ValueError(f"unknown table [{table}]{_meant(table, _TABLES.values())}")
    if len(names) == 1:
        raise ValueError(f"the key {table!r} stands outside a table{_meant(table)}")
    if _TABLES.get(name) != table:
        raise ValueError(f"unknown key {name!r} in [{table}]{_meant(name)}")
    if name == FAIL_ON:
        raise ValueError(f'{name}: {shown} is no list of findings, e.g. ["co-tenant"]')
    key = next(key for key in KEYS if key.name == name)
    counted, percent = key.figure.unit == TOKENS, _PERCENT.fullmatch(str(value))
    written = f"{value:,}" if isinstance(value, int) else str(value)
    if percent and key.percent_of:
        return Limit(key, None, Fraction(percent[1]) / 100, written)
    if isinstance(value, str) and value.isdecimal() and not counted and 0 < int(value) < MIB:
        raise ValueError(f"{name}: {value} is so many bytes: write {value}GiB or {value}MiB")
    if isinstance(value, str) and not counted and not percent:
        try:
            value = parse_size(value)
        except ValueError as exc:
            raise ValueError(f"{name}: {exc}") from exc
    if type(value) is not int:
        takes = "number of tokens" if counted else 'number of bytes, nor a size such as "43.5GiB"'
        share = f', nor a percentage of {key.percent_of} such as "1%"' if key.percent_of else ""
        raise ValueError(f"{name}: {shown} is no {takes}{share}")
    if not 0 <= value < _LARGEST:
        raise ValueError(f"{name}: {written} is {'below 0' if value < 0 else 'too large'}")
    return Limit(key, value, None, written)


def _meant(name: str, known: Iterable[str] = _TABLES) -> str:
    """Return what may have been meant, as the end of a sentence."""
    if name in _TABLES:
        return f": it belongs into [{_TABLES[name]}]"
    near = nearest(name, known)
    return f": did you mean {near[0]}?" if near else ""
