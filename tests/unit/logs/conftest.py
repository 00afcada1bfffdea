"""Logs as bytes, read into runs."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from vllm_memprof.logs.clean import read_chunks, read_lines
from vllm_memprof.logs.parse import parse
from vllm_memprof.logs.record import build_runs
from vllm_memprof.logs.runs import Sorter
from vllm_memprof.record.loader import Run


def explain(data: bytes | str) -> list[Run]:
    raw = data.encode() if isinstance(data, str) else data
    return build_runs(Sorter().take(parse(read_lines(read_chunks(io.BytesIO(raw))))), "log")


@pytest.fixture
def runs_of() -> Callable[[bytes | str], list[Run]]:
    return explain
