"""``memprof fit --find max-num-batched-tokens`` against every value of its grid, by real plans.

A search passes what starts and survives its largest batches. The sweep makes the plans of the whole
grid, the search takes them from the cache of the same folder; ``memprof offline`` then serves the
largest prefill of the answer, and dies of that of the next value.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import MEMPROF, OLD_STACK, STACK, require_stack
from vllm_memprof.engines.vllm.full_step import Limits
from vllm_memprof.sim.profiles import PROFILES_DIR
from vllm_memprof.sim.stacks import default_prefix

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(1500)]
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A grid on which the largest value lies inside."""

    model: str
    device_bytes: int
    grid: str  # LOW:HIGH
    step: int
    kind: str  # of the failure of the first value that does not pass
    args: tuple[str, ...]
    stack: str = STACK
    conditions: tuple[str, ...] = ()  # of the search
    max_num_seqs: int = 16
    max_model_len: int = 4096

    @property
    def values(self) -> list[int]:
        low, high = map(int, self.grid.split(":"))
        return list(range(low, high + 1, self.step))

    def command(self, device: Path) -> list[str]:
        sizes = [f"--max-model-len={self.max_model_len}", f"--max-num-seqs={self.max_num_seqs}"]
        return [
            self.model, "--device", f"sim:{device}", "--stack", self.stack,
            "--load-format=dummy", *sizes, *self.args,
        ]  # fmt: skip


EAGER = "--enforce-eager"
#: With a KV cache of a fixed size the share of the device decides nothing, but must be free.
HALF = "--gpu-memory-utilization=0.5"
CASES = {
    # a KV cache of a fixed size: a larger step finds no room beside it
    "fixed-kv": Case(
        "memprof/tiny", 4 * GIB, "4096:20480", 4096, "oom",
        (EAGER, HALF, "--kv-cache-memory-bytes=3600000000"), max_model_len=32768,
    ),
    # the KV cache that is left does not hold one request
    "no-room-for-kv": Case(
        "memprof/tiny", 4 * GIB, "49152:114688", 16384, "kv-cache",
        (EAGER, "--gpu-memory-utilization=0.2"), max_model_len=32768,
    ),
    "images": Case(
        "memprof/tiny-vl", 4 * GIB, "4096:40960", 9216, "oom",
        (EAGER, HALF, "--kv-cache-memory-bytes=3400000000"),
    ),
    "headroom": Case(
        "memprof/tiny-moe", 4 * GIB, "4096:20480", 4096, "want",
        (EAGER, HALF, "--kv-cache-memory-bytes=3000000000"),
        conditions=("--headroom", "620000000"),
    ),
    "graphs": Case(
        "memprof/tiny", 4 * GIB, "4096:20480", 4096, "oom",
        (HALF, "--kv-cache-memory-bytes=3600000000"),
    ),
    "older": Case(
        "memprof/tiny", 4 * GIB, "32768:98304", 16384, "kv-cache",
        (EAGER, "--gpu-memory-utilization=0.3"), OLD_STACK, max_model_len=32768,
    ),
}  # fmt: skip
#: Cases whose answer is served, and the value above it, by ``memprof offline``.
SERVED = ("fixed-kv", "no-room-for-kv")


def place(tmp_path: Path, case: Case) -> Path:
    """A folder with a cache of its own that leads to the stack, and a smaller device."""
    (tmp_path / "cache" / "stacks").mkdir(parents=True)
    link = tmp_path / "cache" / "stacks" / f"{case.stack}.prefix"
    link.write_text(f"{default_prefix(case.stack)}\n")
    profile = (PROFILES_DIR / "ascend910b.toml").read_text()
    whole = "total_bytes = 65_452_113_920"
    assert profile.count(whole) == 1
    device = tmp_path / "device.toml"
    device.write_text(profile.replace(whole, f"total_bytes = {case.device_bytes}"))
    return device


