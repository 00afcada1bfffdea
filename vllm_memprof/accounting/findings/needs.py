"""What a run must have measured before the absence of a finding means anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.trend import TOO_SHORT
from vllm_memprof.text import Text, text


@dataclass(frozen=True)
class Need:
    """A condition on a rank."""

    said: str  # completes "looked for where ..."
    lacking: Callable[[Report, RankReport], str | None]  # the reason; None where it is met


def _hooks(report: Report, rank: RankReport) -> Text | None:
    return text("a log does not tell") if report.run.source == "log" else None


def _oom_told(report: Report, rank: RankReport) -> Text | None:
    told = rank.oom is not None or _hooks(report, rank) is None
    return None if told else text("a log need not hold the message")


def _granted(report: Report, rank: RankReport) -> Text | None:
    granted = rank.budget.engine_kv_cache_bytes
    return text("no KV cache was granted") if granted is None else None


def _granted_or_refused(report: Report, rank: RankReport) -> Text | None:
    return None if rank.figures.get("no_cache_blocks") else _granted(report, rank)


def _recomputed(report: Report, rank: RankReport) -> Text | None:
    checked = rank.budget.balanced is not None
    return None if checked else text("the equation could not be checked")


def _device_budget(report: Report, rank: RankReport) -> Text | None:
    if rank.budget.engine_kv_cache_bytes is None:
        return text("no KV cache was granted")
    if rank.budget.spare_bytes is None:
        return text("what the profile run held at its peak is not known")
    return None


def _allocated(report: Report, rank: RankReport) -> Text | None:
    spans = (span for span in rank.phases if span.phase == "kv_cache_alloc")
    stands = any(span.after is not None for span in spans)
    return None if stands else text("the KV cache was not allocated")


def _audited(report: Report, rank: RankReport) -> Text | None:
    compared = any(row.agrees is not None for row in rank.budget.audit)
    unknown = _hooks(report, rank) or text("no figure of the engine could be compared")
    return None if compared else unknown


def _sampled(report: Report, rank: RankReport) -> Text | None:
    unknown = _hooks(report, rank)
    unknown = unknown or text("the run was not sampled while it served (--sample)")
    return None if rank.samples else unknown


def _growth_judged(report: Report, rank: RankReport) -> Text | None:
    judged = any(row.verdict != TOO_SHORT for row in rank.growth)
    return None if judged else text("too little was sampled while it served")


#: A finding that is made of whatever figures there are.
NOTHING = Need("its figures are known", lambda report, rank: None)
HOOKS = Need("the run was recorded by hooks, not read from a log", _hooks)
SAMPLED = Need("the run was sampled while it served", _sampled)
OOM_TOLD = Need("the run was recorded by hooks, or the log holds the message", _oom_told)
GRANTED = Need("the KV cache that the engine granted is known", _granted)
GRANTED_OR_REFUSED = Need(
    "the KV cache that the engine granted is known, or its refusal is", _granted_or_refused
)
RECOMPUTED = Need("the equation can be recomputed", _recomputed)
AUDITED = Need("figures of the engine and readings of memprof are known", _audited)
DEVICE_BUDGET = Need("the KV cache and the peak of the profile run are known", _device_budget)
GROWTH_JUDGED = Need(
    "the run was sampled (--sample) while 150 requests or more finished, or for ten minutes",
    _growth_judged,
)
KV_ALLOCATED = Need("the KV cache was allocated", _allocated)


def item_known(name: str) -> Need:
    """Return the need of an item that the equation does not subtract; one without it lacks nothing.

    Args:
        name: of the item, as in ``Budget.not_subtracted``.
    """

    def lacking(report: Report, rank: RankReport) -> str | None:
        item = next((item for item in rank.budget.not_subtracted if item.name == name), None)
        if item is None:
            return None if rank.budget.equation else text("the budget equation is not known")
        if item.bytes is not None or (name == "graph" and report.run.eager):
            return None
        return item.reason or text("{item} is not known", item=item.title)

    return Need("the equation and the bytes of the item are known", lacking)
