"""Build the report of a run: a ``Run`` enters, a ``Report`` leaves. No files, clocks or device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from vllm_memprof.accounting.budget import equations, infer_equation
from vllm_memprof.accounting.budget.budgets import equation_budget, fit_device
from vllm_memprof.accounting.budget.infer_equation import Printed, device_by_total
from vllm_memprof.accounting.budget.kv import build_kv, infer_layout
from vllm_memprof.accounting.deployment.ranks import fullest_notes
from vllm_memprof.accounting.empty_cache import cycles, empty_cache_calls, summarise_calls
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.findings.table import find
from vllm_memprof.accounting.model import (
    Budget,
    Kv,
    Oom,
    RankReport,
    Report,
    RunSummary,
    Tried,
)
from vllm_memprof.accounting.not_measured import not_measured
from vllm_memprof.accounting.oom.estimates import Case
from vllm_memprof.accounting.oom.failed_allocation import failed_allocation
from vllm_memprof.accounting.oom.remedies import remedies, with_values
from vllm_memprof.accounting.owners.device_memory import device_memory
from vllm_memprof.accounting.owners.in_torch import torch_owners
from vllm_memprof.accounting.owners.outside_torch import owners_of
from vllm_memprof.accounting.readings.quantities import StartupReadings
from vllm_memprof.accounting.readings.startup import (
    Moments,
    after,
    before,
    engine_figures,
    first_device_total,
    grown_by,
    growth,
)
from vllm_memprof.accounting.serving.growth import device_growth, host_growth, traced, with_room
from vllm_memprof.accounting.serving.requests import mm_profile, points, request_rows, stage_rows
from vllm_memprof.accounting.summary import summarise, workers_by_label
from vllm_memprof.engines.base import same_lines
from vllm_memprof.engines.equation import Equation
from vllm_memprof.options import Option, read_options
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.spans import first_of
from vllm_memprof.text import text
from vllm_memprof.units import minus

#: Phases inside kv_cache_alloc that allocate something else.
_BESIDE_KV = ("kv_connector", "request_pool")


def build_report(run: Run) -> Report:
    """Reconcile every rank of a run.

    A run may be partial: what a rank did not reach is None, and listed under ``not_measured``.

    Args:
        run: a loaded run folder, or what was read from a log.
    """
    summary = summarise(run)
    workers = workers_by_label(run)
    ranks = rank_reports(run, summary, workers)
    planned = bool(run.planners)
    if summary.mode == "plan":
        summary = replace(summary, notes=[*summary.notes, *fullest_notes(ranks)])
    return Report(
        run=summary,
        ranks=ranks,
        findings=find(run, ranks),
        not_measured=not_measured(summary, workers, planned),
        failure=with_values(run.failure, ranks),
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
    equation, chosen_by, tried = _equation(run, summary, processes, search=evidence.partial)
    replicas: dict[int | None, list[Moments]] = {}
    for process in run.whole.processes:
        if process.is_worker:
            moments = Moments(process.phases, {}, summary.simulated)
            replicas.setdefault(process.identity.dp_rank, []).append(moments)
    plan = next((each.kv_plan for each in run.whole.planners), None) or {}
    batched_tokens = plan.get("max_num_batched_tokens")
    if not isinstance(batched_tokens, int):
        given = read_options(run.info.command, [Option("max-num-batched-tokens", int)])
        batched_tokens = cast("int | None", given.get("max_num_batched_tokens"))
    ranks = []
    for at, (label, process) in enumerate(workers):
        readings = StartupReadings(
            process.phases,
            engine_figures(process, summary.eager, equation),
            summary.simulated,
            equation,
            replicas[process.identity.dp_rank],
            evidence.no_own,
            nothing_later,
            process.figures_half_units,
        )
        kv = _kv(run, process, readings, summary.engine)
        oom = failed_allocation(run, process)
        budget = replace(
            equation_budget(readings, kv, process.figures, summary.command),
            chosen_by=chosen_by if equation is not None else None,
            tried=tried[at] if tried else [],
        )
        budget = fit_device(budget, readings, kv, oom=oom, eager=summary.eager)
        rank = _rank_report(run, label, process, readings, kv, budget, oom)
        if oom is not None:
            case = Case(rank, oom, summary, batched_tokens)
            rank = replace(rank, oom=replace(oom, remedies=remedies(case)))
        ranks.append(rank)
    return ranks


def _equation(
    run: Run, summary: RunSummary, workers: list[ProcessRecord], search: bool
) -> tuple[Equation | None, str | None, list[list[Tried]]]:
    """Return the equation of a run, how it was chosen, and per worker of a log what was tried."""
    known = {name for each in workers for name, value in each.figures.items() if value is not None}
    engine, release = summary.engine, summary.engine_version
    found, chosen_by = equations.select(engine, release, run.forms, summary.device, known)
    if not search:
        return found, chosen_by, []
    printed = []
    for each in workers:
        figures = engine_figures(each, summary.eager, found)
        if summary.eager:
            figures["graph_estimate_bytes"] = figures.get("graph_estimate_bytes") or 0
        printed.append(Printed(figures, each.figures_half_units))
    by_total = device_by_total(engine, printed)
    if by_total is not None and (found is None or found.only is None):
        special = equations.of_device(by_total, release)
        # the form of the lines outranks the device: older releases had no equation of its own
        if special is not None and all(same_lines(special.id, form) for form in run.forms):
            found, chosen_by = special, text("its device total, which is that of an Ascend 310P")
    result = infer_equation.search(engine, found, release, printed)
    return result.equation, result.chosen_by or chosen_by, result.tried


def _kv(run: Run, process: ProcessRecord, of: StartupReadings, engine: str | None) -> Kv:
    """Return the KV cache of a rank by its own plan, else its replica's, else any."""
    planners = run.whole.planners
    dp_rank = process.identity.dp_rank
    same_replica = [other for other in planners if other.identity.dp_rank == dp_rank]
    own = [process] if process.kv_plan is not None else []
    plan = next((other.kv_plan for other in (*own, *same_replica, *planners)), None)
    span, draft = first_of(process.phases, "kv_cache_alloc"), of.last("draft_load")
    allocated = growth(before(span), after(span), "allocated_bytes")
    for inner in process.phases:
        if span is not None and inner.phase in _BESIDE_KV and inner.parent == span.order:
            allocated = minus(allocated, grown_by(inner))
    layers = None if draft is None else draft.detail.get("layers")
    printed = run.printed_kv.get(dp_rank, run.printed_kv.get(None, {}))
    printed = printed or run.whole.printed_kv.get(dp_rank, {})
    counted = equations.counted_per_byte(of.equation, of.figures)
    drafter = {str(name) for name in layers} if isinstance(layers, list) else None
    kv = build_kv(plan, process.identity.rank, allocated, printed, counted, drafter)
    if kv.recorded or of.figure("kv_cache_bytes") is None:
        return kv
    # the engine serves with the tokens of the rank that has the least
    peers = [each for each in run.processes if each.is_worker and each.identity.dp_rank == dp_rank]
    least = min(peers, key=lambda each: each.figures.get("kv_cache_bytes") or math.inf)
    if len({each.identity.pp_rank for each in peers}) > 1:
        return kv  # stages hold other layers
    granted = engine_figures(least, False, None).get("kv_cache_bytes")
    half = least.figures_half_units.get("kv_cache_bytes", 0)
    return infer_layout(kv, None if granted is None else int(granted), half, engine)


