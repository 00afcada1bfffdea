"""Device memory, copies, physical memory: the C functions, called through ctypes."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.shim.conftest import Sim

MIB = 1 << 20
CONTEXT = 375_809_638
TOTAL = 65_452_113_920


def test_context_and_pages_are_charged(sim: Sim) -> None:
    figures = sim.run(f"""
import acl
from ctypes import byref, c_size_t
before = acl.error_of("aclrtGetMemInfo", 1, byref(c_size_t()), byref(c_size_t()))
acl.set_device(0)
context = acl.used()
sizes = {{}}
requests = {{
    "huge": (3 * {MIB}, acl.HUGE_FIRST),
    "small": (5000, acl.HUGE_FIRST),
    "forced": (5000, acl.HUGE_ONLY),
    "normal": (3 * {MIB} + 1, acl.NORMAL_ONLY),
}}
for name, (size, policy) in requests.items():
    start = acl.used()
    block = acl.malloc(size, policy)
    sizes[name] = acl.used() - start
    acl.free(block)
    assert acl.used() == start
start = acl.used()
padded = acl.malloc(2 * {MIB}, function="aclrtMalloc")
sizes["padded"] = acl.used() - start
acl.result(before=before, context=context, total=acl.mem_info()[1], sizes=sizes)
""")
    assert figures["before"] == 107002  # no context yet: nothing is known about a device
    assert figures["context"] == CONTEXT
    assert figures["total"] == TOTAL
    assert figures["sizes"] == {
        "huge": 4 * MIB,
        "small": 8192,
        "forced": 2 * MIB,
        "normal": 3 * MIB + 4096,
        "padded": 4 * MIB,
    }


def test_the_other_chip_of_a_card_has_a_total_of_its_own(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    change_profile(other_chip_total_bytes=1 << 30)
    figures = sim.run(f"""
import acl
totals = []
for device in (0, 1, 2):
    acl.set_device(device)
    totals.append(acl.mem_info()[1])
acl.set_device(1)
code = acl.malloc_error(900 * {MIB})
acl.result(totals=totals, code=code, text=acl.message())
""")
    assert figures["totals"] == [TOTAL, 1 << 30, TOTAL]
    assert figures["code"] == 207001
    assert "of 1073741824 bytes free" in figures["text"]


def test_a_full_device_refuses(sim: Sim, change_profile: Callable[..., None]) -> None:
    change_profile(total_bytes=1 << 30)
    figures = sim.run(f"""
import acl
acl.set_device(0)
block = acl.malloc(600 * {MIB})
code = acl.malloc_error(500 * {MIB})
text = acl.message()
acl.free(block)
acl.malloc(600 * {MIB})
acl.result(code=code, text=text)
""")
    assert figures["code"] == 207001
    assert "524288000 requested" in figures["text"]


def test_copies_keep_their_bytes_up_to_the_limit(sim: Sim) -> None:
    figures = sim.run("""
import acl
from ctypes import c_size_t, c_void_p
acl.set_device(0)
limit = 1 << 20
block = acl.malloc(8 * limit)
acl.copy(block, b"x" * limit, limit, acl.H2D)
kept = acl.read(block, limit) == b"x" * limit
acl.copy(block + 4 * limit, block, limit, acl.D2D)
device_copy = acl.read(block + 4 * limit, 4)
acl.copy(block, b"y" * (limit + 1), limit + 1, acl.H2D)
dropped = set(acl.read(block, limit + 1))
acl.call("aclrtMemset", c_void_p(block), c_size_t(64), 7, c_size_t(64))
filled = list(acl.read(block + 62, 3))
end = c_void_p(block + 8 * limit - 4)
beyond = acl.error_of("aclrtMemcpy", end, c_size_t(8), b"12345678", c_size_t(8), acl.H2D)
copied = device_copy.decode()
acl.result(kept=kept, device_copy=copied, dropped=sorted(dropped), filled=filled, beyond=beyond)
""")
    assert figures == {
        "kept": True,
        "device_copy": "xxxx",
        "dropped": [0],
        "filled": [7, 7, 0],
        "beyond": 107000,
    }


def test_memory_costs_the_host_nothing_until_touched(sim: Sim) -> None:
    figures = sim.run("""
