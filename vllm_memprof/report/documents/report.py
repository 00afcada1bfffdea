"""The document of one run's report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from vllm_memprof.accounting.budget.equations import STARTUP_PLAN, named_equation
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.summary import engine_text
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.accuracy.spread import spread_of
from vllm_memprof.document import BAD, CODE, GOOD, PLAIN, TOTAL, Document, Line, note_lines
from vllm_memprof.record.cause import Cure, NamedFailure
from vllm_memprof.record.spans import MODELLED, last_of
from vllm_memprof.report.sections import SECTIONS, sections
from vllm_memprof.report.sections.audit import audited
from vllm_memprof.report.sections.base import labels_of, least_grant, sentences_of
from vllm_memprof.report.sections.deployment import gap_text, summary_of
from vllm_memprof.report.sections.files import said_of_files
from vllm_memprof.report.sections.findings import finding_views
from vllm_memprof.tables import UNKNOWN, group_ranks, modelled
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_gib, minus, only_known, smallest

#: Verdicts on a device, the gravest last.
_VERDICTS = ("fits", "narrow", "release", "exceeds")
#: Whether an equation gives what was granted, in the order in which it is said.
_BALANCED = (False, True, None)
#: Cures that are shown; report.json has them all.
_SHOWN_CURES = 3
#: Label of the worker of a log that speaks of one alone.
SOLE_WORKER = "the worker"
#: Name of a part of a report -> tables, or what stands before and behind them.
SUMMARY, FINDINGS = "summary", "findings"
NAMES = (SUMMARY, *SECTIONS, FINDINGS)


class Excerpt(NamedTuple):
    """Some parts of a report."""

    report: Report
    names: tuple[str, ...]  # of ``NAMES``


def report_document(report: Report, width: int, names: tuple[str, ...] = NAMES) -> Document:
    """Return these parts of the report, its tables laid out for lines of ``width`` characters."""
    whole, good = SUMMARY in names, report.run.status in ("ok", "running")
    return Document(
        kind="report",
        title=report.run.model,
        head=head(report) if whole else [],
        findings=finding_views(report) if FINDINGS in names else None,
        sections=sections(report, width, [name for name in names if name in SECTIONS]),
        verdict=verdict(report) if whole else "",
        badge=Line("", _status_word(report), GOOD if good else BAD) if whole else None,
        simulated=report.run.simulated,
    )


def head(report: Report) -> list[Line]:
    """Return the lines that name a run."""
    run, evidence = report.run, report.run.evidence
    ended_well = run.status in ("ok", "running")
    no_phases = None if any(rank.phases for rank in report.ranks) else evidence.no_phases
    return [
        *_failure(report.failure),
        Line(text("model"), run.model, TOTAL, summary=True),
        *_deployment(report),
        Line(text("engine"), engine_text(run), summary=True),
        Line(text("device"), _device(report), summary=True),
        *_commands(report),
        Line(text("status"), _status(report), PLAIN if ended_well else BAD),
        Line(text("verdict"), verdict(report), summary=True),
        *spread(report),
        *note_lines(filter(None, (*run.notes, no_phases))),
    ]


def _failure(failure: NamedFailure | None) -> Iterator[Line]:
    """Yield what failed, by which line, and what to change first."""
    if failure is None:
        return
    figures = vars(failure) | {failure.confidence: True}
    yield Line(text("failed"), sentences_of("failed", figures), BAD)
    for each in failure.evidence:
        yield Line(text("because"), text("line {line}: {text}", each))
    useful = [cure for cure in failure.cures if cure.enough != "no"]
    for change, why in map(said_of_cure, useful[:_SHOWN_CURES]):
        yield Line(text("change"), text("{change}: {why}", change=change, why=why))
    yield from tried(failure)


def tried(failure: NamedFailure) -> Iterator[Line]:
    """Yield what the cures were planned on, and those that were not enough."""
    if failure.tried_on:
        yield Line(text("tried on"), failure.tried_on)
    for cure in failure.cures:
        if cure.enough == "no":
            yield Line("", text("{change}: {why}", cure, why=said_of_cure(cure)[1]))


def said_of_cure(cure: Cure) -> tuple[str, Text]:
    """Return what to change, and why."""
    return cure.change, sentences_of("cure", vars(cure) | {cure.enough: True})


def _commands(report: Report) -> Iterator[Line]:
    """Yield the command; of a deployment with several groups that of the first host of each."""
    deployment = report.deployment
    if deployment is None or len(deployment.groups) < 2:
        yield Line(text("command"), " ".join(report.run.command) or "-", CODE)
        return
    first = {row.run.group: row.run.command for row in reversed(deployment.hosts)}
    for group in deployment.groups:
        name = text("command, {group}", group=group or "-")
        yield Line(name, " ".join(first[group]) or "-", CODE)


def _deployment(report: Report) -> Iterator[Line]:
    """Yield the name of a deployment, its hosts, and what is missing of it."""
    if (deployment := report.deployment) is not None:
        if deployment.name is not None:
            yield Line(text("deployment"), deployment.name)
        yield Line(text("hosts"), summary_of(deployment))
        for gap in deployment.gaps:
            yield Line(text("missing"), gap_text(gap), BAD)


def spread(report: Report) -> Iterator[Line]:
    """Yield how far plans of this kind were off on hardware; nothing where too few runs tell."""
    least = least_grant(report.ranks)
    if least is None or report.run.mode != "plan" or not report.run.simulated:
        return
    if (spread := spread_of(least.budget.equation, report.run.device_profile)) is not None:
        told = text(
            "KV cache {size:gib} GiB; on {count} published runs of this kind the error was "
            "{low:+gib} to {high:+gib} GiB, median {median:+gib} (docs/accuracy.md)",
            size=least.budget.engine_kv_cache_bytes,
            count=spread.runs,
            low=spread.low_bytes,
            high=spread.high_bytes,
            median=spread.median_bytes,
        )
        yield Line(text("accuracy"), told)


def verdict(report: Report) -> Text:
    """Return the result in one sentence: KV cache granted, equation recomputed, whether it fits."""
    found = []
    for group, part in by_group(report).items():
        told = _out_of_memory(part)
        if least_grant(part.ranks) is not None:
            outcome = [audited(part)]
            told += [granted(part), *recomputed(part), *filter(None, outcome)]
            told += fits_device(part) or _left_by_plan(part)
        elif not told:
            told = [granted(part)]
        said = join("; ", told)
        found.append(text("{group}: {verdict}", group=group, verdict=said) if group else said)
    return join("; ", found)


def by_group(report: Report) -> dict[str, Report]:
    """Return the part of each group of a deployment, which has a budget of its own; "" for all."""
    groups = [] if report.deployment is None else report.deployment.groups
    if len(groups) < 2:
        return {"": report}
    return {
        group or "-": replace(
            report, ranks=[rank for rank in report.ranks if rank.group == group], deployment=None
        )
        for group in groups
    }


def _out_of_memory(report: Report) -> list[Text]:
    """Return how full the device was; nothing of a run that did not run out of memory."""
    failed = next((rank.oom for rank in report.ranks if rank.oom is not None), None)
    if report.run.status != "oom" and (failed is None or least_grant(report.ranks) is not None):
        return []
    return [sentences_of("out_of_memory", {} if failed is None else vars(failed))]


def granted(report: Report) -> Text:
    """Return the KV cache, and on which ranks; of a run that sized none, why."""
    run, evidence = report.run, report.run.evidence
    least = least_grant(report.ranks)
    if least is None:
        told: dict[str, object] = {
            "cut_off": evidence.no_kv_cache if run.status == "truncated" else None,
            "reason": run.exit_reason,
            "tokens": smallest(rank.kv.tokens for rank in report.ranks),
            "file": said_of_files(report),
        }
        return sentences_of("unsized", told)
    ranks = _printed(report)
    several, not_run = len(ranks) > 1, run.ranks.not_run if run.ranks else []
    named = not_run or least.lines or (evidence.partial and least.label != SOLE_WORKER)
    differ = len({rank.budget.engine_kv_cache_bytes for rank in ranks}) > 1
    figures = {
        "size": least.budget.engine_kv_cache_bytes,
        "tokens": least.kv.tokens,
        "count": len(ranks),
        "least": differ and labels_of([least]),
        "each": several and evidence.partial,
        "every": several and not not_run,
        "labels": named and labels_of(ranks),
        "not_run": len(not_run) or None,
        "world_size": report.world_size,
    }
    figures["where"] = sentences_of("where", figures)
    return sentences_of("granted", figures)


def _printed(report: Report) -> list[RankReport]:
    """Return the ranks; of a log, lines that no rank is named for are no further rank."""
    partial = report.run.evidence.partial
    return [
        rank
        for rank in report.ranks
        if not partial or rank.budget.engine_kv_cache_bytes is not None
    ]


def recomputed(report: Report) -> list[Text]:
    """Return how the equation came out, and on which ranks where not on all."""
    ranks = _printed(report)
    overrides = {rank.budget.override for rank in ranks} - {None}
    if overrides:
        return [sentences_of("fixed", {"planned": STARTUP_PLAN in overrides})]
    found = []
    groups = group_ranks(ranks, lambda rank: rank.budget.balanced)
    for members in sorted(groups, key=lambda own: _BALANCED.index(own[0].budget.balanced)):
        budget = members[0].budget
        figures = {
            "differs": budget.balanced is False,
            "equation": named_equation(budget.equation),
            "rounded": budget.balanced and any(rank.budget.tolerance_bytes for rank in members),
            "equal": budget.balanced,
        }
        told = sentences_of("recomputed", figures)
        if len(groups) > 1 or budget.balanced is False:
            told = text("{told} on {labels}", told=told, labels=labels_of(members))
        found.append(told)
    return found


def gravest(report: Report) -> RankReport | None:
    """Return the rank that the device has the least room for; None: not known."""
    known = [rank for rank in report.ranks if rank.budget.device_verdict is not None]

    def grave(rank: RankReport) -> tuple[int, int]:
        budget = rank.budget
        return _VERDICTS.index(str(budget.device_verdict)), -(budget.headroom_bytes or 0)

    return max(known, key=grave, default=None)


def fits_device(report: Report) -> list[Text]:
    """Return whether the device holds the KV cache, by the rank with the least headroom."""
    rank, ranks = gravest(report), report.ranks
    if rank is None:
        return []
    budget = rank.budget
    known = [rank for rank in ranks if rank.budget.device_verdict is not None]
    worst = any(item.name == "held_at_worst" for item in budget.held_at_peak)
    figures = {
        str(budget.device_verdict): True,
        "headroom": budget.headroom_bytes,
        "over": minus(0, budget.headroom_bytes),
        "missing": minus(0, budget.released_headroom_bytes),
    }
    said = sentences_of("fits", figures)
    if worst or not full_step_ran(report):
        not_run = text("no step of full size was run")
        if report.run.planned_only:
            not_run = text("graphs, warm-up and steps were not run")
        said = text("{title} (estimated: {not_run})", title=said, not_run=not_run)
    said = modelled(said, budget.how.get("headroom_bytes") == MODELLED)
    if len(known) < len(ranks):
        said = text("{verdict} (known of {labels})", verdict=said, labels=labels_of(known))
    elif len({format_gib(each.budget.headroom_bytes) for each in known}) > 1:
        said = text("{verdict}, on {label}", rank, verdict=said)
    return [said]


def full_step_ran(report: Report) -> bool:
    """Return whether a step of the largest size is known to have run: none else is a full batch."""
    if (step := report.run.full_step) is not None:
        return step.ran
    return any(
        (request.prompt_tokens or 0) >= (rank.kv.max_num_batched_tokens or inf)
        for rank in report.ranks
        for request in rank.requests
    )


def _left_by_plan(report: Report) -> list[Text]:
    """Return what a plan that has allocated the KV cache leaves of the device, on the fullest rank.

    It is no verdict: what graphs and steps take of it was not run.
    """
    ends = [last_of(rank.phases, "kv_cache_alloc") for rank in report.ranks]
    known = only_known(span.after.device_free_bytes for span in ends if span and span.after)
    if not report.run.planned_only or not known or len(known) < len(ends):
        return []
    return [modelled(sentences_of("left", {"size": min(known)}), report.run.simulated)]


def _device(report: Report) -> str:
    run = report.run
    name = run.device or UNKNOWN
    if total := report.device_total_bytes:
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
    words = TITLES["log_statuses"] if report.run.evidence.partial else {}
    return (TITLES["statuses"] | words).get(status, status)


def _status(report: Report) -> str:
    run = report.run
    parts = [_status_word(report)]
    if run.seconds is not None:
        parts.append(f"{run.seconds:.1f} s")
    if run.exit_code:
        parts.append(text("exit status {exit_code}", run))
    status = join(", ", parts)
    return text("{status}: {exit_reason}", run, status=status) if run.exit_reason else status
