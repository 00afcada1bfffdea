"""Logs with a few figures: what they print is shown, and nothing is said of what they lack.

Lines that are not of a file of ``tests/data/logs`` are written by hand in the engines' formats.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.logs.conftest import explain
from tests.unit.logs.samples import CUDA_SUGGESTION
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.report.documents.report import report_document, verdict
from vllm_memprof.report.html import render_html
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.starts import starts_document
from vllm_memprof.units import GIB

DATA = Path(__file__).parents[2] / "data" / "logs"
INIT = (
    "(EngineCore_DP0 pid=20) INFO 01-01 [core.py:58] Initializing a V1 LLM engine (v0.23.0) with config: "
    "model='Qwen/Qwen3-8B', tensor_parallel_size={tp}, pipeline_parallel_size=1, \n"
)
ENABLED = (
    "(EngineCore pid=1) INFO [gpu_worker.py:1] CUDA graph memory profiling is enabled (default since v0.21.0). The "
    "current --gpu-memory-utilization=0.9200 is equivalent to --gpu-memory-utilization=0.9129 without CUDA graph "
    "memory profiling.\n"
)


def reports_of(text: str) -> list[Report]:
    return [build_report(run) for run in explain(text)]


def of_file(name: str) -> Report:
    (report,) = reports_of((DATA / name).read_text())
    return report


def printed(report: Report) -> tuple[dict[str, list[str]], list[str]]:
    (section,) = sections(report, 80, ["printed"])
    return {str(row.cells[0]): row.cells[1:] for row in section.rows}, list(section.notes)


def head(report: Report) -> dict[str, str]:
    return {line.name: line.value for line in report_document(report, 120).head}


# --- figures without an equation


@pytest.mark.parametrize(
    ("name", "title", "cells"),
    [
        (
            "vllm-project__vllm-57475.log",
            "graph memory",
            ["0.4600", "493,921,239 ±5,368,710"],
        ),
        ("vllm-project__vllm-27706.log", "graph memory", ["0.0800", "85,899,346 ±5,368,710"]),
        (
            "vllm-project__vllm-ascend-9372.log",
            "weights",
            ["27.5376", "29,568,272,853 ±53,688"],
        ),
    ],
)
def test_a_parsed_figure_is_shown_without_an_equation(
    name: str, title: str, cells: list[str]
) -> None:
    rows, _ = printed(of_file(name))
    assert rows[title] == cells


def test_two_utilizations_give_no_estimate_where_the_total_is_not_printed() -> None:
    report = of_file("noonghunna__club-3090-127.log")
    _, notes = printed(report)
    assert notes == [
        "the engine says that it subtracts its graph estimate from the KV cache",
        "graphs, estimated: 0.9200 - 0.9129 = 0.0071 of the device's total, which the log does not "
        "print",
    ]
    assert report.ranks[0].figures.get("graph_estimate_bytes") is None


def test_two_utilizations_and_the_total_give_the_estimate_with_its_rounding() -> None:
    """0.0071 x 23.56 = 0.1673 GiB, give or take 0.0001 x 23.56."""
    total = (
        "INFO [gpu_worker.py:1] worker init memory snapshot: free_memory=23.30GiB, total_memory=23.56GiB, "
        "non_torch_memory=0.26GiB\n"
    )
    (report,) = reports_of(total + ENABLED)
    rank = report.ranks[0]
    assert round((rank.figures["graph_estimate_bytes"] or 0) / GIB, 4) == 0.1673
    assert round(rank.half_units["graph_estimate_bytes"] / GIB, 4) == 0.0024
    rows, _ = printed(report)
    assert rows["graphs, estimated"][0] == "0.1673"
    estimated = "INFO [x.py:1] Estimated CUDA graph memory: 0.20 GiB total\n"
    (both,) = reports_of(total + estimated + ENABLED)
    assert both.ranks[0].figures["graph_estimate_bytes"] == round(0.20 * GIB)  # printed comes first


def test_the_suggestions_of_the_engine_are_shown_exactly() -> None:
    line = CUDA_SUGGESTION.format(
        device="", usage="9.19 GiB for weight, 0.31 GiB for CUDAGraph memory"
    )
    (report,) = reports_of(f"INFO [gpu_worker.py:1] {line}\n")
    rows, _ = printed(report)
    assert rows["--kv-cache-memory suggested to fit requested memory"] == [
        "46.5628",
        "49,996,390,195",
    ]
    assert rows["--kv-cache-memory suggested for the whole device"][1] == "56,234,567,890"


def test_without_an_equation_requested_memory_is_the_product() -> None:
    """A command and the first snapshot, without a release: 60.96 x 0.5."""
    text = (DATA / "made" / "e3_neighbour.log").read_text()
    kept = [line for line in text.split("\n") if "[core.py" not in line and "[platform" not in line]
    (report,) = reports_of("\n".join(kept))
    assert report.ranks[0].budget.equation is None
    (section,) = sections(report, 80, ["equation"])
    rows = {str(row.cells[0]): row.cells[1:] for row in section.rows}
    assert rows["requested, derived"] == ["30.4800", "32,727,650,795"]


# --- what is said of ranks


def grants(*sizes: str, tp: int = 4) -> Report:
    text = INIT.format(tp=tp)
    for rank, size in enumerate(sizes):
        text += f"(Worker_TP{rank} pid={30 + rank}) INFO [gpu_worker.py:1] Available KV cache memory: {size} GiB\n"
    (report,) = reports_of(text)
    return report


def test_a_verdict_speaks_of_the_ranks_in_the_log_alone() -> None:
    assert "KV cache 5.00 GiB on each of 2 ranks;" in verdict(grants("5.00", "5.00"))
    least = verdict(grants("5.00", "4.00", "6.00"))
    assert "KV cache 4.00 GiB on TP1, the least of 3 ranks;" in least
    assert "KV cache 5.00 GiB on TP0;" in verdict(grants("5.00"))
    for report in (grants("5.00", "5.00"), grants("5.00")):
        assert "every rank" not in verdict(report)


def test_lines_without_a_rank_are_no_rank() -> None:
    text = "(Worker_TP0 pid=30) INFO [gpu_worker.py:1] Available KV cache memory: 5.00 GiB\n"
    text += "(Worker_TP1 pid=31) INFO [gpu_worker.py:1] Available KV cache memory: 5.00 GiB\n"
    text += "INFO [gpu_model_runner.py:1] Graph capturing finished in 1 secs, took 0.30 GiB\n"
    (report,) = reports_of(text)
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1", "lines without a rank"]
    assert "on each of 2 ranks" in verdict(report)
    assert "lines without a rank" not in verdict(report)


def test_the_equation_is_recomputed_rank_by_rank() -> None:
    actual = (
        "(Worker_TP0 pid=30) INFO [gpu_worker.py:1] Free memory on device (23.30/23.56 GiB) on startup. Desired GPU "
        "memory utilization is (0.5, 11.78 GiB). Actual usage is 5.00 GiB for weight, 1.00 GiB for peak activation, "
        "0.78 GiB for non-torch memory, and 0.10 GiB for CUDAGraph memory. Current kv cache memory in use is 5.0 GiB.\n"
    )
    text = INIT.format(tp=2).replace("0.23.0", "0.11.0") + actual
    text += "(Worker_TP1 pid=31) INFO [gpu_worker.py:1] Available KV cache memory: 5.00 GiB\n"
    (report,) = reports_of(text)
    assert (
        "equation E5 (vllm 0.10+) reproduces it within rounding on TP0; equation not recomputed on TP1"
        in verdict(report)
    )


def test_a_log_that_shows_no_end_is_not_called_ok() -> None:
    assert head(of_file("noonghunna__club-3090-127.log"))["status"] == "no failure in the log"
    (report,) = reports_of("INFO Loading model weights took 9.0000 GB\n")
    assert head(report)["status"] == "the log ends before the KV cache is sized"
    page = render_html(of_file("noonghunna__club-3090-127.log"))
    assert ">no failure in the log<" in page


def test_what_no_snapshot_shows_is_said_in_one_line() -> None:
    """The weights are in the table, so that it is a snapshot that lacks and no figure."""
    (report,) = reports_of(
        "INFO Loading model weights took 9.0000 GB\n"
        "non_torch_memory before profiling is 0.36 G\nINFO Available KV cache memory: 5.00 GiB\n"
    )
    notes = [
        note
        for section in report_document(report, 200).sections
        for note in section.notes
        if "NOT MEASURED: " in note and "graph_capture" in note
    ]
    assert len(notes) == 1
    assert notes[0].endswith("(no snapshot of memory in the log)")


# --- what ranks without a label are called


def test_workers_without_a_label_are_called_by_their_place_and_lines() -> None:
    report = reports_of((DATA / "two_methods_910b_tp2.md").read_text())[0]
    assert [rank.label for rank in report.ranks] == ["worker 1 of 2", "worker 2 of 2"]
    assert [rank.lines for rank in report.ranks] == [(24, 31), (32, 32)]
    titles = [section.title for section in report_document(report, 120).sections]
    assert "KV cache equation E2, worker 1 of 2, lines 24-31" in titles
    assert "KV cache equation E2, worker 2 of 2, line 32" in titles
    assert "unlabelled" not in render_markdown(report)
    assert "the log does not name ranks" in " ".join(report.run.notes)


def test_a_worker_that_failed_is_called_by_its_device() -> None:
    assert of_file("pytorch__pytorch-175666.log").ranks[0].label == "cuda:1"
    assert of_file("vllm-project__vllm-ascend-1617.log").ranks[0].label == "device 1"


# --- several starts


def test_several_starts_begin_with_one_table_that_compares_them() -> None:
    reports = reports_of((DATA / "two_methods_910b_tp2.md").read_text())
    (section,) = starts_document(reports, 120).sections
    assert section.title == "5 engine starts"
    columns = [column.title for column in section.columns]
    rows = [dict(zip(columns, row.cells, strict=True)) for row in section.rows]
    assert [row["Start"] for row in rows] == ["#1", "#2", "#3", "#4", "#5"]
    assert [row["KV cache"] for row in rows] == ["43.33", "40.35", "44.30", "-", "43.39"]
    assert rows[2]["KV tokens"] == "645,120"
    assert [row["Result"] for row in rows] == [
        "equation differs",
        "equation equal",
        "equation equal",
        "out of memory",
        "equation equal",
    ]
    narrow = starts_document(reports, 80).sections[0]
    assert len(narrow.columns) == len(columns) - 3
    page = render_html(*reports)
    assert page.index(">5 engine starts<") < page.index('class="brand"')
    assert "engine starts" not in render_html(reports[0])


def test_starts_of_several_logs_are_named_by_their_log() -> None:
    reports = [of_file(f"noonghunna__club-3090-{number}.log") for number in (612, 652)]
    reports = [
        Report(run, report.ranks)
        for number, report in enumerate(reports)
        for run in [type(report.run)(**{**vars(report.run), "id": f"log-{number}"})]
    ]
    (section,) = starts_document(reports, 120).sections
    assert [row.cells[0] for row in section.rows] == ["log-0", "log-1"]


def test_items_that_a_log_does_not_give_share_a_line() -> None:
    notes = [
        note
        for section in report_document(of_file("wtdcode__vllm-backport-34.log"), 200).sections
        for note in section.notes
        if "NOT MEASURED" in note
    ]
    assert len(notes) == 1
    assert (
        "freed by empty_cache before the engine measures; non-torch, after profiling (the log does not say)"
        in notes[0]
    )


def test_a_request_that_follows_from_the_rest_has_its_rounding() -> None:
    """Four figures of two digits: 4 x 0.005."""
    notes = [
        note
        for section in report_document(of_file("vllm-project__vllm-13061.log"), 200).sections
        for note in section.notes
    ]
    assert any(note.endswith("requested memory of 23.08 +-0.02 GiB") for note in notes)
