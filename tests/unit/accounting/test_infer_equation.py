"""Logs whose release's equation does not close, and what their lines leave unknown."""

from __future__ import annotations

import re

import pytest

from tests.support.render import table
from tests.unit.accounting.builders import DATA, gib
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.budgets import fits_request
from vllm_memprof.accounting.budget.equations import divisor_of, form_of, select
from vllm_memprof.accounting.budget.infer_equation import Printed, device_by_total, search
from vllm_memprof.accounting.budget.kv import tokens_for_bytes
from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.units import GIB

MADE = DATA / "logs" / "made"


def explained(name: str) -> list[Report]:
    return [build_report(run) for run in read_log(str(MADE / name))]


def found(report: Report, name: str) -> list[Finding]:
    return [one for one in report.findings if one.id == name]


@pytest.mark.parametrize("path", sorted(MADE.iterdir()), ids=lambda path: path.name)
def test_every_log_says_that_it_was_made(path) -> None:
    assert path.read_text().startswith("# Written by hand")


# -- the equation that closes ---------------------------------------------------------------


def test_the_only_equation_that_closes_is_used_and_the_others_are_named() -> None:
    (report,) = explained("e3_as_0.18.log")
    budget = report.ranks[0].budget
    assert (budget.equation, budget.balanced) == ("E3", True)
    assert "it alone gives the printed KV cache" in (budget.chosen_by or "")
    given = next(one for one in budget.tried if one.given)
    assert given.equation == "E4"
    assert round((given.residual_bytes or 0) / GIB, 2) == -0.51  # cleared, which E4 leaves out
    (finding,) = found(report, "equation-unbalanced")
    assert finding.severity == "warning"
    assert "fit equation E3 (0.15.0rc1 to before 0.18.0rc1), not E4" in finding.title
    assert "off by -0.5100" in finding.evidence
    assert "leaves 0.51 GiB for graphs, estimated, which the log does not give" in finding.evidence


def test_two_that_close_leave_the_release_s_equation_and_say_so() -> None:
    (report,) = explained("two_equations_fit.log")
    budget = report.ranks[0].budget
    assert (budget.equation, budget.balanced) == ("E4", False)
    assert [one.equation for one in budget.tried if one.closes] == ["E3", "E2"]
    (finding,) = found(report, "equation-unbalanced")
    assert "rounding does not tell which of 2 it is: E3 (" in finding.title
    assert ", E2 (" in finding.title


def test_none_that_closes_says_how_far_off_they_are() -> None:
    reports = [
        build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md"))
    ]
    (finding,) = found(reports[0], "equation-unbalanced")
    assert "the lines are of two runs, or of a different release" in finding.title
    assert "E2 (0.9.1rc2 to before 0.15.0rc1): engine 43.40 GiB, recomputed 43.54" in (
        finding.evidence
    )


def test_an_equation_that_closes_is_not_searched_for_another() -> None:
    row, _ = select("vllm-ascend", "0.23.0")
    assert row is not None
    figures = {
        "requested_bytes": 100,
        "weights_bytes": 40,
        "peak_activation_bytes": 10,
        "non_torch_increase_bytes": 5,
        "kv_cache_bytes": 45,
    }
    assert not search("vllm-ascend", row, [Printed(figures, {})]).tried
    off = search("vllm-ascend", row, [Printed({**figures, "kv_cache_bytes": 44}, {})])
    assert off.equation is row
    assert [one.residual_bytes for one in off.tried[0] if one.given] == [-1]


def test_one_rank_that_does_not_close_rules_an_equation_out() -> None:
    figures = {
        "requested_bytes": 100,
        "weights_bytes": 40,
        "peak_activation_bytes": 10,
        "non_torch_increase_bytes": 5,
        "kv_cache_bytes": 45,
    }
    both = [Printed(figures, {}), Printed({**figures, "kv_cache_bytes": 30}, {})]
    assert search("vllm-ascend", None, both).equation is None
    alone = search("vllm-ascend", None, both[:1])
    assert alone.equation is not None
    assert alone.equation.id == "E4"
    assert "it alone gives the printed KV cache" in (alone.chosen_by or "")


