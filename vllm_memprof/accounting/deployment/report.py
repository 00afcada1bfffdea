"""Build one report of the run folders of a deployment: loaded parts enter, a ``Report`` leaves.

The ranks of each folder are reconciled with the equation, the release and the settings of that
folder; the plan of the KV cache, and what a finding compares, is that of all hosts of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vllm_memprof.accounting.build import rank_reports
from vllm_memprof.accounting.deployment.host_clocks import host_clocks
from vllm_memprof.accounting.deployment.ranks import fullest_notes
from vllm_memprof.accounting.findings.table import find, in_order
from vllm_memprof.accounting.model import (
    UNKNOWN,
    Deployment,
    EngineCore,
    HostClock,
    HostRow,
    NotMeasured,
    RankReport,
    Report,
    RunSummary,
)
from vllm_memprof.accounting.not_measured import not_measured
from vllm_memprof.accounting.oom.remedies import with_values
from vllm_memprof.accounting.serving.growth import host_growth, traced
from vllm_memprof.accounting.summary import summarise, workers_by_label
from vllm_memprof.record.deployment import Parts
from vllm_memprof.record.loader import Run

#: Statuses, the gravest first.
_GRAVITY = ("oom", "failed", "truncated", "running", "ok")


def build_deployment(found: Parts) -> Report:
    """Reconcile every rank of every folder, and join them.

    Args:
        found: the run folders that can be read, and what is missing.
    """
    clocks = host_clocks(found.runs)
    offsets = {host: c.offset_ns for host, c in clocks.items() if c.offset_ns is not None}
    groups: dict[str | None, list[Run]] = {}
    for run in found.runs:
        groups.setdefault(run.info.group, []).append(run)
    ranks: list[RankReport] = []
    findings = []
    missing: list[NotMeasured] = []
    growth, allocations = [], []
    rows: list[HostRow] = []
    summaries: list[RunSummary] = []
    for group, runs in groups.items():
        # what the runs of a group were given is that of the first
        whole = replace(
            runs[0],
            processes=[process for run in runs for process in run.processes],
            truncated=any(run.truncated for run in runs),
            printed_kv={dp: said for run in runs[::-1] for dp, said in run.printed_kv.items()},
            parts=tuple(runs),
            clock_offsets=dict(offsets),
        )
        labelled = workers_by_label(whole)
        known = [label for label, _ in labelled]
        labels: dict[int, str] = {}
        for label, process in labelled:  # each is there once in the deployment
            if known.count(label) > 1:
                label = f"{process.identity.host} {label}"
            labels[id(process)] = f"{group} {label}" if len(groups) > 1 and group else label
        of_group: list[RankReport] = []
        for run in runs:
            run = replace(run, group=whole, clock_offsets=offsets)
            summary = summarise(run)
            workers = [(labels[id(each)], each) for each in run.processes if each.is_worker]
            made = rank_reports(run, summary, workers)
            planned = bool(whole.planners)
            missing += not_measured(summary, workers, planned) if workers else []
            growth += host_growth(run)
            allocations += traced(run)
            if summary.mode == "plan":
                summary = replace(summary, notes=[*summary.notes, *fullest_notes(made)])
            summaries.append(summary)
            rows += _host_rows(run, summary, made, clocks)
            of_group += made
        findings += find(whole, of_group)
        ranks += of_group
    # what was not measured on several hosts once, with the ranks that it concerns
    absent: dict[tuple[str, str], list[str]] = {}
    everyone = [rank.label for rank in ranks]
    for row in missing:
        concerned = absent.setdefault((row.phase, row.reason), [])
        concerned += [label for label in row.labels or everyone if label not in concerned]
    return Report(
        run=_joined(found, summaries),
        ranks=ranks,
        findings=in_order(findings),
        not_measured=[
            NotMeasured(phase, reason, None if len(each) == len(everyone) else each)
            for (phase, reason), each in absent.items()
        ],
        failure=with_values(next((r.failure for r in found.runs if r.failure), None), ranks),
        growth=growth,
        allocations=allocations,
        deployment=Deployment(found.name, rows, _cores(ranks), found.gaps),
    )


def _host_rows(
    run: Run,
    summary: RunSummary,
    ranks: Sequence[RankReport],
    clocks: Mapping[str | None, HostClock],
) -> list[HostRow]:
    """Return a row per host of a run folder; one where no process left a record."""
    return [
        HostRow(
            host=host,
            group=run.info.group,
            folder=run.folder.name,
            run=summary.id,
            labels=[rank.label for rank in ranks if rank.host == host],
            status=summary.outcome if summary.status == "ok" else summary.status,
            exit_code=summary.exit_code,
            exit_reason=summary.exit_reason,
            engine=summary.engine,
            engine_version=summary.engine_version,
            device=summary.device,
            clock=clocks.get(host, HostClock(UNKNOWN, None)),
            command=summary.command,
            place=run.info.part,
            truncated=summary.truncated,
        )
        for host in run.hosts
    ]


def _cores(ranks: Iterable[RankReport]) -> list[EngineCore]:
    found: dict[tuple[str | None, int | None], list[RankReport]] = {}
    for rank in ranks:
        found.setdefault((rank.group, rank.dp_rank), []).append(rank)
    cores = []
    for (group, dp_rank), members in found.items():
        known = [rank for rank in members if rank.budget.engine_kv_cache_bytes is not None]
        least = min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)
        tokens = [rank.kv.tokens for rank in members if rank.kv.tokens is not None]
        cores.append(
            EngineCore(
                group,
                dp_rank,
                list(dict.fromkeys(rank.host for rank in members if rank.host)),
                [rank.label for rank in members],
                None if least is None else least.label,
                None if least is None else least.budget.engine_kv_cache_bytes,
                min(tokens, default=None),
            )
        )
    return sorted(cores, key=lambda core: (core.group or "", core.dp_rank or 0))


def _joined(found: Parts, summaries: Sequence[RunSummary]) -> RunSummary:
    """Return the head of the report: that of the first host, with what the others add."""
    first = summaries[0]
    several = len(summaries) > 1
    worst = min(summaries, key=lambda each: _GRAVITY.index(each.status))
    notes: dict[str, list[str]] = {}
    for run, summary in zip(found.runs, summaries, strict=True):
        for note in summary.notes:
            notes.setdefault(note, []).append(summary.host or run.folder.name)
    said = [
        note if not several or len(hosts) == len(summaries) else f"{', '.join(hosts)}: {note}"
        for note, hosts in notes.items()
    ]
    reason = worst.exit_reason
    if several and reason is not None and worst is not first:
        reason = f"{worst.host}: {reason}"
    return replace(
        first,
        id=found.name if several and found.name is not None else first.id,
        status=worst.status,
        exit_code=worst.exit_code,
        exit_reason=reason,
        # a deployment of which a part is missing did not come to a known end
        truncated=any(each.truncated for each in summaries)
        or any(gap.kind != "given_twice" for gap in found.gaps),
        notes=said,
    )
