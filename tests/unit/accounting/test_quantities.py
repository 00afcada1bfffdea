"""One table of quantities: the same figure in a report, a comparison, a check and a sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import TOTAL, gib, process, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.budget.equations import EQUATIONS, form_of
from vllm_memprof.accounting.readings.quantities import QUANTITIES, StartupReadings
from vllm_memprof.check.limits import limit_figure, read_figure
from vllm_memprof.compare.causes import Cause
from vllm_memprof.compare.diff import diff_reports
from vllm_memprof.plans.model import Plan, plan_row
from vllm_memprof.record.loader import Run

OWN, NEIGHBOUR = 375_809_639, 375_809_638
LISTED = {"77": NEIGHBOUR}


def run_beside(
    version: str, listed: dict[str, int] | None = LISTED, neighbour: int = NEIGHBOUR
) -> Run:
    """A worker whose device another process shares; ``listed`` is the driver's list of others."""
    start, cleared, increase = OWN + neighbour, gib(0.16), gib(0.56)
    weights, persistent, peak, idle = gib(9.19), gib(0.26), gib(3.85), gib(0.30)
    before = weights + persistent
    others: dict[str, Any] = {}
    if listed is not None:
        others = {"other_processes_bytes": sum(listed.values()), "other_processes": listed}

    def at(reserved: int, non_torch: int, highest: int) -> Any:
        return snapshot(
            device_total_bytes=TOTAL,
            device_free_bytes=TOTAL - reserved - non_torch,
            allocated_bytes=0 if not reserved else before,
            allocated_peak_bytes=highest,
            reserved_bytes=reserved,
            non_torch_bytes=non_torch,
            **others,
        )

    first = at(0, start, 0)
    low, high = (
        at(before + idle, start + increase, before + peak),
        at(before + peak + gib(5.5), start + increase + cleared, before + peak),
    )
    phases = [
        span("device_init", first, first),
        span("profile_run", at(before + idle, start, before), low, order=1),
        span("empty_cache", high, low, order=2, parent=1, depth=1),
    ]
    figures = {
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": 0.95,
        "initial_free_bytes": TOTAL - start,
        "initial_non_torch_bytes": start,
        "weights_bytes": weights,
        "peak_activation_bytes": peak,
        "non_torch_increase_bytes": increase,
        "profile_before_allocated_peak_bytes": before,
        "profile_after_allocated_peak_bytes": before + peak,
        "profile_after_non_torch_bytes": start + increase,
        "profile_after_free_bytes": TOTAL - before - idle - start - increase,
        "profile_after_allocated_bytes": before,
    }
    run = run_of(process(phases, figures), engine="vllm-ascend", engine_version=version)
    granted = build_report(run).ranks[0].budget.kv_cache_bytes
    worker = replace(run.processes[0], figures={**figures, "kv_cache_bytes": granted})
    return replace(run, processes=[worker])


def of_report(report: Report, name: str) -> tuple[int | None, str | None]:
    items = report.ranks[0].budget.not_subtracted
    return next((item.bytes, item.reason) for item in items if item.name == name)


def cause_of(a: Report, b: Report, name: str) -> Cause:
    served = diff_reports(a, b).served
    assert served is not None
    assert served.causes_bytes == served.difference_bytes
    return next(cause for cause in served.causes if name in cause.names)


def of_check(report: Report, name: str) -> int | None:
    return read_figure(report, limit_figure(name, {"phase": "device_init"}))[0].value


def test_what_a_neighbour_holds_is_taken_off_in_every_command() -> None:
    """751,619,277 bytes were in use at the start; 375,809,638 of them are another process's."""
    old_run, new_run = run_beside("0.13.0"), run_beside("0.23.0")
    old, new = build_report(old_run), build_report(new_run)
    # report
    assert of_report(new, "initial_non_torch") == (OWN, None)
    # diff: E2 subtracts what was in use, the neighbour's part as a quantity of its own
    cause = cause_of(old, new, "initial_non_torch")
    assert (cause.names, cause.bytes, cause.kind) == (("initial_non_torch",), OWN, "method")
    assert (cause.a.subtracted_bytes, cause.a.held_bytes, cause.b.held_bytes) == (OWN, OWN, OWN)
    other = cause_of(old, new, "other_processes_at_start")
    assert (other.names, other.bytes) == (("other_processes_at_start",), NEIGHBOUR)
    assert (other.a.subtracted_bytes, other.b.held_bytes) == (NEIGHBOUR, NEIGHBOUR)
    # check
    assert of_check(old, "initial_non_torch") == of_check(new, "initial_non_torch") == OWN
    # sweep: the KV cache less all that no term subtracts
    row = plan_row(new_run, new, Plan("m", []))
    assert row.kv_cache_bytes is not None
    assert row.fits_request_bytes is not None
    rest = [
        item.bytes or 0
        for item in new.ranks[0].budget.not_subtracted
        if item.name != "initial_non_torch"
    ]
    assert row.kv_cache_bytes - row.fits_request_bytes - sum(rest) == OWN


