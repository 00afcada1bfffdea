"""Rows and remainder add up to the device total, whatever a snapshot knows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.accounting.builders import (
    TOTAL,
    divided_rows,
    gib,
    process,
    rest_of,
    run_of,
    snapshot,
    span,
)
from tests.unit.accounting.builders import device_memory as device_edges
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.owners.device_memory import device_memory
from vllm_memprof.accounting.owners.outside_torch import owners_of
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import DeviceMemory
from vllm_memprof.units import MIB


def after(taken: Snapshot, simulated: bool = False) -> DeviceMemory:
    """Return the device by owner after a profile run that ended with a reading."""
    profile = span("profile_run", None, taken)
    return device_memory(profile, profile.edges[0], simulated)


amount = st.one_of(st.none(), st.integers(0, 2**38))


@given(
    st.builds(
        Snapshot,
        t_ns=st.just(0),
        device_total_bytes=amount,
        device_free_bytes=amount,
        allocated_bytes=amount,
        reserved_bytes=amount,
        npu_workspace_bytes=amount,
        non_torch_bytes=st.one_of(st.none(), st.integers(-(2**38), 2**38)),
    ),
    st.booleans(),
)
def test_rows_and_remainder_are_the_total(taken: Snapshot, simulated: bool) -> None:
    memory = after(taken, simulated)
    if taken.device_total_bytes is None:
        assert memory.unexplained_bytes is None
    else:
        assert memory.unexplained_bytes is not None
        known = sum(row.bytes for row in memory.rows if row.bytes is not None)
        assert known + memory.unexplained_bytes == taken.device_total_bytes


counters = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(["APP", "RUNTIME", "HCCL", "GE", "RUNTIME_RESERVED", "another"]),
        st.fixed_dictionaries(
            {"bytes": st.integers(0, 2**36), "peak_bytes": st.integers(0, 2**36)}
        ),
        max_size=4,
    ),
)
anything = st.builds(
    Snapshot,
    t_ns=st.integers(0, 10**9),
    device_total_bytes=amount,
    device_free_bytes=amount,
    allocated_bytes=amount,
    allocated_peak_bytes=amount,
    reserved_bytes=amount,
    npu_workspace_bytes=amount,
    graph_pool_bytes=amount,
    unmapped_bytes=amount,
    process_bytes=amount,
    other_processes_bytes=amount,
    non_torch_bytes=st.one_of(st.none(), st.integers(-(2**38), 2**38)),
    components=counters,
)
PHASES = (
    "device_init",
    "weight_load",
    "profile_run",
    "kv_cache_alloc",
    "graph_capture",
    "warm_up",
    "sleep",
    "shutdown",
)


@settings(deadline=None, max_examples=150)
@given(
    edges=st.lists(st.tuples(anything, anything), min_size=1, max_size=len(PHASES)),
    simulated=st.booleans(),
)
def test_every_edge_of_any_run_balances_in_the_report(
    edges: list[tuple[Snapshot, Snapshot]], simulated: bool
) -> None:
    """As report.json has it, with the counters of components and the other processes."""
    spans = [
        span(phase, *pair, order=n)
        for n, (phase, pair) in enumerate(zip(PHASES, edges, strict=False))
    ]
    (rank,) = to_json(build_report(run_of(process(spans), simulated=simulated)))["ranks"]
    assert len(device_edges(rank)) == 2 * len(spans)
    for memory in device_edges(rank):
        pair = edges[memory["order"]]
        total = pair[0 if memory["edge"] == "before" else 1].device_total_bytes
        known = sum(row["bytes"] for row in memory["owners"] if row["bytes"] is not None)
        assert memory["unexplained_bytes"] == (None if total is None else total - known)
        assert all(type(row["bytes"]) in (int, type(None)) for row in memory["owners"])
        assert {row["how"] for row in memory["owners"]} <= {"measured", "derived", "modelled"}


@given(
    total=st.integers(2**30, 2**38),
    free=st.integers(0, 2**30),
    reserved=st.integers(0, 2**38),
    cached=st.integers(0, 2**30),
    workspace=st.integers(0, 2**30),
)
def test_nothing_is_left_over_in_one_consistent_reading(
    total: int, free: int, reserved: int, cached: int, workspace: int
) -> None:
    taken = snapshot(
        device_total_bytes=total,
        device_free_bytes=free,
        allocated_bytes=reserved - cached,
        reserved_bytes=reserved,
        npu_workspace_bytes=workspace,
        non_torch_bytes=total - free - reserved,
    )
    assert rest_of(after(taken)) == 0


def taken_on_hardware(**changes: int | None) -> Snapshot:
    values: dict[str, int | None] = {
        "device_total_bytes": TOTAL,
        "device_free_bytes": TOTAL - gib(20.2),
        "allocated_bytes": gib(9.45),
        "reserved_bytes": gib(19.13),
        "npu_workspace_bytes": gib(0.16),
        "non_torch_bytes": gib(20.2) - gib(19.13),
    }
    return snapshot(**{**values, **changes})


def rows_of(taken: Snapshot, simulated: bool = False) -> dict[str, tuple[int | None, str]]:
    memory = after(taken, simulated)
    return {row.component: (row.bytes, row.how) for row in divided_rows(memory)}


def test_components_and_how_they_are_known() -> None:
    rows = rows_of(taken_on_hardware())
    assert rows["allocated"] == (gib(9.45), "measured")
    assert rows["reserved_not_allocated"] == (gib(19.13) - gib(9.45), "measured")
    assert rows["npu_workspace"] == (gib(0.16), "measured")
    assert rows["other_non_torch"] == (gib(20.2) - gib(19.13) - gib(0.16), "derived")
    assert rows["free"] == (TOTAL - gib(20.2), "measured")


def test_a_simulated_device_models_what_lies_outside_torch() -> None:
    rows = rows_of(taken_on_hardware(), simulated=True)
    assert {name for name, (_, how) in rows.items() if how == "modelled"} == {
        "npu_workspace",
        "free",
        "other_non_torch",
        "rest",
    }


def test_unknown_stays_unknown() -> None:
    rows = rows_of(
        taken_on_hardware(npu_workspace_bytes=None, reserved_bytes=None, non_torch_bytes=None)
    )
    assert rows["npu_workspace"][0] is None
    assert rows["reserved_not_allocated"][0] is None
    assert rows["other_non_torch"][0] is None


def test_a_reading_torn_between_two_counters_leaves_a_signed_remainder() -> None:
    """Another process allocated between the reading of free and that of reserved."""
    taken = taken_on_hardware(non_torch_bytes=gib(20.2) - gib(19.13) + 4096)
    memory = after(taken)
    assert rest_of(memory) == -4096


def test_every_remainder_is_in_one_row() -> None:
    """The counters leave 70 MiB of HCCL and 30 MiB of the process, the driver 5 MiB of the device."""
    counters = {"APP": gib(9.45) + 30 * MIB, "HCCL": 70 * MIB, "RUNTIME": 20 * MIB}
    own = sum(counters.values()) + 300 * MIB
    taken = snapshot(
        device_total_bytes=TOTAL,
        device_free_bytes=TOTAL - own - 5 * MIB,
        allocated_bytes=gib(9.45),
        reserved_bytes=gib(9.45),
        npu_workspace_bytes=0,
        process_bytes=own,
        other_processes_bytes=0,
        components={name: {"bytes": size, "peak_bytes": size} for name, size in counters.items()},
    )
    found = span("warm_up", None, taken)
    memory = device_memory(found, found.edges[0], False, owners_of(process([found])))
    remainders = {row.component: row.bytes for row in memory.remainders()}
    assert remainders == {
        "communicators_unnamed": 70 * MIB,
        "other": 30 * MIB,
        "context_growth": 0,
        "rest": 5 * MIB,
    }
    assert memory.unexplained_bytes == 105 * MIB
    assert memory.unexplained_how == "derived"
    assert not {row.component for row in memory.rows} & set(remainders)


def test_what_the_context_grows_by_is_unexplained() -> None:
    """No counter counts it, and the context as it was first read does not grow by itself."""
    edges = [
        span(
            phase,
            None,
            replace(
                taken_on_hardware(),
                t_ns=n,
                process_bytes=gib(9.45) + size,
                components={"APP": {"bytes": gib(9.45), "peak_bytes": gib(9.45)}},
            ),
            n,
        )
        for n, (phase, size) in enumerate((("hccl_init", 300 * MIB), ("warm_up", 340 * MIB)))
    ]
    owners = owners_of(process(edges))
    for found, growth in zip(edges, (0, 40 * MIB), strict=True):
        memory = device_memory(found, found.edges[0], False, owners)
        rows = {row.component: row.bytes for row in divided_rows(memory)}
        assert (rows["context"], rows["context_growth"]) == (300 * MIB, growth)


def test_a_difference_is_as_weak_as_its_weakest_part() -> None:
    """The runtime's counter is measured; less graphs, which are derived, it is derived."""
    run = [
        span(
            phase,
            replace(taken_on_hardware(), t_ns=2 * n, components=counted(before)),
            replace(taken_on_hardware(), t_ns=2 * n + 1, components=counted(after)),
            n,
        )
        for n, (phase, before, after) in enumerate(
            (("profile_run", 20, 20), ("graph_capture", 20, 50))
        )
    ]
    owners = owners_of(process(run))
    hows = [
        {row.component: row.how for row in device_memory(each, each.edges[1], False, owners).rows}
        for each in run
    ]
    assert [how["runtime"] for how in hows] == ["measured", "derived"]


def counted(runtime: int) -> dict[str, dict[str, int]]:
    return {"RUNTIME": {"bytes": runtime * MIB, "peak_bytes": runtime * MIB}}


def test_free_of_a_simulated_device_is_modelled() -> None:
    assert rows_of(taken_on_hardware())["free"][1] == "measured"
    assert rows_of(taken_on_hardware(), simulated=True)["free"][1] == "modelled"
    assert rows_of(taken_on_hardware(), simulated=True)["allocated"][1] == "measured"
