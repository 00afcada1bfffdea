"""Build the report of a run: a ``Run`` enters, a ``Report`` leaves. No files, clocks or device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from vllm_memprof.accounting import equations
from vllm_memprof.accounting.allocation_sites import traced
from vllm_memprof.accounting.audit import ReplicaEdges, audit
from vllm_memprof.accounting.budgets import (
    corrections,
    fit_device,
    fits_request,
    items_not_subtracted,
)
from vllm_memprof.accounting.device_memory import device_memory
from vllm_memprof.accounting.empty_cache import cycles, empty_cache_calls, summarise_calls
from vllm_memprof.accounting.engine_figures import engine_figures, first_device_total
from vllm_memprof.accounting.engine_options import is_cuda
from vllm_memprof.accounting.findings.table import find
from vllm_memprof.accounting.infer_equation import Printed, device_by_total, search
from vllm_memprof.accounting.kv import build_kv, infer_layout, tokens_for_bytes, worth_in_tokens
from vllm_memprof.accounting.model import (
    Budget,
    Check,
    Kv,
    Oom,
    RankReport,
    Report,
    RunSummary,
    TermRow,
    Tried,
)
from vllm_memprof.accounting.not_measured import not_measured
from vllm_memprof.accounting.oom import failed_allocation
from vllm_memprof.accounting.owners import owners_of
from vllm_memprof.accounting.quantities import QUANTITIES, Evidence, grown_by
from vllm_memprof.accounting.ranks import fullest_notes
from vllm_memprof.accounting.remedies import Case, remedies
from vllm_memprof.accounting.requests import mm_profile, points, request_rows, stage_rows
from vllm_memprof.accounting.serving_growth import device_growth, host_growth, with_room
from vllm_memprof.accounting.summary import summarise, workers_by_label
from vllm_memprof.accounting.torch_owners import torch_owners
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.equation import Equation, Figures, Term
from vllm_memprof.options import Option, read_options
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.spans import Edge, Span, first_of, last_of
from vllm_memprof.text import Text, text
from vllm_memprof.units import minus

#: Phases inside kv_cache_alloc that allocate something else.
_BESIDE_KV = ("kv_connector", "request_pool")


@dataclass(frozen=True)
class _Rank:
    """What is known of one rank before its report is built."""

    label: str
    process: ProcessRecord
    summary: RunSummary
    equation: Equation | None
    chosen_by: str | None  # how the equation was chosen
    evidence: Evidence  # with the engine's figures
    kv: Kv
    tried: list[Tried]
    replica: ReplicaEdges


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
        growth=host_growth(run),
        allocations=traced(run),
    )


def rank_reports(
    run: Run, summary: RunSummary, workers: list[tuple[str, ProcessRecord]]
) -> list[RankReport]:
    """Reconcile the workers of one run folder; what they share with other hosts is in its group."""
    equation, chosen_by, tried = _equation(run, summary, [process for _, process in workers])
    phases_by_replica: dict[int | None, list[list[Span]]] = {}
    for process in run.whole.processes if run.group is not None else [each for _, each in workers]:
        if process.is_worker:
            phases_by_replica.setdefault(process.identity.dp_rank, []).append(process.phases)
    replicas = {dp: ReplicaEdges(each, summary.simulated) for dp, each in phases_by_replica.items()}
    ranks = []
    for at, (label, process) in enumerate(workers):
        figures = engine_figures(process, run.source, summary.eager, equation)
        evidence = Evidence(figures, process.phases, summary.simulated)
        kv = _kv(run, process, evidence, summary.engine, equation)
        rank = _Rank(
            label,
            process,
            summary,
            equation,
            chosen_by,
            evidence,
            kv,
            tried[at] if tried else [],
            replicas[process.identity.dp_rank],
        )
        ranks.append(_rank_report(run, rank))
    return ranks


def _equation(
    run: Run, summary: RunSummary, workers: list[ProcessRecord]
) -> tuple[Equation | None, str | None, list[list[Tried]]]:
    """Return the equation of a run, how it was chosen, and per worker of a log what was tried."""
    known = {name for each in workers for name, value in each.figures.items() if value is not None}
    engine, release = summary.engine, summary.engine_version
    found, chosen_by = equations.select(engine, release, run.forms, summary.device, known)
    if summary.source != "log":
        return found, chosen_by, []
    printed = []
    for each in workers:
        figures = engine_figures(each, run.source, summary.eager, found)
        if summary.eager:
            figures["graph_estimate_bytes"] = figures.get("graph_estimate_bytes") or 0
        printed.append(Printed(figures, each.figures_half_units))
    by_total = device_by_total(engine, printed)
    if by_total is not None and (found is None or found.only is None):
        special = equations.of_device(by_total, release)
        if special is not None:
            found, chosen_by = special, text("its device total, which is that of an Ascend 310P")
    result = search(engine, found, release, printed)
    return result.equation, result.chosen_by or chosen_by, result.tried


def _kv(
    run: Run,
    process: ProcessRecord,
    evidence: Evidence,
    engine: str | None,
    equation: Equation | None,
) -> Kv:
    """Return the KV cache of a rank by its own plan, else its replica's, else any."""
    planners = run.whole.planners
    dp_rank = process.identity.dp_rank
    same_replica = [other for other in planners if other.identity.dp_rank == dp_rank]
    own = [process] if process.kv_plan is not None else []
    plan = next((other.kv_plan for other in (*own, *same_replica, *planners)), None)
    allocated = None
    span = first_of(process.phases, "kv_cache_alloc")
    if span is not None and span.before is not None and span.after is not None:
        allocated = minus(span.after.allocated_bytes, span.before.allocated_bytes)
        for inner in process.phases:
            if inner.phase in _BESIDE_KV and inner.parent == span.order:
                allocated = minus(allocated, grown_by(inner))
    draft = last_of(process.phases, "draft_load")
    layers = None if draft is None else draft.detail.get("layers")
    printed = run.printed_kv.get(dp_rank, run.printed_kv.get(None, {}))
    printed = printed or run.whole.printed_kv.get(dp_rank, {})
    said = printed if run.source != "log" else None
    counted = equations.counted_per_byte(equation, evidence.figures)
    drafter = {str(name) for name in layers} if isinstance(layers, list) else None
    kv = build_kv(plan, process.identity.rank, allocated, said, counted, drafter)
    if run.source != "log" or evidence.figure("kv_cache_bytes") is None:
        return kv
    # the engine serves with the tokens of the rank that has the least
    peers = [each for each in run.processes if each.is_worker and each.identity.dp_rank == dp_rank]
    least = min(peers, key=lambda each: each.figures.get("kv_cache_bytes") or math.inf)
    if len({each.identity.pp_rank for each in peers}) > 1:
        return kv  # stages hold other layers
    granted = engine_figures(least, run.source, False, None).get("kv_cache_bytes")
    half = least.figures_half_units.get("kv_cache_bytes", 0)
    return infer_layout(kv, None if granted is None else int(granted), half, engine)


