"""Lines become facts: a name, a value in bytes, how exact it is, where it stands and who printed it.

``facts_of`` reads one line. ``parse`` reads a stream of lines and joins those that a terminal or a mail program has
wrapped, where the joined line says something that its pieces do not. Runs and ranks are the matter of ``logs.runs``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from math import ceil

from vllm_memprof.logs.clean import Line, plain
from vllm_memprof.logs.formats import FORMATS, GIB, UNITS, Hole, LineFormat

#: A wrapped line continues on this many lines at most: the longest line of an engine has 800 characters.
MAX_JOINED = 12
#: Lines shorter than this were not wrapped by a terminal.
MIN_WRAPPED = 36
#: No device of an engine that prints plain bytes is smaller. A smaller figure is a number that was cut short.
LEAST_TOTAL_BYTES = 7 * GIB
#: More bytes or tokens than this no machine has (1 PiB): digits of damaged or foreign text.
MOST = 1 << 50

_ANCHORS = tuple(dict.fromkeys(row.anchor for row in FORMATS))
_OPENERS = tuple(row for row in FORMATS if row.opens)

#: The beginning of a log record, behind what a container or a journal may have put before it.
_RECORD = re.compile(
    r"^.{0,70}?(?:\(\w[^()]{0,60}\bpid=\d|\b(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b[:\s\]]|\[rank\d+\])"
    r"|^\W{0,3}(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|Traceback )"
)
_LABEL = re.compile(
    r"\((?P<label>[A-Za-z]\w*)(?: rank=(?P<rank>\d+)| (?P<dims>TP\d+))?,? pid=(?P<pid>\d+)(?:, ip=(?P<ip>[0-9.]+))?\)"
)
#: What the first half of a number ends with.
_OPEN_END = re.compile(r"(?:\d[.,]?|-)\s*$")
_RANK_TAG = re.compile(r"\[rank(?P<rank>\d+)\]:")


@dataclass(frozen=True)
class Speaker:
    """Who printed a line, as its prefix says."""

    label: str  # Worker_TP0, EngineCore_DP0, APIServer, VllmWorkerProcess, rank0, ...
    pid: int | None = None
    ip: str | None = None


@dataclass(frozen=True)
class Fact:
    """One figure of one line."""

    name: str  # as in formats.LOG_FIGURES, record.schema.FIGURES or KV_PLAN
    value: int | float  # bytes where the name ends in _bytes
    half_unit_bytes: int  # half of the last digit that the engine prints, rounded up; 0: exact
    text: str  # the number as it was read
    line: int
    speaker: Speaker | None
    device: str | None  # as the line names it: cuda:1, or the number of an NPU
    format: LineFormat
    begin: int = 0  # where in the line its format begins
    end: int = 0  # and ends


@dataclass(frozen=True)
class Read:
    """What one logical line gave: facts, or nothing but its text for those who look for other things in it."""

    line: int
    text: str  # plain
    speaker: Speaker | None
    facts: tuple[Fact, ...] = ()
    opens: str | None = None  # context for the lines that follow


def speaker_of(text: str) -> Speaker | None:
    """The innermost process that a line's prefix names."""
    labels = list(_LABEL.finditer(text, 0, 400))
    if labels:
        last = labels[-1]
        label = last["label"]
        if last["rank"] is not None:
            label = f"{label}_RANK{last['rank']}"
        elif last["dims"] is not None:
            label = f"{label}_{last['dims']}"
        return Speaker(label, int(last["pid"]), last["ip"])
    tag = _RANK_TAG.search(text, 0, 200)
    return None if tag is None else Speaker(f"rank_RANK{tag['rank']}")


def quantity(text: str, unit: str | None, digits: int) -> tuple[int | float, int] | None:
    """(value, half-unit) of a printed number; None where it cannot be one.

    Args:
        text: the number, thousands separated or not.
        unit: a key of ``UNITS``; None: a count, a ratio, or exact bytes.
        digits: that the engine keeps; more may be printed, and then they count.
    """
    number = Decimal(text.replace(",", ""))
    printed = len(text.partition(".")[2])
    if unit is None or UNITS[unit] == 1:
        return (float(number), 0) if printed else (int(number), 0)
    scale = UNITS[unit]
    half = Decimal(scale) / 2 / Decimal(10) ** max(digits, printed)
    return round(number * scale), ceil(half)


