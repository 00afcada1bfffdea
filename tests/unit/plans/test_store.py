"""The cache of plans: what makes a key, what is kept, and that processes may share it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_memprof.plans import store as store_module
from vllm_memprof.plans.model import Plan, PlanRow, Task, plan_row
from vllm_memprof.plans.store import Store, key_of, read_row, row_of, write_row
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.loader import load_run
from vllm_memprof.report.files import write_reports
from vllm_memprof.sources import build_run

DATA = Path(__file__).parents[2] / "data"
PLAN = Plan("memprof/tiny", ["--max-model-len", "4096", "-tp", "2"], own={"device": "sim:910b"})


def key(plan: Plan = PLAN, **env: str) -> str | None:
    return key_of(plan, env)


def test_the_same_plan_in_other_words_has_the_same_key() -> None:
    other = replace(
        PLAN, engine_args=["--tensor_parallel_size=2", "--max-model-len=4096"], timeout_s=5.0
    )
    assert key(other) == key() is not None
    assert key(replace(PLAN, own={"device": "sim:ascend910b"})) == key()  # one profile by two names
    assert key(replace(PLAN, own={"device": "sim"})) == key()
    sglang = {"device": "sim:910b", "engine": "sglang"}
    by_name = key(replace(PLAN, own={**sglang, "stack": "sglang-0.5.23"}))
    assert key(replace(PLAN, own=sglang)) == by_name, "its own stack is the default"
    assert key(MEMPROF_CACHE_DIR="/elsewhere", HOME="/root", PATH="/bin") == key()


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, engine_args=["--max-model-len", "8192", "-tp", "2"]),
        replace(PLAN, engine_args=[*PLAN.engine_args, "--enforce-eager"]),
        replace(PLAN, model="memprof/tiny-vl"),
        replace(PLAN, own={"device": "sim:310p"}),
        replace(PLAN, own={"device": "sim:910b", "stack": "vllm-ascend-0.13.0"}),
        replace(PLAN, own={"device": "sim:910b", "engine": "sglang"}),
        replace(PLAN, own={"device": "sim:910b", "ranks": "one"}),
    ],
)
def test_another_plan_has_another_key(other: Plan) -> None:
    assert key(other) not in (None, key())


def test_variables_that_bear_on_memory_are_in_the_key() -> None:
    assert len({key(), key(HCCL_BUFFSIZE="100"), key(HCCL_BUFFSIZE="200")}) == 3


def test_a_real_device_has_no_key() -> None:
    assert key(replace(PLAN, own={"device": "npu"})) is None
    assert key(replace(PLAN, own={"device": "sim:910b", "python": "/usr/bin/python3"})) is None


def test_the_content_of_a_model_folder_is_in_the_key(tmp_path: Path) -> None:
    keys = set()
    for layers in (2, 3):
        store_module._model_key.cache_clear()
        store_module._digest.cache_clear()
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
        keys.add(key(replace(PLAN, model=str(tmp_path))))
    store_module._model_key.cache_clear()
    store_module._digest.cache_clear()
    assert len(keys) == 2


def test_the_content_of_a_profile_is_in_the_key(tmp_path: Path) -> None:
    text = (
        Path(store_module.PACKAGE_DIR) / "sim" / "data" / "profiles" / "ascend910b.toml"
    ).read_text()
    keys = set()
    for count in (8, 4):
        (tmp_path / "mine.toml").write_text(
            text.replace("device_count = 8", f"device_count = {count}")
        )
        keys.add(key(replace(PLAN, own={"device": f"sim:{tmp_path / 'mine.toml'}"})))
    assert len(keys) == 2


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, PlanRow]:
    """A plan's run folder and its row, as a sweep leaves them."""
    run_dir = tmp_path / "made"
    shutil.copytree(DATA / "plan_tp2", run_dir)
    write_reports(build_run(run_dir), run_dir)
    row = row_of(PLAN, run_dir)
    write_row(run_dir, "k", row)
    return run_dir, row


def test_a_row_says_what_the_report_says(made: tuple[Path, PlanRow]) -> None:
    run_dir, row = made
    report = build_run(run_dir)
    rank = min(report.ranks, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0)
    assert (row.status, row.tokens, row.kv_cache_bytes) == (
        "ok",
        rank.kv.tokens,
        rank.budget.engine_kv_cache_bytes,
    )
    assert row.fits_request_bytes == min(
        rank.budget.fits_request_bytes or 0 for rank in report.ranks
    )
    total, requested = rank.device_total_bytes, rank.budget.requested_bytes
    assert total is not None
    assert requested is not None
    assert row.fits_request_bytes is not None
    assert rank.kv.planned_bytes is not None
    assert (row.headroom_bytes, row.headroom_how) == (rank.budget.headroom_bytes, "modelled")
    assert row.fits_device_bytes == row.headroom_bytes + rank.kv.planned_bytes
    assert from_json(PlanRow, json.loads(json.dumps(to_json(row)))) == row


def test_the_concurrency_at_full_length_is_the_engines(made: tuple[Path, PlanRow]) -> None:
    run = load_run(made[0])
    row = plan_row(run, build_run(made[0]), replace(PLAN, lengths=(65536, 32768, 128)))
    assert row.max_model_len == 65536
    assert row.concurrency_at[65536] == row.max_concurrency
    blocks = build_run(made[0]).ranks[0].kv.blocks
    assert blocks is not None
    assert row.concurrency_at == {65536: blocks / 512, 32768: blocks / 256, 128: blocks / 1}


