"""The driver's list through a stand-in for its library: what it says, refuses or lacks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from vllm_memprof.capture import driver_list
from vllm_memprof.capture.driver_list import DriverError, DriverList, read_all

MIB = 1 << 20


class Driver:
    """libdcmi of two cards; a memory query that is not in ``told`` is not in the library."""

    def __init__(
        self, told: dict[str, tuple[int, int, int]] | None = None, listed: int = 0
    ) -> None:
        self.told = (
            {"dcmi_get_device_hbm_info": (0, 65536, 3409)} if told is None else told
        )  # name -> status, total, used or available
        self.listed = listed

    def __getattr__(self, name: str) -> Any:
        if name not in self.told:
            raise AttributeError(name)
        status, total, second = self.told[name]

        def ask(card: int, chip: int, out: Any) -> int:
            info = out._obj
            info.size = total
            if hasattr(info, "used"):
                info.used = second
            else:
                info.available = second
            return status

        return ask

    def dcmi_init(self) -> int:
        return 0

    def dcmi_get_card_id_device_id_from_logicid(self, card: Any, chip: Any, logic: Any) -> int:
        card._obj.value, chip._obj.value = divmod(logic.value, 2)
        return 0 if logic.value < 4 else -8001

    def dcmi_get_device_resource_info(self, card: int, chip: int, rows: Any, count: Any) -> int:
        rows[0].pid, rows[0].bytes = 100 * card + chip, 5
        count._obj.value = 1
        return self.listed


def listed_by(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> DriverList:
    monkeypatch.setattr(driver_list, "load_library", lambda: driver)
    return DriverList()


def read(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> dict[str, Any]:
    monkeypatch.setattr(driver_list, "LIBRARIES", ("libdcmi.so",))
    if driver is not None:
        monkeypatch.setattr(driver_list, "load_library", lambda: driver)
    return read_all()


def test_every_device_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, Driver())
    assert found["reason"] is None
    assert [(row["device"], row["card"], row["chip"]) for row in found["devices"]] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    assert found["devices"][3] == {
        "device": 3,
        "card": 1,
        "chip": 1,
        "processes": [(101, 5)],
        "total_bytes": 65536 * MIB,
        "used_bytes": 3409 * MIB,
        "reasons": [],
    }


def test_a_device_without_hbm_is_asked_for_its_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {
        "dcmi_get_device_hbm_info": (-8255, 0, 0),
        "dcmi_get_device_memory_info_v3": (0, 44280, 40000),
    }
    assert listed_by(monkeypatch, Driver(told)).memory((0, 0)) == (44280 * MIB, 4280 * MIB)
    told["dcmi_get_device_hbm_info"] = (0, 0, 0)  # answered, of no size
    assert listed_by(monkeypatch, Driver(told)).memory((0, 0)) == (44280 * MIB, 4280 * MIB)


def test_what_the_driver_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"dcmi_get_device_hbm_info": (-8007, 1, 1)}, listed=-8005)
    row = read(monkeypatch, driver)["devices"][0]
    assert (row["processes"], row["total_bytes"], row["used_bytes"]) == (None, None, None)
    assert row["reasons"] == [
        "dcmi_get_device_resource_info returned -8005",
        "dcmi_get_device_hbm_info returned -8007; "
        "dcmi_get_device_memory_info_v3 is not in the library",
    ]


def test_without_a_device_or_a_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, None) == {
        "reason": "no libdcmi.so here: the driver's management library"
    }
    driver = Driver()
    monkeypatch.setattr(driver, "dcmi_init", lambda: -8000, raising=False)
    assert read(monkeypatch, driver) == {"reason": "dcmi_init returned -8000"}
    driver = Driver()
    refuse = lambda *_: -8001  # noqa: E731
    monkeypatch.setattr(driver, "dcmi_get_card_id_device_id_from_logicid", refuse, raising=False)
    name = "dcmi_get_card_id_device_id_from_logicid"
    assert read(monkeypatch, driver) == {"reason": f"{name} returned -8001"}


def test_the_structures_have_the_sizes_of_the_header() -> None:
    """64-bit Linux: the compiler's padding of ``dcmi_interface_api.h``."""
    assert ctypes.sizeof(driver_list.Process) == 16
    assert ctypes.sizeof(driver_list._Hbm) == 32
    assert driver_list._Hbm.used.offset == 16
    assert driver_list._Ddr.available.offset == 8
    assert ctypes.sizeof(driver_list._Ddr) == 112


def test_an_error_of_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = listed_by(monkeypatch, Driver({"dcmi_get_device_hbm_info": (0, 0, 0)}))
    with pytest.raises(DriverError, match="no size"):
        driver.memory((0, 0))
