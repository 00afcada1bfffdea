"""Closes the books of a run: a ``Run`` enters, a ``Report`` leaves. No files, no clocks, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_memprof.accounting import equations
from vllm_memprof.accounting.budgets import corrections, fits_request, items_not_subtracted
from vllm_memprof.accounting.empty_cache import cycles, empty_cache_calls, summarise
from vllm_memprof.accounting.findings import find
from vllm_memprof.accounting.identity import device_memory
from vllm_memprof.accounting.kv import build_kv, infer_layout, tokens_for_bytes, worth_in_tokens
from vllm_memprof.accounting.model import (
    Budget,
    Check,
    Kv,
    NotMeasured,
    Oom,
    RankReport,
    Report,
    RunSummary,
)
from vllm_memprof.accounting.owners import owners_of
from vllm_memprof.accounting.quantities import Evidence
from vllm_memprof.accounting.ranks import rank_notes
from vllm_memprof.accounting.spare import spare
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of, first_of
from vllm_memprof.text import text
from vllm_memprof.units import minus

#: Phases that every start-up passes. One that a run lacks is reported as not measured, with the reason.
REQUIRED_PHASES = (
    "device_init",
    "hccl_init",
    "weight_load",
    "profile_run",
    "kv_cache_alloc",
    "graph_capture",
    "warm_up",
)
#: Phases that come after the KV plan, where ``memprof plan`` stops the engine.
_AFTER_PLAN = ("kv_cache_alloc", "graph_capture", "warm_up")
#: An equation, and how it was chosen.
_Choice = tuple[equations.Equation | None, str | None]


def build_report(run: Run) -> Report:
    """Reconciles every rank of a run.

    Works on partial runs as well: what a rank did not reach is None, and listed under ``not_measured``.

    Args:
        run: a loaded run folder, or what was read from a log.
    """
    summary = _summarise(run)
    workers = [process for process in run.processes if process.is_worker]
    if run.source == "log":  # in the order of their lines
        workers.sort(key=lambda process: (process.identity.dp_rank or 0, _rank_or_last(process)))
    labels = _labels(workers)
    known = {
        name for process in workers for name, value in process.figures.items() if value is not None
    }
    chosen = equations.select(
        summary.engine, summary.engine_version, run.forms, summary.device, known
    )
    ranks = [
        _rank_report(run, process, labels[i], summary, chosen) for i, process in enumerate(workers)
    ]
    return Report(
        run=summary,
        ranks=ranks,
        findings=find(run, ranks),
        not_measured=_not_measured(run, summary, workers, labels),
    )


def _rank_or_last(process: ProcessRecord) -> int:
    return 1 << 31 if process.identity.rank is None else process.identity.rank


def _summarise(run: Run) -> RunSummary:
    info = run.info
    versions = dict(info.versions)
    for process in run.processes:
        versions.update(process.versions)
    versions = {name.replace("_", "-"): version for name, version in versions.items()}
    engine = info.engine or next(
        (name for name in ("vllm-ascend", "vllm") if name in versions), None
    )
    soc = next((process.identity.soc for process in run.processes if process.identity.soc), None)
    return RunSummary(
        id=info.id,
        source=run.source,
        status=info.status,
        model=info.model,
        mode=info.mode,
        engine=engine,
        engine_version=info.engine_version or versions.get(engine or ""),
        device=soc
        or info.device,  # the processes know the chip; a launcher may know no more than a profile's name
        simulated=info.simulated,
        device_profile=info.device_profile,
        command=info.command,
        started=info.started,
        seconds=info.seconds,
        exit_code=info.exit_code,
        exit_reason=info.exit_reason,
        truncated=run.truncated,
        eager="--enforce-eager" in info.command or "--enforce-eager" in info.engine_command,
        notes=[
            *_experiment_note(info.empty_cache_at),
            *rank_notes(info.ranks),
            *info.notes,
            *run.notes,
        ],
        empty_cache_at=info.empty_cache_at,
        ranks=info.ranks,
        versions=versions,
        env=dict(info.env),
        host=info.host,
        start_t_ns=info.start_t_ns,
    )


def _experiment_note(phases: list[str]) -> list[str]:
    if not phases:
        return []
    return [
        f"experiment: memprof itself called empty_cache at the end of {', '.join(phases)}; the run was changed by it"
    ]


def _labels(workers: list[ProcessRecord]) -> list[str]:
    """One name per worker, distinct also where several replicas have a TP0 each."""
    named = []
    for process in workers:
        who = process.identity
        named.append(
            who.label or (f"rank {who.rank}" if who.rank is not None else f"pid {who.pid}")
        )
    twice = {name for name in named if named.count(name) > 1}
    for i, process in enumerate(workers):
        if named[i] in twice:
            dp_rank = process.identity.dp_rank
            named[i] = (
                f"{named[i]} pid {process.identity.pid}"
                if dp_rank is None
                else f"DP{dp_rank} {named[i]}"
            )
    return named


def _rank_report(
    run: Run, process: ProcessRecord, label: str, summary: RunSummary, chosen: _Choice
) -> RankReport:
    who = process.identity
    calls = empty_cache_calls(run, process)
    figures = _figures(run, process, chosen[0])
    if (
        summary.eager
        and chosen[0] is not None
        and "graph_estimate" in {term.name for term in chosen[0].terms}
    ):
        figures["graph_estimate_bytes"] = (
            figures.get("graph_estimate_bytes") or 0
        )  # it estimates what it will capture
    granted = figures.get("kv_cache_bytes")
    kv = infer_layout(
        _rank_kv(run, process),
        None if granted is None or run.source != "log" else int(granted),
        process.figures_half_units.get("kv_cache_bytes", 0),
        summary.engine,
    )
    total = figures.get("device_total_bytes")
    free = figures.get("initial_free_bytes")
    device_total = _first_total(process) if total is None else int(total)
    return RankReport(
        rank=who.rank,
        label=label,
        pid=who.pid,
        host=who.host,
        dp_rank=who.dp_rank,
        pp_rank=who.pp_rank,
        tp_rank=who.tp_rank,
        ep_rank=who.ep_rank,
        device_total_bytes=device_total,
        initial_free_bytes=None if free is None else int(free),
        phases=_with_owners(process, summary.simulated),
        budget=_budget(process, figures, kv, summary, chosen),
        kv=kv,
        empty_cache=calls,
        reclaim=summarise(process, calls, kv),
        cycles=cycles(process),
        oom=_oom(run, process),
        errors=process.errors,
        spare_bytes=None if run.source == "log" else spare(process.phases, device_total),
        figures=figures,
        unread=process.unread,
        half_units=process.figures_half_units,
    )


def _figures(
    run: Run, process: ProcessRecord, equation: equations.Equation | None
) -> dict[str, int | float | None]:
    """The engine's figures, as its equation wants them.

    Its graph figure starts at 0 and means something only once a capture has run. Where it keeps none of its own
    readings, they are taken from the snapshots at the same moment. A log prints the KV cache before multi-modal
    decoding takes its share, and then what is left.
    """
    figures = dict(process.figures)
    if run.source == "log":
        if figures.get("kv_cache_reduced_bytes") is not None:
            figures["kv_cache_bytes"] = figures["kv_cache_reduced_bytes"]
        return figures
    if not figures.get("graph_bytes") and not any(
        span.phase == "graph_capture" for span in process.phases
    ):
        figures["graph_bytes"] = None
    if (
        equation is not None
        and equation.from_snapshots
        and figures.get("device_total_bytes") is None
    ):
        figures["device_total_bytes"] = _first_total(process)
    for name in equation.from_snapshots if equation is not None else ():
        if figures.get(name) is None:
            figures[name] = _read_in_snapshots(
                name, Evidence(figures, process.phases, simulated=False)
            )
    return figures


#: Figures that an engine reads and forgets: the edge of the profile run's last empty_cache, and the snapshot's field.
_IN_SNAPSHOTS = {
    "profile_end_free_bytes": ("before", "device_free_bytes"),
    "profile_end_non_torch_bytes": ("before", "non_torch_bytes"),
    "profile_after_allocated_peak_bytes": ("before", "allocated_peak_bytes"),
    "profile_after_allocated_bytes": ("after", "allocated_bytes"),
    "profile_after_free_bytes": ("after", "device_free_bytes"),
}


def _read_in_snapshots(name: str, evidence: Evidence) -> int | None:
    before, after, _ = evidence.profile_end()
    edge, field_name = _IN_SNAPSHOTS[name]
    snapshot = before if edge == "before" else after
    if snapshot is None or before is None:  # without an empty_cache there is no such moment
        return None
    value: int | None = getattr(snapshot, field_name)
    return value


def _first_total(process: ProcessRecord) -> int | None:
    totals = (edge.snapshot.device_total_bytes for _, edge in edges_of(process.phases))
    return next((total for total in totals if total is not None), None)


def _with_owners(process: ProcessRecord, simulated: bool) -> list[Span]:
    owners = owners_of(process)
    return [
        replace(
            span,
            edges=tuple(
                replace(edge, owners=device_memory(span, edge, simulated, owners))
                for edge in span.edges
            ),
        )
        for span in process.phases
    ]


def _budget(
    process: ProcessRecord,
    figures: equations.Figures,
    kv: Kv,
    summary: RunSummary,
    chosen: _Choice,
) -> Budget:
    equation, how = chosen
    total, granted = figures.get("device_total_bytes"), figures.get("kv_cache_bytes")
    common: dict[str, Any] = {
        "device_total_bytes": None if total is None else int(total),
        "gpu_memory_utilization": figures.get("gpu_memory_utilization"),
        "engine_kv_cache_bytes": None if granted is None else int(granted),
    }
    if equation is None:
        return Budget(**common, requested=figures.get("requested_bytes"))
    result = equations.evaluate(equation, figures, process.figures_half_units)
    evidence = Evidence(figures, process.phases, summary.simulated)
    items = [
        replace(item, kv_tokens=worth_in_tokens(kv, item.bytes))
        for item in items_not_subtracted(equation.not_subtracted, evidence, result.terms)
    ]
    if summary.source == "log":
        items = [
            replace(item, reason=text("the log does not say")) if item.bytes is None else item
            for item in items
        ]
    fitting = None if result.override or not items else fits_request(result.kv_cache_bytes, items)
    return Budget(
        **common,
        equation=equation.id,
        cite=f"{equation.cite} ({equation.engine} {equation.read_in})",
        chosen_by=how,
        override=result.override,
        formula=equation.formula,
        requested=result.requested,
        terms=result.terms,
        kv_cache_bytes=result.kv_cache_bytes,
        tolerance_bytes=result.tolerance_bytes,
        takes_fixed_size=equation.override is not None,
        checks=_budget_checks(equation, figures, process.figures_half_units),
        not_subtracted=items,
        fits_request_kv_cache_bytes=fitting,
        kv_tokens=None
        if result.kv_cache_bytes is None
        else tokens_for_bytes(kv, result.kv_cache_bytes),
        fits_request_kv_tokens=None if fitting is None else tokens_for_bytes(kv, fitting),
        corrections=corrections(equation, evidence, kv, items) if summary.source == "log" else [],
    )


def _budget_checks(
    equation: equations.Equation, figures: equations.Figures, half_units: Mapping[str, int]
) -> list[Check]:
    """The engine's own figures against what they are said to be made of, within the rounding of what was printed."""
    asked = equations.computed_request(equation, figures)
    slack = half_units.get("requested_bytes", 0) + half_units.get("device_total_bytes", 0)
    checks = [
        _check(
            "requested = device total x utilization", asked, figures.get("requested_bytes"), slack
        )
    ]
    for term in equation.terms:
        if term.plus and term.figure is not None:
            text = f"{term.name} = {' + '.join(term.plus)} - {' - '.join(term.minus)}"
            slack = sum(half_units.get(name, 0) for name in (term.figure, *term.plus, *term.minus))
            checks.append(_check(text, term.derived(figures), figures.get(term.figure), slack))
    return checks


