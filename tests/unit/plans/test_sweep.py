"""What a sweep is made of: values read, plans that are the same made once; and what a search says
of its answer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from vllm_memprof.plans.fit import ASSUMED, UNORDERED, run_fit
from vllm_memprof.plans.knobs import find_knob, search_request
from vllm_memprof.plans.model import Fit, Knob, Plan, PlanRow, Task
from vllm_memprof.plans.runner import PlanRunner, Watcher, default_jobs
from vllm_memprof.plans.store import Store, row_of
from vllm_memprof.plans.sweep import SweepJob, default_folder, parse_over, run_sweep, split_values
from vllm_memprof.plans.wants import Want, parse_wants
from vllm_memprof.report.files import write_reports
from vllm_memprof.sources import build_run

DATA = Path(__file__).parents[2] / "data"
PLAN = Plan("memprof/tiny", [], own={"device": "sim:910b"})


class Quiet(Watcher):
    """A progress that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        self.told.append((place, how))


class FakePool:
    """Makes a plan by copying a recorded one."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, tasks: Sequence[Task], progress: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        for task in tasks:
            self.made.append(task.plan.title)
            shutil.copytree(DATA / "plan_tp2", task.run_dir)
            write_reports(build_run(task.run_dir), task.run_dir)
            yield task, row_of(task.plan, task.run_dir)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4", ["1", "2", "4"]),
        (" a , b", ["a", "b"]),
        ('{"a":1,"b":2},{"a":3}', ['{"a":1,"b":2}', '{"a":3}']),
        ("[1,2],3", ["[1,2]", "3"]),
        ("'a,b',c", ["'a,b'", "c"]),
    ],
)
def test_a_comma_within_brackets_or_quotes_belongs_to_a_value(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_short_names_and_underscores() -> None:
    assert parse_over(["-tp=1,2", "max_num_seqs=8"]) == [
        Knob("tensor-parallel-size", ["1", "2"]),
        Knob("max-num-seqs", ["8"]),
    ]


def test_all_combinations_the_last_option_fastest() -> None:
    knobs = [Knob("device", ["sim:910b", "sim:a3"]), Knob("enforce-eager", ["true", "false"])]
    job = SweepJob(Plan("m", ["--seed", "1"]), knobs, [])
    assert [(plan.own, plan.engine_args) for plan in job.plans] == [
        ({"device": "sim:910b"}, ["--seed", "1", "--enforce-eager"]),
        ({"device": "sim:910b"}, ["--seed", "1", "--no-enforce-eager"]),
        ({"device": "sim:a3"}, ["--seed", "1", "--enforce-eager"]),
        ({"device": "sim:a3"}, ["--seed", "1", "--no-enforce-eager"]),
    ]


def test_the_folder_is_that_of_the_sweep() -> None:
    knobs = [Knob("x", ["1"])]
    other = Plan("memprof/tiny", ["--a_b=1"], own={"device": "sim:910b"})
    same = Plan("memprof/tiny", ["--a-b", "1"], own={"device": "sim:910b"})
    assert default_folder(other, knobs) == default_folder(same, knobs)
    assert default_folder(other, knobs) != default_folder(other, [Knob("x", ["2"])])


def test_plans_that_were_made_before_come_from_the_cache(tmp_path: Path) -> None:
    knobs = [Knob("max-model-len", ["4096"]), Knob("cc", ['{"a": 1,"b":2}', '{"a":2}'])]
    job, pool, progress = SweepJob(PLAN, knobs, []), FakePool(), Quiet()
    store = Store(tmp_path / "cache")
    found = run_sweep(job, PlanRunner(tmp_path / "sweep", progress, store, pool))
    assert sorted(progress.told) == [(0, "made"), (1, "made")]
    assert [row.values for row in found.rows] == [plan.values for plan in job.plans]

    again = run_sweep(job, PlanRunner(tmp_path / "elsewhere", Quiet(), store, pool))
    assert len(pool.made) == 2  # all from the cache
    assert all(row.cached for row in again.rows)
    assert [row.tokens for row in again.rows] == [row.tokens for row in found.rows]
    run_sweep(job, PlanRunner(tmp_path / "without", pool=pool))
    assert len(pool.made) == 4


def test_half_a_folder_is_made_again(tmp_path: Path) -> None:
    job, pool = SweepJob(PLAN, [Knob("max-num-seqs", ["8", "9"])], []), FakePool()
    _, second = run_sweep(job, PlanRunner(tmp_path, pool=pool)).rows
    (tmp_path / str(second.run) / "plan.json").unlink()
    progress = Quiet()
    run_sweep(job, PlanRunner(tmp_path, progress, pool=pool))
    assert sorted(progress.told) == [(0, "there already"), (1, "made")]
    assert len(pool.made) == 3


def test_jobs_follow_the_cores_and_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    gib = 1 << 30

    def free(size: int) -> None:
        memory = type("Memory", (), {"available": size})
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

    free(1000 * gib)
    assert default_jobs([PLAN]) == 16
    assert default_jobs([PLAN, PLAN.vary("tensor-parallel-size", "4")]) == 4
    assert default_jobs([PLAN.vary("tensor-parallel-size", "32")]) == 1
    assert (
        default_jobs([PLAN, Plan("m", [], own={"device": "npu"})])
        == default_jobs([Plan("m", [])])
        == 1
    )
    one = Plan("m", ["-tp", "32"], own={"device": "sim:910b", "ranks": "one"})
    assert default_jobs([one]) == 16
    free(4 * gib)
    assert default_jobs([PLAN]) == 2
    free(0)
    assert default_jobs([PLAN]) == 1


def fit_by(
    pool: Callable[[Sequence[Task], Watcher], Iterator[tuple[Task, PlanRow]]],
    first: int,
    last: int,
    wants: list[Want],
    tmp_path: Path,
) -> Fit:
    """A search of max-num-seqs in a range, over plans that a pool makes up."""
    knob = find_knob("max-num-seqs")
    space = knob.space(search_request(f"{first}:{last}", str(first)))
    runner = PlanRunner(Path(tempfile.mkdtemp(dir=tmp_path)), pool=pool)
    return run_fit(Plan("m", []), knob, space, wants, runner)


def fitted(tmp_path: Path, holds: dict[int, bool]) -> tuple[str | None, list[str], bool]:
    """A search of max-num-seqs over plans that hold as told."""

    def pool(tasks: Sequence[Task], progress: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        for task in tasks:
            good = holds[int(task.plan.values["max-num-seqs"])]
            yield (
                task,
                PlanRow(
                    dict(task.plan.values),
                    "ok",
                    tokens=100 if good else 10,
                    headroom_bytes=1,
                ),
            )

    found = fit_by(pool, min(holds), max(holds), parse_wants(["tokens=50"], None), tmp_path)
    assert all(each.holds == holds[int(each.value)] for each in found.tries)
    return found.answer, found.notes, found.ordered


def test_notes_say_what_the_answer_rests_on(tmp_path: Path) -> None:
    answer, notes, ordered = fitted(tmp_path, {1: True, 2: True, 3: False, 4: False})
    assert (answer, ordered, notes[0]) == (
        "2",
        True,
        ASSUMED,
    )
    answer, notes, _ = fitted(tmp_path, dict.fromkeys([1, 2, 3], True))
    assert (answer, notes[0].startswith("3 is the end of the range")) == ("3", True)
    answer, notes, _ = fitted(tmp_path, dict.fromkeys([1, 2, 3], False))
    assert (answer, "no value tried passes" in notes) == (None, True)


def test_a_figure_that_is_not_even_is_said_where_the_next_value_is_that_close(
    tmp_path: Path,
) -> None:
    sizes = {1: 100, 2: 60, 3: 80, 4: 45, 5: 10, 6: 0, 7: 0, 8: 0}

    def notes_with(headroom: int) -> tuple[str | None, str]:
        def pool(tasks: Sequence[Task], progress: Watcher) -> Iterator[tuple[Task, PlanRow]]:
            for task in tasks:
                size = sizes[int(task.plan.values["max-num-seqs"])]
                yield task, PlanRow(dict(task.plan.values), "ok", headroom_bytes=size)

        found = fit_by(pool, 1, 8, parse_wants([], str(headroom)), tmp_path)
        assert found.ordered
        return found.answer, " ".join(found.notes)

    answer, notes = notes_with(50)
    assert answer == "3"
    assert "not even: the headroom rises by up to 0.0000 GiB" in notes  # 20 bytes, and 5 short
    answer, notes = notes_with(5)
    assert (answer, "not even" in notes) == ("5", False)  # no rise among those tried
    sizes[2] = 90
    assert "not even" not in notes_with(50)[1]


def test_values_out_of_order_are_said(tmp_path: Path) -> None:
    holds = {number: number <= 3 or 30 <= number <= 32 for number in range(1, 41)}
    answer, notes, ordered = fitted(tmp_path, holds)
    assert (answer, ordered) == ("32", False)
    assert UNORDERED in notes
