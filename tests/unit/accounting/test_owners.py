"""Owners of memory outside torch: by counters, and by each inference with its limits."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import TOTAL, divided_rows, process, rest_of, span
from vllm_memprof.accounting.owners.device_memory import device_memory
from vllm_memprof.accounting.owners.outside_torch import ATB_POOL_BYTES, Owners, owners_of
from vllm_memprof.accounting.readings.startup import others_at_start
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import DeviceMemory, Span
from vllm_memprof.units import MIB

CONTEXT, RUNTIME, BUFFERS = 332 * MIB, 26 * MIB, 400 * MIB
amount = st.integers(0, 2**34)


def taken(
    t_ns: int, reserved: int = 0, workspace: int | None = 0, driver: bool = True, **held: int
) -> Snapshot:
    """Return one consistent reading of torch, the counters and the driver. Sizes in bytes."""
    counters = {
        "RUNTIME": RUNTIME,
        "HCCL": 0,
        **{name: size for name, size in held.items() if name.isupper()},
    }
    counters["APP"] = (
        reserved + (workspace or held.get("unread_workspace", 0)) + held.get("past_torch", 0)
    )
    own = CONTEXT + sum(counters.values())
    others = held.get("others", 0)
    free = TOTAL - own - others
    return Snapshot(
        t_ns=t_ns,
        device_total_bytes=TOTAL,
        device_free_bytes=free,
        allocated_bytes=reserved,
        reserved_bytes=reserved,
        npu_workspace_bytes=workspace,
        non_torch_bytes=TOTAL - free - reserved,
        process_bytes=own if driver else None,
        other_processes_bytes=others if driver else None,
        components={name: {"bytes": size, "peak_bytes": size} for name, size in counters.items()},
    )


def spans(*edges: tuple[str, Snapshot, Snapshot], **details: dict[str, Any]) -> list[Span]:
    return [
        span(phase, before, after, order, detail=details.get(phase, {}))
        for order, (phase, before, after) in enumerate(edges)
    ]


def divided(found: list[Span], order: int, edge: str = "after") -> dict[str, int | None]:
    memory = whole(found, order, edge)
    return {row.component: row.bytes for row in divided_rows(memory)}


def whole(found: list[Span], order: int, edge: str = "after") -> DeviceMemory:
    (read,) = (each for each in found[order].edges if each.side == edge)
    return device_memory(found[order], read, False, owners_of(process(found)))


@given(
    reserved=amount,
    workspace=amount,
    counters=st.dictionaries(st.sampled_from(["APP", "HCCL", "RUNTIME", "GE", "OP"]), amount),
    free=amount,
    own=st.one_of(st.none(), amount),
    others=st.one_of(st.none(), amount),
    unmapped=st.one_of(st.none(), st.integers(0, 2**20)),
)
def test_the_books_close_whatever_the_counters_say(
    reserved: int,
    workspace: int,
    counters: dict[str, int],
    free: int,
    own: int | None,
    others: int | None,
    unmapped: int | None,
) -> None:
    snapshot = Snapshot(
        t_ns=1,
        device_total_bytes=TOTAL,
        device_free_bytes=free,
        allocated_bytes=reserved // 2,
        reserved_bytes=reserved,
        npu_workspace_bytes=workspace,
        unmapped_bytes=unmapped,
        process_bytes=own,
        other_processes_bytes=others,
        components={name: {"bytes": size, "peak_bytes": size} for name, size in counters.items()},
    )
    found = [span("warm_up", None, snapshot)]
    memory = device_memory(found[0], found[0].edges[0], False, Owners(counted=True))
    known = sum(row.bytes for row in memory.rows if row.bytes is not None)
    assert memory.unexplained_bytes is not None
    assert known + memory.unexplained_bytes == TOTAL
    if (
        own is not None
    ):  # everything of this process has a row: what is left is what no process holds
        assert rest_of(memory) == TOTAL - free - own - (others or 0)


def test_a_reading_that_belongs_together_leaves_nothing() -> None:
    found = spans(
        (
            "warm_up",
            taken(1),
            taken(2, 5 * MIB, 7 * MIB, HCCL=BUFFERS, GE=3 * MIB, past_torch=11 * MIB),
        )
    )
    memory = whole(found, 0)
    rows = {row.component: (row.bytes, row.how) for row in divided_rows(memory)}
    assert rest_of(memory) == 0
    assert rows["context"] == (CONTEXT, "measured")
    assert rows["communicators_unnamed"] == (BUFFERS, "measured")  # no collective was seen
    assert rows["cann_ge"] == (3 * MIB, "measured")
    assert rows["other"] == (11 * MIB, "measured")
    assert rows["other_processes"] == (0, "measured")


def test_sleeping_memory_is_counted_by_torch_alone() -> None:
    awake = taken(1, 500 * MIB)
    asleep = taken(2, 100 * MIB)
    asleep = Snapshot(**{**vars(asleep), "reserved_bytes": 500 * MIB, "allocated_bytes": 500 * MIB,
                         "unmapped_bytes": 400 * MIB})  # fmt: skip
    found = spans(("sleep", awake, asleep))
    rows = divided(found, 0)
    assert (rows["unmapped"], rows["other"]) == (-400 * MIB, 0)
    assert rest_of(whole(found, 0)) == 0


def test_the_context_is_carried_to_moments_at_which_the_driver_is_not_asked() -> None:
    found = spans(
        ("device_init", taken(1), taken(2)),
        ("empty_cache", taken(3, driver=False), taken(4, driver=False)),
    )
    rows = {row.component: (row.bytes, row.how) for row in divided_rows(whole(found, 1))}
    assert rows["context"] == (CONTEXT, "derived")
    assert rows["other_processes"] == (0, "derived")
    assert rest_of(whole(found, 1)) == 0


def test_other_processes_are_carried_to_moments_at_which_the_driver_is_not_asked() -> None:
    """What one takes after the list was read is unexplained; one that has ended holds nothing."""
    other, moved = 358 * MIB, 100 * MIB
    for now, row, rest in (
        (other, other, 0),
        (other + moved, other, moved),
        (other - moved, other - moved, 0),
        (0, 0, 0),
    ):
        found = spans(
            ("graph_capture", taken(1, others=other), taken(4, others=now)),
            ("empty_cache", taken(2, driver=False, others=now), taken(3, driver=False, others=now)),
        )
        rows = {each.component: (each.bytes, each.how) for each in divided_rows(whole(found, 1))}
        assert rows["other_processes"] == (row, "derived")
        assert rest_of(whole(found, 1)) == rest


def test_before_the_driver_was_asked_nothing_is_carried() -> None:
    found = spans(
        ("device_init", taken(1, driver=False, others=MIB), taken(2, driver=False, others=MIB)),
        ("warm_up", taken(3, others=MIB), taken(4, others=MIB)),
    )
    rows = {row.component: row.bytes for row in divided_rows(whole(found, 0))}
    assert rows["other_processes"] is None


def test_without_the_driver_the_context_is_what_the_first_reading_leaves() -> None:
    alone = spans(("device_init", taken(1, driver=False), taken(2, 5 * MIB, driver=False)))
    assert divided(alone, 0)["context"] == CONTEXT
    crowded = spans(
        ("device_init", taken(1, driver=False, others=2**34), taken(2, driver=False, others=2**34))
    )
    assert divided(crowded, 0)["context"] is None
    assert rest_of(whole(crowded, 0)) == CONTEXT + 2**34


def group(name: str, size: int | None = BUFFERS, **more: Any) -> dict[str, Any]:
    return {"group": name, "buffer_bytes": size, "buffer_source": "hccl_config", **more}


def two_communicators(held_at_the_end: int, second: int | None = BUFFERS) -> dict[str, int | None]:
    found = [
        span("communicator", taken(1), taken(2, HCCL=BUFFERS), 0, detail=group("tp:0")),
        span(
            "communicator",
            taken(3, HCCL=BUFFERS),
            taken(4, HCCL=2 * BUFFERS),
            1,
            detail=group("ep:0", second),
        ),
        span("warm_up", taken(5, HCCL=2 * BUFFERS), taken(6, HCCL=held_at_the_end), 2),
    ]
    assert divided(found, 0, "before")["communicator:tp"] == 0
    assert divided(found, 1, "before")["communicator:ep"] == 0
    rows = divided(found, 2)
    assert rest_of(whole(found, 2)) == 0
    return {
        name.removeprefix("communicator"): size
        for name, size in rows.items()
        if name.startswith("communicator")
    }


def test_the_counter_is_divided_by_what_each_communicator_is_configured_with() -> None:
    assert two_communicators(2 * BUFFERS) == {":tp": BUFFERS, ":ep": BUFFERS, "s_unnamed": 0}
    assert two_communicators(3 * BUFFERS) == {":tp": BUFFERS, ":ep": BUFFERS, "s_unnamed": BUFFERS}
    assert two_communicators(2 * BUFFERS, None) == {
        ":tp": BUFFERS,
        ":ep": BUFFERS,
        "s_unnamed": 0,
    }  # by its growth


def test_buffers_on_their_way_are_the_last_communicator_s() -> None:
    assert two_communicators(BUFFERS + 5) == {":tp": BUFFERS, ":ep": 5, "s_unnamed": 0}


def test_destroyed_communicators_leave_no_names() -> None:
    assert two_communicators(BUFFERS - 5) == {":tp": None, ":ep": None, "s_unnamed": BUFFERS - 5}
    assert two_communicators(0) == {":tp": 0, ":ep": 0, "s_unnamed": 0}


def test_a_communicator_alone_is_measured_by_the_counter() -> None:
    found = [span("communicator", taken(1), taken(2, HCCL=BUFFERS), 0, detail=group("tp:0"))]
    rows = {row.component: row for row in divided_rows(whole(found, 0))}
    assert (rows["communicator:tp"].bytes, rows["communicator:tp"].how) == (BUFFERS, "measured")
    assert "2 x 200 MiB by hccl_config" in rows["communicator:tp"].source


def test_a_group_s_point_to_point_communicator_has_a_name_of_its_own() -> None:
    found = [
        span("communicator", taken(1), taken(2, HCCL=BUFFERS), 0, detail=group("pp:0")),
        span("communicator", taken(3, HCCL=BUFFERS), taken(4, HCCL=BUFFERS + 40 * MIB), 1,
             detail=group("pp:0", 40 * MIB, p2p=True)),
    ]  # fmt: skip
    rows = divided(found, 1)
    assert (rows["communicator:pp"], rows["communicator:pp p2p"]) == (BUFFERS, 40 * MIB)


def start_up(in_profile: int, between: int, in_warm_up: int, in_atb: int) -> list[Span]:
    """Growth outside torch, one after the other."""
    a, b = in_profile, in_profile + between
    c, d = b + in_warm_up, b + in_warm_up + in_atb
    return spans(
        ("profile_run", taken(1), taken(2, past_torch=a)),
        ("kv_cache_alloc", taken(3, past_torch=b), taken(4, past_torch=b)),
        ("graph_capture", taken(5, past_torch=b), taken(6, past_torch=c)),
        ("atb_warm_up", taken(7, past_torch=c), taken(8, past_torch=d)),
    )


def atb_and_other(found: list[Span], order: int) -> tuple[int | None, int | None]:
    rows = divided(found, order)
    assert rest_of(whole(found, order)) == 0
    return rows["atb"], rows["other"]


def test_atb_s_pool_is_what_its_warm_up_adds() -> None:
    found = start_up(0, ATB_POOL_BYTES, 0, ATB_POOL_BYTES)
    assert atb_and_other(found, 2) == (0, ATB_POOL_BYTES)  # the other one came in no phase
    assert atb_and_other(found, 3) == (ATB_POOL_BYTES, ATB_POOL_BYTES)


def test_atb_s_pool_was_taken_earlier_where_its_warm_up_adds_nothing() -> None:
    found = start_up(0, 0, ATB_POOL_BYTES, 0)
    assert atb_and_other(found, 2) == (ATB_POOL_BYTES, 0)
    much = start_up(512 * MIB, 0, 0, 0)
    assert atb_and_other(much, 3) == (128 * MIB, 384 * MIB)  # no pool is larger


def test_atb_s_pool_may_come_inside_a_phase_of_its_phase() -> None:
    """Operators run in a thread of their own: here while a communicator is made."""
    pool = ATB_POOL_BYTES
    found = [
        span("kv_cache_sizing", taken(1), taken(2), 0),
        span("graph_capture", taken(3), taken(6, past_torch=pool), 1),
        span("communicator", taken(4), taken(5, past_torch=pool), 2, parent=1,
             detail=group("tp:0")),
    ]  # fmt: skip
    assert divided(found, 2, "before")["atb"] == 0
    assert atb_and_other(found, 2) == (pool, 0)
    assert atb_and_other(found, 1) == (pool, 0)


def test_small_growth_is_no_atb_pool() -> None:
    assert atb_and_other(start_up(0, 0, 0, 4 * MIB), 3) == (0, 4 * MIB)


def test_without_atb_s_warm_up_nothing_says_that_atb_ran() -> None:
    found = start_up(ATB_POOL_BYTES, 0, 0, 0)[:3]
    assert atb_and_other(found, 2) == (0, ATB_POOL_BYTES)


def test_graphs_are_what_a_capture_adds_to_the_runtime_s_counter() -> None:
    found = spans(
        ("graph_capture", taken(1), taken(4, RUNTIME=RUNTIME + 60 * MIB)),
        ("empty_cache", taken(2, RUNTIME=RUNTIME + 20 * MIB), taken(3, RUNTIME=RUNTIME + 20 * MIB)),
        ("shutdown", taken(5, RUNTIME=RUNTIME + 64 * MIB), taken(6, RUNTIME=10 * MIB)),
    )
    assert [divided(found, 0, edge)["graph"] for edge in ("before", "after")] == [0, 60 * MIB]
    assert divided(found, 1)["graph"] == 20 * MIB
    assert [divided(found, 2, edge)["graph"] for edge in ("before", "after")] == [
        60 * MIB,
        10 * MIB,
    ]
    assert [divided(found, 2, edge)["runtime"] for edge in ("before", "after")] == [
        RUNTIME + 4 * MIB,
        0,
    ]


def test_a_moment_at_which_workspace_is_not_read_keeps_both_together() -> None:
    found = spans(("empty_cache", taken(1, workspace=None, unread_workspace=9 * MIB), taken(2)))
    rows = divided(found, 0, "before")
    assert (rows["npu_workspace"], rows["npu_workspace_and_other"]) == (None, 9 * MIB)
    assert rest_of(whole(found, 0, "before")) == 0


def uncounted(t_ns: int, non_torch: int, workspace: int = 0) -> Snapshot:
    return Snapshot(t_ns=t_ns, device_total_bytes=TOTAL, device_free_bytes=TOTAL - non_torch,
                    allocated_bytes=0, reserved_bytes=0, npu_workspace_bytes=workspace,
                    non_torch_bytes=non_torch)  # fmt: skip


def test_without_counters_names_come_from_the_order_of_events() -> None:
    low, high = uncounted(1, CONTEXT), uncounted(2, CONTEXT + BUFFERS)
    found = [
        span("communicator", low, high, 0, detail=group("tp:0")),
        span(
            "warm_up",
            uncounted(3, CONTEXT + BUFFERS),
            uncounted(4, CONTEXT + BUFFERS + 50 * MIB, 20 * MIB),
            1,
        ),
    ]
    rows = {row.component: (row.bytes, row.how) for row in divided_rows(whole(found, 1))}
    assert rows["context"] == (CONTEXT, "derived")
    assert rows["communicator:tp"] == (BUFFERS, "derived")
    assert rows["other_non_torch"] == (30 * MIB, "derived")
    assert rest_of(whole(found, 1)) == 0
    assert divided(found, 0, "before")["communicator:tp"] == 0


def test_without_counters_a_communicator_holds_no_more_than_was_seen_to_come() -> None:
    found = [
        span(
            "communicator",
            uncounted(1, CONTEXT),
            uncounted(2, CONTEXT + 7 * MIB),
            0,
            detail=group("tp:0"),
        )
    ]
    assert divided(found, 0)["communicator:tp"] == 7 * MIB


def test_ranks_of_the_run_are_no_neighbours() -> None:
    mixed = Snapshot(t_ns=1, other_processes_bytes=47, other_processes={"21": 40, "22": 7})
    found = [span("device_init", None, mixed)]
    assert others_at_start(found) == 47
    assert others_at_start(found, {"21"}) == 7
    assert others_at_start(found, {"21", "22", "23"}) == 0
    unlisted = Snapshot(
        t_ns=1, other_processes_bytes=47
    )  # a record of before: nobody is told apart
    assert others_at_start([span("device_init", None, unlisted)], {"21"}) == 47
    assert others_at_start([span("device_init", None, Snapshot(t_ns=1))], {"21"}) is None