def facts_of(
    text: str, line: int, context: str | None = None, cut: bool = False, torn: bool = False
) -> tuple[Fact, ...]:
    """Facts of one line.

    Args:
        text: plain, with or without the prefix of its process.
        line: its number, for the facts.
        context: what an earlier line has opened.
        cut: the line may have been cut at its end.
        torn: a number at its beginning may be the rest of one that the line before it ends with.
    """
    present = [anchor for anchor in _ANCHORS if anchor in text]
    if not present:
        return ()
    found: list[Fact] = []
    taken: list[tuple[int, int]] = []
    for row in FORMATS:
        if row.anchor not in present or (row.when is not None and row.when != context):
            continue
        for match in row.regex.finditer(text):
            groups = match.groupdict()
            device = groups.get("device")
            facts = []
            for hole in row.holes:
                span = match.span(hole.name)
                if any(span[0] < end and begin < span[1] for begin, end in taken):
                    break
                if torn and not text[: span[0]].strip():
                    break
                fact = _fact(
                    row,
                    hole,
                    groups,
                    line,
                    device,
                    suspicious=cut and span[1] == len(text.rstrip()),
                )
                if fact is None:
                    break
                facts.append(fact)
            else:
                if not _plausible(row, facts, groups):
                    continue
                said = {**dict.fromkeys(row.says, 1), **dict.fromkeys(row.denies, 0)}
                facts += [
                    Fact(name, value, 0, "", line, None, device, row)
                    for name, value in said.items()
                ]
                begin, end = _extent(row, match, text)
                facts = [replace(fact, begin=begin, end=end) for fact in facts]
                taken += [match.span(hole.name) for hole in row.holes]
                found += facts
    speaker = speaker_of(text) if found else None
    return (
        tuple(found) if speaker is None else tuple(replace(fact, speaker=speaker) for fact in found)
    )


def _extent(row: LineFormat, match: re.Match[str], text: str) -> tuple[int, int]:
    """Where a format begins and ends: its literal may stand before or behind its numbers."""
    begin, end = match.span()
    size = len(row.anchor)
    places = [text.rfind(row.anchor, 0, end), text.find(row.anchor, begin)]
    nearest = min(
        (at for at in places if at >= 0),
        key=lambda at: max(0, begin - at - size, at - end),
        default=begin,
    )
    return min(begin, nearest), max(end, nearest + size)


def _fact(
    row: LineFormat,
    hole: Hole,
    groups: dict[str, str | None],
    line: int,
    device: str | None,
    suspicious: bool,
) -> Fact | None:
    text = groups[hole.name]
    assert text is not None
    if hole.ends_line and suspicious:
        return None
    unit = groups.get(f"{hole.name}__unit", hole.unit)
    value, half = quantity(text, unit, hole.digits if unit == hole.unit else 2) or (0, 0)
    if hole.name.endswith(("_bytes", "_tokens")) and not isinstance(value, int):
        return None
    if abs(value) > MOST:
        return None
    return Fact(hole.name, value, half, text, line, None, device, row)


def _plausible(row: LineFormat, facts: list[Fact], groups: dict[str, str | None]) -> bool:
    """Plain bytes at the end of a line may have been cut short: a device holds its KV cache and has some size."""
    ends = any(hole.ends_line for hole in row.holes)
    total = next((fact.value for fact in facts if ends and fact.name == "device_total_bytes"), None)
    if total is None:
        return True
    return total >= LEAST_TOTAL_BYTES and total >= int(groups.get("kv") or 0)


def parse(lines: Iterable[Line]) -> Iterator[Read]:
    """Every line, with the facts that it holds; wrapped lines come back joined where that makes a fact whole."""
    waiting: deque[tuple[Line, str]] = deque()
    source = iter(lines)
    context: str | None = None
    joined = 0  # lines to come that were read already, as the rest of a wrapped one
    inherited: Speaker | None = None  # of the line that this one continues
    before = ""  # the line before

    def fill() -> None:
        while len(waiting) <= MAX_JOINED:
            line = next(source, None)
            if line is None:
                return
            waiting.append((line, plain(line.text)))

    fill()
    while waiting:
        line, text = waiting.popleft()
        fill()
        if not text.strip():
            joined, inherited, before = 0, None, ""
            yield Read(line.number, "", None)
            continue
        facts: tuple[Fact, ...] = ()
        if joined:
            joined -= 1  # said with the line that it continues
        else:
            torn = line.follows and _may_be_torn(before, text)
            facts, joined = _record(line, text, waiting, context, torn)
        before = text
        speaker = (
            facts[0].speaker
            if facts
            else speaker_of(text)
            if "pid=" in text or "[rank" in text
            else None
        )
        if speaker is not None:
            inherited = speaker
        elif inherited is not None and _continues((line, text)):
            speaker = inherited
            facts = tuple(replace(fact, speaker=speaker) for fact in facts)
        else:
            inherited = None
        opens = next(
            (row.opens for row in _OPENERS if row.anchor in text and row.regex.search(text)), None
        )
        if opens:
            context = opens
        elif context and facts and not any(fact.format.when == context for fact in facts):
            context = None
        yield Read(line.number, text.rstrip(), speaker, facts, opens)