def test_what_was_kept_is_taken_with_its_run(made: tuple[Path, PlanRow], tmp_path: Path) -> None:
    run_dir, row = made
    store = Store(tmp_path / "cache")
    assert store.take(Task(0, PLAN, tmp_path / "none", "k")) is None
    store.keep(Task(0, PLAN, run_dir, "k"), row)
    target = tmp_path / "sweep" / "plans" / "01"
    found = store.take(Task(0, PLAN, target, "k"))
    assert found is not None
    assert found.cached
    assert replace(found, cached=False) == row
    assert read_row(target, "k") == found
    assert read_row(target, "another") is None
    assert to_json(build_run(target)) == to_json(build_run(run_dir))
    assert store.take(Task(0, PLAN, tmp_path / "none", None)) is None


def test_a_row_of_the_same_sources_is_not_read_from_its_record_again(
    made: tuple[Path, PlanRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, row = made
    store = Store(tmp_path / "cache")
    store.keep(Task(0, PLAN, run_dir, "k"), row)
    read: list[Plan] = []

    def again(plan: Plan, *rest: object) -> PlanRow:
        read.append(plan)
        return replace(row, reason="read again")

    monkeypatch.setattr("vllm_memprof.plans.store.row_of", again)
    other = replace(PLAN, values={"max-num-seqs": "8"})
    found = store.take(Task(0, other, tmp_path / "taken", "k"))
    assert found == replace(row, values=other.values, cached=True)
    assert not read

    longer = replace(PLAN, lengths=(4096,))
    found = store.take(Task(0, longer, tmp_path / "longer", "k"))
    assert found is not None
    assert found.reason == "read again"

    assert read == [longer]


def test_a_plan_of_the_cache_takes_20_ms(made: tuple[Path, PlanRow], tmp_path: Path) -> None:
    """In processor time, the key included; the least of some, for other tests run meanwhile."""
    run_dir, row = made
    store = Store(tmp_path / "cache")
    plan_key = key()
    write_row(run_dir, plan_key, row)
    store.keep(Task(0, PLAN, run_dir, plan_key), row)
    seconds = []
    for number in range(10):
        begin = time.process_time()
        assert store.take(Task(0, PLAN, tmp_path / f"taken{number}", key())) is not None
        seconds.append(time.process_time() - begin)
    assert min(seconds) <= 0.02, seconds


def test_what_another_try_may_end_otherwise_is_not_kept(
    made: tuple[Path, PlanRow], tmp_path: Path
) -> None:
    run_dir, row = made
    store = Store(tmp_path / "cache")
    store.keep(Task(0, PLAN, run_dir, "k"), replace(row, final=False))
    assert store.take(Task(0, PLAN, tmp_path / "none", "k")) is None
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "reason", "kept"),
    [
        (
            "oom",
            "TP0 ran out of device memory in weight_load: OutOfMemoryError: NPU out of memory",
            True,
        ),
        ("failed", "the engine exited with status 1: MemoryError", False),
        (
            "failed",
            "the engine exited with status 1: ValueError: No available memory for the cache "
            "blocks.",
            True,
        ),
        ("failed", "interrupted by SIGINT: TP0 in weight_load", False),
        (
            "failed",
            "not ready within 600 s (--startup-timeout): TP0 in weight_load for 500 s",
            False,
        ),
        ("failed", "worker TP1 (pid 9) was killed by SIGKILL in weight_load", False),
        ("failed", "EngineCore failed: OSError: [Errno 98] Address already in use", False),
    ],
)
def test_which_failures_are_final(
    made: tuple[Path, PlanRow], status: str, reason: str, kept: bool
) -> None:
    info = json.loads((made[0] / "run.json").read_text())
    (made[0] / "run.json").write_text(
        json.dumps({**info, "status": status, "exit_code": 1, "exit_reason": reason})
    )
    write_reports(build_run(made[0]), made[0])
    row = row_of(PLAN, made[0], exit_code=1)
    assert (row.status, row.reason, row.final) == (status, reason, kept)


def test_half_a_plan_in_the_cache_is_none(made: tuple[Path, PlanRow], tmp_path: Path) -> None:
    run_dir, row = made
    store = Store(tmp_path / "cache")
    store.keep(Task(0, PLAN, run_dir, "k"), row)
    (tmp_path / "cache" / "k" / "plan.json").write_text("{")
    assert store.take(Task(0, PLAN, tmp_path / "none", "k")) is None


def test_processes_that_keep_the_same_plan_leave_one_whole(
    made: tuple[Path, PlanRow], tmp_path: Path
) -> None:
    run_dir, _ = made
    code = (
        "import os, shutil, sys; from pathlib import Path\n"
        "from vllm_memprof.plans.model import Plan, Task\n"
        "from vllm_memprof.plans.store import Store, read_row, write_row\n"
        "run_dir, store = Path(sys.argv[1]), Store(Path(sys.argv[2])); row = read_row(run_dir, 'k')\n"
        "own = shutil.copytree(run_dir, run_dir.with_name(f'own{os.getpid()}'))\n"
        "for n in range(10):\n"
        "    write_row(own, f'k{n}', row); store.keep(Task(0, Plan('m', []), own, f'k{n}'), row)"
    )
    command = [sys.executable, "-c", code, str(run_dir), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        f"k{i}" for i in range(10)
    )
    for number in range(10):
        task = Task(0, PLAN, tmp_path / f"t{number}", f"k{number}")
        assert Store(tmp_path / "cache").take(task) is not None
