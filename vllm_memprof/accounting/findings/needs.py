"""What a run must have measured before the absence of a finding means anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.serving.trend import TOO_SHORT
from vllm_memprof.text import Text, text


@dataclass(frozen=True)
class Need:
    """Conditions on a rank."""

    said: str  # completes "looked for where ..."
    lacking: Callable[[Report, RankReport], str | None]  # the reason; None where it is met


#: A condition on a rank: the reason where it is not met, and what meets it.
Condition = tuple[Text, Callable[[Report, RankReport], object]]


def _need(said: str, *conditions: Condition) -> Need:
    def lacking(report: Report, rank: RankReport) -> Text | None:
        return next((reason for reason, met in conditions if not met(report, rank)), None)

    return Need(said, lacking)


def _recorded(report: Report, rank: RankReport) -> bool:
    return not EVIDENCE[report.run.source].partial


_HOOKS = text("a log does not tell"), _recorded
_NONE_GRANTED = text("no KV cache was granted")
_GRANTED: Condition = (
    _NONE_GRANTED,
    lambda report, rank: rank.budget.engine_kv_cache_bytes is not None,
)

#: A finding that is made of whatever figures there are.
NOTHING = _need("its figures are known")
HOOKS = _need("the run was recorded by hooks, not read from a log", _HOOKS)
SAMPLED = _need(
    "the run was sampled while it served",
    _HOOKS,
    (
        text("the run was not sampled while it served (--sample)"),
        lambda report, rank: rank.samples,
    ),
)
OOM_TOLD = _need(
    "the run was recorded by hooks, or the log holds the message",
    (
        text("a log need not hold the message"),
        lambda report, rank: rank.oom is not None or _recorded(report, rank),
    ),
)
CYCLES_TOLD = _need(
    "the run was recorded by hooks, or the log prints its sleeps",
    (
        text("a log need not print its sleeps"),
        lambda report, rank: rank.cycles or _recorded(report, rank),
    ),
)
GRANTED = _need("the KV cache that the engine granted is known", _GRANTED)
GRANTED_OR_REFUSED = _need(
    "the KV cache that the engine granted is known, or its refusal is",
    (
        _NONE_GRANTED,
        lambda report, rank: rank.figures.get("no_cache_blocks") or _GRANTED[1](report, rank),
    ),
)
RECOMPUTED = _need(
    "the equation can be recomputed",
    (
        text("the equation could not be checked"),
        lambda report, rank: rank.budget.balanced is not None,
    ),
)
AUDITED = _need(
    "figures of the engine and readings of memprof are known",
    _HOOKS,
    (
        text("no figure of the engine could be compared"),
        lambda report, rank: any(row.agrees is not None for row in rank.budget.audit),
    ),
)
DEVICE_BUDGET = _need(
    "the KV cache and the peak of the profile run are known",
    _GRANTED,
    (
        text("what the profile run held at its peak is not known"),
        lambda report, rank: rank.budget.headroom_bytes is not None,
    ),
)
GROWTH_JUDGED = _need(
    "the run was sampled (--sample) while 150 requests or more finished, or for ten minutes",
    (
        text("too little was sampled while it served"),
        lambda report, rank: any(row.verdict != TOO_SHORT for row in rank.growth),
    ),
)
KV_ALLOCATED = _need(
    "the KV cache was allocated",
    (
        text("the KV cache was not allocated"),
        lambda report, rank: any(
            span.phase == "kv_cache_alloc" and span.after is not None for span in rank.phases
        ),
    ),
)


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
