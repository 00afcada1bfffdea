"""Streams, events, callbacks, graphs: the C functions, called through ctypes."""

from __future__ import annotations

from collections.abc import Callable

from tests.shim.conftest import Sim

PRELUDE = """
import acl, ctypes, threading, time
acl.set_device(0)
def stream():
    handle = ctypes.c_void_p()
    acl.call("aclrtCreateStream", ctypes.byref(handle))
    return handle
def event():
    handle = ctypes.c_void_p()
    acl.call("aclrtCreateEventExWithFlag", ctypes.byref(handle), 8)
    return handle
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""


def test_stream_ids_differ(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
ids = []
for handle in (None, stream(), stream(), stream()):
    value = ctypes.c_int32(-1)
    acl.call("aclrtStreamGetId", handle, ctypes.byref(value))
    ids.append(value.value)
acl.result(ids=ids)
"""
    )
    assert figures["ids"][0] == 0
    assert len(set(figures["ids"])) == 4


def test_event_times_come_from_a_clock(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
queue, start, end, ms = stream(), event(), event(), ctypes.c_float()
unrecorded = acl.error_of("aclrtEventElapsedTime", ctypes.byref(ms), start, end)
acl.call("aclrtRecordEvent", start, queue)
time.sleep(0.02)
acl.call("aclrtRecordEvent", end, queue)
acl.call("aclrtEventElapsedTime", ctypes.byref(ms), start, end)
acl.result(unrecorded=unrecorded, ms=ms.value)
"""
    )
    assert figures["unrecorded"] == 107006
    assert 20 <= figures["ms"] < 2000


def test_host_functions_run_in_order_before_synchronize_returns(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
queue, order = stream(), []
functions = [FUNCTION(lambda _, n=n: (time.sleep(0.01), order.append(n))) for n in range(5)]
for function in functions:
    acl.call("aclrtLaunchHostFunc", queue, function, None)
acl.call("aclrtSynchronizeStream", queue)
acl.result(order=order)
"""
    )
    assert figures["order"] == [0, 1, 2, 3, 4]


def test_callbacks_run_on_the_subscribed_thread(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
queue, seen = stream(), []
function = FUNCTION(lambda _: seen.append(threading.current_thread().name))
nobody = acl.error_of("aclrtLaunchCallback", function, None, 1, queue)
ready = threading.Event()
def serve():
    acl.call("aclrtSubscribeReport", ctypes.c_uint64(threading.get_ident()), queue)
    ready.set()
    acl.call("aclrtProcessReport", -1)
    seen.append(acl.error_of("aclrtProcessReport", 10))
thread = threading.Thread(target=serve, name="reporter")
thread.start()
ready.wait()
acl.call("aclrtLaunchCallback", function, None, 1, queue)
acl.call("aclrtSynchronizeStream", queue)
thread.join()
acl.result(nobody=nobody, seen=seen)
"""
    )
    assert figures == {"nobody": 107015, "seen": ["reporter", 507012]}


def test_a_captured_graph_replays_its_host_functions_and_costs_memory(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
queue, side, fork, runs = stream(), stream(), event(), []
graph, status = ctypes.c_void_p(), ctypes.c_int()
function = FUNCTION(lambda _: runs.append(1))
before = acl.used()
acl.call("aclmdlRICaptureBegin", queue, 2)
acl.call("aclrtRecordEvent", fork, queue)
acl.call("aclrtStreamWaitEvent", side, fork)
acl.call("aclmdlRICaptureGetInfo", side, ctypes.byref(status), ctypes.byref(graph))
joined = status.value
acl.call("aclrtLaunchHostFunc", queue, function, None)
acl.call("aclmdlRICaptureTaskGrpBegin", queue)
group = ctypes.c_void_p()
acl.call("aclmdlRICaptureTaskGrpEnd", queue, ctypes.byref(group))
wrong = acl.error_of("aclmdlRICaptureEnd", side, ctypes.byref(graph))
acl.call("aclmdlRICaptureEnd", queue, ctypes.byref(graph))
captured, during = acl.used() - before, len(runs)
for _ in range(3):
    acl.call("aclmdlRIExecuteAsync", graph, queue)
acl.call("aclrtSynchronizeStream", queue)
acl.call("aclmdlRICaptureTaskUpdateBegin", queue, group)
acl.call("aclmdlRICaptureTaskUpdateEnd", queue)
acl.call("aclmdlRIDestroy", graph)
after = acl.used() - before
acl.result(
    joined=joined, wrong=wrong, captured=captured, during=during, runs=len(runs), after=after
)
"""
    )
    assert figures == {
        "joined": 1,
        "wrong": 107036,
        "captured": 2 << 20,
        "during": 0,
        "runs": 3,
        "after": 0,
    }


def test_a_captured_graph_costs_arguments_where_it_ends_and_queues_where_it_runs(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    mib = 1 << 20
    change_profile(
        graph_capture_bytes=6 * mib, graph_argument_bytes=mib // 64, graph_queue_bytes=2 * mib
    )
    figures = sim.run(
        PRELUDE
        + """
queue, side, fork, graph = stream(), stream(), event(), ctypes.c_void_p()
function = FUNCTION(lambda _: None)
before = acl.used()
acl.call("aclmdlRICaptureBegin", queue, 2)
acl.call("aclrtRecordEvent", fork, queue)
acl.call("aclrtStreamWaitEvent", side, fork)
for where in (*[queue] * 32_767, *[side] * 32_766):
    acl.call("aclrtLaunchHostFunc", where, function, None)
acl.call("aclmdlRICaptureEnd", queue, ctypes.byref(graph))
used = [acl.used() - before]
for _ in range(2):
    acl.call("aclmdlRIExecuteAsync", graph, queue)
    acl.call("aclrtSynchronizeStream", queue)
    used.append(acl.used() - before)
acl.call("aclmdlRIDestroy", graph)
acl.result(used=[*used, acl.used() - before])
"""
    )
    # The event counts on both streams. 32,767 tasks and one entry more, of 64 bytes, fill a queue of
    # 2 MiB; one more task doubles it.
    captured, queues = 6 * mib + 65_535 * (mib // 64), (4 + 2) * mib
    pages = [-(-size // (2 * mib)) * 2 * mib for size in (captured, captured + queues)]
    assert figures == {"used": [pages[0], pages[1], pages[1], 0]}
