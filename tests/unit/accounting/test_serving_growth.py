"""Growth by owner and process, from samples by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.series import MIB
from tests.support.served import engine_core, leaking, sample, worker
from tests.unit.accounting.builders import gib, process, run_of
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import OwnerGrowth
from vllm_memprof.accounting.serving.growth import (
    ALLOCATED,
    CACHED,
    ENCODER_CACHE,
    HOST,
    KV_BLOCKS,
    NON_TORCH,
    device_growth,
    host_growth,
    with_room,
)
from vllm_memprof.accounting.serving.trend import GREW, GROWING, STEADY, TOO_SHORT
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.samples import RequestRecord, Served

COUNT = 300


def rows(run: Run) -> dict[str, OwnerGrowth]:
    return {row.owner: row for row in device_growth(run, run.processes[0])}


def served_by(*others: ProcessRecord, first: ProcessRecord) -> dict[str, OwnerGrowth]:
    return rows(run_of(first, *others))


def test_a_leak_is_priced_per_request_and_per_hour() -> None:
    found = rows(leaking(COUNT))
    assert list(found) == [ALLOCATED, CACHED, KV_BLOCKS]
    row = found[ALLOCATED]
    assert row.verdict == GROWING
    assert row.readings == COUNT
    assert row.bytes_per_request == pytest.approx(MIB, rel=0.01)
    assert row.bytes_per_hour == pytest.approx(3600 * MIB, rel=0.01)  # one request a second
    assert row.bytes_per_request_low is not None
    assert row.bytes_per_request_high is not None
    assert row.bytes_per_request_low < MIB < row.bytes_per_request_high
    assert row.requests == 269  # from the thirty-first request on, less the one it begins with
    assert row.seconds == 269
    assert found[KV_BLOCKS].verdict == STEADY


def test_what_is_reserved_and_not_allocated_shrinks_as_tensors_take_it() -> None:
    row = rows(leaking(COUNT))[CACHED]
    assert row.verdict == STEADY
    assert row.bytes_per_request == pytest.approx(-MIB, rel=0.01)
    assert row.grown_bytes is not None
    assert row.grown_bytes < 0


def test_the_process_of_a_host_leak_is_named() -> None:
    [core] = host_growth(leaking(COUNT))
    assert (core.process, core.roles, core.pid) == ("engine_core", ["engine_core"], 2)
    assert core.growth.owner == HOST
    assert core.growth.verdict == GROWING
    assert core.growth.bytes_per_request == pytest.approx(MIB / 2, rel=0.02)


def test_a_process_with_several_roles_names_all_of_them() -> None:
    run = leaking(COUNT)
    core = run.processes[1]
    both = replace(core.identity, roles=frozenset({"engine_core", "worker"}), label="TP0")
    [row] = host_growth(replace(run, processes=[replace(core, identity=both)]))
    assert (row.process, row.roles, row.label) == ("worker", ["worker", "engine_core"], "TP0")


def test_the_encoder_cache_is_taken_off_what_tensors_hold() -> None:
    cache = [MIB * min(at, 200) for at in range(COUNT)]
    allocated = [gib(20) + size for size in cache]
    found = served_by(engine_core(COUNT), first=worker(allocated, encoder_cache=cache))
    assert found[ALLOCATED].verdict == STEADY
    assert found[ALLOCATED].grown_bytes == 0
    assert found[ENCODER_CACHE].verdict == GREW
    assert found[ENCODER_CACHE].bounded is True


def test_memory_outside_torch_is_divided_by_the_runtime_s_counters() -> None:
    device = [
        {"non_torch_bytes": gib(2) + 2 * MIB * at, "runtime.HCCL": gib(1) + 2 * MIB * at,
         "runtime.APP": gib(30)}
        for at in range(COUNT)
    ]  # fmt: skip
    found = served_by(engine_core(COUNT), first=worker([gib(20)] * COUNT, device=device))
    assert "runtime:APP" not in found  # torch's own segments
    assert found["runtime:HCCL"].verdict == GROWING
    assert found["runtime:HCCL"].bytes_per_request == pytest.approx(2 * MIB)
    assert found[NON_TORCH].verdict == STEADY
    assert found[NON_TORCH].last_bytes == gib(1)


def test_a_figure_that_was_not_read_has_no_row() -> None:
    first = worker([gib(20)] * COUNT)
    assert ENCODER_CACHE not in served_by(engine_core(COUNT), first=first)
    assert rows(run_of(process([]))) == {}


def test_without_requests_ten_minutes_are_judged_by_time_alone() -> None:
    alone = run_of(worker([gib(20) + MIB * at for at in range(COUNT)], every_s=3))
    row = rows(alone)[ALLOCATED]
    assert row.verdict == GROWING
    assert row.bytes_per_request is None
    assert row.requests is None
    assert row.bytes_per_hour == pytest.approx(1200 * MIB)
    short = run_of(worker([gib(20) + MIB * at for at in range(COUNT)], every_s=1))
    assert rows(short)[ALLOCATED].verdict == TOO_SHORT
    assert rows(short)[ALLOCATED].bytes_per_hour is None


def test_readings_whose_requests_are_in_no_file_have_no_position() -> None:
    core = engine_core(COUNT)
    served = core.served
    cut = replace(
        core, served=replace(served, requests=served.requests[100:], dropped={"request": 200})
    )
    allocated = [gib(20) + MIB * at for at in range(COUNT)]
    row = rows(run_of(worker(allocated), cut))[ALLOCATED]
    assert row.readings == 200
    assert row.bytes_per_request == pytest.approx(MIB)


def test_with_replicas_a_worker_has_the_requests_of_the_core_that_is_its_parent() -> None:
    own, other = engine_core(COUNT), engine_core(2 * COUNT, every_s=0.5)
    other = replace(other, identity=replace(other.identity, pid=3))
    sizes = [gib(20) + MIB * at for at in range(COUNT)]
    child, stranger = worker(sizes, ppid=2), worker(sizes, ppid=9)
    assert rows(run_of(child, own, other))[ALLOCATED].bytes_per_request == pytest.approx(MIB)
    assert rows(run_of(stranger, own, other))[ALLOCATED].bytes_per_request is None
    assert rows(run_of(stranger, own))[ALLOCATED].bytes_per_request == pytest.approx(MIB)


def test_the_api_server_serves_the_requests_of_all_replicas() -> None:
    own, other = engine_core(COUNT), engine_core(COUNT)
    other = replace(other, identity=replace(other.identity, pid=3))
    times = [sample(at * 10**9, host_rss_bytes=gib(1) + MIB * at)
             for at in range(1, COUNT + 1)]  # fmt: skip
    api = process([], role="api", roles=frozenset({"api"}), pid=4, label=None, rank=None)
    api = replace(api, served=Served(device_samples=times))
    [row] = [each for each in host_growth(run_of(api, own, other)) if each.process == "api"]
    assert row.growth.bytes_per_request == pytest.approx(MIB / 2)


@pytest.mark.parametrize(("shared", "grows"), [(MIB, False), (0, True)])
def test_shared_pages_are_no_host_memory_of_the_process(shared: int, grows: bool) -> None:
    times = [
        sample(at * 10**9, host_rss_bytes=gib(1) + MIB * at,
               host_shared_bytes=shared * at)
        for at in range(1, COUNT + 1)
    ]  # fmt: skip
    api = process([], role="api", roles=frozenset({"api"}), pid=4, label=None, rank=None)
    api = replace(api, served=Served(device_samples=times))
    [row] = [each for each in host_growth(run_of(api, engine_core(COUNT))) if each.pid == 4]
    assert (row.growth.verdict == GROWING) is grows


def test_requests_of_another_host_have_no_position_here() -> None:
    core = engine_core(COUNT)
    elsewhere = replace(core, identity=replace(core.identity, host="other"))
    first = worker([gib(20) + MIB * at for at in range(COUNT)])
    assert rows(run_of(first, elsewhere))[ALLOCATED].bytes_per_request is None


def test_growth_over_time_that_no_request_causes_is_found() -> None:
    """Half of the requests come in the first tenth of the time."""
    core = engine_core(0)
    ends = [*range(1, 201), *range(210, 2200, 10)]
    records = [RequestRecord(str(at), end_ns=end * 10**9) for at, end in enumerate(ends)]
    core = replace(core, served=Served(requests=records))
    allocated = [gib(20) + MIB // 4 * at for at in range(2200)]
    row = rows(run_of(worker(allocated), core))[ALLOCATED]
    assert row.verdict == GROWING
    assert row.bytes_per_hour == pytest.approx(900 * MIB)


def test_room_is_the_headroom_less_what_has_grown() -> None:
    row = rows(leaking(COUNT))[ALLOCATED]
    [priced] = with_room([row], gib(2))
    assert row.grown_bytes is not None
    assert row.bytes_per_request is not None
    left = (gib(2) - row.grown_bytes) / row.bytes_per_request
    assert priced.requests_until_full == pytest.approx(left)
    assert priced.hours_until_full == pytest.approx(left / 3600, rel=1e-3)
    assert with_room([row], None)[0].requests_until_full is None
    assert with_room([row], 0)[0].requests_until_full == 0
    [bounded] = with_room([replace(row, bounded=True)], gib(2))
    assert bounded.requests_until_full is None


def test_a_report_has_growth_per_rank_and_per_process() -> None:
    report = build_report(leaking(COUNT))
    assert [row.owner for row in report.ranks[0].growth] == [ALLOCATED, CACHED, KV_BLOCKS]
    assert [row.process for row in report.growth] == ["engine_core"]


def test_thinned_samples_count_as_the_reading_they_end_with() -> None:
    one = sample(5, allocated_bytes=7, reserved_bytes=9)
    folded = replace(one, since_ns=1, folded=16, low={"allocated_bytes": 1})
    alone = replace(process([]), served=Served(samples=[folded]))
    assert rows(run_of(alone))[ALLOCATED].last_bytes == 7