def _rank_report(run: Run, rank: _Rank) -> RankReport:
    process, evidence = rank.process, rank.evidence
    who = process.identity
    total = evidence.figure("device_total_bytes")
    if total is None:
        total = first_device_total(process)
    calls = empty_cache_calls(run, process)
    oom = failed_allocation(process, run.oom_counters)
    budget = _budget(rank, oom)
    report = RankReport(
        rank=who.rank,
        label=rank.label,
        pid=who.pid,
        host=who.host,
        dp_rank=who.dp_rank,
        group=None if run.info.part is None else run.info.part.group,
        pp_rank=who.pp_rank,
        tp_rank=who.tp_rank,
        ep_rank=who.ep_rank,
        device_total_bytes=total,
        initial_free_bytes=evidence.figure("initial_free_bytes"),
        phases=_phases_with_owners(process, rank.summary.simulated, rank.kv.draft_bytes),
        budget=budget,
        kv=rank.kv,
        empty_cache=calls,
        reclaim=summarise_calls(process, calls, rank.kv),
        cycles=cycles(process),
        oom=oom,
        errors=process.errors,
        figures=dict(evidence.figures),
        unread=process.unread,
        half_units=process.figures_half_units,
        lines=who.lines,
        growth=with_room(device_growth(run, process), _spare_at_start(budget)),
        requests=request_rows(run, process),
        stages=stage_rows(process),
        samples=points(run, process),
        mm_profile=mm_profile(process) if process.served.samples else None,
        thinned=process.served.thinned,
        dropped=process.served.dropped,
    )
    if oom is None:
        return report
    oom = replace(oom, at_request=oom.at_request or _in_turn(run, oom))
    case = Case(
        rank=report,
        oom=oom,
        env=run.info.env,
        logged=run.source == "log",
        simulated=rank.summary.simulated,
        eager=rank.summary.eager,
        cuda=is_cuda(rank.summary.engine, rank.summary.device),
        engine=rank.summary.engine,
        max_batched_tokens=_batched_tokens(run),
    )
    return replace(report, oom=replace(oom, remedies=remedies(case)))