def _check(name: str, expected: int | float | None, found: int | float | None, slack: int) -> Check:
    ok = None
    if expected is not None and found is not None:
        # a printed figure is known to a byte at best
        ok = expected == found if not slack else abs(expected - found) <= slack + 1
    return Check(
        name, None if expected is None else int(expected), None if found is None else int(found), ok
    )


def _rank_kv(run: Run, process: ProcessRecord) -> Kv:
    plans = [other for other in run.processes if other.kv_plan is not None]
    same_replica = [other for other in plans if other.identity.dp_rank == process.identity.dp_rank]
    candidates = [process] if process.kv_plan is not None else (same_replica or plans)
    plan = candidates[0].kv_plan if candidates else None
    return build_kv(plan, process.identity.rank, _kv_allocation(process))


def _kv_allocation(process: ProcessRecord) -> int | None:
    span = first_of(process.phases, "kv_cache_alloc")
    if span is None or span.before is None or span.after is None:
        return None
    return minus(span.after.allocated_bytes, span.before.allocated_bytes)


def _oom(run: Run, process: ProcessRecord) -> Oom | None:
    """Return the allocation that failed; what the engine's message says comes before readings."""
    span = first_of(process.phases, "oom")
    if span is None:
        return None
    snapshot = span.after or span.before or Snapshot(t_ns=0)

    def told(name: str, read: int | None = None) -> int | None:
        value = span.integer(name)
        return read if value is None else value

    total = told("device_total_bytes")
    allocated = told("allocated_bytes", snapshot.allocated_bytes)
    reserved = told("reserved_bytes", snapshot.reserved_bytes)
    # the allocator's own figure at the failure is nearer to it than a reading after it
    free = told("free_bytes", told("device_free_bytes", snapshot.device_free_bytes))
    if free is None:
        free = minus(minus(total, reserved), span.integer("non_torch_bytes"))
    # where only the peak of allocated memory is known, at least this much of the segments was free
    held = told("allocated_peak_bytes") if allocated is None else allocated
    index = process.identity.device_index
    return Oom(
        requested_bytes=told("requested_bytes"),
        device_total_bytes=total,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        free_bytes=free,
        active_bytes=told("active_bytes"),
        device=span.string("device"),
        fragmentation_bytes=minus(reserved, held),
        other_bytes=minus(minus(total, free), reserved),
        # the csv of torch_npu is rounded
        components=run.oom_counters.get(-1 if index is None else index)
        if snapshot.components is None
        else snapshot.components,
    )


