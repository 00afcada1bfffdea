"""The first screen: short for every run and log, its figures those of the report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.host_runs import write_hosts
from tests.support.many_ranks import write_many_ranks
from tests.support.render import printed
from tests.support.runs import DATA, LOGS, RUNS, oom_report, reports_of
from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.deployment.report import build_deployment
from vllm_memprof.accounting.findings.advice import more_kv_cache
from vllm_memprof.accounting.model import LargestStep, RequestRow
from vllm_memprof.accounting.owners.peak_owners import SERVING_PEAK, divided_device
from vllm_memprof.logs.to_record import NoMemoryLines, read_log
from vllm_memprof.record.cause import Cure, EvidenceLine, NamedFailure
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.record.loader import load_run
from vllm_memprof.report.documents.first_screen import FirstScreen, most_lines
from vllm_memprof.report.language import LANGUAGES
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table
from vllm_memprof.units import format_size

MADE = sorted(str(path.relative_to(DATA)) for path in (DATA / "logs" / "made").glob("*.log"))
#: Folders of further logs, which are no part of the repository: ``A:B``.
FOLDERS = [Path(name) for name in os.environ.get("MEMPROF_TEST_LOGS", "").split(":") if name]
MORE = sorted(str(path) for folder in FOLDERS for path in folder.rglob("*") if path.is_file())
NAMES = [*RUNS, *(f"logs/{path.name}" for path in LOGS), *MADE]


def screen_of(name: str) -> FirstScreen:
    return FirstScreen(tuple(reports_of(name)), name)


def drawn(found: FirstScreen, width: int = 100, lang: str = "en", encoding: str = "utf-8") -> str:
    return printed(render_table(found, lang=lang), width, encoding)


def is_short(found: FirstScreen, width: int, lang: str = "en") -> bool:
    lines = drawn(found, width, lang).splitlines()
    assert max(map(cell_len, lines)) <= width
    return len(lines) <= (45 if width >= 100 else 55)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_short(name: str, width: int, lang: str) -> None:
    assert is_short(screen_of(name), width, lang)


@pytest.mark.parametrize("path", MORE)
def test_it_is_short_for_any_log(path: str) -> None:
    try:
        runs = read_log(path)
    except NoMemoryLines:
        pytest.skip("the log has no line about memory")
    found = FirstScreen([build_report(run) for run in runs], path)
    assert is_short(found, 100)
    assert is_short(found, 80)


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_room_in_a_comment(name: str) -> None:
    for lang in LANGUAGES:
        assert len(render_markdown(screen_of(name), lang).encode()) <= 12_000


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_ranks_are_the_worst_the_median_and_the_best(ranks: int, tmp_path: Path) -> None:
    run = load_run(write_many_ranks(tmp_path / "run", ranks=ranks, outlier=3))
    found = FirstScreen([build_report(run)], "run")
    assert is_short(found, 100)
    assert is_short(found, 80)
    text = drawn(found)
    assert "worst: TP3" in text
    assert "median: TP" in text
    assert "best: TP" in text


def test_a_deployment(tmp_path: Path) -> None:
    found = FirstScreen([build_deployment(load_parts(write_hosts(tmp_path, ahead_s=3.0)))], "runs")
    assert is_short(found, 100)
    assert is_short(found, 80)


def test_it_says_what_the_report_says() -> None:
    (report,) = reports_of("recorded_023_tp2")
    text, rank = drawn(FirstScreen([report], "runs/a")), report.ranks[0]
    size, headroom = rank.budget.engine_kv_cache_bytes, rank.budget.headroom_bytes
    assert f"KV cache {format_size(size)}, {rank.kv.tokens:,} tokens on every rank, 9.8" in text
    assert f"fits the device, headroom {format_size(headroom)}" in text
    assert (
        "equation E4 (vllm-ascend 0.18+) reproduces it exactly; 14 of 14 engine values confirmed"
        in text
    )
    assert "60.96 × 0.95 = 57.91 - 9.17 weights - 4.22 peak activation" in text
    assert "\n          memprof report runs/a --full\n" in text
    assert "\n          memprof report --full\n" in drawn(
        FirstScreen([report])
    )  # of the newest run


@pytest.mark.parametrize("name", RUNS)
def test_owners_at_the_serving_peak_are_the_device(name: str) -> None:
    for report in reports_of(name):
        for rank in report.ranks:
            divided = divided_device(rank)
            if divided is not None and divided.moment == SERVING_PEAK:
                assert sum(row.bytes for row in divided.owners) == divided.total_bytes


def test_more_kv_cache_leaves_what_profiling_may_miss() -> None:
    (report,) = reports_of("recorded_023_tp2")
    more, budget = more_kv_cache(report.ranks), report.ranks[0].budget
    assert more is not None
    assert more.argument == "--gpu-memory-utilization 0.966"
    assert more.bytes + more.left_bytes == budget.headroom_bytes
    assert budget.unprofiled_bytes is not None
    assert more.left_bytes >= budget.unprofiled_bytes
    assert more_kv_cache(reports_of("graph_tp2")[0].ranks) is None  # it does not fit as it is
    steps = [LargestStep("prompt-logprobs", "logits of a step", 8192, 8, budget.headroom_bytes)]
    large = [replace(each, kv=replace(each.kv, steps=steps)) for each in report.ranks]
    careful = more_kv_cache(large)
    assert careful is not None
    assert careful.argument == "--max-logprobs 0 --gpu-memory-utilization 0.966"
    kv = replace(report.ranks[0].kv, max_num_seqs=8, max_model_len=100, usable_tokens=800)
    assert more_kv_cache([replace(each, kv=kv) for each in report.ranks]) is None


def test_a_headroom_without_a_full_batch_is_estimated() -> None:
    """One short request is no full batch, though the run was sampled."""
    (report,) = reports_of("recorded_023_tp2")
    most = report.ranks[0].kv.max_num_batched_tokens
    assert most is not None

    def said(prompt_tokens: int) -> str:
        request = RequestRow("a", prompt_tokens=prompt_tokens)
        ranks = [replace(rank, requests=[request]) for rank in report.ranks]
        return " ".join(drawn(FirstScreen([replace(report, ranks=ranks)])).split())

    assert "estimated: no step of full size was run" in said(24)
    assert "estimated: no step of full size was run" not in said(most)


def test_a_part_of_the_peak_that_was_not_seen_leaves_nothing_to_offer() -> None:
    """A plan that stops at the KV plan has captured no graph: its headroom is no KV cache."""
    (report,) = reports_of("recorded_023_tp2")
    assert more_kv_cache(report.ranks) is not None
    unseen = []
    for rank in (replace(rank, samples=[]) for rank in report.ranks):
        held = [
            replace(item, bytes=None) if item.name == "late_torch" else item
            for item in rank.budget.held_at_peak
        ]
        unseen.append(replace(rank, budget=replace(rank.budget, held_at_peak=held)))
    assert more_kv_cache(unseen) is None
    planned = replace(report, ranks=unseen, run=replace(report.run, mode="plan", until="kv"))
    text = drawn(FirstScreen([planned]))
    assert "plan with --until ready" in text
    assert "graphs, warm-up and steps were not run" in " ".join(text.split())


FAILURE = NamedFailure(
    kind="graph-capture-oom",
    is_memory=True,
    title="graphs took the last memory",
    confidence="certain",
    evidence=[EvidenceLine(12, "NPU out of memory. " + "x" * 2_000)],
    cures=[
        Cure("without graphs nothing is captured", argument="--enforce-eager", enough="checked"),
    ],
)


def test_a_failure_comes_first_and_once() -> None:
    (report,) = reports_of("recorded_oom")
    found = FirstScreen([replace(report, failure=FAILURE)], "run")
    text = drawn(found)
    assert text.splitlines()[1] == "FAILED   graphs took the last memory"
    assert "asked for 22 MiB, 4 MiB free on the device, short by 18 MiB, in graph_capture" in text
    assert text.count("graphs took the last memory") == 1
    assert text.count("--enforce-eager") == 1
    assert is_short(found, 80)
    assert text.index("Device when the allocation failed") < text.index("What to do")


def test_a_failure_by_the_hooks_alone() -> None:
    assert "FAILED" in drawn(FirstScreen([oom_report()], "run"))


def test_a_short_log_says_what_it_does_not_tell() -> None:
    text = drawn(screen_of("logs/baidu__vLLM-Kunlun-330.log"))
    assert len(text.splitlines()) < 10
    assert "not in this log  release, device total, weights, peak activation" in text


def test_several_starts_are_a_table_and_the_last_of_them() -> None:
    text = drawn(screen_of("logs/two_methods_910b_tp2.md"))
    assert text.startswith("5 engine starts\n")
    assert "another one: memprof explain logs/two_methods_910b_tp2.md#1" in text


def test_a_terminal_without_blocks() -> None:
    text = drawn(screen_of("graph_tp2"), 80, encoding="ascii")
    assert text.isascii()
    assert "####" in text


def test_a_plan_says_whether_it_fits() -> None:
    (report,) = reports_of("plan_tp2")
    found = FirstScreen([report], "run", serve="vllm serve model --tensor-parallel-size 2")
    lines = drawn(found).splitlines()
    assert lines[1].startswith("FITS ")
    assert any(line.startswith("serve it  vllm serve model") for line in lines)
    assert any(line.startswith("accuracy ") for line in lines)
    refused = replace(report, run=replace(report.run, status="failed", exit_reason="no room"))
    assert "FAILED" in drawn(FirstScreen([refused], "run"))


def test_figures_of_one_replica_are_said_to_be_that() -> None:
    (plan,), (served,) = reports_of("plan_tp2"), reports_of("recorded_023_tp2")
    command = [*plan.run.engine_command, "-dp", "4"]
    planned = replace(plan, run=replace(plan.run, engine_command=command))
    rows = [replace(rank, dp_rank=at) for at, rank in enumerate(served.ranks)]
    for report, said in (
        (planned, ", in each of 4 replicas"),
        (replace(served, ranks=rows), ", in each of 2 replicas"),
        (plan, None),
        (served, None),
    ):
        line = drawn(FirstScreen([report], "run"), 120).splitlines()[1]
        assert " requests of " in line
        assert line.endswith(said) if said else "replicas" not in line


def test_the_limit_is_by_width() -> None:
    assert [most_lines(width) for width in (40, 80, 99, 100, 200)] == [55, 55, 55, 45, 45]


def test_no_ranks() -> None:
    report = build_report(replace(recorded("graph_tp2"), processes=[]))
    assert "no KV cache was sized" in drawn(FirstScreen([report], "run"))


def shares_of(name: str) -> dict[str, float]:
    (run,) = read_log(f"tests/data/logs/{name}")
    rank = build_report(run).ranks[0]
    divided = divided_device(rank)
    assert divided is not None
    assert sum(row.bytes for row in divided.owners) == divided.total_bytes
    return {row.name: round(row.bytes / (1 << 30), 2) for row in divided.owners}


@pytest.mark.parametrize(
    ("name", "in_use"), [("e3_neighbour", 60.96 - 42.61), ("310p_neighbour", 43.24 - 24.24)]
)
def test_what_was_in_use_before_the_start_has_a_row(name: str, in_use: float) -> None:
    shares = shares_of(f"made/{name}.log")
    assert shares["in_use"] == pytest.approx(in_use, abs=0.01)
    (run,) = read_log(f"tests/data/logs/made/{name}.log")
    text = drawn(FirstScreen([build_report(run)]))
    assert "in use before the start" in text
    assert "free, or not in the log" in text


def test_a_term_that_has_it_in_it_stands_alone() -> None:
    assert shares_of("made/e3_as_0.18.log").keys().isdisjoint({"in_use", "initial_non_torch"})


def test_graph_memory_that_was_measured_beats_its_estimate() -> None:
    """0.1 GiB (actual), 0.58 GiB (estimated)"""
    shares = shares_of("wtdcode__vllm-backport-34.log")
    assert shares["graph"] == 0.1
    assert "graph_estimate" not in shares


def test_one_size_of_the_kv_cache_is_suggested() -> None:
    run = read_log("tests/data/logs/two_methods_910b_tp2.md")[2]
    text = drawn(FirstScreen([build_report(run)]))
    assert text.count("--kv-cache-memory-bytes") == 1
