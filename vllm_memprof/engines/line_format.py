"""One line format: how a row of a table of engine lines is written, and how it is compiled.

A row of a table (``lines`` of a TOML file) is a literal that the line contains (the anchor), a
pattern, in pieces where it is long, and what ``LineFormat`` says of both. A space in a pattern
matches any white space or none. Long lines are several rows, so that a line cut in the middle still
gives the figures before the cut. A new release costs a row; a new unit a line in ``UNITS``. Numbers
are placeholders in the pattern:

=================  ================================================================================
``{name}``         a number as it is: bytes, tokens, a ratio
``{name GiB}``     a number and its unit; ``GB.4``: printed with four digits (default two),
                   ``G``: also GB and GiB
``{name/GiB}``     a number whose unit is printed elsewhere
``{name ?}``       a number and whatever unit follows it
``{name!}``        a number that may be the end of the line: not trusted where the line was cut
=================  ================================================================================

Names are those of ``record.schema.FIGURES`` and ``KV_PLAN``, and of ``figures`` and
``shared_figures`` of a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_memprof.files import read_table
from vllm_memprof.options import Value
from vllm_memprof.units import GIB, KIB, MIB

#: Unit as printed -> bytes. Engines and torch's allocators divide by powers of 1024 also where they
#: print "GB".
UNITS: dict[str, int] = {
    "bytes": 1,
    "KiB": KIB,
    "KB": KIB,
    "MiB": MIB,
    "MB": MIB,
    "GiB": GIB,
    "GB": GIB,
    "G": GIB,
    "TiB": 1 << 40,
    "billion": 10**9,  # of the one engine that means GB by "GB"
}

#: Stages of a start-up in their order, as a table names them. A process that prints a line of an
#: earlier stage than it has reached has started again.
STAGES = ("init", "load", "profile", "grant", "plan", "capture", "ready", "oom")
INIT, LOAD, PROFILE, GRANT, PLAN, CAPTURE, READY, OOM = range(len(STAGES))

#: Subject of a line: a worker's device, or all workers (printed by the engine core).
RANK, ENGINE = "rank", "engine"
ASCEND, CUDA = "vllm-ascend", "vllm"
#: Equations of vllm-ascend: lines that show another form are vLLM's, where no engine is named.
_OF_ASCEND = ("E2", "E4", "E4p")

#: Not a piece of a longer number; "43,40" is no number at all: engines separate thousands only.
_NUMBER = r"(?<![\w.])(?<!\d,)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\.?\d)"
_ANY_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_PLACEHOLDER = re.compile(
    r"\{(?P<name>[a-z_]+)(?P<kind>[ /!]?)(?P<unit>\??|[A-Za-z]+)(?:\.(?P<digits>\d))?\}"
)


@dataclass(frozen=True)
class Placeholder:
    """One number of a pattern."""

    name: str
    unit: str | None  # None: printed beside it, or none
    digits: int  # of the engine's own format; fewer are printed where it drops zeros
    ends_line: bool


@dataclass(frozen=True)
class LineFormat:
    """One row of the table: a line's form, the meaning of its numbers, and who prints it."""

    anchor: str
    regex: re.Pattern[str]
    placeholders: tuple[Placeholder, ...]
    stage: int | None
    engine: str | None  # None: both engines print this line
    equation: str | None = None  # the equation whose engines print this line
    scope: str = RANK
    sets: tuple[str, ...] = ()  # figures without a number: 1 where the line is there
    clears: tuple[str, ...] = ()  # the same, 0
    when: str | None = None  # only after a line that opened this context
    opens: str | None = None


def row(
    pattern: str,
    *,
    engine: str | None = None,
    equation: str | None = None,
    cite: str = "",
    **fields: Any,
) -> LineFormat:
    """Compile a row; the engine follows from the equation where that is given.

    Args:
        pattern: of the line, with placeholders.
        engine: that prints it.
        equation: of the engines that print it.
        cite: where the engine's source prints it, for the reader of the table.
        fields: the others of ``LineFormat``.
    """
    placeholders: list[Placeholder] = []
    text, at = "", 0
    for match in _PLACEHOLDER.finditer(pattern):
        name, kind, unit = match["name"], match["kind"], match["unit"]
        known = unit if unit in UNITS else None
        default = 2 if known not in (None, "bytes") else 0
        digits = int(match["digits"] or default)
        placeholders.append(Placeholder(name, known, digits, kind == "!"))
        number = f"(?P<{name}>{_NUMBER})"
        if unit == "?":
            number += rf"\s*(?P<{name}__unit>{_ANY_UNIT})(?![A-Za-z])"
        elif kind == " ":
            number += rf"\s*{'(?:GiB|GB|G)' if unit == 'G' else unit}(?![A-Za-z])"
        text += pattern[at : match.start()].replace(" ", r"\s*") + number
        at = match.end()
    return LineFormat(
        regex=re.compile(text + pattern[at:].replace(" ", r"\s*")),
        placeholders=tuple(placeholders),
        engine=engine or (equation and (ASCEND if equation in _OF_ASCEND else CUDA)),
        equation=equation,
        **fields,
    )


def line_formats(rows: Iterable[Mapping[str, Any]], engine: str | None) -> tuple[LineFormat, ...]:
    """Compile the rows of a table.

    Args:
        rows: their keys are the parameters of ``row``; the stage is a word of ``STAGES``.
        engine: whose lines they are where a row names none.
    """
    return tuple(
        row(
            **{
                "engine": engine,
                **each,
                "stage": STAGES.index(each["stage"]) if "stage" in each else None,
                "pattern": "".join(each["pattern"]),
            }
        )
        for each in rows
    )


