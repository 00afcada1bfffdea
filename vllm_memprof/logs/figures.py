"""Lines become figures: a name, a value in bytes, its precision, its line, the printing process.

``figures_in`` reads one line. ``parse_lines`` reads a stream of lines and joins those that a
terminal or a mail program has wrapped, where the joined line gives a figure that its pieces do not.
``logs.starts`` assigns the figures to starts of an engine and to ranks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from math import ceil

from vllm_memprof.engines.line_format import UNITS, LineFormat, Placeholder
from vllm_memprof.logs.formats import FORMATS, OF_ENGINES
from vllm_memprof.logs.lines import LogLine, strip_markup
from vllm_memprof.redact import Redactor
from vllm_memprof.units import GIB

#: Lines on which a wrapped line continues, at most: the longest engine line has 800 characters.
MAX_JOINED = 12
#: Lines shorter than this were not wrapped by a terminal.
MIN_WRAPPED = 36
#: No device of an engine that prints plain bytes is smaller: a smaller total was cut short.
LEAST_TOTAL_BYTES = 7 * GIB
#: No machine has more bytes or tokens (1 PiB): larger numbers are damaged or foreign text.
MOST = 1 << 50

_ANCHORS = tuple(dict.fromkeys(row.anchor for row in FORMATS))
_OPENERS = tuple(row for row in FORMATS if row.opens)

#: The beginning of a log record, behind what a container or a journal may have put before it.
_RECORD = re.compile(
    r"^.{0,70}?(?:\(\w[^()]{0,60}\bpid=\d"
    r"|\b(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b[:\s\]]|\[rank\d+\])"
    r"|^\W{0,3}(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|Traceback )"
)
_LABEL = re.compile(
    r"\((?P<label>[A-Za-z]\w*)(?: rank=(?P<rank>\d+)| (?P<dims>TP\d+))?,? pid=(?P<pid>\d+)"
    r"(?:, ip=(?P<ip>[0-9.]+))?\)"
)
#: The end of the first half of a number.
_OPEN_END = re.compile(r"(?:\d[.,]?|-)\s*$")
#: How engines name the rank that prints a line.
_RANKS = tuple(log.ranks for log in OF_ENGINES if log.ranks is not None)
_RANK_IN = re.compile(r"(?<![A-Z_])(?:DP|PP|TP)\d+")
_RANK_TAG = re.compile(r"\[rank(?P<rank>\d+)\]:")


@dataclass(frozen=True)
class Prefix:
    """The process that a line's prefix names."""

    label: str  # Worker_TP0, EngineCore_DP0, APIServer, VllmWorkerProcess, rank0, ...
    pid: int | None = None
    ip: str | None = None


@dataclass(frozen=True)
class Figure:
    """One figure of one line."""

    name: str  # as in formats.LOG_FIGURES, record.schema.FIGURES or KV_PLAN
    value: int | float  # bytes where the name ends in _bytes
    half_unit_bytes: int  # half of the last digit that the engine prints, rounded up; 0: exact
    text: str  # the number as it was read
    line: int
    prefix: Prefix | None
    device: str | None  # as the line names it: cuda:1, or the number of an NPU
    format: LineFormat
    begin: int = 0  # where in the line its format begins
    end: int = 0  # and ends


@dataclass(frozen=True)
class ParsedLine:
    """One logical line with its figures, if any."""

    line: int
    text: str  # without markup
    prefix: Prefix | None
    figures: tuple[Figure, ...] = ()


def prefix_of(text: str, before: int = 0) -> Prefix | None:
    """Return the innermost process that a line's prefix names.

    Args:
        text: of the line.
        before: where its message is known to begin; another process may have written before the
            prefix, without an end of its line.
    """
    for pattern in _RANKS:
        ranks = list(pattern.finditer(text, 0, max(before, 120)))
        if ranks and (names := _RANK_IN.findall(ranks[-1]["ranks"])):
            return Prefix(f"Worker_{'_'.join(names)}")
    labels = list(_LABEL.finditer(text, 0, 400))
    if labels:
        last = labels[-1]
        label = last["label"]
        if last["rank"] is not None:
            label = f"{label}_RANK{last['rank']}"
        elif last["dims"] is not None:
            label = f"{label}_{last['dims']}"
        return Prefix(label, int(last["pid"]), last["ip"])
    tag = _RANK_TAG.search(text, 0, 200)
    return None if tag is None else Prefix(f"rank_RANK{tag['rank']}")


