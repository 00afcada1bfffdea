"""The document of one run's report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_memprof.accounting.budget.equations import STARTUP_PLAN
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.summary import engine_text
from vllm_memprof.accuracy.spread import spread_of
from vllm_memprof.document import BAD, CODE, GOOD, PLAIN, TOTAL, Document, Line
from vllm_memprof.record.spans import MODELLED, last_of
from vllm_memprof.report.sections import SECTIONS, sections
from vllm_memprof.report.sections.audit import audited
from vllm_memprof.report.sections.base import least_grant
from vllm_memprof.report.sections.deployment import gap_text, summary_of
from vllm_memprof.report.sections.failure import failure_lines
from vllm_memprof.report.sections.findings import finding_views
from vllm_memprof.tables import STATUS_WORDS, UNKNOWN, fold, labels_of
from vllm_memprof.text import Text, join, text

#: Verdicts on a device, the gravest last.
_VERDICTS = ("fits", "narrow", "release", "exceeds")
#: Label of the worker of a log that speaks of one alone.
SOLE_WORKER = "the worker"


def report_document(report: Report, width: int) -> Document:
    """Return the whole report, its tables laid out for lines of ``width`` characters."""
    status = report.run.status
    good = GOOD if status in ("ok", "running") else BAD
    return Document(
        kind="report",
        title=report.run.model,
        head=head(report),
        findings=finding_views(report),
        sections=sections(report, width),
        verdict=verdict(report),
        badge=Line("", _status_word(report), good),
        simulated=report.run.simulated,
    )


#: Name of a part of a report -> tables, or what stands before and behind them.
SUMMARY, FINDINGS = "summary", "findings"
NAMES = (SUMMARY, *SECTIONS, FINDINGS)


@dataclass(frozen=True)
class Parts:
    """Some parts of a report."""

    report: Report
    names: tuple[str, ...]  # of ``NAMES``


def parts_document(parts: Parts, width: int) -> Document:
    """Return these parts of the report, in the order of their names."""
    report = parts.report
    whole = SUMMARY in parts.names
    return Document(
        kind="report",
        title=report.run.model,
        head=head(report) if whole else [],
        findings=finding_views(report) if FINDINGS in parts.names else None,
        sections=sections(report, width, [name for name in parts.names if name in SECTIONS]),
        verdict=verdict(report) if whole else "",
        simulated=report.run.simulated,
    )


def head(report: Report) -> list[Line]:
    """Return the lines that name a run."""
    run = report.run
    ended_well = run.status in ("ok", "running")
    notes = list(run.notes)
    no_phases = EVIDENCE[run.source].no_phases
    if no_phases is not None and not any(rank.phases for rank in report.ranks):
        notes.append(no_phases)
    return [
        *failure_lines(report.failure),
        Line(text("model"), run.model, TOTAL, summary=True),
        *_deployment(report),
        Line(text("engine"), engine_text(run), summary=True),
        Line(text("device"), _device(report), summary=True),
        *_commands(report),
        Line(text("status"), _status(report), PLAIN if ended_well else BAD),
        Line(text("verdict"), verdict(report), summary=True),
        *_spread(report),
        *(Line(text("note"), note) for note in notes),
    ]


def _commands(report: Report) -> list[Line]:
    """Return the command; of a deployment that of the first host of each group."""
    if report.deployment is None or len(report.deployment.groups) < 2:
        return [Line(text("command"), " ".join(report.run.command) or "-", CODE)]
    first = {row.group: row.command for row in reversed(report.deployment.hosts)}
    return [
        Line(text("command, {group}", group=group or "-"), " ".join(first[group]) or "-", CODE)
        for group in report.deployment.groups
    ]


def _deployment(report: Report) -> list[Line]:
    """Return the name of a deployment, its hosts, and what is missing of it."""
    deployment = report.deployment
    if deployment is None:
        return []
    name = [] if deployment.name is None else [Line(text("deployment"), deployment.name)]
    missing = [Line(text("missing"), gap_text(gap), BAD) for gap in deployment.gaps]
    return [*name, Line(text("hosts"), summary_of(deployment)), *missing]


def _spread(report: Report) -> list[Line]:
    """Return how far plans of this kind were off on hardware; nothing where too few runs tell."""
    least = least_grant(report.ranks)
    if least is None or report.run.mode != "plan" or not report.run.simulated:
        return []
    spread = spread_of(least.budget.equation, report.run.device_profile)
    if spread is None:
        return []
    told = text(
        "KV cache {size:gib} GiB; on {count} published runs of this kind the error was "
        "{low:+.1f} to {high:+.1f} %, median {median:+.1f} % (docs/accuracy.md)",
        size=least.budget.engine_kv_cache_bytes,
        count=spread.runs,
        low=100 * spread.low,
        high=100 * spread.high,
        median=100 * spread.median,
    )
    return [Line(text("accuracy"), told)]


def verdict(report: Report) -> Text:
    """Return the result in one sentence: KV cache granted, equation recomputed, whether it fits."""
    if report.deployment is not None and len(report.deployment.groups) > 1:
        return _by_group(report, report.deployment.groups)
    evidence, least = EVIDENCE[report.run.source], least_grant(report.ranks)
    if least is None or least.budget.engine_kv_cache_bytes is None:
        if report.run.status == "oom" or any(rank.oom is not None for rank in report.ranks):
            return _out_of_memory(report)
        if evidence.no_kv_cache is not None and report.run.status == "truncated":
            return evidence.no_kv_cache
        tokens = [rank.kv.tokens for rank in report.ranks if rank.kv.tokens is not None]
        if tokens and not report.run.exit_reason:
            return text("KV cache of {tokens:,} tokens, its size is not known", tokens=min(tokens))
        if not report.run.exit_reason:
            return text("no KV cache was sized")
        return text("no KV cache was sized: {reason}", reason=report.run.exit_reason)
    budget, log = least.budget, evidence.partial
    not_run = report.run.ranks.not_run if report.run.ranks else []
    size = text("KV cache {size:gib} GiB", size=budget.engine_kv_cache_bytes)
    granted = size
    if least.kv.tokens is not None:
        granted = text("{size}, {tokens:,} tokens", size=size, tokens=least.kv.tokens)
    ranks = report.ranks
    if log:  # lines that no rank is named for are no further rank
        ranks = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    if len({rank.budget.engine_kv_cache_bytes for rank in ranks}) > 1:
        label, count = labels_of([least]), len(ranks)
        granted = (
            text(
                "{granted} on {label}, the least of the {count} ranks in the log",
                granted=granted,
                label=label,
                count=count,
            )
            if log
            else text(
                "{granted} on {label}, the least of {count} ranks",
                granted=granted,
                label=label,
                count=count,
            )
        )
    elif not_run:
        labels = fold([rank.label for rank in report.ranks])
        granted = text("{granted} on {labels}", granted=granted, labels=labels)
    elif len(ranks) > 1 and log:
        granted = text(
            "{granted} on each of the {count} ranks in the log",
            granted=granted,
            count=len(ranks),
        )
    elif len(ranks) > 1:
        granted = text("{granted} on every rank", granted=granted)
    elif len(report.ranks) > 1 or least.lines is not None:
        granted = text("{granted} on {labels}", granted=granted, labels=labels_of([least]))
    elif log and least.label != SOLE_WORKER:
        granted = text(
            "{granted} on {label}, the only rank in the log",
            granted=granted,
            label=labels_of([least]),
        )
    parts = [_out_of_memory(report)] if report.run.status == "oom" else []
    parts.append(granted)
    if not_run:
        parts.append(
            text(
                "{count} of {world_size} ranks differ and were not run",
                count=len(not_run),
                world_size=report.world_size,
            )
        )
    parts.append(_recomputed(report))
    if (outcome := audited(report)) is not None:
        parts.append(outcome)
    parts += _fits_device(report) or _left_by_plan(report)
    return join("; ", parts)


def _by_group(report: Report, groups: list[str | None]) -> Text:
    """Return the result of each group of a deployment: each has a budget of its own."""
    found = []
    for group in groups:
        ranks = [rank for rank in report.ranks if rank.group == group]
        own = verdict(replace(report, ranks=ranks, deployment=None))
        found.append(text("{group}: {verdict}", group=group or "-", verdict=own))
    return join("; ", found)


def _fits_device(report: Report) -> list[Text]:
    """Return whether the device holds the KV cache, by the rank with the least headroom."""
    known = [rank for rank in report.ranks if rank.budget.device_verdict is not None]
    if not known:
        return []
    worst = max(
        known,
        key=lambda rank: (
            _VERDICTS.index(rank.budget.device_verdict or "fits"),
            -(rank.budget.headroom_bytes or 0),
        ),
    )
    budget = worst.budget
    match budget.device_verdict:
        case "fits":
            said = text("fits the device, headroom {size:gib} GiB", size=budget.headroom_bytes)
        case "narrow":
            said = text(
                "fits the device narrowly, headroom {size:gib} GiB, less than profiling may miss",
                size=budget.headroom_bytes,
            )
        case "release":
            said = text(
                "fits the device only if unallocated blocks are released, {size:gib} GiB over",
                size=-(budget.headroom_bytes or 0),
            )
        case _:
            said = text(
                "does not fit the device, {size:gib} GiB over",
                size=-(budget.released_headroom_bytes or 0),
            )
    if any(item.name == "held_at_worst" for item in budget.held_at_peak):
        said = text("{title} (estimated: no step of full size was run)", title=said)
    if budget.how.get("headroom_bytes") == MODELLED:
        said = text("{title} (m)", title=said)
    if len(known) < len(report.ranks):
        return [text("{verdict} (known of {labels})", verdict=said, labels=labels_of(known))]
    return [said]


def _left_by_plan(report: Report) -> list[Text]:
    """Return what a plan that has allocated the KV cache leaves of the device, on the fullest rank.

    It is no verdict: what graphs and steps take of it was not run.
    """
    if report.run.mode != "plan" or report.run.until == "ready":
        return []
    ends = [last_of(rank.phases, "kv_cache_alloc") for rank in report.ranks]
    left = [
        free
        for span in ends
        if span is not None
        and span.after is not None
        and (free := span.after.device_free_bytes) is not None
    ]
    if not left or len(left) < len(ends):
        return []
    said = text(
        "leaves {size:gib} GiB of the device to graphs and steps, which a plan does not run",
        size=min(left),
    )
    return [text("{title} (m)", title=said) if report.run.simulated else said]


def _out_of_memory(report: Report) -> Text:
    oom = next((rank.oom for rank in report.ranks if rank.oom is not None), None)
    reserved, total, idle = (
        getattr(oom, f"{name}_bytes", None)
        for name in ("reserved", "device_total", "fragmentation")
    )
    if reserved is None or total is None:
        return text("out of memory")
    if idle is None:
        return text(
            "out of memory: {reserved:gib} of {total:gib} GiB reserved",
            reserved=reserved,
            total=total,
        )
    return text(
        "out of memory: {reserved:gib} of {total:gib} GiB reserved, {idle:gib} GiB of it not "
        "allocated",
        reserved=reserved,
        total=total,
        idle=idle,
    )


def _recomputed(report: Report) -> Text:
    if any(rank.budget.override == STARTUP_PLAN for rank in report.ranks):
        return text("fixed by a start-up plan, profiling skipped")
    if any(rank.budget.override for rank in report.ranks):
        return text("fixed by --kv-cache-memory-bytes")
    results: dict[bool | None, list[RankReport]] = {}
    for rank in report.ranks:
        if EVIDENCE[report.run.source].partial and rank.budget.engine_kv_cache_bytes is None:
            continue  # lines without a rank, or a rank that was not sized
        results.setdefault(rank.budget.balanced, []).append(rank)
    equal, wrong, unknown = (results.get(result, []) for result in (True, False, None))
    parts: list[str] = []
    if wrong:
        parts.append(text("equation recomputed: differs on {labels}", labels=labels_of(wrong)))
    if equal:
        equation = equal[0].budget.equation
        told = text("equation {equation} recomputed: equal to the byte", equation=equation)
        if any(rank.budget.tolerance_bytes for rank in equal):
            told = text("equation {equation} recomputed: equal within rounding", equation=equation)
        if wrong or unknown:
            told = text("{told} on {labels}", told=told, labels=labels_of(equal))
        parts.append(told)
    if unknown:
        told = text("equation not recomputed")
        if wrong or equal:
            told = text("{told} on {labels}", told=told, labels=labels_of(unknown))
        parts.append(told)
    return join("; ", parts)


def _device(report: Report) -> str:
    run = report.run
    name = run.device or UNKNOWN
    total = next(
        (rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), None
    )
    if total:
        name = text("{device}, {total:gib} GiB", device=name, total=total)
    if not run.simulated:
        return name
    return text(
        "{device} [simulated: profile {profile}; non-torch figures are modelled (m)]",
        device=name,
        profile=run.device_profile or UNKNOWN,
    )


def _status_word(report: Report) -> str:
    status = report.run.status
    words = {**STATUS_WORDS, **EVIDENCE[report.run.source].status}
    return words.get(status, status)


def _status(report: Report) -> str:
    run = report.run
    status = _status_word(report)
    parts = [status if run.seconds is None else join(", ", [status, f"{run.seconds:.1f} s"])]
    if run.exit_code:
        parts.append(text("exit status {code}", code=run.exit_code))
    told = join(", ", parts)
    return (
        text("{status}: {reason}", status=told, reason=run.exit_reason) if run.exit_reason else told
    )
