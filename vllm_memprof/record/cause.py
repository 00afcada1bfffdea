"""Why a start or a server failed, as its log tells: made by ``causes``, carried by ``Run``."""

from __future__ import annotations

from dataclasses import dataclass, field
from shlex import quote
from typing import Annotated

from vllm_memprof.files import read_own
from vllm_memprof.record.codec import one_of

#: What a failure may be, and whether memory of any sort was short.
KINDS: dict[str, bool] = read_own(__file__, "cause.toml")
#: Whether a cure suffices: a plan with it passes, or fails (no); else as far as it is known.
ENOUGH = ("checked", "computed", "at least", "unknown", "no")


@dataclass(frozen=True)
class EvidenceLine:
    """A line of the log, secrets replaced."""

    line: int  # from 1
    text: str


@dataclass(frozen=True)
class Cure:
    """One change that answers a failure: an argument, a variable, or something to do."""

    why: str
    argument: str | None = None
    environment: str | None = None
    action: str | None = None
    value: str | None = None  # where it can be computed
    enough: Annotated[str, one_of(*ENOUGH)] = "unknown"
    engine: str | None = None  # of ``ENGINES``, or torch or torch_npu below it; None: any
    release: str | None = None  # from which on, where that matters

    @property
    def change(self) -> str:
        """Return what to change, as it is typed."""
        named = self.action or self.argument or self.environment or ""
        mark = "=" if self.environment else " "
        return named if self.value is None else f"{named}{mark}{quote(self.value)}"


@dataclass(frozen=True)
class NamedFailure:
    """What went wrong first, why memprof thinks so, and what to change."""

    kind: Annotated[str, one_of(*KINDS)]
    is_memory: bool
    title: str
    confidence: Annotated[str, one_of("certain", "likely", "unrecognised")]
    evidence: list[EvidenceLine] = field(default_factory=list)
    cures: list[Cure] = field(default_factory=list)
    source: str = ""  # a thread or documentation; "" for none
    tried_on: str = ""  # with --prove: what its cures were planned on, or why they were not