def memprof(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MEMPROF_CACHE_DIR": str(folder / "cache"), "NO_COLOR": "1"}
    return subprocess.run(
        [*MEMPROF, *args], capture_output=True, text=True, cwd=folder, env=env, timeout=1400
    )


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_that_of_all_values(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    require_stack(case.stack)
    command = case.command(place(tmp_path, case))
    over = f"max-num-batched-tokens={','.join(map(str, case.values))}"
    done = memprof(tmp_path, "sweep", *command, "--until", "ready", "--over", over, "-o", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "all" / "sweep.json").read_text())["rows"]
    headroom = int(case.conditions[1]) if case.conditions else None
    passing = [
        value
        for value, row in zip(case.values, rows, strict=True)
        if row["status"] == "ok"
        and row["survived"]
        and (headroom is None or row["headroom_bytes"] >= headroom)
    ]
    print(name, [(row["status"], row["headroom_bytes"]) for row in rows])
    assert 0 < len(passing) < len(rows), [row["reason"] for row in rows]

    search = ["--find", "max-num-batched-tokens", "--between", case.grid, "--step", str(case.step)]
    done = memprof(tmp_path, "fit", *command, *search, *case.conditions, "--format", "json")
    found = json.loads(done.stdout)
    print(name, found["answer"], found["beyond"], found["notes"])
    assert (done.returncode, found["answer"]) == (0, str(max(passing))), done.stderr
    assert {row["plan"]["run_id"] for row in found["tries"]} <= {row["run_id"] for row in rows}
    after = str(max(passing) + case.step)
    beyond = found["beyond"]
    assert (beyond["value"], beyond["kind"]) == (after, case.kind)
    best, row = (rows[case.values.index(int(value))] for value in (max(passing), after))
    if case.kind == "oom":
        assert (
            beyond["short_bytes"]
            == beyond["oom"]["requested_bytes"] - beyond["oom"]["free_bytes"]
            > 0
        )
        assert row["status"] == "oom"
    elif case.kind == "want":
        assert headroom is not None
        assert beyond["short_bytes"] == headroom - row["headroom_bytes"] > 0
        grown = {owner["name"]: owner["difference_bytes"] for owner in beyond["owners"]}
        assert grown["kv_cache"] == grown["weights"] == 0
        assert sum(grown.values()) == best["headroom_bytes"] - row["headroom_bytes"] > 0
    elif beyond["at_least"]:  # the equation gives less than nothing
        assert beyond["short_bytes"] == -row["kv_cache_bytes"] > 0
    else:
        needed = round(best["kv_cache_bytes"] / best["max_concurrency"])  # whole blocks are less
        assert 0 < beyond["short_bytes"] <= needed - row["kv_cache_bytes"]
    assert {max(passing), int(after)} <= {int(row["value"]) for row in found["tries"]}
    if name in SERVED:
        served(case, tmp_path, max(passing), command, best, dies=False)
        served(case, tmp_path, int(after), command, best, dies=True)


def served(
    case: Case, folder: Path, tokens: int, command: list[str], best: dict[str, Any], dies: bool
) -> None:
    """Hand the prompt of the largest prefill to ``memprof offline``.

    It is one: several come to the engine one by one, and may begin in steps of their own.

    Args:
        best: the plan of the answer, whose KV cache bounds a step as well.
    """
    limits = Limits(tokens, case.max_num_seqs, case.max_model_len, best["tokens"], 128, True)
    [length] = limits.prefill()
    prompts = folder / f"prompts-{tokens}.jsonl"
    row = {"prompt": {"prompt_token_ids": [100 + i % 800 for i in range(length)]}}
    prompts.write_text(json.dumps(row) + "\n")
    run_dir = folder / f"offline-{tokens}"
    done = memprof(
        folder, "offline", *command, "--max-num-batched-tokens", str(tokens),
        "--prompts", str(prompts), "--max-tokens", "4", "--run-dir", str(run_dir),
    )  # fmt: skip
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    steps = [
        sum(scheduled for _, scheduled, *_ in event["requests"])
        for path in run_dir.glob("samples/*/*")
        for event in map(json.loads, path.read_text().splitlines())
        if event["kind"] == "sample" and event.get("requests")
    ]
    print("offline", tokens, done.returncode, report["run"]["status"], max(steps, default=None))
    if dies:
        assert done.returncode != 0
        assert report["run"]["status"] == ("oom" if case.kind == "oom" else "failed")
    else:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert max(steps) == best["step"]["prefill_tokens"]
