"""Logs as bytes, read into runs."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from vllm_memprof.logs.figures import parse_lines
from vllm_memprof.logs.lines import read_chunks, read_lines
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.starts import StartSorter
from vllm_memprof.logs.to_record import to_runs
from vllm_memprof.record.loader import Run


def explain(data: bytes | str) -> list[Run]:
    raw = data.encode() if isinstance(data, str) else data
    ((_, stream),) = logs_in(io.BufferedReader(io.BytesIO(raw)), "log")
    return to_runs(StartSorter().sort(parse_lines(read_lines(read_chunks(stream)))), "log")


@pytest.fixture
def runs_of() -> Callable[[bytes | str], list[Run]]:
    return explain
