"""The name of this host in records."""

from __future__ import annotations

import socket

import pytest

from vllm_memprof.record.host import ENV_HOST, host_name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, socket.gethostname()),
        ("", socket.gethostname()),
        ("npu-07.rack", "npu-07.rack"),
        ("../rack 7", ".._rack_7"),  # it stands in the names of files
    ],
)
def test_host_name(monkeypatch: pytest.MonkeyPatch, given: str | None, name: str) -> None:
    monkeypatch.delenv(ENV_HOST, raising=False)
    if given is not None:
        monkeypatch.setenv(ENV_HOST, given)
    assert host_name() == name
