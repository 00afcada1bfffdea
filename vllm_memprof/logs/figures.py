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
from functools import cached_property
from itertools import accumulate, islice
from math import ceil

from vllm_memprof.engines.line_format import UNITS, LineFormat
from vllm_memprof.logs.formats import FORMATS, LOGS
from vllm_memprof.logs.lines import LogLine, strip_markup
from vllm_memprof.redact import Redactor
from vllm_memprof.units import GIB, only_known

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
    r"|^\W{0,3}(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|Traceback )|^(?:```|~~~)"
)
_LABEL = re.compile(
    r"\((?P<label>[A-Za-z]\w*)(?: rank=(?P<rank>\d+)| (?P<dims>TP\d+))?,? pid=(?P<pid>\d+)"
    r"(?:, ip=(?P<ip>[0-9.]+))?\)"
)
#: The end of the first half of a number.
_OPEN_END = re.compile(r"(?:\d[.,]?|-)\s*$")
#: How engines name the rank that prints a line.
_RANKS = tuple(only_known(log.ranks for log in LOGS.values()))
_RANK_IN = re.compile(r"(?<![A-Z_])(?:DP|PP|TP)\d+")
_RANK_TAG = re.compile(r"\[rank(?P<rank>\d+)\]:")
_DIMENSION = re.compile(r"(?<![A-Z])(DP|PP|PCP|TP|EP|RANK)(\d+)")


@dataclass(frozen=True)
class Prefix:
    """The process that a line's prefix names."""

    label: str  # Worker_TP0, EngineCore_DP0, APIServer, VllmWorkerProcess, rank_RANK0, ...
    pid: int | None = None
    ip: str | None = None

    @cached_property
    def dims(self) -> dict[str, int]:
        """Return its place by dimension: dp, pp, pcp, tp, ep, rank."""
        return {name.lower(): int(number) for name, number in _DIMENSION.findall(self.label)}

    @property
    def is_worker(self) -> bool:
        return "orker" in self.label or self.label.startswith("rank_")

    @property
    def is_core(self) -> bool:
        return "EngineCore" in self.label

    @property
    def replica(self) -> int | None:
        """Return the data-parallel rank of an engine core."""
        return self.dims.get("dp") if self.is_core else None

    @cached_property
    def short(self) -> str | None:
        """Return TP0 of Worker_TP0, "rank 3" of [rank3]; None for a name that many processes share.

        The place in a group of experts tells only where nothing else does.
        """
        dims = {name: place for name, place in self.dims.items() if name != "rank"}
        if len(dims) > 1:
            dims.pop("ep", None)
        if not dims:
            return f"rank {self.dims['rank']}" if self.dims else None
        return "_".join(f"{name.upper()}{place}" for name, place in dims.items())


@dataclass(frozen=True)
class Figure:
    """One figure of one line."""

    name: str  # as in ``record.schema``, or in the table of an engine
    value: int | float  # bytes where the name ends in _bytes
    half_unit_bytes: int  # half of the last digit that the engine prints, rounded up; 0: exact
    text: str  # the number as it was read
    line: int
    prefix: Prefix | None
    device: str | None  # as the line names it: cuda:1, or the number of an NPU
    format: LineFormat
    begin: int  # where in the line its format begins
    end: int  # and ends

    def agrees(self, other: Figure) -> bool:
        """Return True where two printed figures can be the same number."""
        apart = abs(self.value - other.value)
        if self.name.endswith("_bytes"):
            return apart <= self.half_unit_bytes + other.half_unit_bytes + 1
        digits = min(len(figure.text.partition(".")[2]) for figure in (self, other))
        return apart <= (0.5 * 10.0**-digits if digits else 0) + 1e-9


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
    if labels := list(_LABEL.finditer(text, 0, 400)):
        label, rank, dims, pid, ip = labels[-1].groups()
        more = f"_RANK{rank}" if rank else f"_{dims}" if dims else ""
        return Prefix(f"{label}{more}", int(pid), ip)
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
    scale = 1 if unit is None else UNITS[unit]
    if scale == 1:
        return float(number) if printed else int(number), 0
    return round(number * scale), ceil(Decimal(scale) / 2 / Decimal(10) ** max(digits, printed))


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
    present = {anchor: text.index(anchor) for anchor in _ANCHORS if anchor in text}
    if not present:
        return ()
    prefix = prefix_of(text, min(present.values()))
    begins = len(text) - len(text.lstrip()) if torn else -1  # of a number that is not whole
    ends = len(text.rstrip()) if cut else -1
    found: list[Figure] = []
    taken: list[tuple[int, int]] = []  # spans of the numbers that were read
    for row in FORMATS:
        if row.anchor not in present or row.when not in (None, context):
            continue
        for match in row.regex.finditer(text):
            groups, (begin, end) = match.groupdict(), match.span()
            numbers: dict[str, tuple[int | float, int]] = {}
            for place in row.placeholders:
                name, unit = place.name, groups.get(f"{place.name}__unit", place.unit)
                first, last = match.span(name)
                digits = place.digits if unit == place.unit else 2
                value, half = quantity(groups[name] or "", unit, digits)
                whole = isinstance(value, int) or not name.endswith(("_bytes", "_tokens"))
                least = max(LEAST_TOTAL_BYTES, int(groups.get("kv") or 0))
                short = name == "device_total_bytes" and value < least
                if (
                    not whole
                    or abs(value) > MOST
                    # halves of a number, and a total of plain bytes that its line may have cut
                    or first == begins
                    or (place.ends_line and (short or last == ends))
                    or any(first < until and since < last for since, until in taken)
                ):
                    break
                numbers[name] = value, half
            if len(numbers) < len(row.placeholders):
                continue
            taken += [match.span(name) for name in numbers]
            flags = {**dict.fromkeys(row.sets, (1, 0)), **dict.fromkeys(row.clears, (0, 0))}
            # the literal of a format may stand before or behind its numbers
            at = text.rfind(row.anchor, 0, end)
            at = text.find(row.anchor, begin) if at < 0 else at
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
                    begin=min(begin, at),
                    end=max(end, at + len(row.anchor)),
                )
                for name, (value, half) in (*numbers.items(), *flags.items())
            ]
    return tuple(found)


