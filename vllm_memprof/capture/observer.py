"""The hooks of one process: rows enter, wrapped functions leave; a call runs its row's halves.

Made by the plugin. The recorder holds what is known of the process; the observer binds, runs and
judges the rows.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_memprof.capture import failure
from vllm_memprof.capture.binder import STATES, Binder
from vllm_memprof.capture.callsite import outwards
from vllm_memprof.capture.hook import Call, Half, Hook, StopAfterPlan, StrictFailure, Verdict
from vllm_memprof.capture.hooks.table import rows_in_force
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.schema import ENV_STRICT


class Observer(Binder):
    """The hooks of one process.

    Args:
        recorder: records what the actions read.
        hooks: rows in force.
    """

    def __init__(self, recorder: Recorder, hooks: tuple[Hook, ...]) -> None:
        self.recorder = recorder
        self.logger = logging.getLogger(ENGINES[recorder.engine].logger)
        self.hooks = hooks
        super().__init__(hooks, self.wrap, recorder.error)
        recorder.hooks = self
        self._forget()

    def _forget(self) -> None:
        self._reported: dict[str, str | None] = {}  # hook id -> last state written
        self.calls: Counter[str] = Counter()  # by hook id, seen in this process
        self.failed: set[str] = set()  # hooks that raised and are out of the way

    def after_fork(self) -> None:
        self.recorder.after_fork()
        self._forget()

    def wrap(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of a row: same signature, same result, same exceptions."""
        name = function.__name__

        @functools.wraps(function)
        def memprof_wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Observed(hook, name, args, kwargs, observer=self) as call:
                call.result = function(*args, **kwargs)
            return call.result

        return memprof_wrapper

    def run(self, half: Half | None, call: Call) -> None:
        """Run one half of a row; if it fails, record that once and never run this row again."""
        if half is None or call.hook.id in self.failed:
            return
        if call.hook.within is not None and not self.recorder.is_open(call.hook.within):
            return
        try:
            half(self.recorder, call)
        except (StopAfterPlan, StrictFailure):
            raise
        except Exception as error:
            self.failed.add(call.hook.id)
            self.recorder.error(f"hook {call.hook.id}", error)
            why = f"{type(error).__name__}: {error}"
            self.logger.warning("memprof: hook %s failed and is off: %s", call.hook.id, why)

    def self_check(self, moment: str) -> None:
        """Judge the rows that are due, write the changes, in strict mode fail on a required row.

        Raises:
            StrictFailure: MEMPROF_STRICT is set and a required hook is not bound.
        """
        recorder = self.recorder
        self.check()
        required, failing = 0, []
        for hook in self.hooks:
            if hook.role not in recorder.roles:
                continue
            verdict, reported = self._judge(hook, moment), self._reported.get(hook.id)
            state = self._reported[hook.id] = verdict["state"]
            if state != reported:
                recorder.emit("hook", **verdict)
            if hook.need == "required":
                required += 1
                if state != "bound":
                    failing.append(f"{state}: {hook.id} ({verdict['target']})")
        found = f"{required - len(failing)}/{required} required hooks bound"
        summary = "; ".join([found, *failing])
        if moment not in ("model_ready", "engine_ready"):
            return
        if moment == "engine_ready" or "engine_core" not in recorder.roles:  # else it follows
            self.logger.info("memprof: %s: %s", recorder.label or recorder.role, summary)
        if failing and os.environ.get(ENV_STRICT) == "1":
            raise StrictFailure(f"memprof: {summary} (MEMPROF_STRICT=1)")

    def _judge(self, hook: Hook, moment: str) -> Verdict:
        """Return the verdict on one row, whose role is one of this process's."""
        found = {each.state: each for each in reversed(self.bindings) if each.hook.id == hook.id}
        first = next(found[state] for state in STATES if state in found)
        is_there, absent = first.owner is not None, hook.need == "expected_absent"
        outdated = "expected to be absent in this version: the hook table is out of date"
        due = moment == hook.due or self._reported.get(hook.id) == "never_called"
        calls, least = self.calls[hook.id], hook.least_calls
        verdicts = (
            (absent and is_there, "stale", outdated),
            (absent, "absent_ok", None),
            (not is_there or first.state == "overwritten", first.state, first.detail),
            (hook.id in self.failed, "error", "the hook failed and is off; see the error event"),
            (due and calls < least, "never_called", f"{calls} calls, expected at least {least}"),
            (True, "bound", None),
        )
        state, detail = next((state, detail) for applies, state, detail in verdicts if applies)
        return hook.verdict(state, first.target, detail)


@dataclass(slots=True)
class _Observed(Call):
    """A call that runs its row's halves around it."""

    observer: Any = None

    def __enter__(self) -> _Observed:
        hook = self.hook
        self.observer.calls[hook.id] += 1
        if hook.becomes:
            self.observer.recorder.roles.add(hook.role)
        self.observer.run(hook.enter, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.error = error
            failure.read(self.observer.recorder, error)
        self.observer.run(self.hook.leave, self)
        if error is None:
            self.observer.run(self.hook.done, self)


def start(run_dir: Path, engine: str) -> Recorder:
    """Record this process of an engine into a run folder."""
    recorder = Recorder(run_dir)
    recorder.engine = engine
    known = ENGINES[engine].roles
    # by the module that loads plugins; forked children learn their role from later calls
    for frame in outwards(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        role = known.get(f"{module}:{frame.f_code.co_name}") or known.get(module)
        if role is not None:
            recorder.roles.add(role)
            break
    version = getattr(sys.modules.get(f"{ENGINES[engine].package}.version"), "__version__", None)
    rows = rows_in_force(recorder.probe.backend, version, recorder.sampled, engine)
    observer = Observer(recorder, rows)
    observer.install()
    os.register_at_fork(after_in_child=observer.after_fork)
    return recorder
