"""What a run was read from, and what that cannot tell: a reason for each, None where it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vllm_memprof.text import Text, text


class Evidence(NamedTuple):
    """A kind of record. ``no_...`` is the reason why something is not in it."""

    name: str
    read_from: Text
    #: Ranks, phases and the end of the run may be missing without anything having gone wrong.
    partial: bool = False
    no_own: Text | None = None  # memprof's readings beside the engine's figures
    no_later: Text | None = None  # what follows the KV plan
    no_snapshot: Text | None = None  # memory at both ends of a phase
    no_phases: Text | None = None  # any of them
    no_times: Text | None = None
    no_figure: Text | None = None  # a figure that a limit is set on
    no_kv_cache: Text | None = None  # of a run that ended before it
    no_equation: Text | None = None  # where the release is not known either
    recomputed: Text | None = None  # what a recomputed equation shows; None: the audit does
    status: Mapping[str, Text] = {}  # instead of the usual words


#: ``RunSummary.source`` -> what it can tell.
EVIDENCE = {
    "hooks": Evidence("hooks", text("read from hooks")),
    "log": Evidence(
        "log text",
        text("read from log text"),
        partial=True,
        no_own=text("a log has the engine's values only"),
        no_later=text("the log does not say"),
        no_snapshot=text("no snapshot of memory in the log"),
        no_phases=text("no phase was measured: the log has no snapshot of memory"),
        no_times=text("a log names no moments in time: there is no timeline"),
        no_figure=text("the log does not print it"),
        no_kv_cache=text("no KV cache in the log"),
        no_equation=text(
            "the log names neither the release nor an equation: its figures are shown as they are"
        ),
        recomputed=text(
            "recomputed from the engine's own values: the equation matches this release; "
            "a log has no measurements to compare them with"
        ),
        # a log rarely shows a run to its end: what it shows is said, and no more
        status={
            "ok": text("no failure in the log"),
            "truncated": text("the log ends before the KV cache is sized"),
        },
    ),
}
