"""Who is at the other end of a Unix socket, from the kernel."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Peer(NamedTuple):
    """The process that has connected, or that listens."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end. (unix(7), ``SO_PEERCRED``: Linux alone)"""
    asked = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(asked)
    return Peer(pid, uid)
