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
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import psutil

_ASK_S = 1.0  # for an answer of the head
_PAUSE_S = 0.5  # between two questions
_MAPPED = "::ffff:"  # before an IPv4 address of an IPv6 socket


class End(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


#: The established TCP connections of a process: (here, there).
Connections = Callable[[int], Iterable[tuple[End, End]]]


class Head:
    """The head, as the processes of this host see it.

    Args:
        address: ``HOST:PORT`` as the engine prints it.
        connections: of a process.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        address: str,
        connections: Connections | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = address.rpartition(":")[0].strip("[]") or address
        self._addresses = {self.host}
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
            self._addresses = {str(there[0]) for *_, there in found}
        self._connections = connections or _established
        self._clock = clock
        self._ends: set[End] = set()
        #: Since when no process has had a connection; None: one has, or none had any so far.
        self.lost_s: float | None = None

    @property
    def met(self) -> bool:
        """Whether there was a connection at all."""
        return bool(self._ends)

    def look(self, pids: Iterable[int]) -> None:
        """Read the connections of these processes, all that the engine has here.

        Those between two of them do not count: on one machine the head may have their address.
        """
        pairs = [pair for pid in pids for pair in self._connections(pid)]
        here = {local for local, _ in pairs}
        ends = {far for _, far in pairs if far.address in self._addresses and far not in here}
        if ends:
            self._ends, self.lost_s = ends, None
        elif self._ends and self.lost_s is None:
            self.lost_s = self._clock()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Ask whether the head accepts no connection any more; False where none was ever seen.

        Args:
            within_s: it may be about to end: asked again until so many seconds have passed.
        """
        deadline_s = self._clock() + within_s
        while self._ends:
            if not any(map(_accepts, self._ends)):
                return True
            if self._clock() >= deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return False


def _established(pid: int) -> Iterator[tuple[End, End]]:
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        read = getattr(process, "net_connections", None) or process.connections  # psutil < 6
        for connection in read("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr:
                yield _end(connection.laddr), _end(connection.raddr)


def _end(pair: tuple[str, int]) -> End:
    return End(pair[0].removeprefix(_MAPPED), pair[1])


def _accepts(end: End) -> bool:
    try:
        socket.create_connection(end, _ASK_S).close()
    except OSError:
        return False
    return True
