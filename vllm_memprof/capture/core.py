"""The recording of one process put together: session, bindings, self-check. Made by the plugin, used by the actions."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_memprof.capture import verdicts
from vllm_memprof.capture.actions import ACTIONS, Action, Call, Half, StopAfterPlan, StrictFailure
from vllm_memprof.capture.binder import Binder
from vllm_memprof.capture.hooks import MODEL_READY, Hook, rows_in_force
from vllm_memprof.capture.probe import detect_backend
from vllm_memprof.capture.session import Session
from vllm_memprof.record.schema import ENV_EMPTY_CACHE_AT, ENV_STOP_AFTER, ENV_STRICT

_MEANT_TO_LEAVE = (StopAfterPlan, StrictFailure)


class Capture:
    """Hooks of one process and what they record.

    Args:
        session: where events go.
        hooks: rows in force.
    """

    def __init__(self, session: Session, hooks: tuple[Hook, ...]) -> None:
        self.session = session
        self.hooks = hooks
        self.strict = os.environ.get(ENV_STRICT) == "1"
        self.stop_after = os.environ.get(ENV_STOP_AFTER)
        self.empty_cache_at = frozenset(
            filter(None, os.environ.get(ENV_EMPTY_CACHE_AT, "").split(","))
        )
        self.binder = Binder(hooks, self.wrap, session.error)
        self.reported: dict[str, str] = {}  # hook id -> last state written

    def wrap(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapper of a row: same signature, same result, same exceptions."""
        action = ACTIONS[hook.action]
        make = (
            _wrap_async
            if hook.kind == "async"
            else _wrap_context
            if hook.kind == "context"
            else _wrap_call
        )
        return make(self, hook, action, function)

    def run(self, half: Half | None, call: Call) -> None:
        """Run one half of an action; if it fails, record that once and never run this row again."""
        if half is None or call.hook.id in self.session.failed:
            return
        try:
            half(self, call)
        except _MEANT_TO_LEAVE:
            raise
        except Exception as error:
            self.session.failed.add(call.hook.id)
            self.session.error(f"hook {call.hook.id}", error)
            logger().warning(
                "memprof: hook %s failed and is off: %s: %s",
                call.hook.id,
                type(error).__name__,
                error,
            )

    def count(self, hook: Hook) -> None:
        self.session.calls[hook.id] = self.session.calls.get(hook.id, 0) + 1

    def bind_instance(self, instance: object | None) -> None:
        """The classes really used are known now: bind what they override and what appeared since."""
        self.binder.bind_pending()
        if instance is not None:
            self.binder.bind_overrides(instance)

    def bind_model(self, runner: object | None) -> None:
        """The model is there: bind what is hooked on it, below whatever the runner has wrapped around it."""
        get_model = getattr(runner, "get_model", None)
        model = getattr(runner, "model", None) if get_model is None else get_model()
        if model is not None:
            self.binder.bind_live("<loaded>:model.load_weights", model)

    def release(self, moment: str) -> None:
        self.binder.release(moment)

    def self_check(self, moment: str) -> None:
        """Judge the rows that are due, write what changed, and in strict mode fail on a required one.

        Raises:
            StrictFailure: MEMPROF_STRICT is set and a required hook is not bound.
        """
        self.binder.check()
        judged = verdicts.judge(self, moment)
        for verdict in judged:
            if self.reported.get(verdict.hook.id) != verdict.state:
                self.reported[verdict.hook.id] = verdict.state
                self.session.emit("hook", **verdict.to_event())
        summary, failing = verdicts.summarise(judged)
        engine_follows = moment == MODEL_READY and "engine_core" in self.session.roles
        if moment in verdicts.REPORTED_AT and not engine_follows:
            logger().info(
                "memprof: %s: %s", self.session.notes.get("label", self.session.role), summary
            )
        if self.strict and failing and moment in verdicts.REPORTED_AT:
            raise StrictFailure(f"memprof: {summary} (MEMPROF_STRICT=1)")

    def observe_oom(self) -> None:
        """Be told of failed allocations (torch_npu only); the observer reads counters and returns."""
        torch_npu = sys.modules.get("torch_npu")
        attach = getattr(getattr(torch_npu, "_C", None), "_npu_attach_out_of_memory_observer", None)
        if attach is not None and not self.session.notes.get("oom_observed"):
            self.session.notes["oom_observed"] = True
            attach(self._on_oom)

    def _on_oom(self, device: int, requested: int, total: int, free: int) -> None:
        try:
            detail = {
                "device": device,
                "requested_bytes": requested,
                "device_total_bytes": total,
                "device_free_bytes": free,
            }
            self.session.mark("oom", "oom.observer", self.session.probe.counters_only(), detail)
        except Exception as error:
            self.session.error("oom observer", error)

    def after_fork(self) -> None:
        self.session.after_fork()
        self.reported.clear()


