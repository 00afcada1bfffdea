"""What the views and the metrics get of a report, and of one that is made again while it serves."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.served import leaking
from vllm_memprof.accounting import build_report
from vllm_memprof.cli.live import rank_budgets, read_budgets, refresher
from vllm_memprof.record.spans import UNEXPLAINED
from vllm_memprof.sources import build_run

DATA = Path(__file__).parents[2] / "data"


def test_figures_of_a_rank_are_those_of_its_report() -> None:
    first, second = read_budgets(DATA / "graph_tp2")
    assert (first.label, second.label) == ("TP0", "TP1")
    assert first.kv_cache_granted_bytes is not None
    served_with = build_run(DATA / "graph_tp2").ranks[0].kv.planned_bytes
    assert first.headroom_bytes == (first.kv_cache_fits_device_bytes or 0) - (served_with or 0)
    assert sum(first.owners.values()) == 65_452_113_920  # the device
    assert UNEXPLAINED in first.owners
    assert first.growth is None  # not sampled: nothing is known of it


def test_a_run_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert read_budgets(tmp_path) == []


def test_newer_figures_are_those_of_a_report_made_in_another_process() -> None:
    folder = DATA / "serving" / "tp2"
    (made,) = refresher(folder, sampled=True)
    printed = subprocess.run(made._command, capture_output=True, check=True, timeout=120).stdout
    assert made._read(printed) == read_budgets(folder)
    assert len(read_budgets(folder)) == 2
    assert refresher(folder, sampled=False) == []


def test_what_grows_is_named_and_what_does_not_is_not() -> None:
    (budget,) = rank_budgets(build_report(leaking()))
    assert budget.growth is not None
    assert {each.owner for each in budget.growth} == {"allocated"}
    (grows,) = budget.growth
    assert grows.bytes_per_hour is not None
    assert grows.bytes_per_hour > 0
