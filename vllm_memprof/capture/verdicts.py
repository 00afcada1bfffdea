"""Verdicts on the hooks of a running process: bindings, calls and failures enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_memprof.capture.binder import BOUND, MISSING, OVERWRITTEN, RELEASED, Binding
from vllm_memprof.capture.hook import ENGINE_READY, EXPECTED_ABSENT, MODEL_READY, REQUIRED, Hook

#: Moments at which the summary goes to the engine's log.
REPORTED_AT = (MODEL_READY, ENGINE_READY)


@dataclass(frozen=True)
class HookVerdict:
    """The state of one row at one moment."""

    hook: Hook
    #: pending | bound | missing | absent_ok | overwritten | never_called | error | stale; against
    #: the installed sources (selfcheck.py): found | missing | absent_ok | stale | compiled
    state: str
    target: str
    detail: str | None = None

    def to_event(self) -> dict[str, str | None]:
        hook = self.hook
        return {"hook": hook.id, "phase": hook.phase, "need": hook.need, "state": self.state,
                "target": self.target, "detail": self.detail}  # fmt: skip


def judge(
    hook: Hook, bindings: Sequence[Binding], *, calls: int, due: bool, failed: bool
) -> HookVerdict:
    """Return the verdict on one row.

    Args:
        hook: the row; its role is one of this process's.
        bindings: one per target.
        calls: seen so far.
        due: the calls that the row expects should have come by now.
        failed: its action raised and is off.
    """
    bound = [binding for binding in bindings if binding.state in (BOUND, OVERWRITTEN, RELEASED)]
    if not bound:
        states = {binding.state for binding in bindings}
        if hook.need == EXPECTED_ABSENT:
            return HookVerdict(hook, "absent_ok", hook.targets[0])
        state = next((state for state in ("error", MISSING) if state in states), "pending")
        return HookVerdict(hook, state, hook.targets[0])
    target = bound[0].target if len(bound) == 1 else f"{bound[0].target} and {len(bound) - 1} more"
    if hook.need == EXPECTED_ABSENT:
        detail = "expected to be absent in this version: the hook table is out of date"
        return HookVerdict(hook, "stale", target, detail)
    for binding in bound:
        if binding.state == OVERWRITTEN:
            return HookVerdict(hook, OVERWRITTEN, binding.target, binding.detail)
    if failed:
        return HookVerdict(hook, "error", target, "the hook failed and is off; see the error event")
    if due and calls < hook.least_calls:
        detail = f"{calls} calls, expected at least {hook.least_calls}"
        return HookVerdict(hook, "never_called", target, detail)
    return HookVerdict(hook, "bound", target)


def summarise(verdicts: list[HookVerdict]) -> tuple[str, list[HookVerdict]]:
    """Return one line for the log, and the required rows that are not in place."""
    required = [verdict for verdict in verdicts if verdict.hook.need == REQUIRED]
    failing = [verdict for verdict in required if verdict.state not in ("bound", "absent_ok")]
    line = f"{len(required) - len(failing)}/{len(required)} required hooks bound"
    if failing:
        line += "; " + ", ".join(
            f"{verdict.state}: {verdict.hook.id} ({verdict.target})" for verdict in failing
        )
    return line, failing
