"""The head of a deployment, seen from another host: by connections alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_memprof.launch import head_node
from vllm_memprof.launch.head_node import End, HeadNode

HERE, THERE = ("10.0.0.6", 40000), ("10.0.0.5", 5000)
HEAD = "10.0.0.5:13345"
Known = dict[int, list[tuple[End, End]]]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """The connections that there are, by process."""
    found: Known = {}
    monkeypatch.setattr(head_node, "connections_of", lambda pid: found.get(pid, []))
    return found


def test_no_connection_yet_is_no_end(known: Known) -> None:
    head = HeadNode(HEAD)
    head.look([1])
    assert (head.host, head.ends, head.lost_s) == ("10.0.0.5", set(), None)
    assert not head.has_ended()


def test_a_connection_that_comes_back_is_no_end(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(head_node.time, "monotonic", lambda: now)
    head = HeadNode(HEAD)
    known[7] = [(HERE, THERE)]
    head.look([6, 7])
    assert head.ends == {THERE}
    assert head.lost_s is None
    known.clear()
    head.look([6, 7])
    now = 105.0
    head.look([6, 7])
    assert head.lost_s == 100.0
    known[6] = [(HERE, THERE)]
    head.look([6, 7])
    assert head.lost_s is None


def test_other_hosts_and_own_processes_are_no_head(known: Known) -> None:
    """On one machine all have the same address: a pair of own processes is known by its ends."""
    one, other = ("127.0.0.1", 5001), ("127.0.0.1", 5002)
    head = HeadNode("127.0.0.1:13345")
    known |= {1: [(one, other)], 2: [(other, one)]}
    head.look([1, 2])
    assert not head.ends
    head.look([1])  # the other end is not of this host
    assert head.ends
    known[1] = [(HERE, ("10.0.0.9", 5000))]
    stranger = HeadNode(HEAD)
    stranger.look([1])
    assert not stranger.ends


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_names_of_a_head(address: str) -> None:
    assert HeadNode(f"{address}:13345").host == address.strip("[]")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


def test_connections_of_real_processes(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    head = HeadNode("127.0.0.1:1")
    code = (
        f"import socket, time; s = socket.create_connection(('127.0.0.1', {port})); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code])
    try:
        far, _ = listener.accept()
        with far:
            head.look([os.getpid(), client.pid])  # a pair of own processes
            assert not head.ends
            head.look([client.pid])
            assert head.ends
            assert not head.has_ended()
        listener.close()
        assert head.has_ended()
    finally:
        client.kill()
        client.wait(10)