def _in_turn(run: Run, oom: Oom) -> int | None:
    """Return which request of the run failed, counted from 1 in the order in which they began.

    Of several in the step it is the first whose items were encoded; None where that is not known.
    """
    begun = [record.id for process in run.whole.processes for record in process.served.requests]
    step = oom.requests or []
    encoded = [each for each in step if any(item.encoded for item in each.items)]
    failed = encoded[0].id if encoded else step[0].id if len(step) == 1 else None
    return begun.index(failed) + 1 if failed in begun else None


def _batched_tokens(run: Run) -> int | None:
    """Return the most tokens of a step: by the KV plan, else as the command says."""
    plan = next((each.kv_plan for each in run.whole.planners), None) or {}
    planned = plan.get("max_num_batched_tokens")
    if isinstance(planned, int):
        return planned
    given = read_options(run.info.command, [Option("max-num-batched-tokens", int)])
    return cast("int | None", given.get("max_num_batched_tokens"))


def _asked_utilization(command: Sequence[str]) -> float | None:
    """Return ``--gpu-memory-utilization`` of a command line; None where it was not given."""
    given = read_options(command, [Option("gpu-memory-utilization", float)])
    return cast("float | None", given.get("gpu_memory_utilization"))


def _spare_at_start(budget: Budget) -> int | None:
    """Return what was spare at the serving peak, without what was read above it later."""
    if budget.spare_bytes is None:
        return None
    later = (item.bytes or 0 for item in budget.held_at_peak if item.name == "held_later")
    return budget.spare_bytes + sum(later)


def _phases_with_owners(
    process: ProcessRecord, simulated: bool, draft_kv_bytes: int | None
) -> list[Span]:
    owners = owners_of(process)
    torch = torch_owners(process.phases, draft_kv_bytes)
    phases = []
    for span in process.phases:
        edges = tuple(
            Edge(edge.side, edge.snapshot, device_memory(span, edge, simulated, owners, torch))
            for edge in span.edges
        )
        phases.append(replace(span, edges=edges))
    return phases


def _budget(rank: _Rank, oom: Oom | None) -> Budget:
    """Return the engine's equation of a rank, and what fits the request and the device."""
    why_unknown = _why_nothing_later(rank)
    return fit_device(
        _equation_budget(rank),
        rank.equation,
        rank.evidence,
        rank.kv,
        rank.process.figures_half_units,
        oom=oom,
        eager=rank.summary.eager,
        why_unknown=why_unknown,
    )


def _why_nothing_later(rank: _Rank) -> Text | None:
    """Return why nothing is recorded after the KV plan; None where that is not known."""
    if rank.summary.source == "log":
        return text("the log does not say")
    if rank.summary.mode == "plan" and rank.summary.until != "ready":
        return text("memprof plan stops after the KV plan")
    return None


