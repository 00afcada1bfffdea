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


def test_a_stream_that_runs_a_graph_waits_for_all_streams_of_the_capture(sim: Sim) -> None:
    figures = sim.run(
        PRELUDE
        + """
queue, side, fork, graph, runs = stream(), stream(), event(), ctypes.c_void_p(), []
function = FUNCTION(lambda _: (time.sleep(0.2), runs.append(1)))
acl.call("aclmdlRICaptureBegin", queue, 2)
acl.call("aclrtRecordEvent", fork, queue)
acl.call("aclrtStreamWaitEvent", side, fork)
acl.call("aclrtLaunchHostFunc", side, function, None)
acl.call("aclmdlRICaptureEnd", queue, ctypes.byref(graph))
other = stream()
acl.call("aclmdlRIExecuteAsync", graph, other)
acl.call("aclrtSynchronizeStream", other)
waited = len(runs)
acl.call("aclmdlRIExecute", graph, -1)
acl.result(after=[waited, len(runs)])
"""
    )
    assert figures == {"after": [1, 2]}


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


LIMITED = (
    PRELUDE
    + """
def most(count, make):
    for number in range(count):
        code = make()
        if code != 0:
            return number, code, acl.message()
    return count, 0, ""
def new_stream():
    return acl.error_of("aclrtCreateStream", ctypes.byref(ctypes.c_void_p()))
"""
)


def test_a_device_has_as_many_streams_as_documented(sim: Sim) -> None:
    code = LIMITED + "made, code, said = most(3000, new_stream)\nacl.result(m=made, c=code, s=said)"
    figures = sim.run(code, MEMPROF_SIM_LIMITS="streams")
    assert figures["m"] == 1983, "one is the default stream"
    assert figures["c"] == 207008
    assert "Insufficient_Stream_Resources(EL0009)" in figures["s"]
    assert sim.run(code)["m"] == 3000, "nobody asked for a limit"


def test_streams_of_graphs_and_of_other_processes_count_and_come_back(sim: Sim) -> None:
    other = sim.start(
        LIMITED + "print(most(1900, new_stream)[0], flush=True); input()",
        MEMPROF_SIM_LIMITS="streams",
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "1900\n"
    code = (
        LIMITED
        + """
graphs = []
def capture():
    if begun := acl.error_of("aclmdlRICaptureBegin", queue, 0):
        return begun
    graphs.append(ctypes.c_void_p())
    return acl.error_of("aclmdlRICaptureEnd", queue, ctypes.byref(graphs[-1]))
queue = stream()
made, code, said = most(3000, capture)
for graph in graphs:
    acl.call("aclmdlRIDestroy", graph)
acl.result(made=made, code=code, again=most(10, capture)[0])
"""
    )
    figures = sim.run(code, MEMPROF_SIM_LIMITS="streams")
    assert figures == {"made": 1984 - 1901 - 2, "code": 207008, "again": 10}
    other.kill()
    other.wait(30)
    assert sim.run(code, MEMPROF_SIM_LIMITS="streams")["made"] == 1984 - 2


def test_events_of_graphs_are_limited(sim: Sim) -> None:
    figures = sim.run(
        LIMITED
        + """
queue, mark = stream(), event()
outside = most(70000, lambda: acl.error_of("aclrtRecordEvent", mark, queue))[0]
acl.call("aclmdlRICaptureBegin", queue, 0)
made, code, said = most(70000, lambda: acl.error_of("aclrtRecordEvent", mark, queue))
acl.result(outside=outside, made=made, code=code, said=said)
""",
        MEMPROF_SIM_LIMITS="streams,events",
    )
    assert (figures["outside"], figures["made"], figures["code"]) == (70000, 65535, 207007)
    assert "Insufficient_Event_Resources(EL0008)" in figures["said"]