def quantity(text: str, unit: str | None, digits: int) -> tuple[int | float, int]:
    """Return (value, half-unit) of a printed number.

    Args:
        text: the number, thousands separated or not.
        unit: a key of ``UNITS``; None: a count, a ratio, or exact bytes.
        digits: digits that the engine keeps; where more are printed, they count.
    """
    number = Decimal(text.replace(",", ""))
    printed = len(text.partition(".")[2])
    if unit is None or UNITS[unit] == 1:
        return (float(number), 0) if printed else (int(number), 0)
    scale = UNITS[unit]
    half = Decimal(scale) / 2 / Decimal(10) ** max(digits, printed)
    return round(number * scale), ceil(half)


def figures_in(
    text: str, line: int, context: str | None = None, cut: bool = False, torn: bool = False
) -> tuple[Figure, ...]:
    """Return the figures of one line.

    Args:
        text: without markup, with or without the prefix of its process.
        line: its number, for the figures.
        context: the context that an earlier line has opened.
        cut: the line may have been cut at its end.
        torn: a number at its beginning may be the rest of one that the line before it ends with.
    """
    present = [anchor for anchor in _ANCHORS if anchor in text]
    if not present:
        return ()
    prefix = prefix_of(text, min(text.index(anchor) for anchor in present))
    found: list[Figure] = []
    taken: list[tuple[int, int]] = []  # spans of the numbers that were read
    for row in FORMATS:
        if row.anchor not in present or (row.when is not None and row.when != context):
            continue
        for match in row.regex.finditer(text):
            groups = match.groupdict()
            printed: dict[str, tuple[int | float, int]] = {}
            for place in row.placeholders:
                begin, end = match.span(place.name)
                if any(begin < last and first < end for first, last in taken):
                    break
                if torn and not text[:begin].strip():
                    break
                if place.ends_line and cut and end == len(text.rstrip()):
                    break
                number = _read_number(place, groups)
                if number is None:
                    break
                printed[place.name] = number
            else:
                # plain bytes at the end of a line may have been cut short
                total = printed.get("device_total_bytes")
                least = max(LEAST_TOTAL_BYTES, int(groups.get("kv") or 0))
                ends_line = any(place.ends_line for place in row.placeholders)
                if ends_line and total is not None and total[0] < least:
                    continue
                flags = {**dict.fromkeys(row.sets, (1, 0)), **dict.fromkeys(row.clears, (0, 0))}
                begin, end = _extent(row, match, text)
                found += [
                    Figure(
                        name=name,
                        value=value,
                        half_unit_bytes=half,
                        text=groups.get(name) or "",
                        line=line,
                        prefix=prefix,
                        device=groups.get("device"),
                        format=row,
                        begin=begin,
                        end=end,
                    )
                    for name, (value, half) in (*printed.items(), *flags.items())
                ]
                taken += [match.span(name) for name in printed]
    return tuple(found)


def _read_number(
    place: Placeholder, groups: dict[str, str | None]
) -> tuple[int | float, int] | None:
    """Return (value, half-unit); None for a fraction of a byte or token, or an impossible size."""
    text = groups[place.name]
    assert text is not None
    unit = groups.get(f"{place.name}__unit", place.unit)
    value, half = quantity(text, unit, place.digits if unit == place.unit else 2)
    if place.name.endswith(("_bytes", "_tokens")) and not isinstance(value, int):
        return None
    return None if abs(value) > MOST else (value, half)


def _extent(row: LineFormat, match: re.Match[str], text: str) -> tuple[int, int]:
    """Return (begin, end) of a format: its literal may stand before or behind its numbers."""
    begin, end = match.span()
    size = len(row.anchor)
    places = [text.rfind(row.anchor, 0, end), text.find(row.anchor, begin)]
    nearest = min(
        (at for at in places if at >= 0),
        key=lambda at: max(0, begin - at - size, at - end),
        default=begin,
    )
    return min(begin, nearest), max(end, nearest + size)


