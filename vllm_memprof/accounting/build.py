"""Build the report of a run: a ``Run`` enters, a ``Report`` leaves. No files, clocks or device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import cast

from vllm_memprof.accounting.budget.budgets import equation_budget, fit_device
from vllm_memprof.accounting.budget.infer_equation import choose
from vllm_memprof.accounting.budget.kv import kv_cache
from vllm_memprof.accounting.empty_cache import cycles, empty_cache_calls, summarise_calls
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.findings.table import find
from vllm_memprof.accounting.model import RankReport, Report, RunSummary
from vllm_memprof.accounting.not_measured import not_measured
from vllm_memprof.accounting.oom.estimates import Case
from vllm_memprof.accounting.oom.failed_allocation import failed_allocation
from vllm_memprof.accounting.oom.remedies import remedies, with_values
from vllm_memprof.accounting.owners.device_memory import device_memory
from vllm_memprof.accounting.owners.in_torch import torch_owners
from vllm_memprof.accounting.owners.outside_torch import owners_of
from vllm_memprof.accounting.readings.quantities import StartupReadings
from vllm_memprof.accounting.readings.startup import Moments, engine_figures, first_device_total
from vllm_memprof.accounting.serving.growth import device_growth, host_growth, traced, with_room
from vllm_memprof.accounting.serving.requests import mm_profile, points, request_rows, stage_rows
from vllm_memprof.accounting.summary import summarise, workers_by_label
from vllm_memprof.options import Option, read_options
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.text import text
from vllm_memprof.units import either, sum_or_none


def build_report(run: Run) -> Report:
    """Reconcile every rank of a run.

    A run may be partial: what a rank did not reach is None, and listed under ``not_measured``.

    Args:
        run: a loaded run folder, or what was read from a log.
    """
    report = run_report(run, workers_by_label(run))
    return replace(
        report,
        failure=with_values(run.failure, report.ranks, report.run.engine),
        findings=find(run, report.ranks),
    )


def run_report(run: Run, workers: list[tuple[str, ProcessRecord]]) -> Report:
    """Return the report of one run folder as far as it is its own: findings are of all hosts.

    Args:
        run: with all hosts of its group, where it is of several.
        workers: of it, by label.
    """
    summary = summarise(run)
    return Report(
        run=summary,
        ranks=rank_reports(run, summary, workers),
        not_measured=not_measured(summary, workers, bool(run.whole.planners)),
        growth=host_growth(run),
        allocations=traced(run),
    )


def rank_reports(
    run: Run, summary: RunSummary, workers: list[tuple[str, ProcessRecord]]
) -> list[RankReport]:
    """Reconcile the workers of one run folder; what they share with other hosts is in its group."""
    evidence = EVIDENCE[run.source]
    nothing_later = evidence.no_later
    if nothing_later is None and summary.mode == "plan" and summary.until != "ready":
        nothing_later = text("memprof plan stops after the KV plan")
    processes = [process for _, process in workers]
    choice = choose(summary, run.forms, processes, evidence.partial)
    replicas: dict[int | None, list[Moments]] = defaultdict(list)
    for process in run.whole.processes:
        if process.is_worker:
            moments = Moments(process.phases, {}, summary.simulated)
            replicas[process.identity.dp_rank].append(moments)
    ranks = []
    for at, (label, process) in enumerate(workers):
        who, spans = process.identity, process.phases
        of = StartupReadings(
            spans,
            engine_figures(process, summary.eager, choice.equation),
            summary.simulated,
            choice.equation,
            replicas[who.dp_rank],
            evidence.no_own,
            nothing_later,
            process.figures_half_units,
        )
        total = either(of.figure("device_total_bytes"), first_device_total(spans))
        kv = kv_cache(run, process, of, summary.engine)
        oom = failed_allocation(run, process)
        budget = replace(
            equation_budget(of, kv, process.figures, summary.command),
            chosen_by=choice.chosen_by if choice.equation is not None else None,
            tried=choice.tried[at] if choice.tried else [],
        )
        budget = fit_device(budget, of, kv, oom=oom, eager=summary.eager)
        # the headroom at the serving peak, without what was read above it later
        later = (item.bytes for item in budget.held_at_peak if item.name == "held_later")
        room = sum_or_none([budget.headroom_bytes, *later])
        owners, torch = owners_of(process), torch_owners(spans, kv.draft_bytes)
        divided = [
            {
                edge.side: device_memory(span, edge, summary.simulated, owners, torch)
                for edge in span.edges
            }
            for span in spans
        ]
        calls = empty_cache_calls(run, process)
        rank = RankReport(
            **{**vars(who), "label": label},
            group=run.info.group,
            device_total_bytes=total,
            initial_free_bytes=of.figure("initial_free_bytes"),
            phases=[replace(span, owners=each) for span, each in zip(spans, divided, strict=True)],
            budget=budget,
            kv=kv,
            empty_cache=calls,
            reclaim=summarise_calls(process, calls, kv),
            cycles=cycles(process),
            oom=oom,
            errors=process.errors,
            figures=dict(of.figures),
            readings=of.quantities,
            unread=process.unread,
            half_units=process.figures_half_units,
            growth=with_room(device_growth(run, process), room),
            requests=request_rows(run, process),
            stages=stage_rows(process),
            samples=points(run, process),
            mm_profile=mm_profile(process) if process.served.samples else None,
            thinned=process.served.thinned,
            dropped=process.served.dropped,
        )
        if oom is not None:
            given = read_options(run.info.command, [Option("max-num-batched-tokens", int)])
            batched = either(
                kv.max_num_batched_tokens,
                cast("int | None", given.get("max_num_batched_tokens")),
            )
            tried = remedies(Case(rank, oom, summary, batched))
            rank = replace(rank, oom=replace(oom, remedies=tried))
        ranks.append(rank)
    return ranks
