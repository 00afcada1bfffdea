"""Reading who holds what: segments divided, counters and the driver's list, and why a reading is
missing."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.capture.conftest import fake_torch
from vllm_memprof.capture import communicators, driver_list, owners
from vllm_memprof.capture.driver_list import DriverError
from vllm_memprof.capture.owners import Owners
from vllm_memprof.capture.probe import Probe, with_later
from vllm_memprof.record.segments import divide

MIB = 1 << 20


def segment(
    size: int, stream: int = 0, pool: tuple[int, int] = (0, 0), device: int = 0
) -> dict[str, Any]:
    return {"device": device, "total_size": size, "stream": stream, "segment_pool_id": pool}


def test_what_comes_after_the_reserved_segments_is_workspace() -> None:
    listed = [
        segment(20),
        segment(2, pool=(0, 1)),
        segment(5, device=1),
        segment(7, 9),
        segment(4, 11),
        segment(0, 13),
    ]
    assert divide(listed, 0, 22) == {
        "npu_workspace_bytes": 11,
        "npu_workspace_streams": {"9": 7, "11": 4},
        "graph_pool_bytes": 2,
    }
    assert divide(listed, 0, 33)["npu_workspace_streams"] == {}


def test_segments_in_another_order_still_have_a_sum() -> None:
    listed = [segment(7, 9), segment(20), segment(2)]
    assert divide(listed, 0, 22) == {
        "npu_workspace_bytes": 7,
        "npu_workspace_streams": None,
        "graph_pool_bytes": None,
    }


def test_fewer_segments_than_reserved_tell_nothing() -> None:
    assert set(divide([segment(20)], 0, 22).values()) == {None}


def counters_with(
    rows: list[tuple[bytes, int, int]], status: int = 0, count: int | None = None
) -> Owners:
    def function(device: Any, out: Any, capacity: Any, written: Any) -> int:
        assert (device.value, capacity.value) == (0, len(out))
        for index, (name, current, peak) in enumerate(rows):
            out[index].name, out[index].current, out[index].peak = name, current, peak
        written._obj.value = len(rows) if count is None else count
        return status

    found = Owners()
    found._function = function
    return found


def test_counters_by_module() -> None:
    read = counters_with([(b"APP", 5 * MIB, 6 * MIB), (b"HCCL", 0, MIB)]).components(0)
    assert read == {
        "components": {
            "APP": {"bytes": 5 * MIB, "peak_bytes": 6 * MIB},
            "HCCL": {"bytes": 0, "peak_bytes": MIB},
        }
    }


def test_a_count_beyond_what_was_asked_for_is_not_believed() -> None:
    read = counters_with([(b"APP", 1, 1)], count=10_000).components(0)["components"]
    assert read["APP"] == {"bytes": 1, "peak_bytes": 1}


def test_counters_that_the_driver_refuses() -> None:
    with pytest.raises(DriverError, match="aclrtGetMemUsageInfo returned 207000"):
        counters_with([], status=207000).components(0)


def test_without_the_library_or_the_function_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DriverError, match="is of an older CANN, or not loaded"):
        Owners().components(0)
    monkeypatch.setattr(owners, "loaded_library", lambda: SimpleNamespace())
    with pytest.raises(DriverError, match="no aclrtGetMemUsageInfo here"):
        Owners().components(0)


class Driver:
    """libdcmi: three processes on one device."""

    def __init__(self, own: int = 300, status: int = 0) -> None:
        self.rows = [(os.getpid(), own), (1, 40), (2, 2)] if own else [(1, 40)]
        self.status, self.inits, self.asked = status, 0, []  # type: ignore[var-annotated]

    def dcmi_init(self) -> int:
        self.inits += 1
        return 0

    def dcmi_get_card_id_device_id_from_logicid(self, card: Any, device: Any, logic_id: Any) -> int:
        ctypes.cast(card, ctypes.POINTER(ctypes.c_int))[0] = logic_id.value
        return 0

    def dcmi_get_device_resource_info(self, card: int, device: int, out: Any, count: Any) -> int:
        self.asked.append((card, device))
        for index, (pid, size) in enumerate(self.rows):
            out[index].pid, out[index].bytes = pid, size
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = len(self.rows)
        return self.status


def asked(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> Owners:
    monkeypatch.setattr(driver_list, "LIBRARIES", ("libdcmi.so",))
    if driver is not None:
        monkeypatch.setattr(driver_list, "load_library", lambda: driver)
    return Owners()


def test_own_and_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    reader = asked(monkeypatch, driver)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    for _ in range(2):
        assert reader.processes(1) == {
            "process_bytes": 300,
            "other_processes_bytes": 42,
            "other_processes": {"1": 40, "2": 2},
        }
    assert driver.inits == 1
    assert driver.asked == [(6, 0), (6, 0)]


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "no libdcmi.so here: the driver's management library"),
        (Driver(status=-8005), "dcmi_get_device_resource_info returned -8005"),
        (Driver(own=0), "does not list process"),
    ],
)
def test_why_the_driver_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, reason: str
) -> None:
    with pytest.raises(DriverError, match=reason):
        asked(monkeypatch, driver).processes(0)


def test_the_library_stays_out_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_DCMI", "0")
    driver = Driver()
    with pytest.raises(DriverError, match="MEMPROF_DCMI=0"):
        asked(monkeypatch, driver).processes(0)
    assert driver.inits == 0


def test_a_refusing_driver_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(status=-8005)
    reader = asked(monkeypatch, driver)
    for _ in range(2):
        with pytest.raises(DriverError, match="returned -8005"):
            reader.processes(0)
    assert len(driver.asked) == 1


def probe_over(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> Probe:
    """A probe of a device whose free memory is, reading by reading, as given."""
    counters = {"current": 8, "peak": 8, "allocated": 8}
    stats = {
        "allocated_bytes": {"all": counters},
        "reserved_bytes": {"all": counters},
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    fake_torch(
        monkeypatch,
        lambda device: stats,
        lambda device: (free.pop(0) if len(free) > 1 else free[0], 100),
    )
    return Probe("npu", owners=counters_with([(b"APP", 8, 8)]))


def test_readings_of_a_snapshot_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    still = probe_over(monkeypatch, [50]).snapshot()
    assert (still["device_free_bytes"], still["read_again"]) == (50, 0)
    moved = probe_over(monkeypatch, [50, 40, 40]).snapshot()
    assert (moved["device_free_bytes"], moved["read_again"]) == (40, 1)
    restless = probe_over(monkeypatch, [50, 49, 48, 47, 46, 45, 44]).snapshot()
    assert restless["read_again"] == 2
    assert restless["components"] == {"APP": {"bytes": 8, "peak_bytes": 8}}


def test_a_missing_reading_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, told = probe_over(monkeypatch, [50]), []
    probe.owners = counters_with([], status=7)
    probe.on_unread = cache(lambda what, reason: told.append((what, reason)))
    assert probe.snapshot()["components"] is None
    probe.snapshot()
    assert told == [("components", "aclrtGetMemUsageInfo returned 7")]


@pytest.mark.parametrize(
    ("p2p", "config", "env", "expected"),
    [
        (False, {}, {}, (400, "default")),
        (False, {}, {"HCCL_BUFFSIZE": "400"}, (800, "HCCL_BUFFSIZE")),
        (False, {"hccl_buffer_size": 50}, {"HCCL_BUFFSIZE": "400"}, (100, "hccl_config")),
        (True, {"hccl_buffer_size": 50}, {"HCCL_BUFFSIZE": "400"}, (40, "default")),
        (True, {}, {"P2P_HCCL_BUFFSIZE": "30"}, (60, "P2P_HCCL_BUFFSIZE")),
        (False, {}, {"HCCL_BUFFSIZE": "many"}, (400, "default")),
    ],
)
def test_where_the_size_of_a_communicator_s_buffers_comes_from(
    monkeypatch: pytest.MonkeyPatch,
    p2p: bool,
    config: dict[str, int],
    env: dict[str, str],
    expected: tuple[int, str],
) -> None:
    for name in ("HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=lambda name: name))
    options = SimpleNamespace(hccl_config=config)
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    found = communicators.buffers(group, p2p)
    assert (found["buffer_bytes"], found["buffer_source"]) == (expected[0] * MIB, expected[1])


def test_a_late_edge_takes_the_later_owners_and_keeps_its_own_torch() -> None:
    def taken(reserved: int, hccl: int, workspace: int) -> dict[str, Any]:
        app = reserved + workspace
        held = {"APP": app, "HCCL": hccl}
        components = {name: {"bytes": size, "peak_bytes": size} for name, size in held.items()}
        return {"device_total_bytes": 1000, "device_free_bytes": 1000 - app - hccl,
                "reserved_bytes": reserved, "unmapped_bytes": None,
                "non_torch_bytes": workspace + hccl, "npu_workspace_bytes": workspace,
                "npu_workspace_streams": {}, "other_processes_bytes": 0, "other_processes": {},
                "process_bytes": app + hccl, "components": components, "read_again": 0}  # fmt: skip

    merged = with_later(taken(100, 0, 0), taken(160, 40, 7))
    assert merged["reserved_bytes"] == 100
    assert merged["components"]["APP"]["bytes"] == 107
    assert merged["components"]["HCCL"]["bytes"] == 40
    assert merged["process_bytes"] == 147
    assert merged["device_free_bytes"] == 1000 - 147
