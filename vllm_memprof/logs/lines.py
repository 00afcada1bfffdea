"""Bytes of a log become plain lines of text, in constant memory; runs in ``memprof explain``.

Input: pieces of bytes, UTF-8 or UTF-16, with or without a byte order mark. Output: an iterator of
``LogLine``. The first ``DENSE_BYTES`` are passed on line by line, because pastes are short and may
be wrapped or cut; after that only the lines around a needle are, so that a log of 1 GiB is read in
seconds.
"""

from __future__ import annotations

import codecs
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from vllm_memprof.causes.reader import SIGNALS
from vllm_memprof.files import check_limit
from vllm_memprof.logs.formats import LOGS
from vllm_memprof.text import plain

CHUNK_BYTES = 1 << 20
#: A longer line is passed on in pieces of this size; no line of an engine comes near it.
MAX_LINE_BYTES = 1 << 16
DENSE_BYTES = 4 << 20
#: Lines passed on before and after one with a needle, for wrapped lines.
LINES_BEFORE, LINES_AFTER = 1, 10

NEEDLES: tuple[bytes, ...] = tuple(needle for log in LOGS.values() for needle in log.needles)
#: A line that tells of a failure contains one of these. Of lines that differ in digits alone, so
#: many are passed on.
_ERRORS = tuple(words.encode() for words in SIGNALS)
_ERRORS_ALIKE = 20
#: What most lines of a server end with or contain: they hold no figure, and are passed over, but
#: for the first lines.
DULL_LINES = 40
_ACCESS, _STATISTICS = b" 200 OK", b" throughput"
#: vllm-ascend prints this line once per step at level DEBUG. The same figures from the same process
#: are passed on once.
_PER_STEP = b"torch reserved m"
_PER_STEP_LIMIT = 1 << 14
#: The head of an npu-smi table, and the lines of the table that are passed on.
_TABLE_HEAD, _TABLE_LINES = b"HBM-Usage", 120
#: A log that shows the newest line first is turned round up to this size.
NEWEST_FIRST_BYTES = 256 << 20
#: The time at the beginning of a line; the year is not looked at, and may be missing.
_TIME = re.compile(rb"^[^\n]{0,60}?(\d\d)[-/](\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)", re.MULTILINE)
#: A traceback that reads downwards in a log whose times go upwards: its lines were kept together.
_KEPT_TOGETHER = re.compile(
    rb"^[^\n]*Traceback \(most recent call last\)[^\n]*\n[^\n]* File \"", re.M
)
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class LogLine(NamedTuple):
    """One logical line: between line feeds, or between carriage returns of a progress bar."""

    number: int  # from 1, as an editor counts
    text: str  # decoded, still dirty
    follows: bool  # the line before it was passed on as well
    cut: bool  # a piece of a longer line