def parse_lines(lines: Iterable[LogLine]) -> Iterator[ParsedLine]:
    """Yield every line with its figures; wrapped lines are joined where that completes one.

    Secrets are replaced before anything else reads a line.
    """
    redactor = Redactor()
    source = (line._replace(text=redactor.feed(strip_markup(line.text))) for line in lines)
    waiting = deque(islice(source, MAX_JOINED + 1))
    context: str | None = None
    joined = 0  # lines to come that were read already, as the rest of a wrapped one
    inherited: Prefix | None = None  # of the line that this one continues
    before = ""  # the line before
    while waiting:
        line = waiting.popleft()
        waiting.extend(islice(source, 1))
        text = line.text
        if not text.strip():
            joined, inherited, before = 0, None, ""
            yield ParsedLine(line.number, "", None)
            continue
        figures: tuple[Figure, ...] = ()
        if joined:
            joined -= 1  # its figures came with the line that it continues
        else:
            torn = line.follows and _may_be_torn(before, text)
            figures, joined = _join(line, waiting, context, torn)
            if not figures:
                digits_follow = waiting and waiting[0].follows and waiting[0].text.strip().isdigit()
                cut = line.cut or bool(digits_follow)
                figures = figures_in(text, line.number, context, cut=cut, torn=torn)
        before = text
        prefix = None
        if figures:
            prefix = figures[0].prefix
        elif "pid=" in text or "[rank" in text or "] " in text[:120]:
            prefix = prefix_of(text)
        if prefix is None and inherited is not None and _continues(line):
            prefix = inherited
            figures = tuple(replace(figure, prefix=prefix) for figure in figures)
        inherited = prefix
        opened = next(
            (row.opens for row in _OPENERS if row.anchor in text and row.regex.search(text)), None
        )
        if opened or (figures and all(figure.format.when != context for figure in figures)):
            context = opened
        yield ParsedLine(line.number, text.rstrip(), prefix, figures)


def _join(
    line: LogLine, following: Iterable[LogLine], context: str | None, torn: bool
) -> tuple[tuple[Figure, ...], int]:
    """Return (figures, lines joined) where a figure lies across a line's end; else ((), 0).

    Lines are wrapped at the screen's end, or at a space. Other figures of the joined lines are
    returned as well. A format could begin on the first line where an anchor is on it or lies across
    its end.
    """
    pieces = [line.text]
    for other in following:
        if len(line.text) < MIN_WRAPPED or len(pieces) > MAX_JOINED or not _continues(other):
            break
        if len(pieces) == 1:
            end, begin = line.text[-60:], other.text[:60]
            places = line.text, end + begin, f"{end} {begin}"
            if not any(anchor in place for anchor in _ANCHORS for place in places):
                break
        pieces.append(other.text)
    if len(pieces) == 1:
        return (), 0
    width = max(len(piece) for piece in pieces)
    ways = (
        [piece if len(piece) == width else f"{piece} " for piece in pieces],
        pieces,
        [f"{piece} " for piece in pieces],
        [piece.rstrip() for piece in pieces],  # a terminal's rows may be filled up with spaces
    )
    for parts in ways:
        if any(
            len(part) > len(piece) and _may_be_torn(piece, after)
            for part, piece, after in zip(parts, pieces, pieces[1:], strict=False)
        ):
            continue
        ends = list(accumulate(map(len, parts)))
        figures = [
            figure
            for figure in figures_in("".join(parts), line.number, context, torn=torn)
            # the end of one line and the beginning of an unrelated one make a longer number, too
            if any(figure.text in piece for piece in parts)
            or all(p.name != figure.name or not p.ends_line for p in figure.format.placeholders)
        ]
        last = 0
        while last < len(ends) - 1 and any(one.begin < ends[last] < one.end for one in figures):
            last += 1
        if last:
            return tuple(figure for figure in figures if figure.end <= ends[last]), last
    return (), 0


def _may_be_torn(text: str, following: str) -> bool:
    """Return True where a line's end and the next one's beginning may be halves of a number."""
    return following[:1].isdigit() and _OPEN_END.search(text) is not None


def _continues(line: LogLine) -> bool:
    """Return True where a line may be the rest of the one before it."""
    stripped = line.text.strip()
    return line.follows and bool(stripped) and _RECORD.match(stripped) is None