def _not_measured(
    run: Run, summary: RunSummary, workers: list[ProcessRecord], labels: list[str]
) -> list[NotMeasured]:
    rows: list[NotMeasured] = []
    if run.source == "log":
        seen = {span.phase for process in workers for span in process.phases}
        return [
            NotMeasured(phase, "not in the log") for phase in REQUIRED_PHASES if phase not in seen
        ]
    for phase in REQUIRED_PHASES:
        reasons: dict[str, list[str]] = {}
        for process, label in zip(workers, labels, strict=True):
            if not any(span.phase == phase for span in process.phases):
                reasons.setdefault(_why_absent(run, summary, process, phase), []).append(label)
        for reason, concerned in reasons.items():
            everyone = len(concerned) == len(workers)
            rows.append(NotMeasured(phase, reason, None if everyone else concerned))
    return rows


def _why_absent(run: Run, summary: RunSummary, process: ProcessRecord, phase: str) -> str:
    if phase == "graph_capture" and summary.eager:
        return "eager mode"
    if (
        phase in _AFTER_PLAN
        and summary.mode == "plan"
        and any(other.kv_plan is not None for other in run.processes)
    ):
        return "memprof plan stops after the KV plan"
    states = {hook.state for hook in process.hooks.values() if hook.phase == phase}
    if states and not states & {"bound", "pending"}:
        return f"its hook is {', '.join(sorted(states)).replace('_', ' ')}"
    seen = [
        REQUIRED_PHASES.index(span.phase)
        for span in process.phases
        if span.phase in REQUIRED_PHASES
    ]
    if max(seen, default=-1) < REQUIRED_PHASES.index(phase):
        unfinished = [span.phase for span in process.phases if span.open]
        if unfinished:
            return f"not reached: {unfinished[-1]} was not finished"
        if summary.status != "ok":
            return "not reached"
    if phase == "graph_capture":
        return "no graph was captured"
    return "no record of it"
