"""Arguments of two runs, compared whatever way they are written."""

from __future__ import annotations

import pytest

from tests.support.runs import report_of
from vllm_memprof.accounting import build_report
from vllm_memprof.compare.changes import changes
from vllm_memprof.compare.diff import diff_reports
from vllm_memprof.compare.document import diff_document
from vllm_memprof.logs.to_record import read_log

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


SGLANG = [f"tests/data/logs/sglang_0.5.18_8b_{name}.log" for name in ("eager", "graph")]


def test_the_arguments_that_sglang_prints_are_compared() -> None:
    a, b = (build_report(read_log(path)[0]) for path in SGLANG)
    assert [(change.name, change.a, change.b) for change in changes(a, b)] == [
        ("--mem-fraction-static", "0.8", "0.792"),
        ("--disable-cuda-graph", "given", None),
    ]
    assert (a.run.eager, b.run.eager) == (True, False)


def test_printed_figures_are_the_same_as_printed_only() -> None:
    one, two = (build_report(read_log(path)[0]) for path in SGLANG)
    pairs = [(one, two), (report_of("graph_tp2"), report_of("skewed_tp2"))]
    notes = [
        [
            note
            for section in diff_document(diff_reports(*pair), 120).sections
            for note in section.notes
        ]
        for pair in pairs
    ]
    said = [[note for note in each if "the same in both" in note] for each in notes]
    assert all("as printed" in note for note in said[0])
    assert all("to the byte" in note for note in said[1])
    assert said[0]
    assert said[1]
