"""Which hooks are in place while a process runs: bindings, calls and failures enter, one verdict per row leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_memprof.capture.hooks import ENGINE_READY, EXPECTED_ABSENT, MODEL_READY, REQUIRED, Hook

if TYPE_CHECKING:
    from vllm_memprof.capture.core import Capture

#: Moments at which the summary goes to the engine's log.
REPORTED_AT = (MODEL_READY, ENGINE_READY)

_GOOD = ("bound", "absent_ok")


@dataclass(frozen=True)
class Verdict:
    """The state of one row at one moment."""

    hook: Hook
    state: str  # pending | bound | missing | absent_ok | overwritten | never_called | error | stale
    target: str
    detail: str | None = None

    def to_event(self) -> dict[str, Any]:
        hook = self.hook
        return {"hook": hook.id, "phase": hook.phase, "need": hook.need, "state": self.state, "target": self.target,
                "detail": self.detail}  # fmt: skip


def judge(capture: Capture, moment: str) -> list[Verdict]:
    """The verdicts on every row that this process should have bound."""
    roles = capture.session.roles
    return [_judge_row(capture, hook, moment) for hook in capture.hooks if hook.role in roles]


def _judge_row(capture: Capture, hook: Hook, moment: str) -> Verdict:
    bindings = capture.binder.of(hook)
    bound = [
        binding for binding in bindings if binding.state in ("bound", "overwritten", "released")
    ]
    if not bound:
        return _judge_unbound(hook, [binding.state for binding in bindings])
    target = bound[0].target if len(bound) == 1 else f"{bound[0].target} and {len(bound) - 1} more"
    if hook.need == EXPECTED_ABSENT:
        return Verdict(
            hook,
            "stale",
            target,
            "expected to be absent in this version: the hook table is out of date",
        )
    overwritten = [binding for binding in bound if binding.state == "overwritten"]
    if overwritten:
        return Verdict(hook, "overwritten", overwritten[0].target, overwritten[0].detail)
    if hook.id in capture.session.failed:
        return Verdict(hook, "error", target, "the hook failed and is off; see the error event")
    calls = capture.session.calls.get(hook.id, 0)
    due = moment == hook.due or capture.reported.get(hook.id) == "never_called"
    if due and calls < hook.expect_calls[0]:
        return Verdict(
            hook, "never_called", target, f"{calls} calls, expected at least {hook.expect_calls[0]}"
        )
    return Verdict(hook, "bound", target)


def _judge_unbound(hook: Hook, states: list[str]) -> Verdict:
    if hook.need == EXPECTED_ABSENT:
        return Verdict(hook, "absent_ok", hook.targets[0])
    if "error" in states:
        return Verdict(hook, "error", hook.targets[0])
    return Verdict(hook, "missing" if "missing" in states else "pending", hook.targets[0])


def summarise(verdicts: list[Verdict]) -> tuple[str, list[Verdict]]:
    """One line for the log, and the required rows that are not in place."""
    required = [verdict for verdict in verdicts if verdict.hook.need == REQUIRED]
    failing = [verdict for verdict in required if verdict.state not in _GOOD]
    line = f"{len(required) - len(failing)}/{len(required)} required hooks bound"
    if failing:
        line += "; " + ", ".join(
            f"{verdict.state}: {verdict.hook.id} ({verdict.target})" for verdict in failing
        )
    return line, failing
