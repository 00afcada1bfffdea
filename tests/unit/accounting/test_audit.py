"""The engine's figures beside memprof's own readings of the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.mutations import figures_of, with_its_grant, workers
from tests.unit.accounting.builders import DATA, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.equations import EQUATIONS
from vllm_memprof.accounting.model import MOST_TOLERANCE_BYTES, Reading, Report
from vllm_memprof.accounting.readings.audit import audit
from vllm_memprof.accounting.readings.startup import LOAD_SLACK_BYTES, Moments
from vllm_memprof.engines.equation import Equation, Figures
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.loader import Run
from vllm_memprof.record.spans import Span
from vllm_memprof.units import GIB, MIB

ENGINE_RUNS = ("recorded_013_tp2", "recorded_023_tp2", "recorded_tiny_tp2", "recorded_tp1")


def audited(
    row: Equation, figures: Figures, spans: list[Span], simulated: bool = False
) -> list[Reading]:
    return audit(row, figures, Moments(spans, figures, simulated, row))


def rows_of(report: Report, rank: int = 0) -> dict[str, Reading]:
    return {row.name: row for row in report.ranks[rank].budget.audit}


def equation(name: str, release: str) -> Equation:
    return next(row for row in EQUATIONS if row.id == name and release in row.read_in)


@pytest.mark.parametrize("name", ENGINE_RUNS)
def test_a_run_of_the_real_engine_agrees_to_the_byte(name: str) -> None:
    for rank in build_report(recorded(name)).ranks:
        compared = [row for row in rank.budget.audit if row.difference_bytes is not None]
        assert len(compared) >= 4
        assert {row.difference_bytes for row in compared} == {0}
        assert all(row.agrees for row in compared)


def test_a_row_says_what_it_has() -> None:
    report = build_report(recorded("recorded_023_tp2"))
    data = to_json(report)["ranks"][0]["budget"]["audit"]
    wanted = {"name", "engine_bytes", "bytes", "difference_bytes", "tolerance_bytes"}
    assert all(wanted <= set(row) for row in data)
    terms = [row.name for row in report.ranks[0].budget.terms]
    assert [row["name"] for row in data][: len(terms) + 1] == ["requested", *terms]
    assert data[-1]["name"] == "kv_cache"
    weights = next(row for row in data if row["name"] == "weights")
    assert (weights["tolerance_bytes"], weights["how"]) == (LOAD_SLACK_BYTES, "derived")
    # free and non-torch of a simulated device are the profile's
    assert rows_of(report)["non_torch"].how == rows_of(report)["kv_cache"].how == "modelled"


def test_the_engine_halves_its_peak_and_its_residual_stays_0() -> None:
    """The audit alone tells, with the bytes and tokens that the KV cache has too many."""
    run = recorded("recorded_023_tp2")
    (halved,) = (
        each
        for each in figures_of(run)
        if (each.what, each.change) == ("figure peak_activation_bytes", "halved")
    )
    figures = workers(halved.run)[0].figures
    wrong = int(figures["peak_activation_bytes"] or 0)  # half of it
    granted = int(figures["kv_cache_bytes"] or 0) + wrong
    report = build_report(with_its_grant(halved, granted).run)
    assert report.ranks[0].budget.residual_bytes == 0
    (found,) = (one for one in report.findings if one.id == "engine-term-off")
    assert (found.severity, found.label, found.bytes) == ("warning", "TP0", wrong)
    assert found.kv_tokens is not None
    assert found.kv_tokens > 30_000
    assert "peak activation: engine 2.1104 GiB, read 4.2207 GiB" in found.evidence


def test_what_the_engine_keeps_no_figure_of_stands_in_the_equation() -> None:
    """E2 reads and forgets: the granted KV cache is what memprof's readings are compared with."""
    rows = rows_of(build_report(recorded("recorded_013_tp2")))
    assert rows["peak_allocated"].engine_bytes is None
    assert rows["peak_allocated"].bytes == 14_249_981_952
    assert rows["peak_allocated"].agrees is None
    assert "keeps no figure" in str(rows["peak_allocated"].reason)
    assert rows["kv_cache"].agrees is True
    assert rows["kv_cache"].how == "modelled"  # used on the device is


def test_a_log_has_no_reading_of_memprof() -> None:
    (run,) = read_log(str(DATA / "logs" / "recorded_tp2_0.23.0.log"))
    report = build_report(run)
    rows = rows_of(report)
    assert rows["weights"].engine_bytes is not None
    for row in rows.values():
        assert (row.bytes, row.difference_bytes, row.tolerance_bytes, row.agrees) == (None,) * 4
        assert "a log has the engine's values only" in str(row.reason)


def start_up(moved: int = 0) -> list[Span]:
    """Return a start-up in which another process takes memory before the groups are made."""
    free = 50 * GIB
    before = snapshot(device_total_bytes=64 * GIB, device_free_bytes=free, non_torch_bytes=0)
    later = replace(before, device_free_bytes=free - moved, non_torch_bytes=moved)
    return [
        span("device_init", None, later, 0),
        span("empty_cache", before, before, 1, parent=0),
        span("hccl_init", later, later, 2, parent=0),
    ]


