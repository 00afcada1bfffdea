"""A calibrated plan: which plans are made with what, and what is left where one cannot be made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from vllm_memprof.cli import main
from vllm_memprof.cli.commands.calibrate import read_hardware
from vllm_memprof.errors import RunRecordError
from vllm_memprof.plans import calibrated
from vllm_memprof.plans.calibrated import Calibrated, Hardware, run_calibrated
from vllm_memprof.plans.model import Plan, PlanRow, Task
from vllm_memprof.plans.runner import PlanRunner, Watcher
from vllm_memprof.plans.store import Store, row_of
from vllm_memprof.report.files import write_reports
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sources import build_run

DATA = Path(__file__).parents[2] / "data"
TWO = DATA / "logs" / "two_methods_910b_tp2.md"
PROFILE = load_profile("910b")
MODEL = "Qwen/Qwen3-VL-8B-Instruct"


class Recorded:
    """Answers each plan with a run that is recorded here; a number of plans fail."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.plans: list[Plan] = []
        self.failing = failing

    def __call__(self, tasks: Sequence[Task], progress: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        for task in tasks:
            self.plans.append(task.plan)
            if task.place in self.failing:
                yield task, PlanRow(dict(task.plan.values), "failed", "no such option")
                continue
            shutil.copytree(DATA / "recorded_023_tp2", task.run_dir)
            write_reports(build_run(task.run_dir), task.run_dir)
            yield task, row_of(task.plan, task.run_dir)


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "stack_state", lambda *_: "ready")


def run(
    tmp_path: Path, source: Hardware, pool: Recorded, store: Store | None = None, *args: str
) -> Calibrated:
    plan = Plan(MODEL, ["--tensor-parallel-size", "2", *args], own={"device": "sim:910b"})
    (tmp_path / "out").mkdir(parents=True)
    runner = PlanRunner(tmp_path / "out", store=store, pool=pool)
    return run_calibrated(plan, source, PROFILE, runner)


def test_the_command_of_the_log_is_planned_then_the_plan_on_both_profiles(tmp_path: Path) -> None:
    pool = Recorded()
    found = run(tmp_path, read_hardware(f"{TWO}#3", PROFILE), pool)
    assert [plan.values["plan"] for plan in pool.plans] == ["own", "without", "with"]
    own, without, corrected = pool.plans
    assert "65536" in own.engine_args
    assert own.own["device"] == without.own["device"] == "sim:910b"
    assert corrected.own["device"] == f"sim:{tmp_path / 'out' / 'calibrated.toml'}"
    assert without.engine_args == corrected.engine_args == ["--tensor-parallel-size", "2"]
    made = load_profile(str(tmp_path / "out" / found.profile))
    assert made.name == "ascend910b-calibrated"
    assert made.memory == structs.replace(
        PROFILE.memory, kernels_bytes=102_173_245, operator_binary_bytes=0
    )
    assert "two_methods_910b_tp2.md#3" in (tmp_path / "out" / found.profile).read_text()
    assert found.own is not None
    assert (found.own.run, found.corrected.run) == ("plans/1-own", "plans/3-with")
    assert found.source.devices == 2


def test_plans_are_kept_by_content_so_that_nothing_is_made_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    source = read_hardware(f"{TWO}#3", PROFILE)
    run(tmp_path / "a", source, Recorded(), store)
    pool = Recorded()
    found = run(tmp_path / "b", source, pool, store)
    assert pool.plans == []
    assert found.corrected.cached


def test_where_its_command_is_not_known_the_context_alone_is_compared(tmp_path: Path) -> None:
    source = replace(read_hardware(f"{TWO}#3", PROFILE), arguments=None)
    pool = Recorded()
    found = run(tmp_path, source, pool)
    assert [plan.values["plan"] for plan in pool.plans] == ["without", "with"]
    assert (found.own, found.stack) == (None, None)
    rows = {row.owner: row for row in found.corrections}
    context, one = rows["context"].simulated, rows["non_torch"].hardware
    assert context is not None
    assert context.bytes == PROFILE.memory.context_bytes
    assert one is not None
    assert one.bytes == 601_295_421
    assert rows["non_torch"].simulated is None
    assert not any(row.applied_bytes for row in rows.values())
    assert "nothing was corrected: both answers are one" in found.notes


def test_where_its_command_cannot_be_planned_the_reason_is_there(tmp_path: Path) -> None:
    found = run(tmp_path, read_hardware(f"{TWO}#3", PROFILE), Recorded(failing=[1]))
    assert any("cannot be planned: no such option" in note for note in found.notes)
    with pytest.raises(RunRecordError, match=r"nothing of .*#2 can be compared.*no such option"):
        run(tmp_path / "b", read_hardware(f"{TWO}#2", PROFILE), Recorded(failing=[1]))


def test_the_plan_of_the_run_itself_is_no_evidence(tmp_path: Path) -> None:
    source = read_hardware(f"{TWO}#3", PROFILE)
    assert source.arguments is not None
    found = run(tmp_path, source, Recorded(), None, *source.arguments[2:])
    assert found.same_command
    assert any("by construction, and no evidence" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "npu"], "memprof calibrate corrects what a simulated device models"),
        (["--engine", "sglang"], "memprof calibrate has no counterpart in SGLang"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in options else ["--device", "sim:910b"]
    assert main(["calibrate", MODEL, *device, "--run", f"{TWO}#3", *options]) == 2
    assert said in capsys.readouterr().err
