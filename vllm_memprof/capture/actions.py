"""What the rows of the hook table do: one action per name, entered before the engine's call and left after it.

Actions read; the only things they change are the session and the event file. An action that raises is recorded
once and its row is out of the way from then on. Two exceptions are meant to leave: StopAfterPlan and StrictFailure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_memprof.capture import communicators, emptycache, figures, identity, kvplan, residency
from vllm_memprof.capture.hooks import DEVICE_READY, END, ENGINE_READY, MODEL_READY, PROFILED, Hook
from vllm_memprof.capture.session import OpenPhase

if TYPE_CHECKING:
    from vllm_memprof.capture.core import Capture


class StopAfterPlan(SystemExit):
    """The engine was started for its KV plan only, and has it.

    A SystemExit of status 0, because engine cores pass that on without a traceback.
    """

    def __init__(self) -> None:
        super().__init__(0)


class StrictFailure(RuntimeError):
    """A required hook is not bound and MEMPROF_STRICT is set."""


@dataclass
class Call:
    """One call of a hooked function. ``result`` and ``error`` are set when it has returned or raised."""

    hook: Hook
    function: str  # name of the hooked function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    error: BaseException | None = None
    token: Any = None  # what the entering half hands to the leaving half

    @property
    def subject(self) -> Any:
        """``self`` of a hooked method."""
        return self.args[0] if self.args else None


Half = Callable[["Capture", Call], None]


@dataclass(frozen=True)
class Action:
    enter: Half | None = None
    leave: Half | None = None


# --- phases ---------------------------------------------------------------------------------------------------------


def _begin(capture: Capture, call: Call) -> None:
    """Open the row's phase, unless an override's call already has."""
    session = capture.session
    phase = call.hook.phase
    assert phase is not None
    if not session.is_open(phase):
        call.token = session.begin(phase, call.hook.id)


def _end(capture: Capture, call: Call) -> None:
    if isinstance(call.token, OpenPhase):
        capture.session.end(call.token, call.error)
        if call.error is None:
            emptycache.call_after(capture, call.token.phase)


def _begin_device_init(capture: Capture, call: Call) -> None:
    """The worker has not chosen its device yet: a reading now would touch another one."""
    if not capture.session.is_open("device_init"):
        call.token = capture.session.begin(
            "device_init", call.hook.id, unread="the worker has not chosen its device yet"
        )


def _leave_load_model(capture: Capture, call: Call) -> None:
    _end(capture, call)
    if call.error is None:
        runner = getattr(call.subject, "model_runner", None)
        capture.bind_instance(runner)
        figures.read_worker(capture.session, call.subject)
        capture.session.emit_figures("load_model")
        capture.bind_model(runner)


def _leave_profile_run(capture: Capture, call: Call) -> None:
    _end_mm_profile(capture, call.error)
    _end(capture, call)
    if call.error is None and isinstance(call.token, OpenPhase):
        figures.read_profile(capture.session, call.subject, call.result)
        capture.session.emit_figures("determine_available_memory")
    capture.release(PROFILED)


def _keep_profile_result(capture: Capture, call: Call) -> None:
    capture.session.notes["profile_result"] = call.result


def _begin_mm_profile(capture: Capture, call: Call) -> None:
    session = capture.session
    if session.is_open("profile_run") and not session.is_open("mm_profile"):
        session.notes["mm_profile"] = session.begin("mm_profile", call.hook.id)


def _stop_mm_profile(capture: Capture, call: Call) -> None:
    """The dummy run at full size is the text part: the encoder's profiling is over when it starts."""
    if "mm_profile" not in capture.session.notes:
        return
    num_tokens = call.kwargs.get("num_tokens", call.args[1] if len(call.args) > 1 else None)
    if num_tokens == getattr(call.subject, "max_num_tokens", None):
        _end_mm_profile(capture)


def _end_mm_profile(capture: Capture, error: BaseException | None = None) -> None:
    opened = capture.session.notes.pop("mm_profile", None)
    if opened is not None:
        capture.session.end(opened, error)
        if error is None:
            emptycache.call_after(capture, "mm_profile")


def _captured_graphs() -> int | None:
    """Graphs captured by this process so far, as vLLM counts them; None where it does not. (compilation/counter.py)"""
    counter = getattr(sys.modules.get("vllm.compilation.counter"), "compilation_counter", None)
    count = getattr(counter, "num_cudagraph_captured", None)
    return count if isinstance(count, int) else None


def _begin_graph_capture(capture: Capture, call: Call) -> None:
    _begin(capture, call)
    capture.session.notes["graphs_before"] = _captured_graphs()


def _leave_graph_capture(capture: Capture, call: Call) -> None:
    before, after = capture.session.notes.pop("graphs_before", None), _captured_graphs()
    inner_bytes = capture.session.notes.pop("captured_bytes", None)
    graph_bytes = int(call.result) if isinstance(call.result, int) else inner_bytes
    if call.error is None:
        capture.session.figures["graph_bytes"] = graph_bytes
    if isinstance(call.token, OpenPhase):
        call.token.detail["graph_bytes"] = graph_bytes
        call.token.detail["graphs"] = None if before is None or after is None else after - before
    _end(capture, call)


