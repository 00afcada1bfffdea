"""Version ranges of the hook table: ``">=0.23,<0.24"`` against ``"0.23.0+empty"``.

Pure text, no imports.

Only release numbers count: a development or candidate build of 0.25.1 is taken as 0.25.1, because a
hook's target exists in the branch that is about to be released.
"""

from __future__ import annotations

import operator
import re

_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_OPERATORS = {">=": operator.ge, "<": operator.lt}


def in_range(version: str | None, spec: str) -> bool:
    """Return True if a version satisfies every clause of a range.

    An unknown version satisfies everything: better a hook that finds no target, and says so, than a
    silent gap.

    Raises:
        KeyError: a clause of the range has another operator than ``>=`` and ``<``.
    """
    numbers = _release(version or "")
    clauses = re.findall(r"([^\d,]+)([\d.]+)", spec)
    return all(_OPERATORS[sign](numbers, _release(bound)) or not numbers for sign, bound in clauses)


def _release(version: str) -> list[int]:
    """``"0.25.1rc1+g1234"`` to ``[0, 25, 1]``, without zeros at its end; unreadable to ``[]``."""
    found = _RELEASE.search(version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
