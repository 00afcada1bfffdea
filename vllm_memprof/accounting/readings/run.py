"""What a run is reported from: its record, the start-up of each rank as read, what failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import Oom, RankReport, Report, RunSummary, Tried
from vllm_memprof.accounting.readings.quantities import StartupReadings
from vllm_memprof.record.loader import ProcessRecord, Run


@dataclass(frozen=True)
class RankReadings:
    """One worker, read once; the steps of its report take their figures from here.

    Attributes:
        run: that it belongs to; what it shares with other hosts is in the run's group.
        summary: of the run.
        process: the worker's record.
        startup: its moments and quantities.
        oom: an allocation that failed on it.
        chosen_by: how the equation of ``startup`` was found; None: there is none.
        tried: equations that were held against the printed figures of a log.
    """

    run: Run
    summary: RunSummary
    process: ProcessRecord
    startup: StartupReadings
    oom: Oom | None
    chosen_by: str | None
    tried: Sequence[Tried]


@dataclass(frozen=True)
class RunReadings:
    """A run folder or a log, read once: its workers by label, and what was read of each."""

    run: Run
    workers: Sequence[tuple[str, ProcessRecord]]
    ranks: Sequence[RankReadings]


#: A step of the report: it takes what is known so far, and returns it with its own part.
Step = Callable[[RunReadings, Report], Report]
RankStep = Callable[[RankReadings, RankReport], RankReport]


def on_each_rank(step: RankStep) -> Step:
    """Return a step of one rank as a step of all."""

    def on_all(read: RunReadings, report: Report) -> Report:
        pairs = zip(read.ranks, report.ranks, strict=True)
        return replace(report, ranks=[step(rank, known) for rank, known in pairs])

    return on_all