@pytest.mark.parametrize(("moved", "agrees"), [(MIB, True), (MOST_TOLERANCE_BYTES + 1, None)])
def test_what_moves_between_two_readings_is_the_tolerance(moved: int, agrees: bool | None) -> None:
    """The engine reads between both: at 50 GiB free, or with what was taken."""
    figures = {"initial_free_bytes": 50 * GIB, "gpu_memory_utilization": 0.9}
    rows = {row.name: row for row in audited(equation("E4", "0.23.0"), figures, start_up(moved))}
    free = rows["initial_free"]
    assert (free.bytes, free.tolerance_bytes) == (50 * GIB - moved, moved)
    assert free.agrees is agrees
    assert free.undecided is (agrees is None)
    if free.undecided:
        assert "it moved by 0.06 GiB between the readings" in str(free.reason)
    wrong = {**figures, "initial_free_bytes": 50 * GIB + 1}
    off = audited(equation("E4", "0.23.0"), wrong, start_up(MIB))
    assert next(row for row in off if row.name == "initial_free").agrees is False


def test_vllm_reads_after_its_groups_are_made() -> None:
    before = snapshot(device_total_bytes=64 * GIB, device_free_bytes=60 * GIB)
    after = replace(before, device_free_bytes=59 * GIB)
    spans = [span("hccl_init", before, after, 0)]
    figures = {"initial_free_bytes": 59 * GIB, "gpu_memory_utilization": 0.9}
    known, unknown = (
        next(
            row for row in audited(equation(*release), figures, spans) if row.name == "initial_free"
        )
        for release in (("E6", "0.33.0"), ("E5", "0.23.0"))
    )
    assert (known.bytes, known.difference_bytes, known.agrees) == (59 * GIB, 0, True)
    assert (unknown.bytes, unknown.difference_bytes) == (59 * GIB, 0)
    assert unknown.undecided  # from which release on it reads after them is not known


def test_an_estimate_is_not_read_and_hides_the_peak() -> None:
    """Graphs that are captured for it raise the counter between the engine's reading and ours."""
    run = recorded("recorded_023_tp2")
    first = workers(run)[0]
    row = equation("E5", "0.23.0")
    figures = {**first.figures, "graph_estimate_bytes": 100 * MIB}
    found = {each.name: each for each in audited(row, figures, first.phases, True)}
    assert found["graph_estimate"].bytes is None
    assert "an estimate of the engine" in str(found["graph_estimate"].reason)
    assert found["peak_activation"].bytes is None
    assert "graphs were captured" in str(found["peak_activation"].reason)
    assert "and the engine's peak_activation, graph_estimate" in str(found["kv_cache"].source)


def test_an_estimate_of_nothing_is_the_engines_in_the_equation() -> None:
    run = recorded("recorded_023_tp2")
    first = workers(run)[0]
    row = equation("E5", "0.23.0")
    figures = {**first.figures, "graph_estimate_bytes": 0}
    found = {each.name: each for each in audited(row, figures, first.phases, True)}
    assert found["kv_cache"].difference_bytes == 0


def test_a_fixed_size_is_not_the_equations() -> None:
    figures: dict[str, int | float | None] = {
        "kv_cache_memory_bytes_arg": GIB,
        "kv_cache_bytes": GIB,
        "gpu_memory_utilization": 0.9,
    }
    rows = audited(equation("E4", "0.23.0"), figures, start_up())
    assert rows[-1].bytes is None
    assert "a fixed size replaced the equation" in str(rows[-1].reason)


def test_a_run_that_ended_early_has_readings_as_far_as_it_got() -> None:
    run: Run = run_of(process(start_up(), {"initial_free_bytes": 50 * GIB}))
    report = build_report(run)
    rows = rows_of(report)
    assert rows["initial_free"].agrees is True
    assert rows["weights"].bytes is None
    assert "not recorded to its end" in str(rows["weights"].reason)


def test_weights_end_where_the_second_runner_makes_what_else_a_model_needs() -> None:
    levels = [snapshot(allocated_bytes=size * MIB) for size in (10, 40, 46)]
    load = span("weight_load", levels[0], levels[2], 0)
    state = span("model_state", levels[1], levels[2], 1, parent=0)
    (row,) = rows_of_spans([load, state], {"weights_bytes": 30 * MIB})
    assert (row.bytes, row.difference_bytes) == (30 * MIB, 0)
    assert "model_state" in str(row.source)
    (row,) = rows_of_spans([load], {"weights_bytes": 30 * MIB})
    assert (row.bytes, row.agrees) == (36 * MIB, False)


def rows_of_spans(spans: list[Span], figures: dict[str, int]) -> list[Reading]:
    report = build_report(run_of(process(spans, figures)))
    return [row for row in report.ranks[0].budget.audit if row.name == "weights"]


def test_a_term_without_both_moments_has_no_reading() -> None:
    run = recorded("recorded_023_tp2")
    first = workers(run)[0]
    rows = audited(equation("E6", "0.33.0"), first.figures, first.phases, True)
    found = {row.name: row for row in rows}
    assert found["transient_headroom"].bytes is None
    assert "from which allocated memory" in str(found["transient_headroom"].reason)
    assert found["consumed"].bytes is not None
    assert found["kv_cache"].bytes is None
