"""Build the report of a run: a ``Run`` enters, a ``Report`` leaves. No files, clocks or device.

The run is read, then its report goes through ``STEPS``, none of which is entered twice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from vllm_memprof.accounting.budget.budgets import balance
from vllm_memprof.accounting.budget.infer_equation import choose
from vllm_memprof.accounting.budget.kv import kv_cache
from vllm_memprof.accounting.budget.usable import usable
from vllm_memprof.accounting.empty_cache import reclaimed
from vllm_memprof.accounting.findings.table import find
from vllm_memprof.accounting.model import RankReport, Report, RunSummary
from vllm_memprof.accounting.not_measured import not_measured
from vllm_memprof.accounting.oom.failed_allocation import failed_allocation
from vllm_memprof.accounting.oom.remedies import remedied
from vllm_memprof.accounting.owners.connectors import connected
from vllm_memprof.accounting.owners.device_memory import divided
from vllm_memprof.accounting.owners.host import host_memory
from vllm_memprof.accounting.readings.quantities import StartupReadings
from vllm_memprof.accounting.readings.run import RankReadings, RunReadings, Step, on_each_rank
from vllm_memprof.accounting.readings.startup import Moments, engine_figures, first_device_total
from vllm_memprof.accounting.serving.growth import grown
from vllm_memprof.accounting.serving.requests import sampled
from vllm_memprof.accounting.summary import summarise, workers_by_label
from vllm_memprof.accounting.weights import weighed
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.text import text
from vllm_memprof.units import either

#: The steps of a report, in its order.
STEPS: tuple[Step, ...] = (
    on_each_rank(kv_cache),
    on_each_rank(balance),
    on_each_rank(weighed),
    on_each_rank(divided),
    usable,
    on_each_rank(connected),
    on_each_rank(reclaimed),
    on_each_rank(sampled),
    grown,
    host_memory,
    remedied,
    not_measured,
)


def build_report(run: Run) -> Report:
    """Reconcile every rank of a run.

    A run may be partial: what a rank did not reach is None, and listed under ``not_measured``.

    Args:
        run: a loaded run folder, or what was read from a log.
    """
    report = run_report(run, workers_by_label(run))
    return replace(report, findings=find(run, report.ranks))


def run_report(run: Run, workers: list[tuple[str, ProcessRecord]]) -> Report:
    """Return the report of one run folder as far as it is its own: findings are of all hosts.

    Args:
        run: with all hosts of its group, where it is of several.
        workers: of it, by label.
    """
    summary = summarise(run)
    read = RunReadings(run, workers, read_ranks(run, summary, workers))
    report = Report(
        summary,
        [_as_read(label, each) for (label, _), each in zip(workers, read.ranks, strict=True)],
    )
    for step in STEPS:
        report = step(read, report)
    return report


def read_ranks(
    run: Run, summary: RunSummary, workers: list[tuple[str, ProcessRecord]]
) -> list[RankReadings]:
    """Return what was read of each worker of a run folder, with the equation of its release."""
    evidence = summary.evidence
    nothing_later = evidence.no_later
    if nothing_later is None and summary.planned_only:
        nothing_later = text("memprof plan stops after the KV plan")
    choice = choose(summary, run.forms, [process for _, process in workers], evidence.partial)
    replicas: dict[int | None, list[Moments]] = defaultdict(list)
    for process in run.whole.workers:
        moments = Moments(process.phases, {}, summary.simulated)
        replicas[process.identity.dp_rank].append(moments)
    found = []
    for at, (_, process) in enumerate(workers):
        startup = StartupReadings(
            process.phases,
            engine_figures(process, summary.eager, choice.equation),
            summary.simulated,
            choice.equation,
            replicas[process.identity.dp_rank],
            evidence.no_own,
            nothing_later,
            process.figures_half_units,
        )
        rank = RankReadings(
            run,
            summary,
            process,
            startup,
            failed_allocation(run, process),
            chosen_by=None if choice.equation is None else choice.chosen_by,
            tried=choice.tried[at] if choice.tried else (),
        )
        found.append(rank)
    return found


def _as_read(label: str, read: RankReadings) -> RankReport:
    """Return the report of one rank before any step: what was read of it."""
    of, process = read.startup, read.process
    total = either(of.figure("device_total_bytes"), first_device_total(process.phases))
    return RankReport(
        **{**vars(process.identity), "label": label},
        group=read.run.info.group,
        device_total_bytes=total,
        initial_free_bytes=of.figure("initial_free_bytes"),
        oom=read.oom,
        errors=process.errors,
        figures=dict(of.figures),
        readings=of.quantities,
        unread=process.unread,
        half_units=process.figures_half_units,
        files=process.files,
    )
