"""The hooks of one process: rows enter, wrapped functions leave; a call runs its row's halves.

Made by the plugin. The recorder holds what is known of the process; the observer binds, runs and
judges the rows.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_memprof.capture import failure, verdicts
from vllm_memprof.capture.binder import BOUND, Binder
from vllm_memprof.capture.callsite import outwards
from vllm_memprof.capture.hook import MODEL_READY, Call, Half, Hook, StopAfterPlan, StrictFailure
from vllm_memprof.capture.hooks.table import rows_in_force
from vllm_memprof.capture.probe import detect_backend
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.schema import ENV_STRICT


class Observer:
    """The hooks of one process.

    Args:
        recorder: records what the actions read.
        hooks: rows in force.
        engine: of this process.
    """

    def __init__(self, recorder: Recorder, hooks: tuple[Hook, ...], engine: str = "vllm") -> None:
        self.recorder = recorder
        self.logger = logging.getLogger(ENGINES[engine].logger)
        self.hooks = hooks
        self.strict = os.environ.get(ENV_STRICT) == "1"
        self.binder = Binder(hooks, self.wrap, recorder.error)
        self.reported: dict[str, str] = {}  # hook id -> last state written
        recorder.hooks = self

    def wrap(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of a row: same signature, same result, same exceptions."""
        if hook.kind == "async":

            @functools.wraps(function)
            async def memprof_async(*args: Any, **kwargs: Any) -> Any:
                with _Observed(self, Call(hook, function.__name__, args, kwargs)) as call:
                    call.result = await function(*args, **kwargs)
                return call.result

            return memprof_async
        if hook.kind == "context":

            @functools.wraps(function)
            @contextmanager
            def memprof_context(*args: Any, **kwargs: Any) -> Iterator[Any]:
                call = Call(hook, function.__name__, args, kwargs)
                with _Observed(self, call), function(*args, **kwargs) as call.result:
                    yield call.result

            return memprof_context

        return self._wrap_function(hook, function)

    def _wrap_function(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of a plain function: what ``_Observed`` does, written out.

        It is in the path of a token where the run is sampled; an object that enters and leaves
        costs as much as all else here.
        """
        recorder, enter, leave = self.recorder, hook.enter, hook.leave
        hook_id, name = hook.id, function.__name__

        @functools.wraps(function)
        def memprof_wrapper(*args: Any, **kwargs: Any) -> Any:
            call = Call(hook, name, args, kwargs)
            calls = recorder.calls
            calls[hook_id] = calls.get(hook_id, 0) + 1
            if enter is not None:
                self.run(enter, call)
            try:
                call.result = function(*args, **kwargs)
            except BaseException as error:
                call.error = error
                failure.read(recorder, error)
                self.run(leave, call)
                raise
            if leave is not None:
                self.run(leave, call)
            return call.result

        return memprof_wrapper

    def run(self, half: Half | None, call: Call) -> None:
        """Run one half of a row; if it fails, record that once and never run this row again."""
        recorder = self.recorder
        if half is None or (recorder.failed and call.hook.id in recorder.failed):
            return
        try:
            half(recorder, call)
        except (StopAfterPlan, StrictFailure):
            raise
        except Exception as error:
            self.recorder.failed.add(call.hook.id)
            self.recorder.error(f"hook {call.hook.id}", error)
            why = f"{type(error).__name__}: {error}"
            self.logger.warning("memprof: hook %s failed and is off: %s", call.hook.id, why)

    def bind_instance(self, instance: object | None) -> None:
        """Bind what the class really used overrides, and what appeared since."""
        self.binder.bind_pending()
        self.binder.bind_overrides(instance)

    def bind_model(self, runner: object | None) -> None:
        """Bind what is hooked on the model, below whatever the runner has wrapped around it."""
        get_model = getattr(runner, "get_model", None)
        model = getattr(runner, "model", None) if get_model is None else get_model()
        if model is not None:
            self.binder.bind_live("<loaded>:model.", model)

    def is_bound(self, hook_id: str) -> bool:
        """Return True if any target of a row has its wrapper."""
        return any(each.hook.id == hook_id and each.state == BOUND for each in self.binder.bindings)

    def release(self, moment: str) -> None:
        """Take off the rows that are only wanted until this moment."""
        self.binder.release(moment)

    def self_check(self, moment: str) -> None:
        """Judge the rows that are due, write the changes, in strict mode fail on a required row.

        Raises:
            StrictFailure: MEMPROF_STRICT is set and a required hook is not bound.
        """
        recorder = self.recorder
        self.binder.check()
        judged = [
            verdicts.judge(
                hook,
                self.binder.of(hook),
                calls=recorder.calls.get(hook.id, 0),
                due=moment == hook.due or self.reported.get(hook.id) == "never_called",
                failed=hook.id in recorder.failed,
            )
            for hook in self.hooks
            if hook.role in recorder.roles
        ]
        for each in judged:
            if self.reported.get(each.hook.id) != each.state:
                self.reported[each.hook.id] = each.state
                recorder.emit("hook", **each.to_event())
        summary, failing = verdicts.summarise(judged)
        engine_follows = moment == MODEL_READY and "engine_core" in recorder.roles
        if moment in verdicts.REPORTED_AT and not engine_follows:
            self.logger.info("memprof: %s: %s", recorder.notes.label or recorder.role, summary)
        if self.strict and failing and moment in verdicts.REPORTED_AT:
            raise StrictFailure(f"memprof: {summary} (MEMPROF_STRICT=1)")

    def observe_oom(self) -> None:
        """Attach to failed allocations; the allocator's callback reads counters only."""
        if self.recorder.notes.oom_observed:
            return
        if (backend := self.recorder.probe.backend) is not None:
            # where the allocator takes a function that it calls when an allocation has failed
            torch = getattr(sys.modules.get(backend.package), "_C", None)
            attach = getattr(torch, f"_{backend.name}_attach_out_of_memory_observer", None)
            if attach is not None:
                attach(self._on_oom)
        self.recorder.notes.oom_observed = True
        failure.watch_logs(self.recorder)

    def _on_oom(self, device: int, requested: int, total: int, free: int) -> None:
        sampler = self.recorder.sampler
        try:
            detail: dict[str, object] = {
                "device": device,
                "requested_bytes": requested,
                "device_total_bytes": total,
                "device_free_bytes": free,
                "moment": None if sampler is None else sampler.moment(),
            }
            counters = self.recorder.probe.counters_only()
            number = self.recorder.mark("oom", "oom.observer", counters, detail)
            self.recorder.notes.oom = number, requested
        except Exception as error:
            self.recorder.error("oom observer", error)

    def after_fork(self) -> None:
        self.recorder.after_fork()
        self.reported.clear()


class _Observed:
    """Runs a row's halves around a coroutine or a context manager of the engine."""

    __slots__ = ("_call", "_observer")

    def __init__(self, observer: Observer, call: Call) -> None:
        self._observer, self._call = observer, call

    def __enter__(self) -> Call:
        hook, calls = self._call.hook, self._observer.recorder.calls
        calls[hook.id] = calls.get(hook.id, 0) + 1
        self._observer.run(hook.enter, self._call)
        return self._call

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._call.error = error
        failure.read(self._observer.recorder, error)
        self._observer.run(self._call.hook.leave, self._call)


def start(run_dir: str, engine: str = "vllm") -> Recorder:
    """Record this process of an engine into a run folder."""
    recorder = Recorder(Path(run_dir))
    recorder.probe.backend = detect_backend()
    recorder.engine = engine
    recorder.roles.update(roles_by_stack(engine))
    package = sys.modules.get(f"{ENGINES[engine].package}.version")
    version = getattr(package, "__version__", None)
    sampling = recorder.sampler is not None
    rows = rows_in_force(recorder.probe.backend_name, version, sampling, engine)
    observer = Observer(recorder, rows, engine)
    observer.binder.install()
    os.register_at_fork(after_in_child=observer.after_fork)
    return recorder


def roles_by_stack(engine: str) -> set[str]:
    """Return the role of this process by the module that loads plugins in it, if known.

    Forked children learn theirs from later calls.
    """
    known = ENGINES[engine].roles
    for frame in outwards(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        for key in (f"{module}:{frame.f_code.co_name}", module):
            if key in known:
                return {known[key]}
    return set()