def read_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a log as UTF-8 bytes without a byte order mark."""
    decoder = None
    for number, piece in enumerate(pieces):
        if number == 0:
            encoding, mark = detect_encoding(piece[:4096])
            piece = piece[mark:]
            if encoding != "utf-8":
                decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        if decoder is not None:
            piece = decoder.decode(piece).encode("utf-8", "replace")
        yield piece


def detect_encoding(head: bytes) -> tuple[str, int]:
    """Return (codec, bytes of the byte order mark) from the first bytes of a file."""
    for mark, codec in _MARKS.items():
        if head.startswith(mark):
            return codec, len(mark)
    half = len(head) // 2
    for codec, zeros, letters in (("utf-16-le", 1, 0), ("utf-16-be", 0, 1)):
        often, seldom = head[zeros : 2 * half : 2], head[letters : 2 * half : 2]
        if half >= 4 and often.count(0) > half * 0.4 and seldom.count(0) < half * 0.1:
            return codec, 0
    return "utf-8", 0


def oldest_first(chunks: Iterator[bytes]) -> tuple[Iterator[bytes], bool]:
    """Return (the log in the order of its times, whether it was newest first, as exports are).

    The times of the first ``CHUNK_BYTES`` decide. A line without a time stays behind the one that
    it follows, where a traceback shows that they were kept together.
    """
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) >= CHUNK_BYTES:
            break
    pairs = list(pairwise(match.groups() for match in _TIME.finditer(data)))
    down, up = sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)
    turned = down >= 2 and down >= 5 * up
    together = _KEPT_TOGETHER.search(data) is not None
    for chunk in chunks if turned else ():
        data += chunk
        if len(data) > NEWEST_FIRST_BYTES:
            break
    if not turned or len(data) > NEWEST_FIRST_BYTES:
        return chain(_cut(data, 0, len(data)), chunks), False
    return _turned(data, together), True


def _cut(data: bytearray, begin: int, end: int) -> Iterator[bytes]:
    """Yield a part of some data in pieces."""
    for at in range(begin, end, CHUNK_BYTES):
        yield bytes(memoryview(data)[at : min(at + CHUNK_BYTES, end)])


def _turned(data: bytearray, together: bool) -> Iterator[bytes]:
    """Yield the lines of some data in blocks, the last line first.

    Args:
        data: a log.
        together: a line without a time stays behind the one that it follows.
    """
    at = end = len(data) - data.endswith(b"\n")
    block, size = list[bytes](), 0
    while at >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        at = begin - 1
        if begin and together and not _TIME.match(data, begin):
            continue
        for piece in (*_cut(data, begin, end), b"\n"):
            block.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield b"".join(block)
                block, size = [], 0
        end = at
    yield b"".join(block)


def read_lines(chunks: Iterable[bytes]) -> Iterator[LogLine]:
    """Yield the lines of a log: all of them at its beginning, those around needles later on.

    Raises:
        RunRecordError: a line is longer than a person allows.
    """
    number, read, tail = 1, 0, b""
    length = 0  # of a line without an end
    seen: Counter[bytes] = Counter()
    previous, until = -1, 0  # within the lines of a block: passed on last; to be passed on before
    for chunk in chunks:
        block, newline, tail = (tail + chunk).rpartition(b"\n")
        lines = block.split(b"\n") if newline else []
        length = 0 if newline else length
        dense = read < DENSE_BYTES
        if dense:
            first = DULL_LINES - number
            wanted = [i for i, line in enumerate(lines) if i < first or not _is_dull(line)]
        else:
            wanted, until = _around_needles(lines, seen, until)
        for index in wanted:
            yield from _bounded(lines[index], number + index, index == previous + 1)
            previous = index
        number += len(lines)
        read += len(chunk)
        previous, until = previous - len(lines), until - len(lines)
        if len(tail) >= MAX_LINE_BYTES:  # a line without an end
            pieces, tail = _split_long(tail)
            length += sum(map(len, pieces))
            check_limit("line", length, f"line {number} has")
            for piece in pieces:
                if dense or any(needle in piece for needle in (*NEEDLES, *_ERRORS)):
                    yield from _segments(piece, number, previous == -1, cut=True)
                previous = -2
    if tail:
        yield from _bounded(tail, number, previous == -1)


def _split_long(data: bytes) -> tuple[list[bytes], bytes]:
    """Return (pieces below ``MAX_LINE_BYTES``, cut at a space where there is one; the rest)."""
    pieces = []
    while len(data) >= MAX_LINE_BYTES:
        end = data.rfind(b" ", MAX_LINE_BYTES // 2, MAX_LINE_BYTES)
        end = end if end > 0 else MAX_LINE_BYTES
        pieces.append(data[:end])
        data = data[end:]
    return pieces, data


def _bounded(raw: bytes, number: int, follows: bool) -> Iterator[LogLine]:
    """Yield a line, in pieces where it is too long."""
    pieces, rest = _split_long(raw)
    for piece in (*pieces, rest):
        yield from _segments(piece, number, follows, cut=bool(pieces))
        follows = False


def _segments(raw: bytes, number: int, follows: bool, cut: bool) -> Iterator[LogLine]:
    """Yield the parts of a line between carriage returns, the records of one without line feeds."""
    text = raw.decode("utf-8", "replace")
    for part in re.split(_RUN_ON if len(text) > 1000 else "\r", text):
        if part or "\r" not in text:
            yield LogLine(number, part, follows, cut)
            follows = True


def _around_needles(lines: list[bytes], seen: Counter[bytes], until: int) -> tuple[list[int], int]:
    """Return the lines near a needle, and the first that is no longer near the last one.

    Args:
        lines: of a block.
        seen: keys of the per-step lines and errors that were passed on; grows.
        until: lines at the beginning of the block that are near a needle of the one before.
    """
    searched = [index for index, line in enumerate(lines) if not _is_dull(line)]
    text = b"\n".join([lines[index] for index in searched])
    wanted = set(range(max(until, 0)))
    for needle in [each for each in (*NEEDLES, *_ERRORS) if each in text]:
        for index in searched:
            line = lines[index]
            if needle not in line:
                continue
            # a per-step line of known figures, and an error seen often enough, are passed over
            key, most = b"", 0
            if needle in _ERRORS:
                key, most = line[:400].translate(None, b"0123456789"), _ERRORS_ALIKE
            elif _PER_STEP in line:
                at = line.find(_PER_STEP)
                key, most = line[: line.find(b")", 0, at)][:400] + line[at : at + 400], 1
            if most:
                if seen[key] >= most or len(seen) >= _PER_STEP_LIMIT:
                    continue
                seen[key] += 1
            after = _TABLE_LINES if _TABLE_HEAD in line else LINES_AFTER
            wanted.update(range(max(0, index - LINES_BEFORE), index + after + 1))
    return sorted(index for index in wanted if index < len(lines)), max(wanted, default=-1) + 1


def _is_dull(line: bytes) -> bool:
    """Return True for a line that a server prints again and again, without a figure."""
    return line[-7:] == _ACCESS or _STATISTICS in line


#: Where a record begins on a line that lost its line feeds; a prompt contains no such thing.
_RUN_ON = (
    r"\r|(?<![\])]) +(?=\([^()]{1,60}(?:pid|rank)=[^()]{1,40}\) |\[rank\d+\]:|"
    r"(?:ERROR|INFO|WARNING) \d\d-\d\d \d\d:|\[20\d\d-\d\d-\d\d \d\d:)"
)
_BARE_ANSI = re.compile(r"(?:\^\[|\u241b)?\[[0-9]{1,2}(?:;[0-9]{1,3})*m")
_QUOTE = re.compile(r"^(?:\s{0,3}(?:>|&gt;)\s?)+")
_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")
_TAG = re.compile(
    r"</?(?:b|strong|em|i|code|span|br|p|li|td|tr|pre|font)(?:\s[^<>]{0,200})?/?>", re.IGNORECASE
)
#: Full-width forms of ASCII, ideographic punctuation, no-break spaces, typographic minus signs.
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_FULL_WIDTH |= dict.fromkeys((0x00A0, 0x2002, 0x2003, 0x2009, 0x202F, 0x3000), 0x20)
_FULL_WIDTH |= {0x3001: 0x2C, 0x3002: 0x2E, 0xFF61: 0x2E, 0x2212: 0x2D, 0x2010: 0x2D, 0x2011: 0x2D}


def strip_markup(text: str) -> str:
    """Remove colours, control characters, quote marks, entities, full-width forms and emphasis.

    White space is left as it is: ``figures.parse_lines`` joins wrapped lines by their width.
    """
    if not text.isprintable():
        text = plain(text).replace("\u200b", "")
    if "[" in text:
        text = _BARE_ANSI.sub("", text)
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match.group()), text)
    if not text.isascii():
        text = text.translate(_FULL_WIDTH)
    if ">" in text:
        text = _TAG.sub("", _QUOTE.sub("", text))
    return text.replace("**", "")
