"""Lines of a log become the failures that they tell of, the first of each start of an engine.

``CauseReader`` takes the lines once, in order, secrets replaced, and keeps those that may matter.
``finish`` then walks the book.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import NamedTuple

from vllm_memprof.causes.book import AFTER_ANOTHER, RANKS, SERVING, WRAPPER, Row, read_book
from vllm_memprof.causes.values import ask
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.cause import EvidenceLine, NamedFailure
from vllm_memprof.text import text
from vllm_memprof.units import only_known

#: A line that tells of a failure contains one of these, or stands near one that does.
SIGNALS = ("rror", "RROR", "ailed", "illed", "xception", "not set correctly", "报错", "失败")
#: Lines that are kept of one start, characters of a line, lines kept before and after one that may
#: tell of a failure.
_MOST_LINES, _MOST_CHARACTERS, _BEFORE, _AFTER = 4000, 2000, 3, 12
#: Starts of which lines are kept, the last ones.
_MOST_STARTS = 50
#: From so many lines on, of those that differ in digits alone the first is kept.
_ALIKE = 500
#: A match further down than this many lines is about something else.
_SAME_FAILURE = 400
#: Lines around a match in which ``beside`` and ``unless`` are looked for.
_LINES_BEFORE, _LINES_AFTER = 150, 80
#: Places at which a row is tried.
_MOST_PLACES = 8
_DIGITS = str.maketrans("", "", "0123456789abcdef")


@dataclass(frozen=True)
class Words:
    """What engines print, as their rows and the reader of logs know it."""

    begins: tuple[str, ...]  # in a line that begins a start
    ready: tuple[str, ...]  # in one of a server that is up
    ended: tuple[str, ...]  # in one of a server that ends as it was told to
    #: What serves, or what is below it, as ``Cure.engine`` names it -> what it alone prints.
    speakers: Mapping[str, re.Pattern[str]]


class _Line(NamedTuple):
    number: int
    text: str
    quiet: bool  # of level INFO or WARNING


class _Match(NamedTuple):
    row: Row
    line: _Line
    groups: Mapping[str, str | None]
    beside: _Line  # what stands beside it, else where its match ends


@dataclass
class _Start:
    """The lines of one start that may matter."""

    after_another: bool = False  # that did not say that it ends
    lines: list[_Line] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    ready: int = 0  # line at which the server was up; 0: it was not
    ended: bool = False  # it said so
    #: Process -> lines up to its error whose message stands below the error's name.
    nameless: dict[str, int] = field(default_factory=dict)

    def keep(self, number: int, line: str) -> None:
        line = line.rstrip()[:_MOST_CHARACTERS]
        key = line.translate(_DIGITS)
        if len(self.lines) >= _MOST_LINES or (key in self.seen and len(self.lines) > _ALIKE):
            return
        self.seen.add(key)
        quiet = _pattern("quiet").match(line) and not _pattern("error-level").match(line)
        late = self.ended and _pattern("at-exit").search(line)
        self.lines.append(_Line(number, line, bool(quiet or late)))
        if not ((nameless := _pattern("nameless").search(line)) or self.nameless):
            return  # most lines
        _, process, said = _pattern("head").split(line, 1)
        at = self.nameless.pop(process, 0) if said.strip() else 0
        if at and not quiet and "Traceback (" not in said:
            error = self.lines[at - 1]
            self.lines[at - 1] = error._replace(text=f"{error.text} {said.strip()}")
        if nameless:
            self.nameless[process] = len(self.lines)

    def ends_of_processes(self) -> list[int]:
        """Return the lines in which a process says that it is over."""
        return [
            line.number
            for line in self.lines
            if not line.quiet and _pattern("fatal").search(line.text)
        ]


class CauseReader:
    """Keeps what may tell of a failure; ``finish`` returns the failures."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._starts = [_Start()]
        self.telling = ""  # the last line that contains a signal, told
        self._after = 0
        self._before: list[tuple[int, str]] = []
        kept = read_book().words
        self._signals, self._doing = (*SIGNALS, *kept["failing"]), kept["doing"]

    def add(self, number: int, line: str) -> None:
        """Take the next line; its number counts from 1, its secrets are replaced."""
        start = self._starts[-1]
        if _has(line, self._words.begins) and (start.ready or start.ends_of_processes()):
            start = _Start(after_another=not start.ended)
            self._starts.append(start)
            del self._starts[:-_MOST_STARTS]
        if not start.ready and _has(line, self._words.ready):
            start.ready = number
        start.ended |= _has(line, self._words.ended)
        if _has(line, self._signals):
            for each in self._before:
                start.keep(*each)
            self._before.clear()
            self._after = _AFTER + 1
            if _has(line, SIGNALS):
                self.telling = f"line {number} may tell of one: {line.strip()[:300]}"
        self._after -= 1
        if self._after >= 0 or _has(line, self._doing):
            start.keep(number, line)
        else:
            self._before.append((number, line))
            del self._before[:-_BEFORE]

    def finish(self) -> list[tuple[int, NamedFailure]]:
        """Return (line, failure) of each start that failed, in their order."""
        return only_known(_first_cause(start, self._words.speakers) for start in self._starts)


