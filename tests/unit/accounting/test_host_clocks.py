"""Clocks of several hosts, brought onto that of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.host_runs import part, write_hosts
from vllm_memprof.accounting.deployment.clock import host_starts, passages
from vllm_memprof.accounting.deployment.host_clocks import host_clocks
from vllm_memprof.accounting.deployment.report import build_deployment
from vllm_memprof.accounting.model import COLLECTIVES, FIRST, UNKNOWN, WALL, HostClock, Report
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.record.loader import load_run

SECOND = 10**9


def clocks_of(*folders: Path) -> dict[str | None, HostClock]:
    return host_clocks([load_run(folder) for folder in folders])


def begins_of(report: Report) -> dict[tuple[str, str, int], int]:
    """Return rank, phase and its number -> ns since the start of the deployment."""
    starts = host_starts(report)
    return {
        (rank.label, span.phase, span.order): begins - starts[rank.host]
        for rank in report.ranks
        for span in rank.phases
        for begins, _ in [passages(rank)[span.order]]
    }


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -3.0, 0.4])
def test_the_offset_of_two_hosts_is_known_by_their_collectives(
    tmp_path: Path, ahead_s: float
) -> None:
    found = clocks_of(*write_hosts(tmp_path, ahead_s=ahead_s))
    assert found["node-a"] == HostClock(FIRST, 0, 0, 0, 0, 0)
    clock = found["node-b"]
    true = round((1000 + ahead_s) * SECOND)
    assert clock.by == COLLECTIVES
    assert clock.least_ns is not None
    assert clock.most_ns is not None
    assert clock.offset_ns is not None
    assert clock.least_ns <= true <= clock.most_ns
    assert clock.least_ns <= clock.offset_ns <= clock.most_ns
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns - true) <= clock.uncertainty_ns
    assert abs(clock.offset_ns - true) < SECOND // 10  # both leave the set-up together
    assert clock.wall_ahead_ns == pytest.approx(ahead_s * SECOND, abs=SECOND // 10)


def test_wall_clocks_that_cannot_agree_are_said_to_differ(tmp_path: Path) -> None:
    far = clocks_of(*write_hosts(tmp_path / "far", ahead_s=90.0))["node-b"]
    near = clocks_of(*write_hosts(tmp_path / "near", ahead_s=0.0))["node-b"]
    assert near.wall_differs_ns == 0
    assert far.wall_differs_ns is not None
    assert far.uncertainty_ns is not None
    assert 0 < far.wall_differs_ns <= 90 * SECOND
    assert far.wall_differs_ns >= 90 * SECOND - 2 * far.uncertainty_ns


@pytest.mark.parametrize("ahead_s", [0.0, 3.0, -3.0])
def test_phases_are_in_their_order_whatever_the_clocks_say(tmp_path: Path, ahead_s: float) -> None:
    write_hosts(tmp_path / "same", booted_s=0.0)
    write_hosts(tmp_path / "apart", ahead_s=ahead_s)
    true, found = (
        begins_of(build_deployment(load_parts(sorted((tmp_path / name).iterdir()))))
        for name in ("same", "apart")
    )
    assert true.keys() == found.keys()
    assert all(abs(true[key] - found[key]) < SECOND // 10 for key in true)
    both = ("device_init", "hccl_init", "weight_load", "profile_run", "kv_cache_alloc", "warm_up")
    ends = [max(t for (_, phase, _), t in found.items() if phase == each) for each in both]
    begins = [min(t for (_, phase, _), t in found.items() if phase == each) for each in both]
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False))


def test_groups_share_no_collective_and_are_compared_by_the_wall_clock(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path, second={"part": part(group="decode", node_rank=1)})
    clock = clocks_of(first, second)["node-b"]
    assert clock.by == WALL
    assert clock.offset_ns == pytest.approx(1000 * SECOND, abs=1000)
    assert clock.uncertainty_ns is None


def test_replicas_without_a_common_communicator_are_compared_by_the_wall_clock(
    tmp_path: Path,
) -> None:
    first, second = write_hosts(tmp_path)
    rewrite(second, "identity", dp_rank=1, world_size=2)
    assert clocks_of(first, second)["node-b"].by == WALL
    for folder in (first, second):  # one communicator over both: one world
        rewrite_detail(folder, ranks=[0, 1, 2, 3])
    assert clocks_of(first, second)["node-b"].by == COLLECTIVES


def test_a_record_without_wall_time_and_collectives_tells_nothing(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path, second={"part": part(group="decode")})
    rewrite(second, "process", wall=None)
    clock = clocks_of(first, second)["node-b"]
    assert clock == HostClock(UNKNOWN, None)


def test_collectives_that_exclude_each_other_are_said_to(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    path = next(iter((second / "events").iterdir()))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [each for each in events if each.get("phase") == "hccl_init"]
    later = max(each["t_ns"] for each in events)
    for number, each in enumerate(spans):  # a second passage, an hour off
        again = json.loads(json.dumps(each)) | {"id": 900, "t_ns": later + 3600 * SECOND + number}
        if again.get("snapshot"):
            again["snapshot"]["t_ns"] = again["t_ns"]
        events.append(again)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in events))
    other = next(path for path in (first / "events").iterdir() if "hccl_init" in path.read_text())
    events = [json.loads(line) for line in other.read_text().splitlines()]
    spans = [each for each in events if each.get("phase") == "hccl_init"]
    other.write_text("".join(f"{json.dumps(each)}\n" for each in [*events, *copied(spans)]))
    clock = clocks_of(first, second)["node-b"]
    assert clock.contradict
    assert clock.by == WALL


def copied(spans: list[dict]) -> list[dict]:
    found = []
    for number, each in enumerate(spans):
        again = json.loads(json.dumps(each)) | {"id": 900, "t_ns": each["t_ns"] + SECOND + number}
        if again.get("snapshot"):
            again["snapshot"]["t_ns"] = again["t_ns"]
        found.append(again)
    return found


def rewrite(folder: Path, kind: str, **fields: object) -> None:
    for path in (folder / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if event["kind"] == kind:
                event.update(fields)
        path.write_text("".join(f"{json.dumps(event)}\n" for event in events))


def rewrite_detail(folder: Path, **fields: object) -> None:
    for path in (folder / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            if event.get("phase") == "communicator" and event.get("detail"):
                event["detail"].update(fields)
        path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
