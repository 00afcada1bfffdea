"""Figures that people reported in public, and a measurement on two Ascend 910B cards written down
by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_memprof.logs.to_record import read_log
from vllm_memprof.units import GIB

from .test_formats import amount

DATA = Path(__file__).parents[2] / "data" / "logs"
EXPECTED = json.loads((DATA / "expected.json").read_text())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_reported_figures(name):
    """Every figure of the row is found; starts, and ranks by their devices, are kept apart."""
    found = []
    for run in read_log(str(DATA / name)):
        plan = next((process.kv_plan for process in run.processes if process.kv_plan), {})
        for process in run.processes:
            if process.is_worker:
                device = next(
                    (span.detail["device"] for span in process.phases if span.phase == "oom"), None
                )
                found.append({**plan, **process.figures, "device": device})
    starts = EXPECTED[name]["starts"]
    assert len(found) == len(starts)
    for figures, row in zip(found, starts, strict=True):
        for key, value in row.items():
            assert figures[key] == (value if key == "device" else amount(value)), key


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_printed_digits_give_the_half_unit(name):
    for run in read_log(str(DATA / name)):
        for process in run.processes:
            for figure, value in process.figures.items():
                exact = figure in (
                    "suggested_requested_bytes",
                    "suggested_limit_bytes",
                ) or not figure.endswith("_bytes")
                assert (figures_half := process.figures_half_units.get(figure, 0)) >= 0
                assert exact == (figures_half == 0), (figure, value)


@pytest.fixture(scope="module")
def notes():
    return read_log(str(DATA / "two_methods_910b_tp2.md"))


def gib(process, name):
    value = process.figures.get(name)
    return None if value is None else round(value / GIB, 4)


def test_notes_hold_five_starts(notes):
    assert len(notes) == 5
    assert {run.source for run in notes} == {"log"}
    assert {run.info.engine for run in notes} == {"vllm-ascend"}
    assert {run.info.model.rsplit("/", 1)[-1] for run in notes} == {"Qwen3-VL-8B-Instruct"}
    assert [run.info.status for run in notes] == ["ok", "ok", "ok", "oom", "ok"]
    assert notes[0].info.command[:2] == ["vllm", "serve"]
    assert [run.forms for run in notes] == [["E2"], ["E2"], ["E4"], [], ["E2"]]


@pytest.mark.parametrize(
    ("start", "utilization", "peak", "real", "granted", "requested"),
    [
        (0, 0.95, 13.11, 1.26, 43.40, None),
        (1, 0.90, 13.30, 1.21, 40.35, 54.86),
        (4, 0.95, 13.30, 1.21, 43.39, 57.91),
    ],
)
def test_notes_of_the_old_method(notes, start, utilization, peak, real, granted, requested):
    worker = notes[start].processes[0]
    assert worker.figures["gpu_memory_utilization"] == utilization
    assert gib(worker, "profile_after_allocated_peak_bytes") == peak
    assert gib(worker, "used_less_allocated_bytes") == real
    assert gib(worker, "kv_cache_bytes") == granted
    assert gib(worker, "requested_bytes") == requested


def test_the_old_method_adds_up(notes):
    """KV = requested - (allocated peak + (device used - allocated)), within the printed digits."""
    for run in (notes[1], notes[4]):
        figures, half = run.processes[0].figures, run.processes[0].figures_half_units
        names = (
            "requested_bytes",
            "profile_after_allocated_peak_bytes",
            "used_less_allocated_bytes",
            "kv_cache_bytes",
        )
        asked, peak, other, granted = (figures[name] for name in names)
        assert abs(asked - peak - other - granted) <= sum(half[name] for name in names)


def test_notes_of_the_new_method(notes):
    worker, plan = notes[2].processes[0], notes[2].processes[-1].kv_plan
    expected = {
        "initial_free_bytes": 60.61,
        "initial_non_torch_bytes": 0.35,
        "requested_bytes": 57.91,
        "weights_bytes": 9.1948,
        "peak_activation_bytes": 3.86,
        "non_torch_increase_bytes": 0.56,
        "non_kv_cache_bytes": 13.61,
        "profile_before_allocated_peak_bytes": 9.45,
        "profile_end_reserved_bytes": 19.13,
        "profile_end_non_torch_bytes": 1.07,
        "profile_after_reserved_bytes": 9.75,
        "profile_after_allocated_peak_bytes": 13.30,
        "profile_after_non_torch_bytes": 0.91,
        "mm_profile_reserved_bytes": 17.69,
        "profile_after_free_bytes": 50.30,
        "profile_after_free_within_requested_bytes": 47.60,
        "corrected_peak_activation_bytes": 4.11,
        "claimed_request_base_bytes": 60.61,
        "kv_cache_bytes": 44.30,
    }
    assert {name: gib(worker, name) for name in expected} == expected
    assert plan["tokens"] == 645_120
    assert plan["max_model_len"] == 65_536
    assert worker.figures["npu_smi_process_bytes"] == 56257 << 20


def test_what_the_methods_differ_by_can_be_told_from_the_notes(notes):
    new, old = notes[2].processes[0], notes[1].processes[0]
    context = gib(new, "initial_non_torch_bytes")
    persistent = gib(new, "profile_before_allocated_peak_bytes") - gib(new, "weights_bytes")
    cached = gib(old, "used_less_allocated_bytes") - gib(old, "profile_after_non_torch_bytes")
    assert [round(part, 2) for part in (context, persistent, cached)] == [0.35, 0.26, 0.30]


def test_phases_of_the_notes(notes):
    spans = {span.phase: span for span in notes[2].processes[0].phases}
    assert list(spans) == ["hccl_init", "profile_run", "mm_profile", "empty_cache"]
    assert not any(span.open for span in spans.values())
    assert spans["empty_cache"].parent == spans["profile_run"].order
    freed = spans["empty_cache"].before.non_torch_bytes - spans["empty_cache"].after.non_torch_bytes
    assert round(freed / GIB, 2) == 0.16
    assert spans["profile_run"].before.allocated_bytes is None


def test_the_oom_of_the_notes(notes):
    oom = notes[3].processes[0].phases[-1]
    assert oom.phase == "oom"
    assert (
        round((oom.detail["reserved_bytes"] - oom.detail["allocated_peak_bytes"]) / GIB, 2) == 4.61
    )
    assert round(oom.after.non_torch_bytes / GIB, 2) == 1.15


#: What hooks read from the engine whose log is ``recorded_tp2_0.23.0.log`` (simulated 910B), on
#: both ranks.
HOOKED = {
    "device_total_bytes": 65452113920,
    "initial_free_bytes": 65076304282,
    "gpu_memory_utilization": 0.95,
    "requested_bytes": 62179508224,
    "weights_bytes": 9847929856,
    "peak_activation_bytes": 4531954688,
    "non_torch_increase_bytes": 419430400,
    "graph_bytes": 287309824,
    "kv_cache_bytes": 47380193280,
}


def test_a_real_log_agrees_with_what_hooks_read():
    (run,) = read_log(str(DATA / "recorded_tp2_0.23.0.log"))
    assert (run.info.engine, run.info.engine_version, run.info.status) == (
        "vllm-ascend",
        "0.23.0",
        "ok",
    )
    assert run.info.model == "Qwen/Qwen3-VL-8B-Instruct"
    assert run.forms == ["E4"]
    found = [process for process in run.processes if process.is_worker]
    assert sorted(process.identity.label for process in found) == ["TP0", "TP1"]
    for process in found:
        for name, value in HOOKED.items():
            assert abs(process.figures[name] - value) <= process.figures_half_units.get(name, 0), (
                name
            )
        # the exact suggestion gives the sum of what the equation and the graphs take, to the byte
        taken = (
            int(HOOKED["requested_bytes"])
            - process.figures["suggested_requested_bytes"]
            - (150 << 20)
        )
        names = (
            "weights_bytes",
            "peak_activation_bytes",
            "non_torch_increase_bytes",
            "graph_bytes",
        )
        assert taken == sum(HOOKED[name] for name in names)
    plan = run.processes[-1].kv_plan
    assert (plan["tokens"], plan["max_model_len"], plan["max_concurrency"], plan["block_size"]) == (
        642560,
        65536,
        9.8,
        128,
    )