def _has(line: str, words: Iterable[str]) -> bool:
    return any(each in line for each in words)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def _pattern(name: str) -> re.Pattern[str]:
    return _compiled(read_book().patterns[name])


def _first_cause(
    start: _Start, speakers: Mapping[str, re.Pattern[str]]
) -> tuple[int, NamedFailure] | None:
    loud, over = [line for line in start.lines if not line.quiet], start.ends_of_processes()
    up = start.ready  # what came before was survived
    survived, failed = not any(at < up for at in over), any(at >= up for at in over)
    whole_page, loud_page = (
        "\n".join(line.text for line in lines) for lines in (start.lines, loud)
    )
    matches = []
    for row in chain.from_iterable(read_book().origins.values()):
        lines, page = (start.lines, whole_page) if row.quiet else (loud, loud_page)
        match = _match(row, lines, page, start)
        if match is None or (match.line.number < up and survived):
            continue
        # a request may fail while the server goes on; that is no failure of the server
        if not up or match.line.number < up or row.is_memory or failed:
            matches.append(match)
    if not matches:
        return _unrecognised(start, loud, over)
    grave = [each for each in matches if each.row.rank != WRAPPER] or matches
    first = min(each.line.number for each in grave)
    near = [each for each in grave if each.line.number <= first + _SAME_FAILURE]
    best = min(near, key=lambda each: (-RANKS.index(each.row.rank), each.line.number))
    spoken = [name for name, own in speakers.items() if own.search(whole_page)]
    return best.line.number, _named(best, spoken)


def _match(row: Row, lines: list[_Line], page: str, start: _Start) -> _Match | None:
    """Return the first place at which a row holds, a line of source only where no other does."""
    source = None
    for match in islice(_compiled(row.pattern).finditer(page), _MOST_PLACES):
        groups = match.groupdict()
        if row.holds and not ask(row.holds, groups, False):
            continue
        line, beside = (lines[page.count("\n", 0, at)] for at in match.span())
        at = start.lines.index(line)
        near = start.lines[max(0, at - _LINES_BEFORE) : at + _LINES_AFTER]
        said = "\n".join(each.text for each in near)
        if 0 < start.ready < line.number:
            said = f"{SERVING}\n{said}"
        if start.after_another:
            said = f"{AFTER_ANOTHER}\n{said}"
        if row.unless and _compiled(row.unless).search(said):
            continue
        if row.beside:
            pattern = _compiled(row.beside)
            if not pattern.search(said):
                continue
            beside = next((each for each in near if pattern.search(each.text)), line)
        found = _Match(row, line, groups, beside)
        if not _pattern("source").search(line.text):
            return found
        source = source or found
    return source


def _named(match: _Match, spoken: list[str]) -> NamedFailure:
    row = match.row
    cures = []
    for cure in row.cures:
        # of the engines that speak the first counts, and of the platforms below them
        peers = [name for name in spoken if (name in ENGINES) == (cure.engine in ENGINES)]
        if cure.engine and peers and peers[0] != cure.engine:
            continue
        if value := ask(row.values[cure], match.groups, "") if cure in row.values else "":
            cure = replace(cure, value=value, enough="computed")
        if cure.engine in ENGINES and not peers:
            title = ENGINES[cure.engine].title
            cure = replace(cure, why=text("with {engine}: {why}", engine=title, why=cure.why))
        cures.append(cure)
    return NamedFailure(
        kind=row.kind,
        is_memory=row.is_memory,
        title=row.title,
        confidence="certain" if row.certain and row.rank != WRAPPER else "likely",
        evidence=[
            EvidenceLine(line.number, line.text.strip()[:400])
            for line in sorted({match.line, match.beside})
        ],
        cures=cures,
        source=row.source,
    )


def _unrecognised(
    start: _Start, loud: list[_Line], over: list[int]
) -> tuple[int, NamedFailure] | None:
    """Return an error that no row names, where one was the end of a process or of a start."""
    if start.ready and not over:
        return None
    told = [line for line in loud if not _pattern("consequence").search(line.text)]
    # of a traceback without its end the last frame says most
    said = [
        (line.number, found["said"])
        for name, lines in (("exception", told), ("frame", told[::-1]))
        for line in lines
        if (found := _pattern(name).search(line.text))
    ]
    said += [
        (each.number, each.text)
        for each in loud
        if each.number in over[:1] or (not start.ready and _pattern("error-level").match(each.text))
    ]
    if not said:
        return None
    number, line = said[0]
    shown = line.strip()[:300]
    title = text("failed: {error}; not recognised", error=shown)
    if '.py", line ' in shown:
        shown = shown.replace('"', "")
        title = text("failed in {frame}; its error is not in this log: give all of it", frame=shown)
    return number, NamedFailure(
        kind="other",
        is_memory=False,
        title=title,
        confidence="unrecognised",
        evidence=[EvidenceLine(number, shown)],
    )
