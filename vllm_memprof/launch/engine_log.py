"""The engine's output with its secrets replaced, as it goes to ``engine.log``.

Bytes enter in chunks of any size, whole lines leave: the result depends on the bytes alone, never
on the chunks. A line leaves with its line feed or carriage return; the rest leaves at the end.
Bytes that are not UTF-8 stay as they are.
"""

from __future__ import annotations

import re

from vllm_memprof.redact import Redactor, may_hold_secret

#: A longer line leaves in pieces of about this size.
MAX_LINE_BYTES = 1 << 16
#: A piece ends at a space or a comma, or else behind another byte that no secret contains.
_CUTS = (re.compile(rb"[\s,]"), re.compile(rb"[^\w.+/=~-]"))
_CUT_WITHIN = 1 << 12

_LINE = re.compile(r"[\r\n]")


class LogFilter:
    """Replaces secrets in a stream of bytes. Its cost is linear in them."""

    def __init__(self) -> None:
        self._redactor = Redactor()
        self._rest = bytearray()  # of a line without its end
        self._searched = 0  # bytes of the rest that hold no line end

    def feed(self, chunk: bytes) -> bytes:
        """Return what can leave after this chunk: every line that it completes."""
        self._rest += chunk
        end = max(self._rest.rfind(b"\n", self._searched), self._rest.rfind(b"\r", self._searched))
        pieces = []
        if end >= 0:
            pieces.append(self._lines(bytes(self._rest[: end + 1])))
            del self._rest[: end + 1]
        while len(self._rest) >= MAX_LINE_BYTES:
            pieces.append(self._cut())
        self._searched = len(self._rest)
        return b"".join(pieces)

    def close(self) -> bytes:
        """Return the line without an end that is left."""
        rest, self._rest, self._searched = bytes(self._rest), bytearray(), 0
        return self._line(rest)

    def _lines(self, block: bytes) -> bytes:
        """Redact whole lines, the long ones in the pieces in which they would leave."""
        text = block.decode("latin-1")
        if self._redactor.idle and not may_hold_secret(text):
            return block
        kept, pieces, last = self._rest, list[bytes](), 0
        for match in _LINE.finditer(text):
            self._rest = bytearray(block[last : match.start()])
            while len(self._rest) >= MAX_LINE_BYTES:
                pieces.append(self._cut())
            pieces += [self._line(bytes(self._rest)), match.group().encode()]
            last = match.end()
        self._rest = kept
        return b"".join(pieces)

    def _cut(self) -> bytes:
        """Take the next piece off a line that is too long."""
        at = MAX_LINE_BYTES
        tail = bytes(self._rest[MAX_LINE_BYTES - _CUT_WITHIN : MAX_LINE_BYTES])
        for cut in _CUTS:
            found = [match.end() for match in cut.finditer(tail)]
            if found:
                at = MAX_LINE_BYTES - _CUT_WITHIN + found[-1]
                break
        piece = bytes(self._rest[:at])
        del self._rest[:at]
        return self._line(piece)

    def _line(self, line: bytes) -> bytes:
        return self._redactor.feed(line.decode("latin-1")).encode("latin-1")
