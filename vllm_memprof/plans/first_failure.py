"""Why a value does not pass: the reports of two plans enter, a ``FirstFailure`` leaves.

The plan of the answer and that of the first value that does not pass differ in one option. What is
held at the serving peak of both, owner by owner, says what took the memory; the failed allocation
of an OOM, the engine's refusal or the condition that is not met says how much is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.quantities import is_device_wide, title_of
from vllm_memprof.plans.model import TABLES, FirstFailure, OwnerChange, Try
from vllm_memprof.record.spans import DERIVED, MEASURED, MODELLED, How
from vllm_memprof.text import join, text, titled
from vllm_memprof.units import GIB, largest, minus, one_line, sum_or_none

#: Findings of an engine that refused to start, whose bytes are what it lacks; with the kind of
#: ``FirstFailure``. Their bytes are what is missing, but for ``negative-kv``: the KV cache itself.
_REFUSALS = {"kv-too-small": "kv-cache", "negative-kv": "kv-cache", "startup-refused": "in-use"}
#: Parts of the reserved peak of the profile run. The rest of it, and all that is held beside it, is
#: one row each: which of them a later reading belongs to differs from run to run.
_OF_THE_PEAK = ("weights", "persistent_torch", "peak_activation")
#: What is known beside them of an engine that refused to start.
_BEFORE_KV = ("non_torch", "graph_estimate")
#: What one request needs where the KV cache is too small for it, GiB with two digits.
#: (vllm 0.13.0 and 0.23.0, vllm/v1/core/kv_cache_utils.py::_check_enough_kv_cache_memory)
_NEEDED = re.compile(r"\(([0-9.]+) GiB KV cache is needed")
_HALF_DIGIT_GIB = 0.005
#: Characters of what an engine said.
_MOST = 200


def beyond(failed: Try, report: Report | None, answer: Report | None) -> FirstFailure:
    """Return why a value does not pass.

    Args:
        failed: the plan of the value.
        report: of the plan; None: there is none.
        answer: the report of the answer's plan; None: there is no answer, or no report.
    """
    texts = [miss.text for miss in failed.missing]
    told = join("; ", [one_line(each, _MOST) if len(each) > _MOST else each for each in texts])
    short = largest(miss.short_bytes for miss in failed.missing)
    kind = "want" if failed.plan.ok else failed.plan.status
    found = FirstFailure(failed.value, kind, told, short_bytes=short)
    rank = None if report is None else _deciding(report)
    if report is not None and rank is not None:
        simulated = report.run.simulated
        like = None if answer is None else _deciding(answer, rank.label)
        if like is not None:
            found = replace(found, owners=_changes((like, rank), simulated))
        if rank.oom is not None:
            found = replace(found, kind="oom", short_bytes=rank.oom.missing_bytes, oom=rank.oom)
        elif not failed.plan.ok:
            found = _of_refusal(found, report, rank)
        modelled = simulated and found.kind in ("oom", "want", "in-use")
        found = replace(found, label=rank.label, modelled=modelled)
    parts: list[str] = []
    if found.short_bytes is not None:
        lack = text("{size:gib4} GiB short", size=found.short_bytes)
        parts.append(text("at least {short}", short=lack) if found.at_least else lack)
    if found.oom is not None and found.oom.site is not None:
        parts.append(text("called at {site}", site=found.oom.site))
    return replace(found, text=join("; ", [*parts, told]))


def _deciding(report: Report, label: str | None = None) -> RankReport | None:
    """Return the rank of a label; without one that of the failed allocation, else that with the
    least headroom."""

    def later(rank: RankReport) -> tuple[bool, bool, bool, int]:
        headroom = rank.budget.headroom_bytes
        return rank.label != label, rank.oom is None, headroom is None, headroom or 0

    return min(report.ranks, key=later, default=None)


def _of_refusal(found: FirstFailure, report: Report, rank: RankReport) -> FirstFailure:
    """Return what an engine lacks that refused to start, where a figure says it.

    Args:
        found: its words.
        report: of its plan.
        rank: that decides, of the report.
    """
    finding = next((each for each in report.findings if each.id in _REFUSALS), None)
    granted, needed = rank.budget.engine_kv_cache_bytes, _NEEDED.search(found.text)
    if finding is not None:
        kind, short, at_least = _REFUSALS[finding.id], finding.bytes or 0, False
        if finding.id == "negative-kv":  # and one request's KV cache, whose size is not known here
            short, at_least = -short, True
    elif needed is None or granted is None:
        return found
    else:
        kind, at_least = "kv-cache", True
        short = round((float(needed[1]) - _HALF_DIGIT_GIB) * GIB) - granted
    return replace(
        found, kind=kind, short_bytes=short if short > 0 else None, at_least=at_least and short > 0
    )


def _changes(ranks: Sequence[RankReport], simulated: bool) -> list[OwnerChange]:
    """Return what both ranks tell of, the owner that grew most from the first to the second.

    At the serving peak where both have one, else what the equation is made of.
    """
    held = [{name: read.bytes for name, read in rank.readings.items()} for rank in ranks]
    peaks = [{row.name: row.bytes for row in rank.budget.held_at_peak} for rank in ranks]
    names = _OF_THE_PEAK if all(peaks) else (*_OF_THE_PEAK, *_BEFORE_KV)
    known = [name for name in names if all(each.get(name) is not None for each in held)]
    sides = [{name: each[name] for name in known} for each in held]
    for side, rank, peak, beside in zip(sides, ranks, peaks, peaks[::-1], strict=True):
        if all(peaks):  # without items that neither plan knows, as both stop before they exist
            items = {name for name in peak if (peak[name], beside.get(name)) != (None, None)}
            reserved = peak.get("reserved_peak")
            side["reserved_rest"] = minus(reserved, sum_or_none(side.values()))
            side["beside"] = sum_or_none(peak[name] for name in items - {"reserved_peak"})
            side["kv_cache"] = rank.kv.planned_bytes

    def how(name: str) -> How:
        if simulated and (name == "beside" or is_device_wide(name)):
            return MODELLED
        return MEASURED if name in ("weights", "kv_cache") else DERIVED

    (left, right), titles = sides, TABLES["owner_changes"]
    rows = [
        OwnerChange(name, titled(titles.get(name, title_of(name))), size, other, how(name))
        for name, size in left.items()
        if size is not None and (other := right[name]) is not None
    ]
    return sorted(rows, key=lambda row: -row.difference_bytes)
