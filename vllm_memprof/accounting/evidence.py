"""What a run was read from, and what that cannot tell: a reason for each, None where it can."""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.text import Text


class Evidence(NamedTuple):
    """A kind of record. ``no_...`` is the reason why something is not in it."""

    name: str
    #: Ranks, phases and the end of the run may be missing without anything having gone wrong.
    partial: bool
    read_from: Text
    no_own: Text | None = None  # memprof's readings beside the engine's figures
    no_later: Text | None = None  # what follows the KV plan
    no_snapshot: Text | None = None  # memory at both ends of a phase
    no_phases: Text | None = None  # any of them
    no_times: Text | None = None
    no_figure: Text | None = None  # a figure that a limit is set on
    no_kv_cache: Text | None = None  # of a run that ended before it
    no_equation: Text | None = None  # where the release is not known either
    recomputed: Text | None = None  # what a recomputed equation shows; None: the audit does


#: ``RunSummary.source`` -> what it can tell.
EVIDENCE = {
    "hooks": Evidence("hooks", False, **TITLES["from_hooks"]),
    "log": Evidence("log text", True, **TITLES["from_log"]),
    "file": Evidence("memory file", True, **TITLES["from_file"]),
}
