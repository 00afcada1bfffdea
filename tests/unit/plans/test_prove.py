"""Cures that are planned: which plans are made, and what is said of what they show."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_memprof.accounting.model import Report
from vllm_memprof.cli import main
from vllm_memprof.cli import plans as commands
from vllm_memprof.errors import MemprofError
from vllm_memprof.options import value_of
from vllm_memprof.plans import calibrated, prove
from vllm_memprof.plans.model import Plan, PlanRow, Task
from vllm_memprof.plans.prove import proved, start_of
from vllm_memprof.plans.runner import Interrupted, PlanRunner, Watcher
from vllm_memprof.record.cause import Cure, NamedFailure
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import REPORT_JSON, FullStep
from vllm_memprof.sources import build_run

FOLDER = Path(__file__).parents[2] / "data" / "recorded_oom"
SHARE = "--gpu-memory-utilization"
STEP = FullStep(2048, 8, 8000, 2048, 8, 8192, False, 4, 1.0, None)
FAILURE = NamedFailure(
    "graph-capture-oom",
    True,
    "device memory ran out while graphs were captured",
    "certain",
    cures=[
        Cure("stop it", action="stop other processes"),
        Cure("a lower share", argument=SHARE, value="0.98", enough="at least"),
        Cure("fewer requests", argument="--max-num-seqs"),
        Cure("fewer tokens", argument="--max-num-batched-tokens"),
        Cure("other blocks", environment="PYTORCH_NPU_ALLOC_CONF", value="x:1"),
    ],
)
Passes = Callable[[Plan], bool]


class StandIn:
    """Makes no plan: what passes is told; the others fail as the start did."""

    def __init__(self, passes: Passes, failure: NamedFailure | None = FAILURE) -> None:
        self.passes, self.failure = passes, failure
        self.tasks: list[Task] = []
        self.interrupt_at = 99

    @property
    def changes(self) -> list[str]:
        return [task.plan.values["change"] for task in self.tasks]

    def __call__(self, tasks: Sequence[Task], _: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        for task in tasks:
            if len(self.tasks) == self.interrupt_at:
                raise Interrupted(signal.SIGINT)
            self.tasks.append(task)
            if self.passes(task.plan):
                yield task, PlanRow({}, "ok", step=STEP)
                continue
            shutil.copytree(FOLDER, task.run_dir)
            report = replace(build_run(FOLDER), failure=self.lower(task.plan))
            (task.run_dir / REPORT_JSON).write_text(json.dumps(to_json(report)))
            yield task, PlanRow({}, "oom", "out of memory")

    def lower(self, plan: Plan) -> NamedFailure | None:
        """Its failure, whose shortfall asks for 0.01 less than the plan had."""
        less = f"{float(value_of(plan.engine_args, SHARE) or 1) - 0.01:.2f}"
        cure = Cure("a lower share", argument=SHARE, value=less)
        return None if self.failure is None else replace(self.failure, cures=[cure])


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "stack_state", lambda *_: "ready")
    monkeypatch.setattr(prove, "prepare_runtime", lambda *_: None)


@pytest.fixture
def report() -> Report:
    return replace(build_run(FOLDER), failure=FAILURE)


def last(report: Report, pool: StandIn, folder: Path) -> NamedFailure:
    plan, on = start_of(report, None)
    *_, found = proved(report, plan, on, PlanRunner(folder, pool=pool))
    assert found.failure is not None
    return found.failure


def share(plan: Plan) -> float:
    return float(value_of(plan.engine_args, SHARE) or 0)


def test_the_start_is_planned_as_it_was(report: Report) -> None:
    plan, on = start_of(report, None)
    assert (plan.model, share(plan)) == ("Qwen/Qwen3-14B", 0.99)
    assert (plan.own["stack"], plan.own["until"]) == ("vllm-ascend-0.23.0", "ready")
    assert on == "sim:ascend910b, vllm-ascend-0.23.0, one rank of Qwen/Qwen3-14B"
    assert start_of(report, "sim:a3")[0].own["device"] == "sim:a3"
    # a log has the path of its own machine
    for name in ("/data/models/Qwen3-14B/", "Qwen3-14B"):
        moved = replace(report, run=replace(report.run, model=name))
        assert start_of(moved, None)[0].model == "Qwen/Qwen3-14B"


def test_a_cure_that_passes_is_checked(report: Report, tmp_path: Path) -> None:
    pool = StandIn(lambda plan: share(plan) <= 0.98)
    found = last(report, pool, tmp_path)
    assert pool.changes == ["as it was", f"{SHARE} 0.98"]
    first, *others = found.cures
    assert (first.change, first.enough) == (f"{SHARE} 0.98", "checked")
    assert "it starts and survives its largest batches" in first.why
    assert [cure.enough for cure in others] == ["unknown"] * 4


def test_a_cure_that_fails_is_tightened(report: Report, tmp_path: Path) -> None:
    pool = StandIn(lambda plan: share(plan) <= 0.97)
    found = last(report, pool, tmp_path)
    assert pool.changes == ["as it was", f"{SHARE} 0.98", f"{SHARE} 0.97"]
    told = {cure.change: cure for cure in found.cures}
    assert found.cures[0] is told[f"{SHARE} 0.97"]
    assert told[f"{SHARE} 0.97"].enough == "checked"
    assert told[f"{SHARE} 0.98"].enough == "no"
    assert told[f"{SHARE} 0.98"].why == f"tried: {FAILURE.title}"


def test_at_most_four_plans_and_halves_where_nothing_computes(
    report: Report, tmp_path: Path
) -> None:
    [_, *cures] = FAILURE.cures
    report = replace(report, failure=replace(FAILURE, cures=cures[1:]))
    pool = StandIn(lambda _: False)
    found = last(report, pool, tmp_path)
    halves = [f"--max-num-batched-tokens {size}" for size in (1024, 512, 256, 128)]
    assert pool.changes == ["as it was", *halves]
    assert {cure.enough for cure in found.cures} == {"no", "unknown"}


def test_a_variable_is_set(report: Report, tmp_path: Path) -> None:
    report = replace(report, failure=replace(FAILURE, cures=FAILURE.cures[4:]))
    pool = StandIn(lambda plan: "ALLOC_CONF" in plan.values["change"])
    assert last(report, pool, tmp_path).cures[0].enough == "checked"
    environ = pool.tasks[1].environ
    assert environ is not None
    assert environ["PYTORCH_NPU_ALLOC_CONF"] == "x:1"


@pytest.mark.parametrize(
    "failure", [None, replace(FAILURE, kind="negative-kv"), replace(FAILURE, is_memory=False)]
)
def test_a_failure_that_does_not_occur_there_says_nothing(
    report: Report, tmp_path: Path, failure: NamedFailure | None
) -> None:
    if failure is not None and not failure.is_memory:
        pool = StandIn(lambda _: True)  # it starts there
    else:
        pool = StandIn(lambda _: False, failure)
    found = last(report, pool, tmp_path)
    assert pool.changes == ["as it was"]
    assert found.cures == FAILURE.cures
    assert found.tried_on.endswith("; it does not fail there like that: no cure is tried")


def test_what_cannot_be_planned(report: Report) -> None:
    for other in (
        replace(report, failure=None),
        replace(report, failure=replace(FAILURE, is_memory=False)),
        replace(report, run=replace(report.run, engine_command=[])),
        replace(report, run=replace(report.run, engine="vllm", device="cuda")),
        replace(report, run=replace(report.run, engine=None)),
    ):
        with pytest.raises(MemprofError, match="no cure is tried"):
            start_of(other, None)


def command(
    monkeypatch: pytest.MonkeyPatch, folder: Path, report: Report, pool: StandIn
) -> Callable[..., int]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("vllm_memprof.cli.commands.report.read_reports", lambda _: [report])
    monkeypatch.setattr(commands, "Store", lambda: None)
    monkeypatch.setattr(
        commands, "PlanRunner", lambda path, shown, _: PlanRunner(path, shown, pool=pool)
    )

    def run(*args: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["report", str(FOLDER), *args])
        return int(ended.value.code or 0)

    return run


def test_the_report_says_what_was_tried(
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = StandIn(lambda plan: share(plan) <= 0.97)
    run = command(monkeypatch, tmp_path, report, pool)
    assert run("--prove") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tried on sim:ascend910b, vllm-ascend-0.23.0, one rank of Qwen/Qwen3-14B" in text
    assert f"{SHARE} 0.98: tried: {FAILURE.title}; not enough" in text
    assert f"What to do {SHARE} 0.97 a lower share: it starts and survives" in text
    assert "enough, checked by a plan" in text
    assert f"{SHARE} 0.98 frees" not in text, "the remedy that failed"
    for args in ([], ["--full"]):
        assert run(*args) == 0
        assert "checked by a plan" not in capsys.readouterr().out
    assert run("--prove", "--full", "--lang", "zh") == 0
    assert "试于" in capsys.readouterr().out


def test_ctrl_c_prints_what_is_known(
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = StandIn(lambda _: False)
    pool.interrupt_at = 2
    run = command(monkeypatch, tmp_path, report, pool)
    assert run("--prove", "--format", "json") == 128 + signal.SIGINT
    told = capsys.readouterr()
    cures = json.loads(told.out)["failure"]["cures"]
    assert ("0.98", "no") in [(cure["value"], cure["enough"]) for cure in cures]
    assert "the report has what is known until then" in told.err


def test_what_cannot_be_tried_changes_nothing(
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = replace(report, run=replace(report.run, engine_command=[]))
    run = command(monkeypatch, tmp_path, lost, StandIn(lambda _: True))
    assert run("--prove", "--format", "json") == 0
    told = capsys.readouterr()
    assert "no cure is tried" in told.err
    assert [cure["enough"] for cure in json.loads(told.out)["failure"]["cures"]][1] == "at least"
