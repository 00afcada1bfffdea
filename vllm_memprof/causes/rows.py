"""The form of the book: one ``Row`` per family of errors, and what its patterns see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_memprof.record.cause import Cure
from vllm_memprof.text import Text

#: How near a row is to the root: of rows that match side by side the highest counts.
WRAPPER, SYMPTOM, ROOT = 1, 2, 3

#: Lines around a match in which ``beside`` and ``unless`` are looked for.
LINES_BEFORE, LINES_AFTER = 150, 80

#: Marks that the reader puts into the text where it knows more than one line says.
SERVING = "[[serving]]"
AFTER_ANOTHER = "[[after a start that did not end]]"


@dataclass(frozen=True)
class Row:
    """One family of errors."""

    kind: str  # of record.cause.KINDS
    title: Text  # what is wrong, in a sentence
    pattern: str  # of a line, or of several; a dot stays within its line
    example: str  # lines by which a reader knows it
    cures: tuple[Cure, ...] = ()
    source: str = ""  # of the cure: a thread or documentation
    rank: int = ROOT
    beside: str = ""  # must stand around it, too
    unless: str = ""  # must not
    certain: bool = True  # the message itself says so
    memory: bool | None = None  # None: as the kind says
    quiet: bool = False  # it may stand in a line of level INFO or WARNING
    #: Of the named groups of ``pattern``: whether the figures bear it out.
    holds: Callable[[Mapping[str, str | None]], bool] | None = None
    #: Argument or variable -> its value, from the named groups; "" where they do not say.
    values: Mapping[str, Callable[[Mapping[str, str | None]], str]] | None = None
