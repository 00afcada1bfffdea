"""Requests, stages and the multimodal profile, from records written down by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import process, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import Finding
from vllm_memprof.accounting.serving.requests import MOST_POINTS, largest_rows
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.samples import (
    Item,
    MediaStage,
    RequestMemory,
    RequestRecord,
    Sample,
    Served,
)
from vllm_memprof.record.schema import STAGE_FIGURES
from vllm_memprof.units import GIB, MIB

S = 10**9
#: Tokens of the items that the profiled batch has, and of one image of the requests.
PROFILED_TOKENS, SIZE = 16384, (4096, 4096)


def sample(t_s: float, **figures: int | None) -> Sample:
    known = {"allocated_bytes": 10 * GIB, "reserved_bytes": 11 * GIB, **figures}
    return Sample(int(t_s * S), int(t_s * S), 1, known, known, known, step=1, steps=1)


def kv_sample(t_s: float, used: int) -> Sample:
    known = {"kv_blocks_used": used, "kv_blocks_total": 100, "running": 1, "waiting": 0}
    return Sample(int(t_s * S), int(t_s * S), 1, known, known, known)


def stage(
    name: str, tokens: int, before: int, peak: int | None, total: int, error: str | None = None
) -> MediaStage:
    figures: dict[str, int | None] = dict.fromkeys(STAGE_FIGURES)
    figures |= {
        "allocated_before_bytes": before,
        "allocated_bytes": before + MIB,
        "allocated_peak_bytes": peak,
        "allocated_total_bytes": total,
    }
    items = (Item("image", tokens, SIZE),)
    return MediaStage(name, ("r1",), items, figures, error)


def vision(
    tokens: int, merged: bool | None = False, taken: int = 2 * GIB, merge: int = GIB
) -> Report:
    """A run whose profiled encoder took 2 GiB, and a request with one image."""
    profiled = replace(
        span(
            "mm_profile",
            snapshot(allocated_bytes=GIB, allocated_peak_bytes=GIB),
            snapshot(allocated_bytes=GIB, allocated_peak_bytes=3 * GIB),
        ),
        detail={
            "mm_modality": "image",
            "mm_items": 1,
            "mm_tokens_per_item": PROFILED_TOKENS,
            "mm_size": [4096, 4096],
        },
    )
    ran = replace(
        span("profile_run", snapshot(), snapshot()),
        detail={} if merged is None else {"mm_merge_ran": merged},
    )
    served = Served(
        samples=[sample(60), sample(62)],
        stages=[
            stage("mm_encoder", tokens, 10 * GIB, 10 * GIB + taken, 3 * GIB),
            stage("mm_merge", tokens, 10 * GIB, None, merge),
        ],
    )
    return build_report(run_of(replace(process([ran, profiled]), served=served), start_t_ns=0))


def named(report: Report, name: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.id == name]


def test_a_larger_item_than_profiled_is_found_with_tokens_and_bytes() -> None:
    [found] = named(vision(PROFILED_TOKENS + 1, taken=3 * GIB), "mm-profile-under")
    assert found.bytes == GIB
    assert "16,384 tokens" in found.evidence
    assert "16,385 tokens" in found.evidence
    assert "4096x4096" in found.evidence
    assert not named(vision(PROFILED_TOKENS), "mm-profile-under")


def test_an_encoder_that_takes_more_for_as_many_tokens_is_found() -> None:
    [found] = named(vision(PROFILED_TOKENS, taken=2 * GIB + 1), "mm-profile-under")
    assert found.bytes == 1


def test_a_profile_of_which_less_than_half_came_is_told() -> None:
    [found] = named(vision(PROFILED_TOKENS // 2 - 1, taken=GIB // 2), "mm-profile-over")
    assert (found.severity, found.bytes) == ("info", 3 * GIB // 2)
    assert not named(vision(PROFILED_TOKENS // 2), "mm-profile-over")


def test_a_merge_that_profiling_did_not_run_is_told_with_its_bytes() -> None:
    [found] = named(vision(100), "merge-not-profiled")
    assert found.bytes == GIB
    assert "100 multimodal tokens" in found.evidence


@pytest.mark.parametrize(("merged", "merge"), [(True, GIB), (None, GIB), (False, 0)])
def test_no_merge_is_told_that_profiling_ran_or_that_took_nothing(
    merged: bool | None, merge: int
) -> None:
    assert not named(vision(100, merged=merged, merge=merge), "merge-not-profiled")


def memory(number: int, **fields: Any) -> RequestMemory:
    begin = (60 + number) * S
    known: dict[str, Any] = {"begin_ns": begin, "end_ns": begin + S // 2, "others": 0, **fields}
    return RequestMemory(f"r{number}", **known)


def served(*memories: RequestMemory, core: list[RequestRecord] | None = None) -> Report:
    worker = replace(
        process([]), served=Served(samples=[sample(60)], request_memory=list(memories))
    )
    engine = replace(
        process([], role="engine_core", roles=frozenset({"engine_core"})),
        served=Served(requests=core or [], kv_samples=[kv_sample(60, 7)]),
    )
    return build_report(run_of(worker, engine, start_t_ns=0))


def test_a_request_joins_what_worker_and_engine_core_know() -> None:
    item = Item("image", 1024, (1024, 1024))
    core = RequestRecord("r1", 1100, 16, (item,), 60 * S, 63 * S, "FINISHED_STOPPED")
    read = memory(
        1,
        allocated_peak_bytes=12 * GIB,
        peak_exact=True,
        peak_stage="mm_merge",
        left_allocated_bytes=5,
        left_reserved_bytes=-6,
    )
    [row] = served(read, core=[core]).ranks[0].requests
    data = to_json(row)
    wanted = {
        "id": "r1",
        "prompt_tokens": 1100,
        "output_tokens": 16,
        "images": [[1024, 1024]],
        "allocated_peak_bytes": 12 * GIB,
        "left_allocated_bytes": 5,
        "left_reserved_bytes": -6,
        "peak_stage": "mm_merge",
    }
    assert {name: data[name] for name in wanted} == wanted
    assert (row.image_tokens, row.reason, row.finished) == (1024, "FINISHED_STOPPED", True)


def test_of_several_engine_cores_the_parent_of_the_worker_counts() -> None:
    worker = replace(
        process([], ppid=20), served=Served(samples=[sample(60)], request_memory=[memory(1)])
    )
    cores = [
        replace(
            process([], role="engine_core", roles=frozenset({"engine_core"}), pid=pid),
            served=Served(requests=[RequestRecord("r1", pid, pid, (), S, 2 * S)]),
        )
        for pid in (10, 20)
    ]
    [row] = build_report(run_of(worker, *cores, start_t_ns=0)).ranks[0].requests
    assert row.output_tokens == 20
    orphan = replace(worker, identity=replace(worker.identity, ppid=30))
    [row] = build_report(run_of(orphan, *cores, start_t_ns=0)).ranks[0].requests
    assert row.output_tokens is None


def test_what_one_side_alone_knows_is_a_row_with_the_rest_unknown() -> None:
    waiting = RequestRecord("r9", 5, None, (), 70 * S)
    rows = {row.id: row for row in served(memory(1), core=[waiting]).ranks[0].requests}
    assert rows["r1"].output_tokens is None
    assert rows["r9"].allocated_peak_bytes is None
    assert rows["r9"].finished is None


def test_an_id_that_comes_again_is_another_request() -> None:
    again = replace(memory(5), id="r1")
    core = [
        RequestRecord("r1", 1, 2, (), 60 * S, 61 * S),
        RequestRecord("r1", 3, 4, (), 65 * S, 66 * S),
    ]
    rows = served(memory(1), again, core=core).ranks[0].requests
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(1, 2), (3, 4)]


def test_the_curve_is_thinned_and_keeps_lowest_and_highest() -> None:
    samples = [sample(60 + i / 100, allocated_bytes=GIB + i % 13) for i in range(5000)]
    samples[2500] = sample(85, allocated_bytes=GIB, allocated_peak_bytes=9 * GIB)
    worker = replace(process([]), served=Served(samples=samples))
    points = build_report(run_of(worker, start_t_ns=0)).ranks[0].samples
    assert len(points) <= MOST_POINTS
    assert max(point.high["allocated_bytes"] for point in points) == 9 * GIB
    assert min(point.low["allocated_bytes"] for point in points) == GIB
    assert sum(point.readings for point in points) == len(samples)
    assert "kv_blocks_used" not in points[0].low


def test_the_curve_of_a_worker_has_the_blocks_of_its_engine_core() -> None:
    point = served(memory(1)).ranks[0].samples[0]
    assert point.low["kv_blocks_used"] == point.high["kv_blocks_used"] == 7


def test_the_ten_largest_leave_out_what_is_unknown() -> None:
    sizes = [None if i % 3 == 0 else i for i in range(40)]
    rows = (
        served(*(memory(i, allocated_peak_bytes=size) for i, size in enumerate(sizes)))
        .ranks[0]
        .requests
    )
    found = [row.allocated_peak_bytes for row in largest_rows(rows, "allocated_peak_bytes")]
    assert found == [38, 37, 35, 34, 32, 31, 29, 28, 26, 25]