import acl, resource
acl.set_device(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
blocks = [acl.malloc(4 << 30) for _ in range(15)]
size = acl.ctypes.c_size_t(4 << 30)
acl.call("aclrtMemset", acl.ctypes.c_void_p(blocks[0]), size, 0, size)
acl.result(grown_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""")
    assert figures["grown_kib"] < 20_000


def test_unknown_pointers_are_errors(sim: Sim) -> None:
    figures = sim.run("""
import acl
acl.set_device(0)
block = acl.malloc(4096)
codes = [acl.error_of("aclrtFree", acl.ctypes.c_void_p(value)) for value in (0x1234560, block + 32)]
acl.free(block)
codes.append(acl.error_of("aclrtFree", acl.ctypes.c_void_p(block)))
destroyers = ["aclrtDestroyStream", "aclrtDestroyEvent", "aclrtFreePhysical", "aclrtFreeHost"]
destroyers += ["aclmdlRIDestroy", "HcclCommDestroy"]
codes += [acl.error_of(name, acl.ctypes.c_void_p(0x99)) for name in destroyers]
acl.result(codes=codes)
""")
    assert 0 not in figures["codes"]


PHYSICAL = """
import acl, ctypes
from acl import map_at, physical, reserve
acl.set_device(0)
M = 1 << 20
"""


def test_physical_memory_is_charged_while_it_exists(sim: Sim) -> None:
    figures = sim.run(
        PHYSICAL
        + """
start = acl.used()
address = reserve(64 * M)
reserved = acl.used() - start
handles = [physical(20 * M), physical(20 * M)]
for index, handle in enumerate(handles):
    map_at(address + index * 20 * M, 20 * M, handle)
mapped = acl.used() - start
acl.copy(address + 20 * M - 2, b"abcd", 4, acl.H2D)  # across two handles
across = acl.read(address + 20 * M - 2, 4).decode()
early = acl.error_of("aclrtReleaseMemAddress", ctypes.c_void_p(address))
acl.call("aclrtFreePhysical", handles[0])
still = acl.used() - start  # mapped memory outlives its handle
acl.call("aclrtUnmapMem", ctypes.c_void_p(address))
after = acl.used() - start
acl.call("aclrtUnmapMem", ctypes.c_void_p(address + 20 * M))
acl.call("aclrtFreePhysical", handles[1])
acl.call("aclrtReleaseMemAddress", ctypes.c_void_p(address))
end = acl.used() - start
acl.result(
    reserved=reserved, mapped=mapped, across=across, early=early, still=still, after=after, end=end
)
"""
    )
    assert figures == {
        "reserved": 0,
        "mapped": 40 * MIB,
        "across": "abcd",
        "early": 107000,
        "still": 40 * MIB,
        "after": 20 * MIB,
        "end": 0,
    }


def test_physical_memory_can_be_shared(sim: Sim) -> None:
    exporter = sim.start(
        PHYSICAL
        + """
handle, address, key = physical(2 * M), reserve(2 * M), ctypes.c_uint64()
map_at(address, 2 * M, handle)
acl.copy(address, b"hello", 5, acl.H2D)
acl.call("aclrtMemExportToShareableHandle", handle, 0, ctypes.c_uint64(0), ctypes.byref(key))
acl.result(key=key.value)
input()
acl.result(text=acl.read(address, 5).decode())
"""
    )
    assert exporter.stdout is not None
    key = int(exporter.stdout.readline().split(":")[1].rstrip("}\n"))
    seen = sim.run(
        PHYSICAL
        + f"""
handle, address = ctypes.c_void_p(), reserve(2 * M)
before = acl.used()
acl.call("aclrtMemImportFromShareableHandle", ctypes.c_uint64({key}), 0, ctypes.byref(handle))
map_at(address, 2 * M, handle)
text = acl.read(address, 5).decode()
acl.copy(address, b"world", 5, acl.H2D)
acl.result(text=text, charged=acl.used() - before)
"""
    )
    out, _ = exporter.communicate("\n", timeout=30)
    assert seen == {"text": "hello", "charged": 0}
    assert '"world"' in out


def test_pinned_memory_is_limited_as_locked_memory_is(sim: Sim) -> None:
    code = """
import acl, ctypes, resource
acl.set_device(0)
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
def pinned(size):
    pointer = ctypes.c_void_p()
    return acl.error_of("aclrtMallocHost", ctypes.byref(pointer), ctypes.c_size_t(size)), pointer
first, pointer = pinned(1 << 15)
refused, _ = pinned(1 << 16)
said = acl.message()
acl.call("aclrtFreeHost", pointer)
acl.result(first=first, refused=refused, said=said, again=pinned(1 << 16)[0])
"""
    figures = sim.run(code, MEMPROF_SIM_LIMITS="memlock")
    assert (figures["first"], figures["refused"], figures["again"]) == (0, 207001, 0)
    assert "rtMallocHost execution failed, reason=driver error:out of memory" in figures["said"]
    assert sim.run(code)["refused"] == 0, "nobody asked for a limit"


def test_pinned_memory_says_so(sim: Sim) -> None:
    """``is_pinned`` asks for it, for every address of a block."""
    code = """
import acl, ctypes
acl.set_device(0)
class Attributes(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int), ("page", ctypes.c_uint32),
                ("rest", ctypes.c_uint32 * 4)]
def place(address):
    found = Attributes()
    acl.call("aclrtPointerGetAttributes", ctypes.c_void_p(address), ctypes.byref(found))
    return ["host", "device", "unregistered"][found.type]
pinned = ctypes.c_void_p()
acl.call("aclrtMallocHost", ctypes.byref(pinned), ctypes.c_size_t(4096))
own = ctypes.create_string_buffer(8192)
at, device = ctypes.addressof(own), acl.malloc(1 << 20)
seen = [place(pinned.value), place(pinned.value + 4095), place(at), place(device + 100)]
acl.call("aclrtHostRegisterV2", ctypes.c_void_p(at), ctypes.c_uint64(4096), 0)
seen += [place(at + 4095), place(at + 4096)]
acl.call("aclrtHostUnregister", ctypes.c_void_p(at))
address = pinned.value
acl.call("aclrtFreeHost", pinned)
acl.result(seen=[*seen, place(at), place(address)])
"""
    unknown = "unregistered"
    assert sim.run(code)["seen"] == [
        "host", "host", unknown, "device", "host", unknown, unknown, unknown,
    ]  # fmt: skip


IPC = """
import acl, ctypes
acl.set_device(0)
def imported(key):
    pointer = ctypes.c_void_p()
    acl.call("aclrtIpcMemImportByKey", ctypes.byref(pointer), key, ctypes.c_uint64(0))
    return pointer.value
"""


def test_memory_of_another_process_counts_once(sim: Sim) -> None:
    exporter = sim.start(
        IPC
        + """
first, pointer = acl.malloc(4 << 20), acl.malloc(2 << 20)
acl.copy(pointer, b"hello", 5, acl.H2D)
key = ctypes.create_string_buffer(65)
acl.call("aclrtIpcMemGetExportKey", ctypes.c_void_p(pointer), ctypes.c_size_t(2 << 20), key, 65,
         ctypes.c_uint64(0))
acl.result(key=key.value.decode())
input()
said = acl.read(pointer, 5).decode(), acl.read(first, 5).decode("latin1")
acl.call("aclrtIpcMemClose", key)
acl.result(said=said, closed=acl.error_of("aclrtIpcMemClose", key))
"""
    )
    assert exporter.stdout is not None
    key = json.loads(exporter.stdout.readline().removeprefix("RESULT "))["key"]
    seen = sim.run(
        IPC
        + f"""
before = acl.used()
pointer = imported(b"{key}")
text = acl.read(pointer, 5).decode()
acl.copy(pointer, b"world", 5, acl.H2D)
charged = acl.used() - before
freed = acl.error_of("aclrtFree", ctypes.c_void_p(pointer))
acl.call("aclrtIpcMemClose", b"{key}")
acl.result(text=text, charged=charged, freed=freed, left=acl.used() - before,
           foreign=acl.error_of("aclrtIpcMemImportByKey", ctypes.byref(ctypes.c_void_p()), b"1f",
                                ctypes.c_uint64(0)))
"""
    )
    out, _ = exporter.communicate("\n", timeout=30)
    last = json.loads(out.splitlines()[-1].removeprefix("RESULT "))
    assert last["said"] == ["world", "\0" * 5]
    assert last["closed"] != 0
    assert (seen["text"], seen["charged"], seen["left"]) == ("hello", 0, 0)
    assert seen["freed"] != 0, "memory of another process is closed, not freed"
    assert seen["foreign"] != 0
