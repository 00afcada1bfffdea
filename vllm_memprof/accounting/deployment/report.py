"""Build one report of the run folders of a deployment: loaded parts enter, a ``Report`` leaves.

The ranks of each folder are reconciled with the equation, the release and the settings of that
folder; the plan of the KV cache, and what a finding compares, is that of all hosts of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from vllm_memprof.accounting.build import run_report
from vllm_memprof.accounting.deployment.host_clocks import host_clocks
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
from vllm_memprof.accounting.oom.remedies import with_values
from vllm_memprof.accounting.summary import workers_by_label
from vllm_memprof.record.deployment import Parts
from vllm_memprof.record.loader import Run
from vllm_memprof.units import smallest

#: Statuses, the gravest first.
_GRAVITY = ("oom", "failed", "terminated", "truncated", "running", "ok")


def build_deployment(found: Parts) -> Report:
    """Reconcile every rank of every folder, and join them.

    Args:
        found: the run folders that can be read, and what is missing.
    """
    clocks = host_clocks(found.runs)
    offsets = {host: c.offset_ns for host, c in clocks.items() if c.offset_ns is not None}
    groups: dict[str | None, list[Run]] = defaultdict(list)
    for run in found.runs:
        groups[run.info.group].append(run)
    findings, reports = [], []
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
        made = [
            run_report(
                replace(run, group=whole, clock_offsets=offsets),
                [(labels[id(each)], each) for each in run.workers],
            )
            for run in runs
        ]
        findings += find(whole, [rank for report in made for rank in report.ranks])
        reports += made
    ranks = [rank for report in reports for rank in report.ranks]
    everyone = [rank.label for rank in ranks]
    # what was not measured on several hosts once, with the ranks that it concerns
    absent: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in (row for report in reports for row in report.not_measured):
        concerned = absent[row.phase, row.reason]
        concerned += [label for label in row.labels or everyone if label not in concerned]
    rows = [
        HostRow(
            host,
            run.folder.name,
            [rank.label for rank in report.ranks if rank.host == host],
            clocks.get(host, HostClock(UNKNOWN, None)),
            report.run,
        )
        for run, report in zip(found.runs, reports, strict=True)
        for host in run.hosts
    ]
    joined = _joined(found, [report.run for report in reports])
    failure = next((run.failure for run in found.runs if run.failure), None)
    return Report(
        run=joined,
        ranks=ranks,
        findings=in_order(findings),
        not_measured=[
            NotMeasured(phase, reason, None if len(each) == len(everyone) else each)
            for (phase, reason), each in absent.items()
        ],
        failure=with_values(failure, ranks, joined.engine),
        growth=[row for report in reports for row in report.growth],
        allocations=[row for report in reports for row in report.allocations],
        deployment=Deployment(found.name, rows, _cores(ranks), found.gaps),
    )


def _cores(ranks: Iterable[RankReport]) -> list[EngineCore]:
    found: dict[tuple[str, int | None], list[RankReport]] = defaultdict(list)
    for rank in ranks:
        found[rank.group or "", rank.dp_rank].append(rank)
    cores = []
    for _, members in sorted(found.items(), key=lambda core: (core[0][0], core[0][1] or 0)):
        granted = [
            (size, rank.label)
            for rank in members
            if (size := rank.budget.engine_kv_cache_bytes) is not None
        ]
        least, label = min(granted, key=lambda each: each[0], default=(None, None))
        cores.append(
            EngineCore(
                members[0].group,
                members[0].dp_rank,
                list(dict.fromkeys(rank.host for rank in members if rank.host)),
                [rank.label for rank in members],
                label,
                least,
                smallest(rank.kv.tokens for rank in members),
            )
        )
    return cores


def _joined(found: Parts, summaries: list[RunSummary]) -> RunSummary:
    """Return the head of the report: that of the first host, with what the others add."""
    first = summaries[0]
    several = len(summaries) > 1
    worst = min(summaries, key=lambda each: _GRAVITY.index(each.status))
    notes: dict[str, list[str]] = defaultdict(list)
    for run, summary in zip(found.runs, summaries, strict=True):
        for note in summary.notes:
            notes[note].append(summary.host or run.folder.name)
    reason = worst.exit_reason
    if reason is not None and worst is not first:
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
        notes=[
            note if len(hosts) == len(summaries) else f"{', '.join(hosts)}: {note}"
            for note, hosts in notes.items()
        ],
    )
