"""The verdict on a device against what happens there: the engine is driven to its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.verdict_cases import CASES, EXCEEDS, FITS, Case, Place, run_cases, table

pytestmark = pytest.mark.sim
#: One of each verdict, on the set-up that starts fastest.
FEW = [case for case in CASES if case.setup == "text, eager" and case.utilization in (0.5, 0.9)]


def hold(cases: list[Case], folder: Path) -> None:
    outcomes = run_cases(cases, Place(folder, (), 600))
    assert [each.verdict for each in outcomes] == [case.wanted for case in cases], table(outcomes)
    assert all(each.right for each in outcomes), table(outcomes)


@pytest.mark.timeout(900)
def test_what_fits_is_served_and_what_does_not_runs_out_of_memory(
    sim_stack: str, tmp_path: Path
) -> None:
    assert {case.wanted for case in FEW} == {FITS, EXCEEDS}
    hold(FEW, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_twenty_cases(sim_stack: str, tmp_path: Path) -> None:
    wanted = [case.wanted for case in CASES]
    assert len(CASES) == 20
    assert min(wanted.count(FITS), wanted.count(EXCEEDS)) >= 5
    hold(list(CASES), tmp_path)