def start(run_dir: str) -> Capture:
    """Record this process into a run folder."""
    session = Session(Path(run_dir))
    session.probe.backend = detect_backend()
    session.roles.update(roles_by_stack())
    backend = session.probe.backend
    capture = Capture(
        session, rows_in_force(None if backend is None else backend.name, vllm_version())
    )
    capture.binder.install()
    os.register_at_fork(after_in_child=capture.after_fork)
    return capture


def vllm_version() -> str | None:
    return getattr(sys.modules.get("vllm.version"), "__version__", None)


#: Module whose function is calling the plugin -> role of this process.
_ROLE_BY_CALLER = {
    "vllm.engine.arg_utils": "api",
    "vllm.v1.engine.core": "engine_core",
    "vllm.v1.worker.worker_base": "worker",
}


def roles_by_stack() -> set[str]:
    """The role of this process by who loads plugins in it; forked children learn theirs from later calls."""
    frame = sys._getframe(1)
    while frame is not None:
        role = _ROLE_BY_CALLER.get(frame.f_globals.get("__name__", ""))
        if role is not None:
            return {role}
        frame = frame.f_back  # type: ignore[assignment]
    return set()


def logger() -> logging.Logger:
    """A child of vLLM's logger: its level, format and process prefix apply."""
    return logging.getLogger("vllm.memprof")


def _wrap_call(
    capture: Capture, hook: Hook, action: Action, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def memprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        call = Call(hook, function.__name__, args, kwargs)
        capture.count(hook)
        capture.run(action.enter, call)
        try:
            call.result = function(*args, **kwargs)
        except BaseException as error:
            call.error = error
            capture.run(action.leave, call)
            raise
        capture.run(action.leave, call)
        return call.result

    return memprof_wrapper


def _wrap_async(
    capture: Capture, hook: Hook, action: Action, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def memprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        call = Call(hook, function.__name__, args, kwargs)
        capture.count(hook)
        capture.run(action.enter, call)
        try:
            call.result = await function(*args, **kwargs)
        except BaseException as error:
            call.error = error
            capture.run(action.leave, call)
            raise
        capture.run(action.leave, call)
        return call.result

    return memprof_wrapper


def _wrap_context(
    capture: Capture, hook: Hook, action: Action, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def memprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        return _Context(
            capture, Call(hook, function.__name__, args, kwargs), action, function(*args, **kwargs)
        )

    return memprof_wrapper


class _Context:
    """A context manager around the engine's own; the call's result is what the engine's yields."""

    def __init__(self, capture: Capture, call: Call, action: Action, inner: Any) -> None:
        self._capture, self._call, self._action, self._inner = capture, call, action, inner

    def __enter__(self) -> Any:
        self._capture.count(self._call.hook)
        self._capture.run(self._action.enter, self._call)
        self._call.result = self._inner.__enter__()
        return self._call.result

    def __exit__(self, *error: Any) -> Any:
        self._call.error = error[1]
        try:
            return self._inner.__exit__(*error)
        finally:
            self._capture.run(self._action.leave, self._call)