@pytest.mark.parametrize(
    ("listed", "neighbour"), [(None, gib(12)), ({"77": gib(2)}, gib(12)), ({}, gib(1))]
)
def test_a_neighbour_that_cannot_be_told_apart_makes_it_unknown_in_every_command(
    listed: dict[str, int] | None, neighbour: int
) -> None:
    old_run, new_run = (run_beside(version, listed, neighbour) for version in ("0.13.0", "0.23.0"))
    old, new = build_report(old_run), build_report(new_run)
    size, reason = of_report(new, "initial_non_torch")
    assert size is None
    assert "cannot be told apart" in (reason or "")
    together = cause_of(old, new, "initial_non_torch")
    assert together.names == ("initial_non_torch", "other_processes_at_start")
    assert together.bytes == together.a.subtracted_bytes == OWN + neighbour
    assert together.b.held_bytes is None
    figure = limit_figure("initial_non_torch", {"phase": "device_init"})
    assert read_figure(new, figure)[0].reason == reason
    assert of_check(old, "initial_non_torch") is None
    assert plan_row(new_run, new, Plan("m", [])).fits_request_bytes is None


def test_a_neighbour_is_none_of_the_increase() -> None:
    """It holds the same all the time: what the run took since the start is not changed."""
    for listed in (LISTED, None):
        report = build_report(run_beside("0.23.0", listed))
        assert report.ranks[0].readings["non_torch"].bytes == gib(0.56)


def test_where_the_driver_lists_nobody_little_memory_in_use_is_the_run_s_own() -> None:
    read = build_report(run_beside("0.13.0", None, 0)).ranks[0].readings
    assert (read["initial_non_torch"].bytes, read["other_processes_at_start"].bytes) == (OWN, 0)


def test_every_term_and_every_item_of_an_equation_is_in_the_table() -> None:
    for row in EQUATIONS:
        names = [name for term in row.terms for name in (term.name, *term.parts)]
        assert {*names, *row.not_subtracted} <= set(QUANTITIES)
        assert all(QUANTITIES[name].read is not None for name in row.not_subtracted)


def test_what_all_rows_of_an_id_have_in_common() -> None:
    for row in EQUATIONS:
        newest = form_of(row.id)
        assert newest is not None
        for name in ("divisor", "subtracts_neighbours", "checks_free"):
            assert getattr(row, name) == getattr(newest, name), name
        for term in row.terms:
            others = [other.parts for other in newest.terms if other.name == term.name]
            assert others in ([], [term.parts])


def test_what_cannot_be_read_has_a_reason() -> None:
    for row in QUANTITIES.values():
        found = row.reading(StartupReadings([], {}))
        assert found.bytes is None
        assert found.reason


@pytest.mark.parametrize("grows_in", ["graph_capture", "warm_up"])
def test_a_neighbour_that_comes_later_is_no_growth_of_this_process(grows_in: str) -> None:
    """It takes 1 GiB during the graph capture, or after it; this process takes the same anyway."""
    alone, beside = (_captured(grows_in, size) for size in (0, gib(1)))
    for name in ("graph", "late_non_torch"):
        assert of_report(beside, name) == of_report(alone, name), name
    assert of_report(alone, "graph") == (gib(0.3), None)
    assert of_report(alone, "late_non_torch") == (gib(0.05), None)


def test_the_parts_of_captured_graphs_add_up_to_them() -> None:
    report = _captured("warm_up", 0)
    item = next(item for item in report.ranks[0].budget.not_subtracted if item.name == "graph")
    sizes = {part.name: part.bytes for part in item.parts}
    assert sizes == {"torch": gib(0.1), "rest": gib(0.3) - gib(0.1)}
    assert sum(sizes.values()) == item.bytes
    assert [part.how for part in item.parts] == ["measured", "derived"]


def _captured(grows_in: str, neighbour: int) -> Report:
    """A run that captures graphs of 0.3 GiB, and takes 0.05 GiB outside torch in its warm-up."""
    run = run_beside("0.23.0")
    worker = run.processes[0]
    last = worker.phases[-1].after
    assert last is not None
    assert last.reserved_bytes is not None
    assert last.non_torch_bytes is not None
    reserved, non_torch = last.reserved_bytes, last.non_torch_bytes

    def at(torch: int, outside: int, more: int) -> Any:
        used = reserved + torch + non_torch + outside + more
        return snapshot(
            device_total_bytes=TOTAL,
            device_free_bytes=TOTAL - used,
            reserved_bytes=reserved + torch,
            non_torch_bytes=non_torch + outside + more,
            other_processes_bytes=NEIGHBOUR + more,
        )

    in_capture = neighbour if grows_in == "graph_capture" else 0
    cleared = gib(0.16)  # taken again by the warm-up
    phases = [
        *worker.phases,
        span("warm_up", at(0, 0, 0), at(gib(0.1), gib(0.25) + cleared, neighbour), order=3),
        span(
            "graph_capture",
            at(0, 0, 0),
            at(gib(0.1), gib(0.3) - gib(0.1), in_capture),
            order=4,
            parent=3,
            depth=1,
        ),
    ]
    figures = {**worker.figures, "graph_bytes": gib(0.3) + in_capture}
    return build_report(replace(run, processes=[replace(worker, phases=phases, figures=figures)]))
