"""A failed allocation: owners, free blocks by whether they could be used, what would have helped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import TOTAL, gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Oom, Remedy, TermRow
from vllm_memprof.accounting.oom.estimates import Case
from vllm_memprof.accounting.oom.failed_allocation import divide_free
from vllm_memprof.accounting.oom.remedies import remedies
from vllm_memprof.record.failures import Failure, Item, Pool, StepRequest
from vllm_memprof.record.loader import ProcessRecord
from vllm_memprof.record.samples import RequestRecord, Served
from vllm_memprof.record.spans import Span
from vllm_memprof.units import MIB


def pool(free: int, largest: int, **more: Any) -> Pool:
    values: dict[str, Any] = {
        "private": False,
        "small": False,
        "stream": "0",
        "expandable": False,
        "allocated_bytes": 0,
        "pending_bytes": 0,
        "free_blocks": 1,
        "fitting_bytes": 0,
        **more,
    }
    total = free + values["allocated_bytes"] + values["pending_bytes"]
    return Pool(free_bytes=free, largest_free_bytes=largest, total_bytes=total, **values)


POOLS = [
    pool(900 * MIB, 300 * MIB, allocated_bytes=5000 * MIB, pending_bytes=10 * MIB),
    pool(70 * MIB, 60 * MIB, stream="9", allocated_bytes=100 * MIB),
    pool(3 * MIB, MIB, small=True, allocated_bytes=9 * MIB),
    pool(40 * MIB, 40 * MIB, private=True, allocated_bytes=80 * MIB),
]
RESERVED = sum(each.total_bytes for each in POOLS)
ALLOCATED = sum(each.allocated_bytes for each in POOLS)


def test_free_memory_is_divided_by_whether_it_could_have_been_used() -> None:
    found = divide_free(POOLS, 400 * MIB, ALLOCATED, RESERVED)
    assert found is not None
    assert (found.stream, found.streams, found.small, found.exact) == ("0", 2, False, True)
    assert found.largest_bytes == 300 * MIB
    parts = (
        found.fitting_bytes,
        found.too_small_bytes,
        found.other_streams_bytes,
        found.other_pools_bytes,
        found.graph_pools_bytes,
        found.pending_bytes,
    )
    assert parts == (0, 900 * MIB, 70 * MIB, 3 * MIB, 40 * MIB, 10 * MIB)
    assert sum(part or 0 for part in parts) == RESERVED - ALLOCATED


def test_a_small_request_looks_into_the_pool_of_small_blocks() -> None:
    found = divide_free(POOLS, 2 * MIB, ALLOCATED, RESERVED)
    assert found is not None
    assert (found.small, found.largest_bytes, found.other_pools_bytes) == (True, MIB, 970 * MIB)


def test_what_was_freed_before_the_reading_makes_it_inexact() -> None:
    found = divide_free(POOLS, 400 * MIB, ALLOCATED + 7, RESERVED)
    assert found is not None
    assert (found.exact, found.freed_bytes) == (False, 7)
    unknown = divide_free(POOLS, None, None, None)
    assert unknown is not None
    assert (unknown.exact, unknown.fitting_bytes, unknown.too_small_bytes) == (False, None, None)


# --- a worker that fails in a request, with its KV cache in place

ASKED = gib(3)
FREE = gib(1)
FIGURES = {
    "device_total_bytes": TOTAL,
    "requested_bytes": TOTAL * 0.95,
    "gpu_memory_utilization": 0.95,
    "kv_cache_bytes": gib(30),
    "weights_bytes": gib(16),
}
IMAGE = Item("image", 16384, [4096, 4096], None, True)
STEP = [StepRequest("1-a", 16400, 16400, [IMAGE])]
CHAIN = ["vllm.v1.worker.gpu_model_runner:GPUModelRunner._execute_mm_encoder"]


def worker(failure: Failure | None, where: list[Span] | None = None, **who: Any) -> ProcessRecord:
    """A worker whose allocation of 3 GiB failed with 1 GiB free."""
    around = where or [
        span("weight_load", snapshot(allocated_bytes=0), snapshot(allocated_bytes=gib(16))),
        span("kv_cache_alloc", snapshot(allocated_bytes=gib(16)),
             snapshot(allocated_bytes=gib(46)), 1),
        span("warm_up", snapshot(), snapshot(), 2),
    ]  # fmt: skip
    counters = snapshot(allocated_bytes=gib(50), reserved_bytes=gib(58))
    detail = {"requested_bytes": ASKED, "device_total_bytes": TOTAL, "device_free_bytes": FREE}
    parent = next((each.order for each in around if each.end_t_ns is None), None)
    oom = span("oom", None, counters, len(around), detail=detail, parent=parent)
    failed = process([*around, oom], FIGURES, **who)
    return replace(failed, failures=[] if failure is None else [replace(failure, oom=oom.id)])


def failed(failure: Failure | None, where: list[Span] | None = None, **info: Any) -> Oom:
    record = worker(failure, where)
    info.setdefault("engine", "vllm-ascend")
    found = build_report(run_of(record, engine_version="0.23.0", **info)).ranks[0].oom
    assert found is not None
    return found


def remedy(oom: Oom, name: str) -> Remedy:
    return next(each for each in oom.remedies if each.id == name)


def test_the_owners_add_up_to_the_device() -> None:
    oom = failed(None)
    whole = [row for row in oom.owners if row.part_of is None]
    assert sum(row.bytes or 0 for row in whole) == TOTAL
    sizes = {row.component: row.bytes for row in oom.owners}
    assert (sizes["weights"], sizes["kv_cache"]) == (gib(16), gib(30))
    assert sizes["other_tensors"] == gib(4)
    assert (oom.phase, oom.missing_bytes) == ("request", gib(2))


def test_parts_of_another_moment_are_left_out() -> None:
    before = [span("weight_load", snapshot(allocated_bytes=0), snapshot(allocated_bytes=gib(55)))]
    assert "weights" not in {row.component for row in failed(None, before).owners}


def _loading(ended: bool) -> list[Span]:
    """Phases in which a draft model of 2 GiB and slots of 1 GiB are loaded, or were."""

    def at(t_ns: int, size: float) -> Any:
        return replace(snapshot(allocated_bytes=gib(size)), t_ns=t_ns)

    whole = span("weight_load", at(-90, 0), at(-50, 19), end_t_ns=0 if ended else None)
    draft = span("draft_load", at(-80, 16), at(-70, 18), 1, parent=0, depth=1)
    slots = span("lora_load", at(-60, 18), at(-55, 19), 2, parent=0, depth=1)
    if ended:
        return [whole, draft, slots, span("kv_cache_alloc", at(-40, 19), at(-30, 46), 3)]
    under_way = replace(slots, after=None, end_t_ns=None)
    return [replace(whole, after=None), draft, under_way]


def test_draft_model_and_lora_slots_are_owners_of_their_own() -> None:
    oom = failed(None, _loading(ended=True))
    sizes = {row.component: row.bytes for row in oom.owners if row.part_of is not None}
    assert sizes == {
        "kv_cache": gib(27),
        "target_weights": gib(16),
        "draft_weights": gib(2),
        "lora": gib(1),
        "other_tensors": gib(4),
    }
    slots, draft = remedy(oom, "lora_slots"), remedy(oom, "draft_model")
    assert slots.argument == "a lower --max-loras or --max-lora-rank"
    assert (slots.bytes, slots.bound, slots.how, slots.enough) == (
        gib(1),
        "at_most",
        "derived",
        None,
    )
    assert (draft.argument, draft.bytes) == ("without --speculative-config", gib(2))
    # the KV cache takes what the weights no longer do
    assert (draft.enough, "grows by as much" in draft.grounds) == (None, True)


def test_slots_that_are_being_made_have_what_they_took_so_far() -> None:
    oom = failed(None, _loading(ended=False))
    sizes = {row.component: row.bytes for row in oom.owners if row.part_of is not None}
    assert sizes == {
        "target_weights": gib(16),
        "draft_weights": gib(2),
        "lora": gib(32),
        "other_tensors": 0,
    }
    assert remedy(oom, "draft_model").enough is True  # 2 GiB were missing, and no KV cache is there


def test_a_start_without_them_has_neither_owner_nor_remedy() -> None:
    oom = failed(None)
    assert not {"lora_slots", "draft_model"} & {each.id for each in oom.remedies}
    assert not {"lora", "draft_weights"} & {row.component for row in oom.owners}


def test_each_remedy_says_what_it_gives_and_whether_that_is_enough() -> None:
    blocks = [pool(gib(8), gib(2), allocated_bytes=gib(50))]
    oom = failed(Failure("", chain=CHAIN, requests=STEP, pools=blocks))
    assert oom.stage == "mm_encoder"

    segments = remedy(oom, "expandable_segments")
    assert (segments.bytes, segments.bound, segments.enough) == (gib(8), "at_most", None)
    fixed = remedy(oom, "kv_cache_memory")
    assert fixed.argument == f"--kv-cache-memory-bytes {gib(28)}"
    assert (fixed.bytes, fixed.bound, fixed.enough) == (gib(2), "exact", True)
    share = remedy(oom, "utilization")
    assert share.argument == "--gpu-memory-utilization 0.91"
    assert share.bytes == int((0.95 - 0.91) * TOTAL)
    assert share.bytes >= gib(2)
    images = remedy(oom, "image_size")
    # a quarter of the pixels leaves 0.75 of the 3 GiB, and 1 GiB is free
    assert images.argument == "--mm-processor-kwargs '{\"max_pixels\": 4194304}'"
    assert (images.bytes, images.bound, images.how) == (gib(2.25), "at_least", "estimated")
    tokens = remedy(oom, "batched_tokens")
    assert (tokens.bytes, tokens.enough) == (None, None)
    assert "whole images" in tokens.grounds
    assert not [each for each in oom.remedies if each.id == "images_per_prompt"]  # one image


def test_a_remedy_that_gives_too_little_says_so() -> None:
    blocks = [pool(gib(0.5), gib(0.5), allocated_bytes=gib(57.5))]
    oom = failed(Failure("", chain=CHAIN, requests=STEP, pools=blocks))
    assert remedy(oom, "expandable_segments").enough is False


@pytest.mark.parametrize(
    "failure",
    [
        Failure("", pools=[pool(gib(8), gib(2), allocated_bytes=gib(50), expandable=True)]),
        Failure("", allocator_settings="page_size:1g, expandable_segments:True"),
    ],
)
def test_what_is_set_already_is_no_remedy(failure: Failure) -> None:
    ids = {each.id for each in failed(failure).remedies}
    assert "expandable_segments" not in ids
    assert "utilization" in ids


def test_several_images_of_a_prompt_are_limited() -> None:
    step = [StepRequest("1-a", 200, 200, [IMAGE, replace(IMAGE, size=[2048, 2048])])]
    limit = remedy(failed(Failure("", chain=CHAIN, requests=step)), "images_per_prompt")
    assert limit.bytes == int(ASKED * (1 - 4096**2 / (4096**2 + 2048**2)))
    assert limit.enough is None  # a lower bound that does not cover it


def test_before_the_kv_cache_its_size_is_no_remedy() -> None:
    profile = [span("profile_run", snapshot(allocated_bytes=gib(16)), None, end_t_ns=None)]
    forward = ["vllm_ascend.worker.model_runner_v1:NPUModelRunner._model_forward"]
    command = ["memprof", "plan", "m", "--max-num-batched-tokens=8192"]
    oom = failed(Failure("", chain=forward), profile, command=command)
    assert (oom.phase, oom.stage) == ("profile_run", "model_forward")
    assert not {"utilization", "kv_cache_memory"} & {each.id for each in oom.remedies}
    tokens = remedy(oom, "batched_tokens")
    assert tokens.argument == "--max-num-batched-tokens 4096"
    assert (tokens.bytes, tokens.how, tokens.enough) == (ASKED // 2, "estimated", None)


def test_graphs_are_counted_from_the_beginning_of_their_capture() -> None:
    before = snapshot(device_total_bytes=TOTAL, device_free_bytes=gib(4))
    capture = [span("graph_capture", before, None, end_t_ns=None)]
    oom = failed(None, capture)
    [eager, fewer] = [each for each in oom.remedies if each.id == "fewer_graphs"]
    assert (eager.bytes, eager.bound, eager.enough) == (gib(3), "at_least", True)
    assert (fewer.bytes, fewer.enough) == (None, None)
    assert not [
        each
        for each in failed(None, capture, engine_command=["--enforce-eager"]).remedies
        if each.id == "fewer_graphs"
    ]


def test_the_step_is_taken_from_the_sampler_where_no_exception_was_read() -> None:
    record = worker(None)
    item = {"request": "7-b", "modality": "image", "size": [640, 480], "tokens": 300}
    moment = {"step": 4, "stage": "mm_merge", "requests": [["7-b", 310]], "items": [item]}
    phases = [
        replace(each, detail={**each.detail, "moment": moment}) if each.phase == "oom" else each
        for each in record.phases
    ]
    report = build_report(run_of(replace(record, phases=phases), engine="vllm-ascend"))
    oom = report.ranks[0].oom
    assert oom is not None
    assert oom.stage == "mm_merge"
    assert oom.requests == [
        StepRequest("7-b", 310, None, [Item("image", 300, [640, 480], None, True)])
    ]


def test_other_processes_are_at_most_what_is_outside_the_allocator() -> None:
    crowded = worker(None)
    counters = snapshot(allocated_bytes=gib(10), reserved_bytes=gib(11))
    phases = [
        span("oom", None, counters, detail=each.detail) if each.phase == "oom" else each
        for each in crowded.phases
    ]
    report = build_report(run_of(replace(crowded, phases=phases), engine="vllm-ascend"))
    oom = report.ranks[0].oom
    assert oom is not None
    others = remedy(oom, "other_processes")
    assert (others.bytes, others.bound, others.enough) == (
        TOTAL - FREE - gib(11),
        "at_most",
        None,
    )


def test_the_kv_cache_that_leaves_room_for_the_peak_is_named_where_that_is_more() -> None:
    report = build_report(recorded("recorded_oom"))
    [rank], summary = report.ranks, replace(report.run, engine=None, simulated=False)
    assert rank.oom is not None

    def given(headroom: int) -> list[Remedy]:
        short = replace(rank, budget=replace(rank.budget, headroom_bytes=headroom))
        assert rank.oom is not None
        case = Case(short, rank.oom, summary, None)
        return [each for each in remedies(case) if each.id == "room_for_the_peak"]

    granted = rank.budget.engine_kv_cache_bytes
    assert granted is not None
    [found] = given(-gib(2))
    assert found.argument == f"--kv-cache-memory-bytes {granted - gib(2)}"
    assert (found.bytes, found.bound, found.enough) == (gib(2), "exact", True)
    assert given(-1) == []  # less than what was missing
    assert given(gib(1)) == []


def test_the_request_in_turn_is_counted_by_the_engine_core() -> None:
    begun = [RequestRecord(f"{number}-a") for number in range(4)]
    core = replace(
        process([], role="engine_core", roles=frozenset({"engine_core"})),
        served=Served(requests=begun),
    )
    idle = StepRequest("0-a", 1)

    def turn(*step: StepRequest) -> int | None:
        record = worker(Failure("", requests=list(step)))
        [rank] = build_report(run_of(record, core)).ranks
        assert rank.oom is not None
        return rank.oom.at_request

    encoding = replace(idle, id="2-a", items=[IMAGE])
    assert turn(idle, encoding) == 3
    assert turn(idle) == 1
    assert turn(idle, replace(idle, id="3-a")) is None  # which of the two is not known
    assert turn(replace(encoding, id="9-z")) is None


def test_graphs_that_the_equation_subtracts_are_no_sure_remedy() -> None:
    report = build_report(recorded("recorded_oom"))
    [rank], summary = report.ranks, report.run
    assert rank.oom is not None
    oom = replace(rank.oom, phase="request")
    served = [each for each in rank.phases if each.phase not in ("graph_capture", "warm_up")]
    served = [replace(each, parent=None) if each.phase == "oom" else each for each in served]

    def given(subtracted: bool) -> Remedy:
        terms = [TermRow("graph", gib(1), subtracted)]
        budget = replace(rank.budget, terms=terms)
        figures = {**rank.figures, "graph_bytes": gib(1)}
        worker = replace(rank, budget=budget, figures=figures, phases=served)
        case = Case(worker, oom, summary, None)
        return next(each for each in remedies(case) if each.id == "fewer_graphs")

    assert (given(False).bytes, given(False).enough) == (gib(1), True)
    assert (given(True).bytes, given(True).enough) == (gib(1), None)
    assert "the KV cache grows" in given(True).grounds