def _record(
    line: Line, text: str, rest: deque[tuple[Line, str]], context: str | None, torn: bool
) -> tuple[tuple[Fact, ...], int]:
    """(facts of a line and of those that continue it, how many of those there are)."""
    pieces = _wrapped(text, rest)
    if pieces:
        facts, count = _join(line.number, pieces, context, torn)
        if facts:
            return facts, count
    return facts_of(text, line.number, context, cut=line.cut or _digits_follow(rest), torn=torn), 0


def _digits_follow(rest: deque[tuple[Line, str]]) -> bool:
    """Whether the next line may be the end of a number."""
    return bool(rest) and rest[0][0].follows and rest[0][1].strip().isdigit()


def _wrapped(text: str, rest: deque[tuple[Line, str]]) -> list[str]:
    """This line and those that may be its rest; empty where no format could cross the first boundary."""
    if (
        len(text) < MIN_WRAPPED
        or not rest
        or not _continues(rest[0])
        or not _near_anchor(text, rest[0][1])
    ):
        return []
    pieces = [text]
    for other in rest:
        if len(pieces) > MAX_JOINED or not _continues(other):
            break
        pieces.append(other[1])
    return pieces


def _join(
    line: int, pieces: list[str], context: str | None, torn: bool
) -> tuple[tuple[Fact, ...], int]:
    """(facts, lines joined) where a fact lies across the end of a line: wrapped at the screen's end, or at a space.

    Facts of the joined lines that no wrapping concerns come with it; without a fact across an end there are none.
    """
    width = max(len(piece) for piece in pieces)
    bare = [piece.rstrip() for piece in pieces]
    ways = (
        (pieces, ["" if len(piece) == width else " " for piece in pieces[:-1]]),
        (pieces, [""] * (len(pieces) - 1)),
        (pieces, [" "] * (len(pieces) - 1)),
        (bare, [""] * (len(pieces) - 1)),  # a terminal's rows may be filled up with spaces
    )
    alone = {(fact.name, fact.text) for piece in pieces for fact in facts_of(piece, line, context)}
    for parts, separators in ways:
        if any(
            sep and _may_be_torn(one, other)
            for one, sep, other in zip(parts, separators, parts[1:], strict=False)
        ):
            continue
        ends = [len(parts[0])]
        for separator, piece in zip(separators, parts[1:], strict=True):
            ends.append(ends[-1] + len(separator) + len(piece))
        whole = parts[0] + "".join(
            sep + piece for sep, piece in zip(separators, parts[1:], strict=True)
        )
        # two lines that have nothing to do with each other make a longer number, too
        facts = [
            fact for fact in facts_of(whole, line, context, torn=torn) if not _glued(fact, parts)
        ]
        crossing = [fact for fact in facts if (fact.name, fact.text) not in alone]
        last = 0
        while last < len(ends) - 1 and any(fact.begin < ends[last] < fact.end for fact in crossing):
            last += 1
        if last:
            return tuple(fact for fact in facts if fact.end <= ends[last]), last
    return (), 0


def _may_be_torn(text: str, following: str) -> bool:
    """Whether the end of one line and the beginning of the next may be the halves of a number."""
    return following[:1].isdigit() and _OPEN_END.search(text) is not None


def _glued(fact: Fact, pieces: list[str]) -> bool:
    """Whether a number that may end a line was made of the ends of two."""
    open_ended = any(hole.ends_line and hole.name == fact.name for hole in fact.format.holes)
    return open_ended and not any(fact.text in piece for piece in pieces)


def _continues(item: tuple[Line, str]) -> bool:
    """Whether a line may be the rest of the one before it."""
    line, text = item
    stripped = text.strip()
    return (
        line.follows
        and bool(stripped)
        and _RECORD.match(stripped) is None
        and not stripped.startswith(("```", "~~~"))
    )


def _near_anchor(text: str, following: str) -> bool:
    """Whether a format could begin on the first line: one of its literals is there, or lies across the boundary."""
    end, begin = text[-60:], following[:60]
    across = end + begin, f"{end} {begin}"
    return any(anchor in text or anchor in across[0] or anchor in across[1] for anchor in _ANCHORS)