def parse_lines(lines: Iterable[LogLine]) -> Iterator[ParsedLine]:
    """Yield every line with its figures; wrapped lines are joined where that completes one.

    Secrets are replaced before anything else reads a line.
    """
    redactor = Redactor()
    waiting: deque[tuple[LogLine, str]] = deque()
    source = iter(lines)
    context: str | None = None
    joined = 0  # lines to come that were read already, as the rest of a wrapped one
    inherited: Prefix | None = None  # of the line that this one continues
    before = ""  # the line before

    def fill() -> None:
        while len(waiting) <= MAX_JOINED:
            line = next(source, None)
            if line is None:
                return
            waiting.append((line, redactor.feed(strip_markup(line.text))))

    fill()
    while waiting:
        line, text = waiting.popleft()
        fill()
        if not text.strip():
            joined, inherited, before = 0, None, ""
            yield ParsedLine(line.number, "", None)
            continue
        figures: tuple[Figure, ...] = ()
        if joined:
            joined -= 1  # its figures came with the line that it continues
        else:
            torn = line.follows and _may_be_torn(before, text)
            pieces = _wrapped(text, waiting)
            if pieces:
                figures, joined = _join(line.number, pieces, context, torn)
            if not figures:
                digits_follow = (
                    waiting and waiting[0][0].follows and waiting[0][1].strip().isdigit()
                )
                cut = line.cut or bool(digits_follow)
                figures = figures_in(text, line.number, context, cut=cut, torn=torn)
        before = text
        prefix = None
        if figures:
            prefix = figures[0].prefix
        elif "pid=" in text or "[rank" in text or "] " in text[:120]:
            prefix = prefix_of(text)
        if prefix is not None:
            inherited = prefix
        elif inherited is not None and _continues(line, text):
            prefix = inherited
            figures = tuple(replace(figure, prefix=prefix) for figure in figures)
        else:
            inherited = None
        opens = next(
            (row.opens for row in _OPENERS if row.anchor in text and row.regex.search(text)), None
        )
        if opens:
            context = opens
        elif context and figures and not any(figure.format.when == context for figure in figures):
            context = None
        yield ParsedLine(line.number, text.rstrip(), prefix, figures)


def _wrapped(text: str, rest: deque[tuple[LogLine, str]]) -> list[str]:
    """Return this line and those that may continue it; [] where no format could cross the boundary.

    A format could begin on the first line where an anchor is on it or lies across its end.
    """
    if len(text) < MIN_WRAPPED or not rest or not _continues(*rest[0]):
        return []
    end, begin = text[-60:], rest[0][1][:60]
    places = text, end + begin, f"{end} {begin}"
    if not any(anchor in place for anchor in _ANCHORS for place in places):
        return []
    pieces = [text]
    for line, other in rest:
        if len(pieces) > MAX_JOINED or not _continues(line, other):
            break
        pieces.append(other)
    return pieces


def _join(
    line: int, pieces: list[str], context: str | None, torn: bool
) -> tuple[tuple[Figure, ...], int]:
    """Return (figures, lines joined) where a figure lies across a line's end; else ((), 0).

    Lines are wrapped at the screen's end, or at a space. Other figures of the
    joined lines are returned as well.
    """
    width = max(len(piece) for piece in pieces)
    bare = [piece.rstrip() for piece in pieces]
    ways = (
        (pieces, ["" if len(piece) == width else " " for piece in pieces[:-1]]),
        (pieces, [""] * (len(pieces) - 1)),
        (pieces, [" "] * (len(pieces) - 1)),
        (bare, [""] * (len(pieces) - 1)),  # a terminal's rows may be filled up with spaces
    )
    alone = {(one.name, one.text) for piece in pieces for one in figures_in(piece, line, context)}
    for parts, separators in ways:
        if any(
            sep and _may_be_torn(one, other)
            for one, sep, other in zip(parts, separators, parts[1:], strict=False)
        ):
            continue
        whole, ends = parts[0], [len(parts[0])]
        for separator, piece in zip(separators, parts[1:], strict=True):
            whole += separator + piece
            ends.append(len(whole))
        figures = [
            figure
            for figure in figures_in(whole, line, context, torn=torn)
            # the end of one line and the beginning of an unrelated one make a longer number, too
            if not any(
                place.ends_line
                and place.name == figure.name
                and not any(figure.text in piece for piece in parts)
                for place in figure.format.placeholders
            )
        ]
        crossing = [figure for figure in figures if (figure.name, figure.text) not in alone]
        last = 0
        while last < len(ends) - 1 and any(one.begin < ends[last] < one.end for one in crossing):
            last += 1
        if last:
            return tuple(figure for figure in figures if figure.end <= ends[last]), last
    return (), 0


def _may_be_torn(text: str, following: str) -> bool:
    """Return True where a line's end and the next one's beginning may be halves of a number."""
    return following[:1].isdigit() and _OPEN_END.search(text) is not None


def _continues(line: LogLine, text: str) -> bool:
    """Return True where a line may be the rest of the one before it."""
    stripped = text.strip()
    return (
        line.follows
        and bool(stripped)
        and _RECORD.match(stripped) is None
        and not stripped.startswith(("```", "~~~"))
    )