# -- 310P -----------------------------------------------------------------------------------


def test_a_310p_is_known_by_its_total_and_its_halved_kv_cache() -> None:
    """(38.92 - 15.29 - 1.95 - 0.31 - cleared) / 2 = 10.16: 1.05 GiB cleared, a context there."""
    (report,) = explained("310p_0.20.log")
    budget = report.ranks[0].budget
    assert budget.equation == "E4p"
    assert "device total, which is that of an Ascend 310P" in (budget.chosen_by or "")
    name, size = budget.implied_term(divisor_of("E4p")) or ("", 0)
    assert (name, round(size / GIB, 2)) == ("cleared", 1.05)
    (halved,) = found(report, "budget-halved")
    assert "leaves 1.05 GiB" in halved.evidence
    assert not found(report, "co-tenant")  # on the 910B more than 1 GiB would be another process
    assert not found(report, "equation-unbalanced")


def test_a_device_of_43_gib_whose_kv_cache_is_not_halved_is_none(tmp_path) -> None:
    whole = (MADE / "310p_0.20.log").read_text().replace("10.16 GiB", "21.37 GiB")
    path = tmp_path / "whole.log"
    path.write_text(whole)
    (report,) = [build_report(run) for run in read_log(str(path))]
    assert report.ranks[0].budget.equation == "E4"
    assert report.ranks[0].budget.balanced
    assert not found(report, "budget-halved")


def test_the_form_of_the_lines_outranks_the_device(tmp_path) -> None:
    """Releases before 0.18 have E2 on a 310P as well. (vllm-project/vllm-ascend#3479)"""
    path = tmp_path / "310p.log"
    path.write_text(
        "INFO 10-15 16:32:11 [model_runner_v1.py:2661] Loading model weights took 7.5553 GB\n"
        "INFO 10-15 16:32:15 [worker_v1.py:234] Available memory: 26954181529, total memory: 46431260672\n"
        "INFO 10-15 16:32:15 [kv_cache_utils.py:1087] GPU KV cache size: 182,784 tokens\n"
    )
    (report,) = [build_report(run) for run in read_log(str(path))]
    assert report.ranks[0].budget.equation == "E2"
    assert not found(report, "budget-halved")


@pytest.mark.parametrize(
    ("engine", "total", "chip"),
    [
        ("vllm-ascend", gib(43.24), "Ascend310P"),
        ("vllm-ascend", gib(42.67), "Ascend310P"),
        ("vllm-ascend", gib(60.96), None),
        ("vllm-ascend", None, None),
        ("vllm", gib(43.24), None),
    ],
)
def test_totals(engine: str, total: int | None, chip: str | None) -> None:
    assert device_by_total(engine, [Printed({"device_total_bytes": total}, {})]) == chip


def test_what_a_310p_does_not_charge_is_worth_half_of_it() -> None:
    (report,) = explained("310p_neighbour.log")
    (neighbour,) = found(report, "co-tenant")
    assert "takes half of that from the KV cache" in neighbour.title
    assert neighbour.action == (
        "--gpu-memory-utilization 0.5604 adds 1.31 GiB of KV cache, computed, not tried; no "
        "utilization makes up for all of it: above that the engine refuses to start; move the "
        "other process to a different device"
    )


# -- suggestions that the engine would refuse -----------------------------------------------


def test_a_utilization_that_would_be_refused_is_not_suggested() -> None:
    """0.5 + 18.35 / 60.96 = 0.80 of the device, of which 0.69 is free: it gives a part."""
    (report,) = explained("e3_neighbour.log")
    (neighbour,) = found(report, "co-tenant")
    suggested = re.findall(r"--gpu-memory-utilization (0\.\d+)", neighbour.action)
    assert suggested == ["0.6988"]
    assert neighbour.action.startswith(
        f"--gpu-memory-utilization 0.6988 adds {(0.6988 - 0.5) * 60.96:.2f} GiB of KV cache"
    )
    assert "above that the engine refuses to start" in neighbour.action
    assert "upgrade to vllm-ascend 0.18 or later" in neighbour.action