def _equation_budget(rank: _Rank) -> Budget:
    equation, evidence, kv = rank.equation, rank.evidence, rank.kv
    figures, half_units = evidence.figures, rank.process.figures_half_units
    budget = Budget(
        device_total_bytes=evidence.figure("device_total_bytes"),
        gpu_memory_utilization=figures.get("gpu_memory_utilization"),
        engine_kv_cache_bytes=evidence.figure("kv_cache_bytes"),
        requested=figures.get("requested_bytes"),
    )
    if equation is None:
        return replace(budget, tried=rank.tried)
    result = equations.evaluate(equation, figures, half_units)
    counted = equations.counted_per_byte(equation, figures)
    # what the equation of an engine without a profile does not subtract comes after the plan
    from_log = rank.summary.source == "log"
    unread = (
        _why_nothing_later(rank)
        if from_log or not row_of_run(rank.summary.engine).profiles
        else None
    )
    items = [
        replace(item, kv_tokens=worth_in_tokens(kv, _over(item.bytes, equation.divisor, counted)))
        for item in items_not_subtracted(equation.not_subtracted, evidence, result.terms, unread)
    ]
    granted = result.kv_cache_bytes
    fitting = (
        None
        if result.override or not items
        else fits_request(granted, items, equation.divisor, counted)
    )
    return replace(
        budget,
        equation=equation.id,
        cite=f"{equation.cite} ({equation.engine} {equation.read_in})",
        chosen_by=rank.chosen_by,
        override=result.override,
        formula=_formula(equation, result) + "".join(f" x {name}" for name in result.stages),
        requested=result.requested,
        terms=[_divided(term, evidence) for term in result.terms],
        kv_cache_bytes=granted,
        tolerance_bytes=result.tolerance_bytes,
        takes_fixed_size=equation.override is not None,
        checks=_budget_checks(equation, figures, half_units),
        not_subtracted=items,
        fits_request_bytes=fitting,
        kv_tokens=None if granted is None else tokens_for_bytes(kv, granted),
        fits_request_tokens=None if fitting is None else tokens_for_bytes(kv, fitting),
        corrections=corrections(equation, evidence, kv, items) if from_log else [],
        audit=audit(
            equation,
            rank.process.figures,
            rank.process.phases,
            rank.summary.source,
            rank.summary.simulated,
            _asked_utilization(rank.summary.command),
            rank.replica,
        ),
        tried=rank.tried,
    )


def _formula(equation: Equation, result: equations.Evaluation) -> str:
    """Return the equation in names; a term that took the place of another stands for it."""
    shown = {row.name for row in result.terms}
    if "whole_pages" not in shown:
        return equation.formula
    terms = [term for term in equation.terms if term.name in shown]
    return equation.formula_of([*terms, Term("whole_pages")])


def _divided(term: TermRow, evidence: Evidence) -> TermRow:
    """Return a term with its parts, where its figure is that of the quantity of its name."""
    if term.name != "weights" or term.bytes is None:
        return term
    found = QUANTITIES[term.name].reading(evidence)
    return replace(term, parts=found.parts) if found.bytes == term.bytes else term


def _over(size: int | None, divisor: int, counted: float) -> int | None:
    if size is None:
        return None
    return size // divisor if counted == 1.0 else int(size // divisor * counted)


def _budget_checks(
    equation: Equation, figures: Figures, half_units: Mapping[str, int]
) -> list[Check]:
    """Compare the engine's figures with their parts, within the rounding of what was printed."""

    def compare(name: str, expected: float | None, figure: str, parts: tuple[str, ...]) -> Check:
        found = figures.get(figure)
        if expected is None or found is None:
            ok = None
        else:
            slack = sum(half_units.get(each, 0) for each in (figure, *parts))
            # a printed figure is known to a byte at best
            ok = expected == found if not slack else abs(expected - found) <= slack + 1
        return Check(
            name,
            None if expected is None else int(expected),
            None if found is None else int(found),
            ok,
        )

    asked = equations.computed_request(equation, figures)
    name = f"requested = {equation.asked}"
    checks = [compare(name, asked, "requested_bytes", (equation.base,))]
    for term in equation.terms:
        if term.plus and term.figure is not None:
            name = f"{term.name} = {' + '.join(term.plus)} - {' - '.join(term.minus)}"
            parts = (*term.plus, *term.minus)
            checks.append(compare(name, term.derived(figures), term.figure, parts))
    return checks
