"""Why a value does not pass: the reports of two plans enter, a ``FirstFailure`` leaves.

The plan of the answer and that of the first value that does not pass differ in one option. What is
held at the serving peak of both, owner by owner, says what took the memory; the failed allocation
of an OOM, the engine's refusal or the condition that is not met says how much is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from vllm_memprof.accounting.budget.kv import blocks_per_request
from vllm_memprof.accounting.model import Oom, RankReport, Report
from vllm_memprof.accounting.readings.quantities import held_quantities, is_device_wide, title_of
from vllm_memprof.plans.rows import FirstFailure, OwnerChange
from vllm_memprof.plans.wants import Miss
from vllm_memprof.record.spans import DERIVED, MEASURED, MODELLED, How
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, format_gib, one_line, sum_or_none

#: Findings of an engine that refused to start, whose bytes are what it lacks; with the kind of
#: ``FirstFailure``. Their bytes are what is missing, but for ``negative-kv``: the KV cache itself.
_REFUSALS = {"kv-too-small": "kv-cache", "negative-kv": "kv-cache", "startup-refused": "in-use"}
#: Parts of the reserved peak of the profile run. The rest of it, and all that is held beside it, is
#: one row each: which of them a later reading belongs to differs from run to run.
_OF_THE_PEAK = ("weights", "persistent_torch", "peak_activation")
_TITLES = {
    "kv_cache": text("KV cache"),
    "reserved_rest": text("the rest of the reserved peak of the profile run"),
    "beside": text("non-torch, and what came after profiling"),
}
#: What one request needs where the KV cache is too small for it, GiB with two digits. The plan of
#: the answer has it exactly, where the option that is searched does not change it.
#: (vllm 0.13.0 and 0.23.0, vllm/v1/core/kv_cache_utils.py::_check_enough_kv_cache_memory)
_NEEDED = re.compile(r"\(([0-9.]+) GiB KV cache is needed")
_HALF_DIGIT_GIB = 0.005
#: Characters of what an engine said.
_MOST = 200
#: What is known beside them of an engine that refused to start.
_BEFORE_KV = ("non_torch", "graph_estimate")


def beyond(
    value: str, report: Report | None, missing: Sequence[Miss], answer: Report | None
) -> FirstFailure:
    """Return why a value does not pass.

    Args:
        value: the value.
        report: of its plan; None: there is none.
        missing: what the plan lacks.
        answer: the report of the answer's plan; None: there is no answer, or no report.
    """
    texts = [miss.text for miss in missing]
    told = join("; ", [one_line(each, _MOST) if len(each) > _MOST else each for each in texts])
    most = max((miss.short_bytes for miss in missing if miss.short_bytes is not None), default=None)
    rank = None if report is None else _rank_of(report)
    like = None if rank is None or answer is None else _like(rank, answer)
    if rank is not None and rank.oom is not None:
        found = _of_oom(value, rank, rank.oom)
    elif report is not None and report.run.outcome != "ok":
        needed = _NEEDED.search("; ".join(texts))
        found = _of_refusal(FirstFailure(value, "kv-cache", told), report, rank, like, needed)
    else:
        kind = "failed" if report is None and most is None else "want"
        lack = [] if most is None else [text("{size:gib4} GiB short", size=most)]
        found = FirstFailure(value, kind, join("; ", [*lack, told]), short_bytes=most)
    if report is None or rank is None:
        return found
    simulated = report.run.simulated
    owners = [] if like is None else _changes(like, rank, simulated)
    modelled = simulated and found.kind in ("oom", "want", "in-use")
    return replace(found, label=rank.label, owners=owners, modelled=modelled)


def _rank_of(report: Report) -> RankReport | None:
    """Return the rank of the failed allocation; without one, that with the least headroom."""
    failed = next((rank for rank in report.ranks if rank.oom is not None), None)
    known = [rank for rank in report.ranks if rank.budget.headroom_bytes is not None]
    least = min(known, key=lambda rank: rank.budget.headroom_bytes or 0, default=None)
    return failed or least or next(iter(report.ranks), None)


def _like(rank: RankReport, report: Report) -> RankReport | None:
    """Return the rank of the same label in another report; the one that decides, without one."""
    same = next((other for other in report.ranks if other.label == rank.label), None)
    return same or _rank_of(report)


def _of_oom(value: str, rank: RankReport, oom: Oom) -> FirstFailure:
    where = oom.phase or oom.last_phase
    parts: list[str] = [
        text("{label} ran out of device memory in {phase}", label=rank.label, phase=where)
        if where is not None
        else text("{label} ran out of device memory", label=rank.label)
    ]
    told = (
        (oom.requested_bytes, text("asked for {size:gib4} GiB", size=oom.requested_bytes)),
        (oom.free_bytes, text("free {size:gib4} GiB", size=oom.free_bytes)),
        (oom.missing_bytes, text("{size:gib4} GiB short", size=oom.missing_bytes)),
        (oom.site, text("called at {site}", site=oom.site)),
    )
    parts += [said for known, said in told if known is not None]
    return FirstFailure(
        value=value,
        kind="oom",
        text=join(", ", parts),
        short_bytes=oom.missing_bytes,
        requested_bytes=oom.requested_bytes,
        free_bytes=oom.free_bytes,
        phase=where,
        site=oom.site,
    )


def _of_refusal(
    found: FirstFailure,
    report: Report,
    rank: RankReport | None,
    like: RankReport | None,
    needed: re.Match[str] | None,
) -> FirstFailure:
    """Return what an engine lacks that refused to start, where a figure says it.

    Args:
        found: its words.
        report: of its plan.
        rank: that decides, of the report.
        like: the same rank in the plan of the answer.
        needed: what one request needs, by its words.
    """
    finding = next((each for each in report.findings if each.id in _REFUSALS), None)
    granted = None if rank is None else rank.budget.engine_kv_cache_bytes
    at_least = False
    if finding is not None:
        found, short = replace(found, kind=_REFUSALS[finding.id]), finding.bytes
        if finding.id == "negative-kv":  # and one request's KV cache, whose size is not known here
            short, at_least = -(short or 0), True
    elif needed is None or granted is None:
        return replace(found, kind="oom" if report.run.outcome == "oom" else "failed")
    else:
        blocks = None if like is None else blocks_per_request(like.kv)
        size = None if like is None else like.kv.bytes_per_block
        exact = None if blocks is None or size is None else blocks * size
        at_least = exact is None or format_gib(exact) != needed[1]
        if exact is None or at_least:
            exact = round((float(needed[1]) - _HALF_DIGIT_GIB) * GIB)
        short = exact - granted
    if short is None or short <= 0:
        return found
    lack = text("{size:gib4} GiB short", size=short)
    if at_least:
        lack = text("at least {short}", short=lack)
    said = join("; ", [lack, found.text])
    return replace(found, text=said, short_bytes=short, at_least=at_least)


def _changes(answer: RankReport, failed: RankReport, simulated: bool) -> list[OwnerChange]:
    """Return what both ranks tell of, the owner that grew most first.

    At the serving peak where both have one, else what the equation is made of.
    """
    held = [held_quantities(rank, simulated) for rank in (answer, failed)]
    at_peak = all(rank.budget.held_at_peak for rank in (answer, failed))
    names = _OF_THE_PEAK if at_peak else (*_OF_THE_PEAK, *_BEFORE_KV)
    known = [name for name in names if all(each.get(name) is not None for each in held)]
    sides = [{name: each[name] for name in known} for each in held]
    if at_peak:
        missing = [
            {item.name for item in rank.budget.held_at_peak if item.bytes is None}
            for rank in (answer, failed)
        ]
        unknown = missing[0] & missing[1]
        for side, rank in zip(sides, (answer, failed), strict=True):
            side["kv_cache"] = rank.kv.planned_bytes
            side |= _beside_kv(rank, sum(side[name] or 0 for name in known), unknown)
    left, right = sides
    rows = [
        OwnerChange(name, _TITLES.get(name, title_of(name)), size, other, _how(name, simulated))
        for name, size in left.items()
        if size is not None and (other := right.get(name)) is not None
    ]
    return sorted(rows, key=lambda row: -row.difference_bytes)


def _how(name: str, simulated: bool) -> How:
    if simulated and (name == "beside" or is_device_wide(name)):
        return MODELLED
    return MEASURED if name in ("weights", "kv_cache") else DERIVED


def _beside_kv(rank: RankReport, known: int, unknown: Collection[str]) -> dict[str, int | None]:
    """Return what a rank holds at its serving peak, without the KV cache, bytes.

    Args:
        rank: of a plan.
        known: of the reserved peak, what has rows of its own.
        unknown: items that neither plan knows, as both stop before they exist.
    """
    items = {row.name: row.bytes for row in rank.budget.held_at_peak if row.name not in unknown}
    peak = items.pop("reserved_peak", None)
    rest = None if peak is None else peak - known
    return {"reserved_rest": rest, "beside": sum_or_none(items.values())}
