"""Corrections of a profile: figures of real hardware logs, and of plans that are recorded here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.plans.corrections import (
    ComparedRank,
    Corrections,
    ProfileCorrection,
    ReportedFigure,
    figures_of,
    holds_context,
)
from vllm_memprof.plans.device_facts import facts_of
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.spans import ESTIMATED
from vllm_memprof.sim.calibrate import Calibration, Setting, calibrate, render
from vllm_memprof.sim.profiles import find_profile, load_profile
from vllm_memprof.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data"
#: Two Ascend 910B, Qwen3-VL-8B, TP=2: the old method at 0.9 (start 2), the new at 0.95 (start 3).
LOG = DATA / "logs" / "two_methods_910b_tp2.md"
PROFILE = load_profile("910b")


def of_log(start: int) -> Report:
    return build_report(read_log(LOG)[start - 1])


def of_run(name: str) -> Report:
    return build_report(load_run(DATA / name))


def side(report: Report) -> ComparedRank:
    rank = report.ranks[-1]
    opened = sum(span.phase == "communicator" for span in rank.phases)
    told = figures_of(rank)
    return ComparedRank(told, rank.budget.equation, communicators=opened)


def row(found: Corrections, owner: str) -> ProfileCorrection:
    return next(each for each in found.rows if each.owner == owner)


def only(**sizes: int) -> ComparedRank:
    told = {name: ReportedFigure(size) for name, size in sizes.items()}
    return ComparedRank(told, "E4", communicators=1, release="0.23")


# --- a log of hardware, against the recorded plan of its command ------------------------------------


def test_a_log_corrects_non_torch_as_one_figure() -> None:
    found = Corrections(side(of_log(3)), side(of_run("recorded_023_tp2")), PROFILE)
    one = row(found, "non_torch")
    figure, simulated = one.hardware, one.simulated
    assert figure is not None
    assert simulated is not None
    assert (figure.bytes, figure.half_unit_bytes) == (601_295_421, 5_368_710)  # 0.56 GiB
    assert simulated.bytes == 499_122_176
    assert one.applied_bytes == one.difference_bytes == 102_173_245
    (constant,) = one.constants
    assert (constant.key, constant.before, constant.after) == ("kernels_bytes", 0, 102_173_245)
    assert one.scales_with == "process and device"
    assert "not told apart: kernels" in str(one.reason)
    assert one.carried_how == ESTIMATED
    assert figure.how == "measured"


def test_what_agrees_within_the_digits_of_the_log_is_left_alone() -> None:
    found = Corrections(side(of_log(3)), side(of_run("recorded_023_tp2")), PROFILE)
    context = row(found, "context")
    assert context.hardware is not None
    assert (context.hardware.bytes, context.applied_bytes, context.constants) == (375809638, 0, [])
    near = only(non_torch=500 * MIB)
    logged = ComparedRank({"non_torch": ReportedFigure(503 * MIB, 5 * MIB)}, "E4")
    kept = Corrections(logged, near, PROFILE)
    assert row(kept, "non_torch").reason == "within the last printed digit of the log"
    assert not any(each.constants for each in kept.rows)


def test_the_old_method_compares_what_is_used_beside_allocated_blocks() -> None:
    found = Corrections(side(of_log(2)), side(of_run("recorded_013_tp2")), PROFILE)
    one = row(found, "non_torch")
    sizes = [each.bytes for each in (one.hardware, one.simulated) if each is not None]
    assert sizes == [1_299_227_607, 1_276_704_870]
    assert one.applied_bytes == 22_522_737
    assert "the context is in it" in str(one.reason)
    assert "as simulated" in str(one.reason)
    assert row(found, "context").reason == "the hardware run does not tell it"


def test_other_equations_are_not_compared_by_what_they_leave() -> None:
    plan = replace(only(used_by_device=4 * GIB), equation="E4")
    found = Corrections(replace(only(used_by_device=5 * GIB), equation="E2"), plan, PROFILE)
    assert row(found, "non_torch").applied_bytes == 0
    assert "E2 and E4" in str(row(found, "non_torch").reason)


# --- where a difference goes ------------------------------------------------------------------------


def test_less_than_simulated_is_taken_from_communicators_and_never_below_nothing() -> None:
    profile = load_profile("a3")  # on a 910B it is 1 MiB
    base = profile.memory.hccl_base_bytes
    some = Corrections(only(non_torch=470 * MIB), only(non_torch=500 * MIB), profile)
    one = row(some, "non_torch")
    assert [(each.key, each.after) for each in one.constants] == [
        ("hccl_base_bytes", base - 30 * MIB)
    ]
    assert one.scales_with == "communicator"
    all_of_it = row(Corrections(only(non_torch=0), only(non_torch=500 * MIB), profile), "non_torch")
    assert all_of_it.constants[0].after == 0
    assert all_of_it.applied_bytes == -base
    assert "MiB less than the profile can give up" in str(all_of_it.reason)


def test_a_context_that_holds_another_process_is_not_taken() -> None:
    context = PROFILE.memory.context_bytes
    more = row(Corrections(only(context=5 * GIB), only(context=context), PROFILE), "context")
    assert more.applied_bytes == 0
    assert "other processes" in str(more.reason)
    some = Corrections(only(context=context + 30 * MIB), only(context=context), PROFILE)
    assert row(some, "context").applied_bytes == 30 * MIB
    small = Corrections(only(context=20 * MIB), only(context=context), PROFILE)
    settings = {each.key: each.value for each in small.calibration().settings}
    assert settings == {"context_bytes": 20 * MIB, "context_runtime_bytes": 20 * MIB}


def test_a_context_is_not_corrected_twice_where_the_equation_subtracts_it() -> None:
    assert holds_context("E2")
    assert not holds_context("E4")
    context = PROFILE.memory.context_bytes
    hardware = {
        "context": ReportedFigure(context + 30 * MIB),
        "used_by_device": ReportedFigure(1100 * MIB),
    }
    plan = {"context": ReportedFigure(context), "used_by_device": ReportedFigure(1000 * MIB)}
    found = Corrections(ComparedRank(hardware, "E2"), ComparedRank(plan, "E2"), PROFILE)
    assert row(found, "context").applied_bytes == 30 * MIB
    assert row(found, "non_torch").applied_bytes == 70 * MIB


def test_workspace_is_corrected_where_one_operator_has_it() -> None:
    rule = PROFILE.workspace["AtbSelfAttention"]
    plan = only(cleared=rule.base + 2 * MIB)
    found = Corrections(only(cleared=rule.base - 18 * MIB), plan, PROFILE)
    (constant,) = row(found, "npu_workspace").constants
    assert (constant.key, constant.after) == ("AtbSelfAttention", rule.base - 20 * MIB)
    none = row(Corrections(only(cleared=GIB), only(cleared=0), PROFILE), "npu_workspace")
    assert none.reason == "no single operator has this workspace: not known whose it is"
    other = row(Corrections(only(cleared=GIB), only(cleared=3 * GIB), PROFILE), "npu_workspace")
    assert other.applied_bytes == 0
    assert "not known whose it is" in str(other.reason)


def test_graphs_are_corrected_by_one_factor_of_their_part_in_the_runtime() -> None:
    hardware = only(graph=160 * MIB)
    found = Corrections(hardware, only(graph=130 * MIB, graph_runtime=120 * MIB), PROFILE)
    graph = row(found, "graph")
    assert graph.applied_bytes == 30 * MIB
    assert {each.after / each.before for each in graph.constants} == {1.25}
    older = replace(hardware, release="0.18")
    kept = row(Corrections(older, only(graph=130 * MIB, graph_runtime=120 * MIB), PROFILE), "graph")
    assert kept.applied_bytes == 0
    assert "a different release captures other graphs: 0.18 and 0.23" in str(kept.reason)
    stopped = row(Corrections(hardware, only(), PROFILE), "graph")
    assert stopped.applied_bytes == 0
    assert "--until ready" in str(stopped.reason)


# --- a run with the runtime's counters ---------------------------------------------------------------


def counted(**settings: int) -> ComparedRank:
    told = [Setting(key, size, "measured: TP0, after warm_up") for key, size in settings.items()]
    workspace = [Setting("Atb*", 90 * MIB, "measured: TP0")]
    return ComparedRank({}, "E4", Calibration(told, {}, workspace))


def test_counters_correct_owner_by_owner() -> None:
    hardware = counted(context_bytes=400 * MIB, kernels_bytes=50 * MIB, hccl_base_bytes=10 * MIB,
                       graph_capture_bytes=3000)  # fmt: skip
    plan = counted(
        context_bytes=PROFILE.memory.context_bytes, kernels_bytes=0, hccl_base_bytes=10 * MIB,
        graph_capture_bytes=2000,
    )  # fmt: skip
    found = Corrections(hardware, plan, PROFILE)
    assert row(found, "kernels").applied_bytes == 50 * MIB
    assert row(found, "communicators").reason == "equal"
    assert [each.key for each in row(found, "graph").constants] == [
        "graph_capture_bytes", "graph_argument_bytes", "graph_queue_bytes"
    ]  # fmt: skip
    assert "non_torch" not in {each.owner for each in found.rows}, "told apart"


def test_hardware_that_loads_fewer_binaries_than_the_plan_takes_them_back(tmp_path: Path) -> None:
    hardware, plan = (
        counted(context_bytes=PROFILE.memory.context_bytes, kernels_bytes=size * MIB)
        for size in (10, 34)
    )
    found = Corrections(hardware, plan, PROFILE)
    assert row(found, "kernels").applied_bytes == -24 * MIB
    path = tmp_path / "calibrated.toml"
    base = find_profile("910b").read_text()
    path.write_text(render(found.calibration(), "ascend910b", base, "other", "a run", "plan"))
    made = load_profile(str(path)).memory
    assert (made.kernels_bytes, made.operator_binary_bytes) == (10 * MIB, 0)


def test_a_recorded_run_has_counters_and_equals_itself() -> None:
    report = of_run("recorded_023_tp2")
    settings = calibrate(facts_of(report))
    assert "kernels_bytes" in {each.key for each in settings.settings}
    same = ComparedRank(figures_of(report.ranks[0]), "E4", settings)
    assert not any(each.constants for each in Corrections(same, same, PROFILE).rows)


# --- the corrected profile ----------------------------------------------------------------------------


def test_the_corrected_profile_can_be_read_and_differs_in_nothing_else(tmp_path: Path) -> None:
    found = Corrections(side(of_log(3)), side(of_run("recorded_023_tp2")), PROFILE)
    base = find_profile("910b").read_text()
    text = render(found.calibration(), "ascend910b", base, "other", "a log", "memprof plan")
    path = tmp_path / "calibrated.toml"
    path.write_text(text)
    made = load_profile(str(path))
    assert made.memory == structs.replace(
        PROFILE.memory, kernels_bytes=102_173_245, operator_binary_bytes=0
    )
    assert (made.device, made.workspace) == (PROFILE.device, PROFILE.workspace)
    assert "corrected from 0 by non_torch of hardware" in text


@pytest.mark.parametrize("start", [1, 4])
def test_a_start_tells_what_it_prints_and_no_more(start: int) -> None:
    ranks = of_log(start).ranks
    told = {name for rank in ranks for name in figures_of(rank)}
    assert told == ({"used_by_device"} if start == 1 else set())
