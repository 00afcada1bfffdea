"""The engine's output: copied to ``engine.log`` with its secrets replaced, and what it tells."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from vllm_memprof.engines import VLLM
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.launch.folder import FILE_MODE
from vllm_memprof.launch.requests import Requests
from vllm_memprof.redact import Redactor, may_hold_secret

#: A longer line leaves in pieces of about this size.
MAX_LINE_BYTES = 1 << 16
#: A line and its end, or a piece of one that is too long: it ends at a space or a comma, or else
#: behind another byte that no secret contains.
_PIECE = re.compile(
    rb"([^\r\n]{0,%(less)d}(?=[\r\n])|(?=[^\r\n]{%(most)d})(?:[^\r\n]{%(least)d,%(most)d}(?<=[\s,])"
    rb"|[^\r\n]{%(least)d,%(most)d}(?<![\w.+/=~-])|[^\r\n]{%(most)d}))([\r\n]?)"
    % {b"less": MAX_LINE_BYTES - 1, b"most": MAX_LINE_BYTES, b"least": MAX_LINE_BYTES - 4095}
)
_END = re.compile(rb"[\r\n]")

_TAIL_LINES = 200
_ERROR_LINES = 60
_READ_BYTES = 1 << 16
#: A line of the engine's log that may tell why it ended.
#: pydantic names the error on one line and says what is wrong on the next: "  Value error, …"; or
#: the argument on the next, and what is wrong on the one after it: "  Input should be …".
_ERROR_LINE = re.compile(
    r"\b\w*(?:Error|Exception)\b: |out of memory|^[\w.-]+(?: \w+)?: error: "
    r"|\b(?:Value error|Assertion failed), "
    r"|^(?:\([^)]*\))?\s*(?:Input should be|Unexpected keyword) ",
    re.IGNORECASE,
)
#: vLLM's warning of a low limit of open files, which quotes an error that it may cause.
_ADVICE = "Found ulimit of"
_OF_AN_ARGUMENT = re.compile(r"^(?:\([^)]*\))?\s*(?=Input should be |Unexpected keyword )")
_PROCESS = re.compile(r"^\([^)]*\)\s*")
#: What a collective says when a rank is gone. (gloo/transport/tcp/pair.cc, of torch 2.5 and 2.10)
_LOST_PEER = re.compile("Connection reset by peer|Connection closed by peer|Broken pipe")
#: A traceback follows the line that says that the engine failed.
_TRACEBACK_NS = 1_000_000_000
#: What the simulated device answered without computing, where it decides about memory.
#: (sim/native/error.cpp, note_answer)
ANSWER_LINE = re.compile(
    r"\[memprof (simulated device)\] (.* is not computed; answered: .*) \(pid \d+\)"
)


class LogFilter:
    """Replaces secrets in a stream of bytes. Its cost is linear in them.

    Bytes enter in chunks of any size, whole lines leave: the result depends on the bytes alone,
    never on the chunks. Bytes that are not UTF-8 stay as they are.
    """

    def __init__(self) -> None:
        self._redactor = Redactor()
        self._rest = bytearray()  # of a line without its end

    def feed(self, chunk: bytes) -> bytes:
        """Return what can leave after this chunk: every line that it completes."""
        self._rest += chunk
        if len(self._rest) < MAX_LINE_BYTES and not _END.search(chunk):
            return b""
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r")) + 1
        pieces, at = [], 0
        if self._redactor.idle and not may_hold_secret(self._rest[:end].decode("latin-1")):
            pieces, at = [bytes(self._rest[:end])], end
        while found := _PIECE.match(self._rest, at):
            pieces += [self._redacted(found[1]), found[2]]
            at = found.end()
        del self._rest[:at]
        return b"".join(pieces)

    def close(self) -> bytes:
        """Return the line without an end that is left."""
        rest, self._rest = self._rest, bytearray()
        return self._redacted(rest)

    def _redacted(self, line: bytes | bytearray) -> bytes:
        return self._redactor.feed(line.decode("latin-1")).encode("latin-1")


class LogPump:
    """Copies the engine's output to ``engine.log``, secrets replaced, and to an echo as it is;
    keeps what its lines tell, secrets replaced.

    Args:
        log_path: ``engine.log``; made with mode 0600, appended to.
        echo: gets every chunk, e.g. to show it on the terminal; called from the pump's thread.
        keep_secrets: ``engine.log`` gets every byte as it is.
        row: of the engine.
    """

    def __init__(
        self,
        log_path: Path,
        echo: Callable[[bytes], None] | None = None,
        keep_secrets: bool = False,
        row: EngineRow = VLLM,
    ) -> None:
        self._read_fd, self.fd = os.pipe()  # the engine writes to the latter
        self._echo, self._keep_secrets = echo, keep_secrets
        self._lines = row.lines
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._log_fd = os.open(log_path, flags, FILE_MODE)
        self._partial = b""
        self._line_before = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.error_lines: deque[str] = deque(maxlen=_ERROR_LINES)  # oldest first
        #: What the engine says of itself, by ``EngineRow.lines``: when, and in which word.
        self.said: dict[str, list[tuple[int, str]]] = {}
        #: When a rank ended its connection with one of this host, which had not failed before.
        self.lost_peer_t_ns: int | None = None
        self.last_output_s = time.monotonic()
        self.log_error: str | None = None  # why engine.log is incomplete
        self.device_answers: dict[str, None] = {}  # of the simulated device, each of them once
        self.requests = Requests()
        self._thread = threading.Thread(target=self._run, name="memprof-log", daemon=True)

    def start(self) -> None:
        """Read what the engine prints; its end of the pipe is in its processes alone from here."""
        os.close(self.fd)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the output: every process that holds the pipe has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        log_filter, chunk = LogFilter(), b"-"
        while chunk:
            try:
                chunk = os.read(self._read_fd, _READ_BYTES)
            except OSError:
                chunk = b""
            redacted = log_filter.feed(chunk) if chunk else log_filter.close()
            self.last_output_s = time.monotonic()
            left = memoryview(chunk if self._keep_secrets else redacted)
            try:
                while left and self.log_error is None:
                    left = left[os.write(self._log_fd, left) :]
            except OSError as error:  # of the log, as on a full disk: the pipe is read on
                self.log_error = f"engine.log is incomplete: {error.strerror}"
            *lines, self._partial = (self._partial + redacted).split(b"\n")
            self._partial = self._partial[-4096:]
            for line in lines if chunk or not self._partial else [*lines, self._partial]:
                self._read(line.decode(errors="replace").rstrip(), time.monotonic_ns())
            if self._echo is not None and chunk:
                with contextlib.suppress(Exception):  # a closed terminal must not stop the log
                    self._echo(chunk)
        os.close(self._read_fd)
        os.close(self._log_fd)

    def _read(self, line: str, now_ns: int) -> None:
        """Keep what a line tells."""
        self.tail.append(line)
        for what, form in self._lines.items():
            if found := form.search(line):
                self.said.setdefault(what, []).append((now_ns, found[found.lastindex or 0]))
        failed = "fatal" in self.said and now_ns - self.said["fatal"][0][0] > _TRACEBACK_NS
        if self.lost_peer_t_ns is None and not failed and _LOST_PEER.search(line):
            self.lost_peer_t_ns = now_ns
        if found := ANSWER_LINE.search(line):
            self.device_answers[": ".join(found.groups())] = None
        if line.startswith("request"):
            self.requests.read(line, now_ns)
        if _ERROR_LINE.search(line) and _ADVICE not in line:
            said = line
            if _OF_AN_ARGUMENT.search(line):
                argument = _PROCESS.sub("", self._line_before)
                said = f"{argument}: {_OF_AN_ARGUMENT.sub('', line)}"
            self.error_lines.append(said.strip()[:500])
        self._line_before = line.strip()