def test_e2_names_the_first_instance() -> None:
    first, second = explained("e2_second_instance.log")
    assert not first.findings
    (negative,) = found(second, "negative-kv")
    assert "equation E2 subtracts what other processes use on the device" in negative.action
    assert "move the other process to a different device, or upgrade" in negative.action
    row = form_of("E2")
    assert row is not None
    assert (row.subtracts_neighbours, row.checks_free) == (True, False)


# -- an estimate of graphs that was charged and not printed ---------------------------------


def test_an_estimate_that_is_not_printed_leaves_the_graphs_unknown() -> None:
    (report,) = explained("e6_estimate_not_printed.log")
    first, second = report.ranks
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    assert first.budget.kv_cache_bytes == second.budget.kv_cache_bytes
    assert first.budget.balanced
    assert second.budget.balanced
    assert [row.name for row in first.budget.terms if row.subtracted] == [
        "consumed",
        "printed_peak",
    ]
    graphs = [
        next(item for item in rank.budget.not_subtracted if item.name == "graph")
        for rank in report.ranks
    ]
    assert [item.bytes for item in graphs] == [None, 0]
    assert graphs[0].reason == "the estimate that the equation subtracts is not known"
    assert graphs[0].required
    assert not found(report, "graph-not-charged")
    assert "NOT MEASURED: graph memory (the estimate" in " ".join(table(report, 200).split())


def test_graphs_of_an_estimate_that_is_switched_off_are_not_charged(tmp_path) -> None:
    text = (MADE / "e6_estimate_not_printed.log").read_text()
    off = (
        "(Worker_TP0 pid=11) WARNING [gpu_worker.py:1] CUDA graph memory profiling is disabled "
        "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).\n"
    )
    head, rest = text.split("(Worker_TP0 pid=11) INFO", 1)
    path = tmp_path / "off.log"
    path.write_text(f"{head}{off}(Worker_TP0 pid=11) INFO{rest}")
    (report,) = [build_report(run) for run in read_log(str(path))]
    assert report.ranks[0].budget.balanced
    (graphs,) = [one for one in found(report, "graph-not-charged") if one.label == "TP0"]
    assert graphs.bytes == gib(0.5)


# -- bytes per token ------------------------------------------------------------------------


def test_the_bytes_per_token_of_latent_attention() -> None:
    (report,) = explained("mla.log")
    assert report.ranks[0].kv.bytes_per_token == 27 * 576 * 2
    said = " ".join(table(report, 200).split())
    assert "bytes per token: 31,094 to 31,112 by the rounding of the log" in said
    assert "block size 128: the engine's default, the log does not print it" in said


# -- what a report of a log says of itself --------------------------------------------------