def _keep_captured_bytes(capture: Capture, call: Call) -> None:
    """The inherited method measures the capture; an override that calls it may hand nothing on."""
    if isinstance(call.result, int):
        capture.session.notes["captured_bytes"] = int(call.result)


def _keep_weights(capture: Capture, call: Call) -> None:
    """What the engine measured around its model's loading, where nothing else keeps it."""
    weights = getattr(call.subject, "consumed_memory", None)
    if call.error is None and isinstance(weights, int) and capture.session.is_open("weight_load"):
        capture.session.figures["weights_bytes"] = weights


def _leave_warm_up(capture: Capture, call: Call) -> None:
    _end(capture, call)
    if call.error is not None:
        return
    figures.read_worker(capture.session, call.subject)
    capture.session.emit_figures("compile_or_warm_up_model")
    capture.session.notes["serving"] = True
    capture.release(MODEL_READY)
    capture.self_check(MODEL_READY)


def _leave_shutdown(capture: Capture, call: Call) -> None:
    _end(capture, call)
    capture.self_check(END)


# --- allocator leaves ------------------------------------------------------------------------------------------------


def _fold_peak(capture: Capture, call: Call) -> None:
    device = call.args[0] if call.args and isinstance(call.args[0], int) else None
    capture.session.probe.fold_peaks(device)


# --- roles, readiness, the plan -------------------------------------------------------------------------------------


def _become_engine_core(capture: Capture, call: Call) -> None:
    capture.session.roles.add("engine_core")


def _become_worker(capture: Capture, call: Call) -> None:
    capture.session.roles.add("worker")


def _leave_device_ready(capture: Capture, call: Call) -> None:
    worker = getattr(call.subject, "worker", None)
    if call.error is not None or worker is None:
        return
    session = capture.session
    session.probe.device = identity.device_index(worker)
    emptycache.keep_worker(session, worker)
    known = identity.of_worker(worker, session)
    session.notes["label"] = known["label"]
    session.emit("identity", **known)
    figures.read_worker(session, worker)
    session.emit_figures("init_device")
    capture.bind_instance(worker)
    capture.bind_instance(getattr(worker, "model_runner", None))
    capture.observe_oom()
    capture.self_check(DEVICE_READY)


def _leave_kv_plan(capture: Capture, call: Call) -> None:
    if call.error is not None:
        return
    session = capture.session
    session.emit("kv_plan", **kvplan.describe(*_plan_arguments(call), call.result))
    if capture.stop_after == "kv_plan":
        session.emit("ready", what="plan")
        raise StopAfterPlan


def _plan_arguments(call: Call) -> tuple[Any, Any]:
    names = ("vllm_config", "kv_cache_specs", "available_memory")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return given["vllm_config"], given["available_memory"]


def _leave_kv_caches(capture: Capture, call: Call) -> None:
    """After a planned stop nobody holds the engine core any more: its executor has to be ended from here."""
    if isinstance(call.error, StopAfterPlan):
        call.subject.model_executor.shutdown()


def _announce_model(capture: Capture, call: Call) -> None:
    session = capture.session
    if call.error is None and not session.notes.get("model_ready"):
        session.notes["model_ready"] = True
        session.emit("ready", what="model")
        capture.self_check(ENGINE_READY)


def _announce_server(capture: Capture, call: Call) -> None:
    if call.error is None:
        capture.session.roles.add("api")
        capture.session.emit("ready", what="server")
        capture.self_check(END)


ACTIONS: dict[str, Action] = {
    "phase": Action(_begin, _end),
    "device_init": Action(_begin_device_init, _end),
    "load_model": Action(_begin, _leave_load_model),
    "profile_run": Action(_begin, _leave_profile_run),
    "memory_profiling": Action(None, _keep_profile_result),
    "mm_profile_start": Action(_begin_mm_profile, None),
    "mm_profile_stop": Action(_stop_mm_profile, None),
    "graph_capture": Action(_begin_graph_capture, _leave_graph_capture),
    "captured_bytes": Action(None, _keep_captured_bytes),
    "weights": Action(None, _keep_weights),
    "warm_up": Action(_begin, _leave_warm_up),
    "shutdown": Action(_begin, _leave_shutdown),
    "empty_cache": Action(emptycache.enter, emptycache.leave),
    "sleep": Action(residency.enter_sleep, residency.leave_phase),
    "wake_up": Action(residency.enter_wake_up, residency.leave_phase),
    "pool_sleep": Action(residency.enter_pool_sleep, residency.leave_pool_sleep),
    "pool_wake_up": Action(None, residency.leave_pool_wake_up),
    "weight_update": Action(residency.enter_update, residency.leave_phase),
    "weight_update_start": Action(residency.enter_update_start, residency.leave_update_start),
    "weight_update_finish": Action(None, residency.leave_update_finish),
    "fold_peak": Action(_fold_peak, None),
    "communicator": Action(communicators.enter, communicators.leave),
    "role_engine_core": Action(_become_engine_core, _announce_model),
    "role_worker": Action(_become_worker, None),
    "device_ready": Action(_become_worker, _leave_device_ready),
    "kv_caches": Action(_become_engine_core, _leave_kv_caches),
    "kv_plan": Action(None, _leave_kv_plan),
    "engine_ready": Action(_announce_model, None),
    "server_ready": Action(None, _announce_server),
}
