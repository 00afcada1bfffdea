"""The phases of a start-up that a run has no record of, with the reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from vllm_memprof.accounting.model import NotMeasured, Report, RunSummary
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.engines import row_of_run
from vllm_memprof.record.loader import ProcessRecord

#: Phases that come after the KV plan, where ``memprof plan`` stops the engine.
_AFTER_PLAN = ("kv_cache_alloc", "graph_capture", "warm_up", "request")


def not_measured(read: RunReadings, report: Report) -> Report:
    """Add a row per absent phase and reason, with the ranks where it is not all of them."""
    summary, workers, planned = report.run, read.workers, bool(read.run.whole.planners)
    none, rows = summary.evidence.no_snapshot, []
    for phase in row_of_run(None if none else summary.engine).phases:
        reasons: dict[str, list[str]] = defaultdict(list)
        for label, process in workers:
            if not any(span.phase == phase for span in process.phases):
                reasons[none or _reason(summary, process, phase, planned)].append(label)
        for reason, labels in reasons.items():
            everyone = len(labels) == len(workers)
            rows.append(NotMeasured(phase, reason, None if everyone else labels))
    return replace(report, not_measured=rows)


def _reason(summary: RunSummary, process: ProcessRecord, phase: str, planned: bool) -> str:
    if phase == "graph_capture" and summary.eager:
        return "eager mode"
    if phase in _AFTER_PLAN and summary.planned_only and planned:
        return "memprof plan stops after the KV plan"
    states = {hook.state for hook in process.hooks.values() if hook.phase == phase}
    if states and not states & {"bound", "pending"}:
        return f"its hook is {', '.join(sorted(states)).replace('_', ' ')}"
    required = row_of_run(summary.engine).phases
    if not {span.phase for span in process.phases} & set(required[required.index(phase) :]):
        if unfinished := [span.phase for span in process.phases if span.open]:
            return f"not reached: {unfinished[-1]} was not finished"
        if summary.status != "ok":
            return "not reached"
    return "no graph was captured" if phase == "graph_capture" else "no record of it"
