"""A run or log as a source of corrections: what it tells of its command, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_memprof.cli.commands.calibrate import read_hardware
from vllm_memprof.errors import RunRecordError
from vllm_memprof.options import value_of
from vllm_memprof.plans import calibrated
from vllm_memprof.plans.calibrated import hardware_of, is_same, own_plan, unlike
from vllm_memprof.plans.model import Plan
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sources import build_run

DATA = Path(__file__).parents[2] / "data"
LOGS = DATA / "logs"
TWO = LOGS / "two_methods_910b_tp2.md"
A2, A3 = load_profile("910b"), load_profile("a3")
ASKED = Plan(
    "Qwen/Qwen3-VL-8B-Instruct", ["--tensor-parallel-size", "2"], own={"device": "sim:910b"}
)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the stacks that are set up."""
    names = {"vllm-ascend-0.13.0", "vllm-ascend-0.23.0"}
    monkeypatch.setattr(
        calibrated, "stack_state", lambda stack, _: "ready" if stack.name in names else "absent"
    )
    return names


def test_the_command_of_a_log_is_planned_with_the_utilization_of_its_start(ready: set[str]) -> None:
    source = read_hardware(f"{TWO}#2", A2)
    assert source.source.devices == 2
    assert source.env is None
    found, _ = own_plan(source, ASKED)
    assert found is not None
    assert value_of(found.engine_args, "--gpu-memory-utilization") == "0.9"
    assert value_of(found.engine_args, "--max-num-batched-tokens") == "32768"
    assert found.model == ASKED.model, "the last part of the log's path"
    assert found.own["stack"] == "vllm-ascend-0.13.0", "E2, as the log's lines say"
    assert found.own["ranks"] == "one"
    new, notes = own_plan(read_hardware(f"{TWO}#3", A2), ASKED)
    assert new is not None
    assert new.own["stack"] == "vllm-ascend-0.23.0"
    assert "not known" in notes[0]


def test_arguments_of_a_line_of_the_engine_are_a_command() -> None:
    source = read_hardware(str(LOGS / "recorded_tp2_0.23.0.log"), A2)
    assert source.arguments == [
        "--max-model-len", "65536", "--tensor-parallel-size", "2",
        "--gpu-memory-utilization", "0.95", "--max-num-batched-tokens", "32768",
        "--max-num-seqs", "8", "--mm-processor-cache-gb", "0.0",
    ]  # fmt: skip


def test_a_log_without_its_command_says_so(ready: set[str], tmp_path: Path) -> None:
    text = (LOGS / "recorded_tp2_0.23.0.log").read_text().splitlines()
    log = tmp_path / "cut.log"
    log.write_text("\n".join(line for line in text if "non-default args" not in line))
    source = read_hardware(str(log), A2)
    assert source.arguments is None
    assert source.source.devices is None
    assert any("does not tell its command" in note for note in source.notes)
    assert own_plan(source, ASKED)[0] is None


def test_the_same_release_is_planned_on_its_stack(ready: set[str]) -> None:
    source = read_hardware(str(LOGS / "recorded_tp2_0.23.0.log"), A2)
    on_old = replace(ASKED, own={**ASKED.own, "stack": "vllm-ascend-0.13.0"})
    plan, _ = own_plan(source, on_old)
    assert plan is not None
    assert plan.own["stack"] == "vllm-ascend-0.23.0"
    ready.discard("vllm-ascend-0.23.0")
    left, notes = own_plan(source, on_old)
    assert left is not None
    assert left.own["stack"] == "vllm-ascend-0.13.0"
    assert "0.23.0; its command is planned on vllm-ascend-0.13.0" in notes[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (DATA / "recorded_tp2", "is of a simulated device"),
        (DATA / "recorded_tp2" / "run.json", "is of a simulated device"),
        (LOGS / "vllm-project__vllm-11251.log", "is of vllm: the plan is of vllm-ascend"),
        (LOGS / "sglang_0.5.23_server.log", "is of sglang: the plan is of vllm-ascend"),
        (f"{TWO}#4", "tells no figure of memory outside torch"),
        (LOGS / "vllm-project__vllm-ascend-1617.log", "is of an engine that it does not name"),
        (TWO, "holds 5 runs"),
        (LOGS / "none.log", "there is no .*file"),
    ],
)
def test_what_cannot_correct_is_refused(name: Path | str, said: str) -> None:
    with pytest.raises(RunRecordError, match=said):
        read_hardware(str(name), A2)


def test_the_log_of_a_run_folder_is_the_run(tmp_path: Path) -> None:
    """Its text looks like hardware's; its record says that the device was simulated."""
    folder = tmp_path / "run"
    shutil.copytree(DATA / "recorded_tp2", folder)
    (folder / "engine.log").write_text((LOGS / "recorded_tp2_0.23.0.log").read_text())
    with pytest.raises(RunRecordError, match="simulated device"):
        read_hardware(str(folder / "engine.log"), A2)


def test_another_type_of_device_is_refused_by_its_total_or_its_name() -> None:
    with pytest.raises(RunRecordError, match=r"60\.96 GiB: Ascend 910B3") as refused:
        read_hardware(f"{TWO}#1", A3)
    assert refused.value.hint == "--device sim:ascend910b"
    with pytest.raises(RunRecordError, match=r"61\.27 GiB: Ascend 910_93"):
        read_hardware(str(LOGS / "made" / "a3_quick_start.log"), A2)
    report = build_run(DATA / "recorded_tp2")
    named = replace(report, run=replace(report.run, simulated=False, device="Ascend910_9391"))
    with pytest.raises(RunRecordError, match="no Ascend 910B3"):
        hardware_of("run", named, [], {}, A2)


def test_other_numbers_of_devices_and_families_are_named(ready: set[str]) -> None:
    source = read_hardware(f"{TWO}#3", A2)
    own, _ = own_plan(source, ASKED)
    assert unlike(source, own, ASKED) == []
    four = replace(ASKED, engine_args=["--tensor-parallel-size", "4"])
    assert "on 2 devices, the plan on 4" in unlike(source, own, four)[0]
    dense = replace(ASKED, model="Qwen/Qwen3-8B")
    assert "a different family of models, qwen3_vl" in unlike(source, own, dense)[0]


def test_the_plan_of_the_very_run_is_known_as_such(ready: set[str]) -> None:
    source = read_hardware(f"{TWO}#3", A2)
    own, _ = own_plan(source, ASKED)
    assert own is not None
    same = replace(ASKED, engine_args=[*reversed_options(own.engine_args)])
    assert is_same(own, same)
    assert not is_same(own, ASKED)
    assert not is_same(own, replace(same, own={**same.own, "stack": "vllm-ascend-0.13.0"}))


def reversed_options(tokens: list[str]) -> list[str]:
    """The same arguments in another order."""
    pairs = [tokens[i : i + 2] for i in range(0, len(tokens), 2)]
    return [word for pair in reversed(pairs) for word in pair]