def test_an_item_that_e4p_leaves_out_costs_half_of_it(tmp_path) -> None:
    head, grant, rest = (
        (MADE / "310p_0.20.log")
        .read_text()
        .partition("(EngineCore pid=1) INFO 01-01 00:00:00 [worker.py:1] Available")
    )
    path = tmp_path / "persistent.log"
    path.write_text(
        f"{head}torch_peak before profiling is 16.2859 G\n{grant}{rest}"
        "(EngineCore pid=1) INFO [kv_cache_utils.py:1] GPU KV cache size: 1,578,240 tokens\n"
    )
    (report,) = [build_report(run) for run in read_log(str(path))]
    rank = report.ranks[0]
    item = next(each for each in rank.budget.not_subtracted if each.name == "persistent_torch")
    assert round((item.bytes or 0) / GIB, 2) == 1.0
    half = tokens_for_bytes(rank.kv, (item.bytes or 0) // 2)
    assert half
    assert item.kv_tokens == half
    (finding,) = found(report, "uncharged-persistent-torch")
    assert finding.kv_tokens == half
    items = [each for each in rank.budget.not_subtracted if each.name == "persistent_torch"]
    assert fits_request(gib(10), items, 2) == gib(10) - (item.bytes or 0) // 2


def test_a_start_under_a_later_heading_says_whose_command_it_shows() -> None:
    reports = [
        build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md"))
    ]
    said = [[note for note in report.run.notes if "stands under" in note] for report in reports]
    assert [len(notes) for notes in said] == [0, 1, 1, 1, 1]
    assert said[1] == [
        'it stands under "gpu_xxx = 0.9 时"; the command is the last one above that heading'
    ]


def test_a_log_without_a_release_says_which_release_ignores_a_fixed_size() -> None:
    reports = [
        build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md"))
    ]
    said = " ".join(table(reports[2], 200).split())
    assert (
        "the release is not known: vllm-ascend 0.18.0rc1, 0.18.0 ignores --kv-cache-memory-bytes"
        in said
    )
    (named,) = explained("mla.log")
    assert "ignores --kv-cache-memory-bytes" not in table(named, 200)


def test_310p_names_what_it_may_have_subtracted() -> None:
    (report,) = [
        build_report(run)
        for run in read_log(str(DATA / "logs" / "vllm-project__vllm-ascend-14004.log"))
    ]
    (halved,) = found(report, "budget-halved")
    assert halved.action == (
        "if other processes are on the device: equation E4p subtracts what they use; move the other "
        "process to a different device"
    )


def test_the_table_of_a_310p_adds_up(tmp_path) -> None:
    """10.16 - 1.00 - 0.21 + 0.61 = 9.55: half of what would be subtracted is kept anyway."""
    head, grant, rest = (
        (MADE / "310p_0.20.log")
        .read_text()
        .partition("(EngineCore pid=1) INFO 01-01 00:00:00 [worker.py:1] Available")
    )
    debug = (
        "torch_peak before profiling is 16.2859 G\n"
        "non_torch_memory after profiling, before empty_cache() is 1.36 G\n"
        "torch_memory after profiling, after empty_cache() is 16.50 G\n"
    )
    path = tmp_path / "debug.log"
    path.write_text(f"{head}{debug}{grant}{rest}")
    (report,) = [build_report(run) for run in read_log(str(path))]
    budget = report.ranks[0].budget
    assert (budget.equation, budget.balanced) == ("E4p", True)
    items = sum(item.bytes or 0 for item in budget.not_subtracted)
    assert round(items / GIB, 2) == 1.21
    assert budget.fits_request_bytes == (budget.kv_cache_bytes or 0) - items // 2
    lines = [line.split() for line in table(report, 120).splitlines()]
    (row,) = [line for line in lines if line[:5] == ["+", "half", "kept", "for", "operator"]]
    assert row[-2] == f"{items - items // 2:,}"


def test_e2_names_what_it_subtracts_of_a_neighbour(tmp_path) -> None:
    """#7308: at 0.3 the second instance gets 0; at 0.6 as much as the first, and it starts."""
    log = (
        "vllm serve some/model --gpu-memory-utilization 0.6\n"
        "INFO [core.py:1] Initializing a V1 LLM engine (v0.14.0) with config: model='some/model', "
        "max_seq_len=4096, \nINFO platform plugin ascend is activated\n"
        "results of real profiling:\npeak_memory after profiling is 3.00 G\n"
        "non_torch_memory after profiling is {used} G\n"
        "Available memory: {kv}, total memory: 65455301591\n"
    )
    path = tmp_path / "second.log"
    path.write_text(log.format(used="19.50", kv=round(14.076 * GIB)))
    (report,) = [build_report(run) for run in read_log(str(path))]
    (neighbour,) = found(report, "co-tenant")
    assert "Equation E2 subtracts all that is in use on the device" in neighbour.title
    assert "19.50 GiB" in neighbour.evidence
    assert neighbour.action.startswith("move the other process to a different device, or upgrade")
    path.write_text(log.format(used="1.21", kv=round(32.366 * GIB)))
    (alone,) = [build_report(run) for run in read_log(str(path))]
    assert not found(alone, "co-tenant")
