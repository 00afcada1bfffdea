"""Figures that can be limited: those of the table of quantities, and why one is not known."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.readings.quantities import QUANTITIES
from vllm_memprof.check.limits import FIGURES, KEYS, limit_figure, read_figure


def test_a_figure_of_the_table_has_its_title_and_reach() -> None:
    shared = set(FIGURES) & set(QUANTITIES)
    assert shared == {"weights", "peak_activation", "non_torch", "graph"}
    for name in shared:
        row = QUANTITIES[name]
        assert (FIGURES[name].title, FIGURES[name].device_wide) == (row.title, row.device_wide)


def test_every_key_has_a_figure() -> None:
    limited = [key.figure for key in KEYS]
    assert all(figure in limited for figure in FIGURES.values())


def test_a_figure_without_a_reading_has_the_reason_of_its_quantity() -> None:
    run = recorded("recorded_tp2")
    bare = [replace(process, figures={}, phases=[]) for process in run.processes]
    report = replace(build_report(replace(run, processes=bare)), not_measured=[])
    figure = limit_figure("persistent_torch", {"phase": "profile_run"})
    readings = read_figure(report, figure)
    assert {reading.value for reading in readings} == {None}
    assert {reading.reason for reading in readings} == {"no profile run was recorded"}
