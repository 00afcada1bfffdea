"""Sweeps and searches over plans of the real engine: rows for what came up and what did not, Ctrl-C and on again, Ray.

The searches, up to the KV plan, are held against sweeps over all their values. Both take a plan from
the cache that the other made, so the engine runs once for each. ``test_fit.py`` has those that run
their largest batches.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine import MEMPROF, STACK, wait_until
from vllm_memprof.sim.stacks import default_prefix

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]
GIB = 1 << 30
TINY = ["memprof/tiny", "--device", "sim:910b", "--enforce-eager"]
#: More tokens at once than the device has room for the activations of.
TOO_MANY_TOKENS = "16777216"


@pytest.fixture(scope="module")
def place(sim_stack: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a cache of its own that leads to the stack."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "cache" / "stacks").mkdir(parents=True)
    (folder / "cache" / "stacks" / f"{STACK}.prefix").write_text(f"{default_prefix(STACK)}\n")
    return folder


def env(place: Path) -> dict[str, str]:
    return {**os.environ, "MEMPROF_CACHE_DIR": str(place / "cache"), "NO_COLOR": "1"}


def memprof(place: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MEMPROF, *args], capture_output=True, text=True, cwd=place, env=env(place), timeout=850
    )


def sweep(place: Path, folder: str, *args: str) -> list[dict[str, Any]]:
    """The rows of a sweep, as its json has them."""
    done = memprof(place, "sweep", *TINY, "-o", folder, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / folder / "sweep.html").stat().st_size > 100_000
    with (place / folder / "sweep.csv").open() as stream:
        table = list(csv.DictReader(stream))
    rows: list[dict[str, Any]] = json.loads((place / folder / "sweep.json").read_text())["rows"]
    assert [row["run_id"] for row in table] == [row["run_id"] for row in rows]
    assert [row["kv_cache_bytes"] for row in table] == [
        str(row["kv_cache_bytes"] or "") for row in rows
    ]
    return rows


def fit(place: Path, *args: str) -> tuple[int, dict[str, Any]]:
    done = memprof(place, "fit", *TINY, "--until", "kv", "--format", "json", *args)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.full
def test_a_search_agrees_with_the_sweep_and_one_that_runs_out_of_memory_is_a_row(
    place: Path,
) -> None:
    args = ["--max-num-batched-tokens", "2048", "--max-model-len", "4096"]
    rows = sweep(place, "small", "--over", "gpu-memory-utilization=0.7,0.8,0.9", *args)
    assert [row["status"] for row in rows] == ["ok"] * 3
    room = sorted(row["headroom_bytes"] for row in rows)[1] - GIB
    search = [
        "--find",
        "gpu-memory-utilization",
        "--between",
        "0.7:0.9",
        "--step",
        "0.1",
        "--headroom",
        str(room),
    ]
    code, found = fit(place, *search, *args)
    assert (code, found["answer"], found["ordered"]) == (0, "0.8", True)
    assert {each["plan"]["run_id"] for each in found["tries"]} <= {
        row["run_id"] for row in rows
    }  # none was made again

    over = ["--over", f"max-num-batched-tokens=2048,{TOO_MANY_TOKENS}"]
    came_up, ran_out = sweep(
        place, "oom", *over, "--max-model-len=4096", "--gpu-memory-utilization", "0.9"
    )
    assert (came_up["balanced"], came_up["cached"], came_up["run_id"]) == (
        True,
        True,
        rows[2]["run_id"],
    )
    assert (ran_out["status"], ran_out["tokens"]) == ("oom", None)
    assert "out of device memory in profile_run" in ran_out["reason"]
    assert ran_out["final"] is True  # it would run out again: the row is kept
    report = json.loads((place / "oom" / ran_out["run"] / "report.json").read_text())
    assert report["run"]["status"] == "oom"


#: 24 plans.
GRID = [
    "--over",
    "gpu-memory-utilization=0.4,0.5,0.6,0.7,0.8,0.9",
    "--over",
    "max-model-len=4096,8192,12288,16384",
]


def start_and_interrupt(place: Path, folder: str, *args: str) -> tuple[int, str]:
    """A sweep that gets a Ctrl-C once five plans are whole: (exit status, stderr); nothing of it is left running."""
    command = [*MEMPROF, "sweep", *TINY, "-o", folder, *args]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=place,
                               env=env(place), start_new_session=True)  # fmt: skip
    try:
        wait_until(
            lambda: len(list((place / folder).glob("plans/*/plan.json"))) >= 5, 600, "five plans"
        )
        below = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    wait_until(
        lambda: not any(child.is_running() for child in below),
        30,
        "the end of what the sweep had started",
    )
    return process.returncode, stderr


def whole(folder: Path) -> dict[str, str]:
    """Plan -> the run that made it."""
    return {
        path.parent.name: json.loads((path.parent / "run.json").read_text())["id"]
        for path in folder.glob("plans/*/plan.json")
    }


def interrupted_and_gone_on(place: Path, folder: str, *args: str) -> list[dict[str, Any]]:
    code, stderr = start_and_interrupt(place, folder, *GRID, *args)
    before = whole(place / folder)
    assert code == 130, stderr
    assert 5 <= len(before) < 24
    assert f"{len(before)} of 24 plans are made" in stderr
    rows = sweep(place, folder, *GRID, *args)
    after = whole(place / folder)
    assert len(rows) == len(after) == len(set(after.values())) == 24
    assert {name: after[name] for name in before} == before  # none of them was made again
    assert [row["status"] for row in rows] == ["ok"] * 24
    assert {row["balanced"] for row in rows} == {True}
    assert sweep(place, folder, *GRID, *args) == rows
    return rows


@pytest.mark.full
def test_24_plans_with_a_ctrl_c_after_5(place: Path) -> None:
    rows = interrupted_and_gone_on(place, "grid")
    by_utilization = [
        row["kv_cache_bytes"] for row in rows if row["values"]["max-model-len"] == "4096"
    ]
    assert by_utilization == sorted(set(by_utilization))


#: knob -> its values, what is wanted, and which rows of the sweep over all values hold that. Three
#: cases; the plans of the first two are among the 24.
CASES: dict[str, tuple[list[str], list[str], Any]] = {
    "gpu-memory-utilization": (
        ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9"],
        [
            "--between",
            "0.4:0.9",
            "--step",
            "0.1",
            "--headroom",
            "14GiB",
            "--want",
            "tokens=1000000",
        ],
        lambda row: row["headroom_bytes"] >= 14 * GIB and row["tokens"] >= 1_000_000,
    ),
    "max-model-len": (
        ["4096", "8192", "12288", "16384"],
        ["--between", "4096:16384", "--step", "4096", "--want", "concurrency=2500"],
        lambda row: row["headroom_bytes"] >= 0 and row["max_concurrency"] >= 2500,
    ),
    "devices": (
        ["1", "2", "4"],
        ["--want", "concurrency=9000@4096"],
        lambda row: row["headroom_bytes"] >= 0 and row["max_concurrency"] >= 9000,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("knob", CASES)
def test_a_search_agrees_with_an_exhaustive_sweep(place: Path, knob: str) -> None:
    values, wants, holds = CASES[knob]
    option = {"devices": "tensor-parallel-size"}.get(knob, knob)
    fixed = {"gpu-memory-utilization": "0.9", "max-model-len": "4096"}
    args = [
        token for name, value in fixed.items() if name != knob for token in (f"--{name}", value)
    ]
    args += ["--ranks", "one"] if knob == "devices" else []
    rows = sweep(place, f"all-{knob}", "--over", f"{option}={','.join(values)}", *args)
    assert [row["status"] for row in rows] == ["ok"] * len(values)
    holding = [value for value, row in zip(values, rows, strict=True) if holds(row)]
    assert 0 < len(holding) < len(values), [
        row["headroom_bytes"] for row in rows
    ]  # the case decides something
    code, found = fit(place, "--find", knob, *wants, *args)
    assert (code, found["answer"]) == (0, holding[0] if knob == "devices" else holding[-1])
    assert [each["value"] for each in found["tries"] if each["holds"]] == [
        each["value"] for each in found["tries"] if each["value"] in holding
    ]


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"
)
def test_24_plans_on_a_local_ray_of_two_workers(place: Path) -> None:
    """Its figures are those of the plans that were made without Ray."""
    rows = interrupted_and_gone_on(place, "ray", "--ray=local", "--jobs", "2", "--no-cache")
    here = sweep(place, "grid", *GRID)
    assert {row["run_id"] for row in rows}.isdisjoint(row["run_id"] for row in here)
    figures = (
        "tokens",
        "kv_cache_bytes",
        "fits_request_bytes",
        "headroom_beside_held_bytes",
        "terms",
        "max_concurrency",
    )
    assert [[row[name] for name in figures] for row in rows] == [
        [row[name] for name in figures] for row in here
    ]
