"""Arguments of two runs, compared whatever way they are written."""

from __future__ import annotations

import pytest

from tests.support.runs import report_of
from vllm_memprof.compare.changes import changes

BASE = ["memprof", "offline", "org/model", "--device", "sim:910b"]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (["-tp", "2"], ["--tensor-parallel-size=2"], []),
        (["--max_model_len", "64"], ["--max-model-len", "64"], []),
        (["--run-dir", "/a"], ["--run-dir", "/b"], []),
        (["-tp", "2"], ["-tp", "4"], [("argument", "--tensor-parallel-size", "2", "4")]),
        (["--max-num-seqs=8"], [], [("argument", "--max-num-seqs", "8", None)]),
        (
            ["--additional-config", '{"a": {"c_d": 1}, "weight_nz_mode": 0}'],
            ["--additional_config.weight_nz_mode=0", "--additional-config.a.c_d", "1"],
            [],
        ),
        (
            ["--additional-config", '{"weight_nz_mode": 0, "b": true}'],
            ['--additional-config={"b": true, "weight_nz_mode": 1}'],
            [("argument", "--additional-config.weight_nz_mode", "0", "1")],
        ),
        (
            ["-cc.cudagraph_mode", "NONE"],
            ["--compilation-config", '{"cudagraph_mode": "FULL"}'],
            [("argument", "--compilation-config.cudagraph_mode", "NONE", "FULL")],
        ),
        (["--hf-overrides", "{not json"], ["--hf-overrides", "{not json"], []),
    ],
)
def test_arguments(a: list[str], b: list[str], wanted: list[tuple[str, ...]]) -> None:
    one, two = (report_of("graph_tp2", command=[*BASE, *args]) for args in (a, b))
    found = [(change.kind, change.name, change.a, change.b) for change in changes(one, two)]
    assert found == wanted


def test_the_variables_of_memprof_are_no_change() -> None:
    one = report_of("graph_tp2", env={"MEMPROF_RUN_DIR": "/a", "HCCL_BUFFSIZE": "200"})
    two = report_of("graph_tp2", env={"MEMPROF_RUN_DIR": "/b", "HCCL_BUFFSIZE": "400"})
    assert [(change.name, change.a, change.b) for change in changes(one, two)] == [
        ("HCCL_BUFFSIZE", "200", "400")
    ]
