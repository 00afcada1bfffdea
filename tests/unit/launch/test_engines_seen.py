"""Processes of a program, grouped by the engine that they are of."""

from __future__ import annotations

from vllm_memprof.launch.engines_seen import group_engines
from vllm_memprof.record.loader import Identity, ProcessRecord


def process(pid: int, ppid: int, *roles: str, dp_rank: int | None = None) -> ProcessRecord:
    who = Identity(pid=pid, ppid=ppid, roles=frozenset(roles), dp_rank=dp_rank)
    return ProcessRecord(f"host-{pid}.jsonl", who, t_ns=pid)


def groups(*processes: ProcessRecord) -> list[list[int | None]]:
    return [[each.identity.pid for each in own] for own in group_engines([*processes])]


def test_a_server_and_its_workers_are_one_engine() -> None:
    api, core = process(1, 0, "api"), process(2, 1, "engine_core")
    workers = [process(3, 2, "worker", dp_rank=0), process(4, 2, "worker", dp_rank=0)]
    assert groups(api, core, *workers) == [[2, 3, 4, 1]]
    assert groups(api) == []


def test_two_of_a_program_are_two() -> None:
    core = ("engine_core", "worker")
    assert groups(process(5, 1, *core), process(2, 1, *core), process(1, 0, "api")) == [[2], [5]]


def test_data_parallel_cores_are_one_and_a_rank_again_is_another() -> None:
    cores = [process(pid, 1, "engine_core", "worker", dp_rank=pid % 2) for pid in (2, 3, 4, 5)]
    assert groups(*cores) == [[2, 3], [4, 5]]


def test_schedulers_without_a_core_belong_to_what_started_them() -> None:
    assert groups(process(1, 0, "api"), process(2, 1, "worker"), process(3, 1, "worker")) == [
        [2, 3]
    ]
