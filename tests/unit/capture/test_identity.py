from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest

from vllm_memprof.capture.identity import data_parallel_rank


def parallel(size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        data_parallel_size=size, data_parallel_rank=rank, data_parallel_index=rank
    )


def test_the_engine_core_s_name_tells_the_rank_that_dense_models_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        multiprocessing, "parent_process", lambda: SimpleNamespace(name="EngineCore_DP3")
    )
    assert data_parallel_rank(parallel(1, 0)) == (3, True)


def test_without_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        multiprocessing, "parent_process", lambda: SimpleNamespace(name="EngineCore")
    )
    assert data_parallel_rank(parallel(1, 0)) == (0, False)
    assert data_parallel_rank(parallel(2, 1)) == (1, True)


def test_releases_that_name_a_single_engine_core_dp0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        multiprocessing, "parent_process", lambda: SimpleNamespace(name="EngineCore_DP0")
    )
    assert data_parallel_rank(SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)) == (
        0,
        False,
    )
    assert data_parallel_rank(SimpleNamespace(data_parallel_size=2, data_parallel_rank=0)) == (
        0,
        True,
    )
