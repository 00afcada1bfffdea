"""The types of the hook table: a row, a call, and the exceptions that may leave an action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_memprof.capture.attributes import Fields
from vllm_memprof.capture.recorder import Recorder

#: Meaning of a row without a target: a finding; nothing; expected, so that a target found makes the
#: row "stale".
Need = Literal["required", "optional", "expected_absent"]
#: Moments at which rows are judged or removed, in their order in a worker's or an engine core's
#: life.
Moment = Literal[
    "device_ready",
    "model_ready",
    "engine_ready",
    "profiled",
    "first_steps",
    "first_transfer",
    "end",
]


#: hook, phase, need, target, detail, and state: of a binding, or absent_ok, never_called, stale;
#: against the installed sources found, missing, absent_ok, stale, compiled.
Verdict = dict[str, "str | None"]


class StopAfterPlan(SystemExit):
    """The engine was started for its KV plan only, and has it.

    A SystemExit, of status 0, because engine cores pass that on without a traceback.
    """


class StrictFailure(RuntimeError):
    """A required hook is not bound and MEMPROF_STRICT is set."""


@dataclass(slots=True)
class Call:
    """One call of a hooked function.

    ``result`` and ``error`` are set when it has returned or raised.
    """

    hook: Hook
    function: str  # name of the hooked function
    args: tuple[Any, ...]
    kwargs: Fields
    result: Any = None
    error: BaseException | None = None
    token: Any = None  # what the entering half hands to the leaving half: the phase it opened
    kept: Any = None  # what it hands over besides

    @property
    def subject(self) -> Any:
        """``self`` of a hooked method."""
        return self.args[0] if self.args else None

    def argument(self, name: str, at: int = 1, default: Any = None) -> Any:
        """Return the argument of that name, or of that place; ``self`` is at 0."""
        return self.kwargs.get(name, self.args[at] if len(self.args) > at else default)


Half = Callable[[Recorder, Call], None]


@dataclass(frozen=True)
class Hook:
    """One row of the table.

    A target is ``module:Attribute`` or ``module:Class.method``. Every target of a row that exists
    is bound: rows list the spellings of several versions and the classes that override each other;
    a call that passes through two of them counts once. A row is in force when the process runs its
    ``engine``, in a release inside ``versions``, and the device backend is in ``backends``.
    """

    id: str
    phase: str | None  # phase id it marks; None for markers that only feed others
    targets: tuple[str, ...]
    enter: Half | None = None  # run before the engine's call
    leave: Half | None = None  # run after it, also when it raised
    done: Half | None = None  # run after that, only when it did not raise
    within: str | None = None  # phase outside which no half is run
    need: Need = "required"
    #: worker | engine_core | api | detokenizer: in which process it is expected to bind
    role: str = "worker"
    becomes: bool = False  # a process that makes the call has that role from then on
    backends: tuple[str, ...] = ("npu", "cuda")
    versions: str = ""  # of the engine; "": every one
    engine: str | None = None  # None: of every engine
    after: str | None = None  # module whose import makes the target final, if not its own module
    least_calls: int = 0  # by the moment named in due
    due: Moment = "model_ready"
    until: Moment | None = None  # moment at which the wrapper is taken off again; None keeps it
    sampling: bool = False  # in force only where the run is sampled: it is in the path of a token

    def verdict(self, state: str, target: str, detail: str | None = None) -> Verdict:
        """Return the state of the row at one moment, as a ``hook`` event."""
        return {"hook": self.id, "phase": self.phase, "need": self.need, "state": state,
                "target": target, "detail": detail}  # fmt: skip
