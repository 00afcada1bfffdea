"""The head of a deployment, seen from another host: by connections alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_memprof.launch.head_node import End, Head

HERE, THERE = End("10.0.0.6", 40000), End("10.0.0.5", 5000)
HEAD = "10.0.0.5:13345"


def test_no_connection_yet_is_no_end() -> None:
    head = Head(HEAD, lambda _: [])
    head.look([1])
    assert (head.host, head.met, head.lost_s) == ("10.0.0.5", False, None)
    assert not head.has_ended()


def test_a_connection_that_comes_back_is_no_end() -> None:
    now = 100.0
    open_now = {7: [(HERE, THERE)]}
    head = Head(HEAD, lambda pid: open_now.get(pid, []), lambda: now)
    head.look([6, 7])
    assert head.met
    assert head.lost_s is None
    open_now.clear()
    head.look([6, 7])
    now = 105.0
    head.look([6, 7])
    assert head.lost_s == 100.0
    open_now[6] = [(HERE, THERE)]
    head.look([6, 7])
    assert head.lost_s is None


def test_other_hosts_and_own_processes_are_no_head() -> None:
    """On one machine all have the same address: a pair of own processes is known by its ends."""
    one, other = End("127.0.0.1", 5001), End("127.0.0.1", 5002)
    head = Head("127.0.0.1:13345", lambda pid: [(one, other)] if pid == 1 else [(other, one)])
    head.look([1, 2])
    assert not head.met
    head.look([1])  # the other end is not of this host
    assert head.met
    stranger = Head(HEAD, lambda _: [(HERE, End("10.0.0.9", 5000))])
    stranger.look([1])
    assert not stranger.met


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_names_of_a_head(address: str) -> None:
    assert Head(f"{address}:13345").host == address.strip("[]")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


def test_connections_of_real_processes(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    head = Head("127.0.0.1:1")
    code = (
        f"import socket, time; s = socket.create_connection(('127.0.0.1', {port})); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code])
    try:
        far, _ = listener.accept()
        with far:
            head.look([os.getpid(), client.pid])  # a pair of own processes
            assert not head.met
            head.look([client.pid])
            assert head.met
            assert not head.has_ended()
        listener.close()
        assert head.has_ended()
    finally:
        client.kill()
        client.wait(10)
