"""A profile made from a run gives that run again: the same memory outside torch at every edge of every phase."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.engine import RunResult
from tests.unit.accounting.builders import device_memory, remainders_in
from vllm_memprof.sim.profiles import PROFILES_DIR, load_profile

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

MIB = 1 << 20
MODEL = "memprof/tiny"
ARGS = ["--tensor-parallel-size=2", "--max-model-len=4096", "--gpu-memory-utilization=0.5"]
#: Other values than the shipped profile's, each one seen in the run.
CHANGED = {
    "name": '"changed"',
    "aliases": "[]",
    "context_bytes": 400 * MIB,
    "context_runtime_bytes": 30 * MIB,
    "kernels_bytes": 33 * MIB,
    "hccl_buffers": 3,
    "hccl_base_bytes": 11 * MIB,
    "atb_pool_bytes": 120 * MIB,
    "graph_capture_bytes": 3 * MIB,
    "graph_argument_bytes": 0,
    "graph_queue_bytes": 0,
}
WORKSPACE = {"AtbLinear": 40 * MIB}
#: With torch_npu's task queue an operator may still be waiting where a phase ends: what is read
#: there would be chance.
NO_QUEUE = {"TASK_QUEUE_ENABLE": "0"}


def series(run: RunResult) -> dict[str, list[tuple[str, str, int]]]:
    """Rank -> (phase, edge, bytes outside torch) in the order of the phases."""
    return {
        rank["label"]: [
            (phase["phase"], edge, phase[edge]["non_torch_bytes"])
            for phase in rank["phases"]
            for edge in ("before", "after")
            if phase[edge].get("non_torch_bytes") is not None
        ]
        for rank in run.report["ranks"]
    }


def left_over(run: RunResult) -> set[Any]:
    return {
        remainders_in(memory)["rest"]
        for rank in run.report["ranks"]
        for memory in device_memory(rank)
        if any(row["component"] == "free" and row["bytes"] is not None for row in memory["owners"])
    }


def changed_profile(path: Path) -> Path:
    text = (PROFILES_DIR / "ascend910b.toml").read_text()
    for key, value in CHANGED.items():
        text, count = re.subn(
            rf"^{key} = (\"[^\"]*\"|\[[^]]*\]|\S+)", f"{key} = {value}", text, flags=re.MULTILINE
        )
        assert count == 1, key
    rules = "".join(f'"{pattern}" = {size}\n' for pattern, size in WORKSPACE.items())
    path.write_text(
        re.sub(r"^\[workspace\].*\n", f"[workspace]\n{rules}", text, flags=re.MULTILINE)
    )
    return path


@pytest.mark.full
def test_round_trip(run_memprof: Callable[..., RunResult], tmp_path: Path) -> None:
    from vllm_memprof.cli import app

    given, made = changed_profile(tmp_path / "changed.toml"), tmp_path / "made.toml"
    first = run_memprof("offline", MODEL, "--device", f"sim:{given}", *ARGS, env=NO_QUEUE)
    assert first.returncode == 0, first.output
    done = CliRunner().invoke(app, ["sim", "calibrate", str(first.run_dir), "-o", str(made)])
    assert done.exit_code == 0, done.output
    second = run_memprof("offline", MODEL, "--device", f"sim:{made}", *ARGS, env=NO_QUEUE)
    assert second.returncode == 0, second.output

    values = load_profile(str(made)).values
    assert values["context_bytes"] == CHANGED["context_bytes"]
    assert values["graph_capture_bytes"] == CHANGED["graph_capture_bytes"]
    assert values["atb_pool_bytes"] == CHANGED["atb_pool_bytes"]
    assert (
        values["hccl_base_bytes"] == 200 * MIB + 12 * MIB
    )  # the third buffer, and 11 MiB in pages of 2 MiB
    before, after = series(first), series(second)
    assert set(before) == set(after) == {"TP0", "TP1"}
    for label, rows in before.items():
        assert [row[:2] for row in rows] == [row[:2] for row in after[label]]
        far = [
            (row, other)
            for row, other in zip(rows, after[label], strict=True)
            if abs(row[2] - other[2]) > MIB
        ]
        assert not far
        assert (
            max(row[2] for row in rows) - min(row[2] for row in rows) > 600 * MIB
        )  # there was something to agree on
    assert left_over(first) == left_over(second) == {0}
