"""Why a value does not pass: the reports of two plans enter, a ``Beyond`` leaves.

The plan of the answer and that of the first value that does not pass differ in one option. What is
held at the serving peak of both, owner by owner, says what took the memory; the failed allocation
of an OOM, the engine's refusal or the condition that is not met says how much is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import Oom, RankReport, Report
from vllm_memprof.accounting.quantities import held_quantities, title_of
from vllm_memprof.plans.rows import Beyond, OwnerChange
from vllm_memprof.plans.wants import Miss
from vllm_memprof.text import join, text
from vllm_memprof.units import one_line

#: Findings of an engine that refused to start, whose bytes are what it lacks; with the kind of
#: ``Beyond``. Their bytes are what is missing, but for ``negative-kv``: the KV cache itself.
_REFUSALS = {"kv-too-small": "kv-cache", "negative-kv": "kv-cache", "startup-refused": "in-use"}
#: Parts of the reserved peak of the profile run; the rest of it is ``_REST``.
_OF_THE_PEAK = ("weights", "persistent_torch", "peak_activation")
_REST = "reserved_at_end"
#: Characters of what an engine said.
_MOST = 200
#: What is known beside them of an engine that refused to start.
_BEFORE_KV = ("non_torch", "graph_estimate")


@dataclass(frozen=True)
class Planned:
    """A plan that was tried: its value, its report if there is one, and what it lacks."""

    value: str
    report: Report | None
    missing: list[Miss]


def beyond(failed: Planned, answer: Planned | None) -> Beyond:
    """Return why a value does not pass, beside the plan of the answer, if there is one."""
    texts = [miss.text for miss in failed.missing]
    told = join("; ", [one_line(each, _MOST) if len(each) > _MOST else each for each in texts])
    report = failed.report
    short = [miss.short_bytes for miss in failed.missing if miss.short_bytes is not None]
    rank = None if report is None else _rank_of(report)
    if rank is not None and rank.oom is not None:
        found = _of_oom(failed.value, rank, rank.oom)
    elif report is not None and report.run.outcome != "ok":
        found = _of_refusal(failed.value, report, told)
    else:
        kind = "want" if report is not None or short else "failed"
        found = Beyond(failed.value, kind, told, short_bytes=max(short, default=None))
    if report is None or rank is None:
        return found
    like = None if answer is None else _like(rank, answer.report)
    owners = [] if like is None else _changes(like, rank, report.run.simulated)
    return replace(found, label=rank.label, owners=owners)


def _rank_of(report: Report) -> RankReport | None:
    """Return the rank of the failed allocation; without one, that with the least spare memory."""
    failed = next((rank for rank in report.ranks if rank.oom is not None), None)
    known = [rank for rank in report.ranks if rank.budget.spare_bytes is not None]
    least = min(known, key=lambda rank: rank.budget.spare_bytes or 0, default=None)
    return failed or least or next(iter(report.ranks), None)


def _like(rank: RankReport, report: Report | None) -> RankReport | None:
    """Return the rank of the same label in another report; the one that decides, without one."""
    if report is None:
        return None
    same = next((other for other in report.ranks if other.label == rank.label), None)
    return same or _rank_of(report)


def _of_oom(value: str, rank: RankReport, oom: Oom) -> Beyond:
    where = oom.phase or oom.last_phase
    parts: list[str] = [
        text("{label} ran out of device memory in {phase}", label=rank.label, phase=where)
        if where is not None
        else text("{label} ran out of device memory", label=rank.label)
    ]
    if oom.requested_bytes is not None:
        parts.append(text("asked for {size:gib4} GiB", size=oom.requested_bytes))
    if oom.free_bytes is not None:
        parts.append(text("free {size:gib4} GiB", size=oom.free_bytes))
    if oom.missing_bytes is not None:
        parts.append(text("{size:gib4} GiB short", size=oom.missing_bytes))
    if oom.site is not None:
        parts.append(text("called at {site}", site=oom.site))
    return Beyond(
        value=value,
        kind="oom",
        text=join(", ", parts),
        short_bytes=oom.missing_bytes,
        requested_bytes=oom.requested_bytes,
        free_bytes=oom.free_bytes,
        phase=where,
        site=oom.site,
    )


def _of_refusal(value: str, report: Report, told: str) -> Beyond:
    """Return what an engine lacks that refused to start, where a finding has the figure."""
    for finding in report.findings:
        kind = _REFUSALS.get(finding.id)
        if kind is None:
            continue
        short, at_least = finding.bytes, False
        if finding.id == "negative-kv":  # and one request's KV cache, whose size is not known here
            short, at_least = None if short is None else max(0, -short), True
        if not short:
            return Beyond(value, kind, told)
        size = text("{size:gib4} GiB short", size=short)
        lack = text("at least {short}", short=size) if at_least else size
        return Beyond(value, kind, join("; ", [lack, told]), short_bytes=short, at_least=at_least)
    return Beyond(value, "oom" if report.run.outcome == "oom" else "failed", told)


def _changes(answer: RankReport, failed: RankReport, simulated: bool) -> list[OwnerChange]:
    """Return what both ranks tell of, the owner that grew most first."""
    at_peak = bool(failed.budget.held_at_peak)
    left, right = (_owners(rank, at_peak, simulated) for rank in (answer, failed))
    rows = [
        OwnerChange(name, _title(name), size, right[name])
        for name, size in left.items()
        if name in right
    ]
    return sorted(rows, key=lambda row: -row.difference_bytes)


def _title(name: str) -> str:
    return text("KV cache") if name == "kv_cache" else title_of(name)


def _owners(rank: RankReport, at_peak: bool, simulated: bool) -> dict[str, int]:
    """Return what a rank holds by owner, bytes; what is unknown is left out.

    Args:
        rank: of a plan.
        at_peak: at the serving peak; else what the equation is made of.
        simulated: the device is.
    """
    held = held_quantities(rank, simulated)
    parts = {name: held.get(name) for name in _OF_THE_PEAK}
    found: dict[str, int | None] = dict(parts)
    if at_peak:
        items = {item.name: item.bytes for item in rank.budget.held_at_peak}
        peak = items.pop("reserved_peak", None)
        sizes = [size for size in parts.values() if size is not None]
        if peak is not None and len(sizes) == len(parts):
            found[_REST] = peak - sum(sizes)
        found |= {"kv_cache": rank.kv.planned_bytes, **items}
    else:
        found |= {name: held.get(name) for name in _BEFORE_KV}
    return {name: size for name, size in found.items() if size is not None}


def grown_most(owners: Sequence[OwnerChange]) -> OwnerChange | None:
    """Return the owner that grew most; None where none grew."""
    first = next(iter(owners), None)
    return first if first is not None and first.difference_bytes > 0 else None
