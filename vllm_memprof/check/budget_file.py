"""The budget file of ``memprof check``: text enters, limits leave, or all mistakes in it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.check.limits import BUDGET, FAIL_ON, KEYS, REGRESSION, TOKENS, Key, figure_of
from vllm_memprof.errors import UsageError, nearest
from vllm_memprof.units import parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_DECIMAL = re.compile(r"[\s0-9_,.]+([kmgt])b\s*", re.IGNORECASE)
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\],]+?)\s*\]\]?\s*(?:#.*)?$")
_TOML_PLACE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")
_LARGEST = 1 << 63
_OTHER = {BUDGET: REGRESSION, REGRESSION: BUDGET}


@dataclass(frozen=True)
class Limit:
    """A key of the file with its value."""

    key: Key
    amount: int | None  # bytes or tokens; None where a percentage is given
    percent: Fraction | None
    written: str  # as in the file: text without its quotes, numbers with separators
    line: int | None


@dataclass(frozen=True)
class BudgetFile:
    """The limits and the forbidden findings of a budget file."""

    name: str
    limits: list[Limit]
    fail_on: dict[str, int | None] = field(default_factory=dict)  # finding -> line

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
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _not_toml(str(exc), text, name) from exc
    reader = _Reader(text)
    for table, values in data.items():
        reader.read_table(table, values)
    if reader.mistakes:
        lines = [f"{name}{place}: {what}" for place, what in reader.mistakes]
        head = [] if len(lines) == 1 else [f"{len(lines)} mistakes in {name}"]
        raise UsageError("\n  ".join([*head, *lines]), hint=reader.hint)
    if not reader.limits and not reader.fail_on:
        raise UsageError(f"{name} sets no limit", hint="memprof check --init RUN proposes one")
    return BudgetFile(name, reader.limits, reader.fail_on)


def parse_option(name: str, typed: str) -> Limit:
    """Return a limit of ``[budget]`` that was given as an option.

    Raises:
        UsageError: not a value of this limit.
    """
    key = next(key for key in KEYS if (key.table, key.name) == (BUDGET, name))
    try:
        amount, percent = _parse(key, int(typed) if typed.isdecimal() else typed)
    except ValueError as exc:
        raise UsageError(f"--{name.replace('_', '-')}: {exc}") from exc
    return Limit(key, amount, percent, typed, None)


def _not_toml(message: str, text: str, name: str) -> UsageError:
    place = _TOML_PLACE.search(message)
    lines = text.splitlines()
    line = min(int(place.group(1) or len(lines)), len(lines)) if place else None
    said = lines[line - 1].strip() if line else ""
    what = f"{name}{_place(line)}: not TOML: {message[: place.start()] if place else message}"
    unquoted = re.search(r"=\s*([0-9.]+\s*(?:[A-Za-z]+|%))", said)
    hint = (
        f'a value with a unit is text: "{unquoted.group(1)}"'
        if unquoted
        else "TOML is described at https://toml.io"
    )
    return UsageError(what, hint=hint)


def _place(line: int | None) -> str:
    return "" if line is None else f", line {line}"


def _names(table: str) -> list[str]:
    return [
        *(key.name for key in KEYS if key.table == table),
        *([FAIL_ON] if table == BUDGET else []),
    ]


class _Reader:
    """Collect the limits and the mistakes of one file."""

    def __init__(self, text: str) -> None:
        self.limits: list[Limit] = []
        self.fail_on: dict[str, int | None] = {}
        self.mistakes: list[tuple[str, str]] = []
        self._lines = text.splitlines()
        self._misread: set[str] = set()  # tables with an unknown key

    @property
    def hint(self) -> str | None:
        """Return the keys of the tables in which one was not known."""
        tables = [table for table in (BUDGET, REGRESSION) if table in self._misread]
        return (
            "; ".join(f"keys of [{table}]: {', '.join(_names(table))}" for table in tables) or None
        )

    def read_table(self, table: str, values: Any) -> None:
        line = self._line_of(None, table)
        if table not in (BUDGET, REGRESSION):
            if isinstance(values, dict):
                near = nearest(table, (BUDGET, REGRESSION))
                what = f"unknown table [{table}]{f': did you mean [{near[0]}]?' if near else ''}"
            else:
                what = f"the key {table!r} stands outside a table{_nearest_key(BUDGET, table)}"
            self._wrong(line, what)
        elif not isinstance(values, dict):
            self._wrong(line, f"{table} is {_kind(values)}; it is a table: [{table}]")
        else:
            for name, value in values.items():
                self._read_key(table, name, value)

    def _read_key(self, table: str, name: str, value: Any) -> None:
        line = self._line_of(table, name)
        key = next((key for key in KEYS if (key.table, key.name) == (table, name)), None)
        if (table, name) == (BUDGET, FAIL_ON):
            self._read_findings(value, line)
        elif key is None:
            self._misread.add(table)
            self._wrong(line, f"unknown key {name!r} in [{table}]{_nearest_key(table, name)}")
        else:
            try:
                amount, percent = _parse(key, value)
            except ValueError as exc:
                self._wrong(line, f"{name}: {exc}")
            else:
                written = f"{value:,}" if isinstance(value, int) else str(value)
                self.limits.append(Limit(key, amount, percent, written, line))

    def _read_findings(self, value: Any, line: int | None) -> None:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            kind = "a list with other things than text"
            if not isinstance(value, list):
                kind = _kind(value)
            what = f'{FAIL_ON} is {kind}; it is a list of findings, e.g. ["co-tenant"]'
            return self._wrong(line, what)
        for item in value:
            numbers = range(line or 1, len(self._lines) + 1)
            place = next((each for each in numbers if item in self._lines[each - 1]), line)
            if item not in FINDINGS:
                near = nearest(item, FINDINGS)
                meant = f": did you mean {near[0]}?" if near else ""
                self._wrong(place, f"{FAIL_ON}: unknown finding {item!r}{meant}")
            else:
                self.fail_on[item] = place
        return None

    def _wrong(self, line: int | None, what: str) -> None:
        self.mistakes.append((_place(line), what))

    def _line_of(self, table: str | None, name: str) -> int | None:
        """Return the number of the line on which a key stands, or a table begins."""
        quoted = rf"[\"']?{re.escape(name)}[\"']?"
        below = re.compile(rf"\s*{quoted}\s*[.=]")
        dotted = re.compile(rf"\s*{table}\s*(\.|=.*[\s{{,])\s*{quoted}\s*=")  # also an inline table
        current: str | None = None
        for number, text in enumerate(self._lines, start=1):
            header = _HEADER.match(text)
            if header is not None:
                current = header.group(1).strip("\"'")
            found = (
                current == name
                if table is None and header
                else current == table and below.match(text)
            )
            if found or (table is not None and dotted.match(text)):
                return number
        return None


def _nearest_key(table: str, name: str) -> str:
    """Return what may have been meant, as the end of a sentence."""
    for other in (table, _OTHER[table]):
        if name in _names(other):
            return f": it belongs into [{other}]"
    for place, other in (("", table), (f" in [{_OTHER[table]}]", _OTHER[table])):
        if near := nearest(name, _names(other)):
            return f": did you mean {near[0]}{place}?"
    return ""


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return next((text for kind, text in names.items() if type(value) is kind), "a date or a time")


def _parse(key: Key, value: Any) -> tuple[int | None, Fraction | None]:
    """Return (amount, percentage) of a value; one of them is None.

    Raises:
        ValueError: it is neither an amount in the key's unit nor a percentage that the key takes.
    """
    if isinstance(value, str) and "%" in value:
        match = _PERCENT.fullmatch(value)
        if match is None:
            raise ValueError(f'not a percentage: {value!r} (write e.g. "1%" or "0.5%")')
        if key.percent_of is None:
            raise ValueError(f"{value!r}: a percentage means nothing here, {_takes(key)}")
        return None, Fraction(Decimal(match.group(1))) / 100
    amount = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and figure_of(key).unit != TOKENS:
        try:
            amount = parse_size(value)
        except ValueError as exc:
            decimal = _DECIMAL.fullmatch(value)
            hint = f"; did you mean {decimal.group(1).upper()}iB?" if decimal else ""
            raise ValueError(f"{exc}{hint}") from exc
    if amount is None:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise ValueError(f"{shown} is {_kind(value)}; {_takes(key)}")
    if not 0 <= amount < _LARGEST:
        raise ValueError(f"{value} is {'below 0' if amount < 0 else 'too large'}")
    return amount, None


def _takes(key: Key) -> str:
    if figure_of(key).unit == TOKENS:
        text = "it takes a whole number of tokens"
    else:
        text = 'it takes bytes, or a size such as "43.5GiB"'
    return text + (f', or a percentage of {key.percent_of} such as "1%"' if key.percent_of else "")
