"""Whether the head of a deployment is there, seen from another host of it. Runs in the launcher.

A host without an API server is told nothing when the head ends: an engine core that is idle waits
for ever. What the kernel knows is read: the connections of the engine's processes with the head's
address. Nothing is sent, but for one question when the engine has ended by itself: whether the head
still accepts a connection.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator

import psutil

_ASK_S = 1.0  # for an answer of the head
_PAUSE_S = 0.5  # between two questions
_MAPPED = "::ffff:"  # before an IPv4 address of an IPv6 socket

#: One end of a connection: address and port.
End = tuple[str, int]


class HeadNode:
    """The head, as the processes of this host see it.

    Args:
        address: ``HOST:PORT`` as the engine prints it.
    """

    def __init__(self, address: str) -> None:
        self.host = address.rpartition(":")[0].strip("[]") or address
        self._addresses = {self.host}
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
            self._addresses = {str(there[0]) for *_, there in found}
        self.ends: set[End] = set()  # of the last connections that there were
        #: Since when no process has had a connection; None: one has, or none had any so far.
        self.lost_s: float | None = None

    def look(self, pids: Iterable[int]) -> None:
        """Read the connections of these processes, all that the engine has here.

        Those between two of them do not count: on one machine the head may have their address.
        """
        pairs = [pair for pid in pids for pair in connections_of(pid)]
        here = {local for local, _ in pairs}
        ends = {far for _, far in pairs if far[0] in self._addresses and far not in here}
        if ends:
            self.ends, self.lost_s = ends, None
        elif self.ends and self.lost_s is None:
            self.lost_s = time.monotonic()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Ask whether the head accepts no connection any more; False where none was ever seen.

        Args:
            within_s: it may be about to end: asked again until so many seconds have passed.
        """
        deadline_s = time.monotonic() + within_s
        while self.ends:
            if not any(map(_accepts, self.ends)):
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return False


def connections_of(pid: int) -> Iterator[tuple[End, End]]:
    """Yield the established TCP connections of a process: (here, there)."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        read = getattr(process, "net_connections", None) or process.connections  # psutil < 6
        for each in read("tcp"):
            if each.status == psutil.CONN_ESTABLISHED and each.raddr:
                here, there = ((end[0].removeprefix(_MAPPED), end[1])
                               for end in (each.laddr, each.raddr))  # fmt: skip
                yield here, there


def _accepts(end: End) -> bool:
    try:
        socket.create_connection(end, _ASK_S).close()
    except OSError:
        return False
    return True