@dataclass(frozen=True)
class SettingLine:
    """A line about the set-up: the groups of its pattern are fields of ``logs.config.Config``."""

    kind: str  # init | api | args: an engine starts; heading: of a section; trace: neither
    pattern: re.Pattern[str]
    anchor: str = ""  # in the line
    pair: re.Pattern[str] | None = None  # name and value of an argument, in the group ``rest``
    said: Mapping[str, Any] = field(default_factory=dict)  # what the line itself says


@dataclass(frozen=True)
class Given:
    """What a start was given, as far as its log says."""

    engine: str
    draft_model: bool = False  # a second model is loaded beside the one that serves
    device: str | None = None
    #: All that its equation needs, by their Python names; none where some of them were cut off.
    arguments: Mapping[str, Value] = field(default_factory=dict)


@dataclass
class PrintedRank:
    """Printed figures of one rank, and half of the last digit of each, bytes."""

    figures: dict[str, int | float | None]
    half_units: dict[str, int]
    place: int | None = None  # among the ranks that agree on one KV cache


class ArgumentLines(Protocol):
    """Puts a line of arguments together that a terminal or a mail program has wrapped."""

    opens: str  # begins one

    @property
    def is_open(self) -> bool: ...

    def feed(self, text: str) -> Mapping[str, Value]:
        """Return the arguments, as much as there is of them; none where more may follow."""


@dataclass(frozen=True)
class LogLines:
    """What reading a log takes of one engine; of vLLM also what torch and the runtime print."""

    engine: str  # as a report names it
    formats: tuple[LineFormat, ...]
    needles: tuple[bytes, ...]  # as ``logs.lines.NEEDLES``
    ready: tuple[str, ...]  # in its line at readiness
    broken: tuple[str, ...]  # in what it prints when one of its processes fails
    speaks: re.Pattern[str]  # what it alone prints, and no list of packages
    phase_of: Mapping[str, str]  # function in a traceback -> the phase that it is
    begins: tuple[str, ...] = ()  # in a line that begins a start
    ended: tuple[str, ...] = ()  # in what it prints when it ends as it was told to
    settings: tuple[SettingLine, ...] = ()
    looked_for: str = ""  # its lines about memory, for who gave a log without
    #: Name of what stands below an engine -> what it alone prints.
    below: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)  # that it alone prints, their meaning
    shared_figures: Mapping[str, str] = field(default_factory=dict)  # that others print as well
    #: Of a figure that is printed again with another value, the one that counts.
    latest: tuple[str, ...] = ()
    least: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()  # figures on which two lines of one start may differ
    #: Figure of the model that serves -> of a draft model that the same worker loads after it.
    draft: Mapping[str, str] = field(default_factory=dict)
    #: Figures of a model: where a draft model is loaded beside it, they are printed once for each.
    once_per_model: tuple[str, ...] = ()
    #: Figures of free memory before and after a model is loaded: they tell a draft model, too.
    free_around_load: tuple[str, str] = ("", "")
    refused: Mapping[str, str] = field(default_factory=dict)  # figure -> why the start failed
    ranks: re.Pattern[str] | None = None  # a line's rank: group ``ranks``, "DP0 TP1"
    pool_tokens: str | None = None  # figure: tokens of a rank's pool
    #: A command that starts it: group ``serve``, or ``module`` behind ``python -m``.
    command: re.Pattern[str] | None = None
    argument_lines: Callable[[], ArgumentLines] | None = None
    #: Arguments, and whether those not there were not given -> fields of ``logs.config.Config``.
    set_up: Callable[[Mapping[str, Value], bool], Mapping[str, object]] | None = None
    #: Adds what its equation takes from all ranks that agree on one KV cache.
    complete: Callable[[Sequence[PrintedRank], Given | None], None] | None = None
    #: Whether there is a draft model, and the figures that have several values -> notes.
    notes: Callable[[bool, Set[str]], list[str]] | None = None

    @property
    def contradiction_is_unknown(self) -> frozenset[str]:
        """Figures that a start prints again for another pool (sliding window, draft model) or
        another capture: two values are no contradiction, and neither counts.
        """
        return frozenset(self.figures).difference(self.latest, self.least, self.once_per_model)


def read_log_lines(folder: Path, **functions: Any) -> LogLines:
    """Return what reading a log takes of one engine, from the table of its folder.

    Args:
        folder: with ``log_lines.toml``.
        functions: fields of ``LogLines`` that no table has.
    """
    given = read_table(folder / "log_lines.toml")
    given["looked_for"] = "".join(given.get("looked_for", ""))
    for name in {"speaks", "ranks", "command"} & given.keys():
        given[name] = re.compile("".join(given[name]))
    given["below"] = {name: re.compile(each) for name, each in given.get("below", {}).items()}
    given["settings"] = tuple(
        SettingLine(
            **{
                **each,
                "pattern": re.compile("".join(each["pattern"])),
                "pair": re.compile(each["pair"]) if "pair" in each else None,
            }
        )
        for each in given.get("settings", ())
    )
    own = None if given.pop("shared", False) else given["engine"]
    formats = line_formats(given.pop("lines"), own)
    given["needles"] = tuple(needle.encode() for needle in given["needles"])
    return LogLines(formats=formats, **given, **functions)