def _rank_report(
    run: Run,
    label: str,
    process: ProcessRecord,
    of: StartupReadings,
    kv: Kv,
    budget: Budget,
    oom: Oom | None,
) -> RankReport:
    who = process.identity
    total = of.figure("device_total_bytes")
    # the headroom at the serving peak, without what was read above it later
    later = (item.bytes or 0 for item in budget.held_at_peak if item.name == "held_later")
    room = None if budget.headroom_bytes is None else budget.headroom_bytes + sum(later)
    calls = empty_cache_calls(run, process)
    owners, torch = owners_of(process), torch_owners(process.phases, kv.draft_bytes)
    phases = []
    for span in process.phases:
        divided = {
            edge.side: device_memory(span, edge, of.simulated, owners, torch) for edge in span.edges
        }
        phases.append(replace(span, owners=divided))
    return RankReport(
        rank=who.rank,
        label=label,
        pid=who.pid,
        host=who.host,
        dp_rank=who.dp_rank,
        group=None if run.info.part is None else run.info.part.group,
        pp_rank=who.pp_rank,
        tp_rank=who.tp_rank,
        ep_rank=who.ep_rank,
        device_total_bytes=first_device_total(process.phases) if total is None else total,
        initial_free_bytes=of.figure("initial_free_bytes"),
        phases=phases,
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
        lines=who.lines,
        growth=with_room(device_growth(run, process), room),
        requests=request_rows(run, process),
        stages=stage_rows(process),
        samples=points(run, process),
        mm_profile=mm_profile(process) if process.served.samples else None,
        thinned=process.served.thinned,
        dropped=process.served.dropped,
    )
