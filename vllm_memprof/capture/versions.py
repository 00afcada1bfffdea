"""Version ranges of the hook table: ``">=0.23,<0.24"`` against ``"0.23.0+empty"``.

Pure text, no imports.

Only release numbers count: a development or candidate build of 0.25.1 is taken as 0.25.1, because a
hook's target exists in the branch that is about to be released.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_CLAUSE = re.compile(r"^\s*(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)\s*$")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def release(version: str) -> tuple[int, ...]:
    """``"0.25.1rc1+g1234"`` to ``(0, 25, 1)``; an unreadable version to ``()``."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def in_range(version: str | None, spec: str) -> bool:
    """Return True if a version satisfies every clause of a range.

    An unknown version satisfies everything: better a hook that finds no target, and says so, than a
    silent gap.

    Raises:
        ValueError: the range cannot be read.
    """
    clauses = [clause for clause in spec.split(",") if clause.strip()]
    numbers = release(version or "")
    for clause in clauses:
        match = _CLAUSE.match(clause)
        if match is None:
            raise ValueError(f"not a version range: {spec!r}")
        bound = release(match.group(2))
        width = max(len(numbers), len(bound))
        left = numbers + (0,) * (width - len(numbers))
        right = bound + (0,) * (width - len(bound))
        if numbers and not _OPERATORS[match.group(1)](left, right):
            return False
    return True
