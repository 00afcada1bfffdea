"""What is known of a run that serves: from events by hand to figures, lines and a table."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from vllm_memprof.launch.painting import Shown, describe_serving, draw_ranks
from vllm_memprof.launch.progress import EngineProgress, GrowingOwner, RankBudget

GIB = 1 << 30


def event(kind: str, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t_ns": int(seconds * 1e9), **fields}


def served(*, ranks: int = 2) -> EngineProgress:
    """Two workers and an engine core that is ready, nothing sampled."""
    progress = EngineProgress()
    progress.fold("core", event("process", 0, pid=9, role="engine_core"))
    progress.fold(
        "core", event("kv_plan", 3, blocks=1000, planned_bytes=[40 * GIB] * ranks, role="x")
    )
    for rank in range(ranks):
        file = f"w{rank}"
        progress.fold(file, event("process", 0, pid=10 + rank, role="worker"))
        progress.fold(file, event("identity", 0, role="worker", rank=rank, label=f"TP{rank}"))
        for edge in ("before", "after"):
            snapshot = {"reserved_bytes": (50 + rank) * GIB, "device_free_bytes": 6 * GIB}
            progress.fold(
                file, event("phase", 4, phase="warm_up", edge=edge, id=1, snapshot=snapshot)
            )
    progress.fold("core", event("ready", 5, what="server"))
    return progress


def budgets(*headroom: int | None) -> list[RankBudget]:
    return [
        RankBudget(f"TP{rank}", 10 + rank, 41 * GIB, 39 * GIB, 45 * GIB, size)
        for rank, size in enumerate(headroom)
    ]


def sample_core(progress: EngineProgress, seconds: float, **figures: Any) -> None:
    known = {"kv_blocks_used": 250, "kv_blocks_total": 1000, "running": 2, "waiting": 1}
    progress.fold("core", event("kv_sample", seconds, **{**known, **figures}))


def line(progress: EngineProgress, now_s: float, **options: Any) -> str:
    progress.serve(options.pop("budgets", budgets(5 * GIB, 4 * GIB)))
    width = options.pop("width", None)
    return describe_serving(progress, Shown("M", 0, **options), int(now_s * 1e9), width)


def test_without_samples_the_line_says_what_is_not_measured() -> None:
    assert line(served(), 60) == (
        "serving | headroom 4.00 GiB | "
        "not measured without --sample: requests, KV cache in use, growth | "
        "reserved 51.00 GiB (TP1)"
    )
    assert "| no step has been sampled yet |" in line(served(), 60, sampled=True)


def test_a_sampled_line() -> None:
    progress = served()
    sample_core(progress, 60)
    progress.fold("w0", event("sample", 60, reserved_bytes=55 * GIB, allocated_bytes=None))
    assert line(progress, 61, sampled=True) == (
        "2 running, 1 waiting | KV cache 10.00 of 40.00 GiB | headroom 4.00 GiB | "
        "reserved 55.00 GiB (TP0)"
    )
    assert "| sampled 30 s ago |" in line(progress, 90, sampled=True)
    assert "| headroom 4.00 GiB (m) |" in line(progress, 61, sampled=True, modelled=True)


@pytest.mark.parametrize("width", [30, 50, 72, 80, 112, 120])
@pytest.mark.parametrize("sampled", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, sampled: bool) -> None:
    progress = served()
    if sampled:
        sample_core(progress, 60)
        progress.fold("core", event("lost", 60, events=1234, until_t_ns=1, reason="full"))
    shown = line(progress, 90, width=width)
    assert len(shown) <= width
    assert shown.startswith("2 running" if sampled else "serving")
    if width >= 72:
        assert "1234 events lost" in shown or not sampled
        assert "KV cache 10.00 of 40.00 GiB" in shown or not sampled


def test_headroom_is_the_least_that_was_free_in_a_sample() -> None:
    progress = served()
    for seconds, free in ((60, 5 * GIB), (70, 3 * GIB), (80, 6 * GIB)):
        progress.fold("w1", event("device_sample", seconds, device_free_bytes=free))
    progress.serve(budgets(5 * GIB, 4 * GIB))
    assert [rank.headroom_bytes for rank in progress.workers] == [5 * GIB, 3 * GIB]
    assert progress.headroom_bytes == 3 * GIB
    assert progress.workers[1].readings["device_free_bytes"] == 6 * GIB
    # what accounting could not tell stays unknown, of that rank and of all
    progress.serve(budgets(5 * GIB, None))
    assert progress.workers[1].headroom_bytes is None
    assert progress.headroom_bytes is None


def test_requests_that_ended_after_the_last_sample_do_not_run() -> None:
    progress = served()
    progress.fold("core", event("request", 59, edge="begin", id="r1", prompt_tokens=3))
    sample_core(progress, 60, running=1, waiting=0)
    assert line(progress, 61).startswith("1 running, 0 waiting |")
    progress.fold("core", event("request", 61, edge="end", id="r1", output_tokens=3))
    assert line(progress, 61.5).startswith("0 running, 0 waiting |")
    progress.fold("core", event("request", 62, edge="begin", id="r2", prompt_tokens=3))
    assert line(progress, 62.5).startswith("1 running, 0 waiting |")


def test_replicas_are_added_up_and_an_unknown_one_makes_the_sum_unknown() -> None:
    progress = served()
    progress.fold("core2", event("process", 0, pid=20, role="engine_core"))
    progress.fold("core2", event("kv_plan", 3, blocks=1000, planned_bytes=[40 * GIB]))
    sample_core(progress, 60)
    progress.fold("core2", event("kv_sample", 59, kv_blocks_used=500, kv_blocks_total=1000,
                                 running=3, waiting=0))  # fmt: skip
    serving = progress.serving
    assert serving is not None
    assert (serving.requests_running, serving.requests_waiting) == (5, 1)
    assert serving.kv_blocks_used == 750
    assert serving.kv_cache_used_bytes == 20 * GIB  # of the replica that holds the most
    assert serving.t_ns == 59_000_000_000
    progress.fold("core2", event("kv_sample", 61, kv_blocks_used=None, running=None, waiting=0))
    serving = progress.serving
    assert serving is not None
    assert (serving.requests_running, serving.kv_blocks_used) == (None, None)
    assert serving.kv_cache_used_bytes is None
    assert line(progress, 62).startswith("serving |")


def test_a_phase_while_serving_comes_first() -> None:
    progress = served()
    sample_core(progress, 60)
    progress.fold("w1", event("phase", 61, phase="sleep", edge="before", id=7, snapshot=None))
    assert line(progress, 62).startswith("TP1 in sleep |")


@pytest.mark.parametrize("width", [80, 120])
def test_table(width: int) -> None:
    progress = served()
    sample_core(progress, 60)
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    progress.serve(budgets(5 * GIB, None))
    shown = Shown("M", 0, sampled=True, modelled=True)
    console.print(draw_ranks(progress, shown, 61_000_000_000, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    first, second = (line for line in lines if line.startswith("TP"))
    assert "serving" in first
    assert [word for word in first.split() if word[0].isdigit() or word == "-"] == [
        "50.00", "-", "-", "41.00", "6.00", "5.00"
    ]  # fmt: skip
    assert second.split()[-1] == "-"  # unknown, not 0
    assert "2 running, 1 waiting" in lines
    assert "KV cache 10.00 of 40.00 GiB" in lines
    assert "A simulated device" in " ".join(" ".join(lines).split())


def test_table_of_a_run_that_is_not_sampled() -> None:
    console = Console(file=io.StringIO(), width=120, no_color=True)
    progress = served()
    progress.serve([])
    console.print(draw_ranks(progress, Shown("M", 0), 10**9, 120))
    text = console.file.getvalue()
    assert "not measured without --sample: requests, KV cache in use, growth" in text
    assert "simulated" not in text
    assert "running" not in text


def test_a_process_that_records_nothing_is_named() -> None:
    progress = served()
    fields = {"since_t_ns": 1, "until_t_ns": None, "events": None, "reason": "No space left"}
    progress.fold("w0", event("lost", 60, **fields))
    assert "| nothing is recorded of TP0: No space left |" in line(progress, 61)
    progress.fold("w0", event("lost", 80, **{**fields, "until_t_ns": 80, "events": 12}))
    assert "| 12 events lost |" in line(progress, 81)
    assert "nothing is recorded" not in line(progress, 81)


def test_growth_is_said_once_it_is_known() -> None:
    progress = served()
    sample_core(progress, 60)
    unknown, known = budgets(5 * GIB, 4 * GIB)
    assert "growth" not in line(progress, 61, budgets=[unknown, known])
    still = [replace(each, growth=()) for each in (unknown, known)]
    assert "| no growth |" in line(progress, 61, budgets=still)
    # one rank that cannot be judged yet: nothing is claimed of all
    assert "growth" not in line(progress, 61, budgets=[still[0], known])
    slow, fast = (
        GrowingOwner(owner, rate * (1 << 20), hours)
        for owner, rate, hours in (("runtime:HCCL", 3.0, None), ("allocated", 12.0, 341.3))
    )
    grows = [replace(unknown, growth=(slow,)), replace(known, growth=(slow, fast))]
    said = "| growth 12 MiB/h (TP1 allocated, full in 341.3 h) |"
    assert said in line(progress, 61, budgets=grows)
