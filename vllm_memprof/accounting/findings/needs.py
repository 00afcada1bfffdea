"""What a run must have measured before the absence of a finding means anything.

``needs`` of ``findings.toml`` say which conditions each takes, and the reason where one is not met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.serving.trend import TOO_SHORT
from vllm_memprof.text import text, titled

#: Whether something of a rank is known.
Condition = Callable[[Report, RankReport], object]


def _recorded(report: Report, rank: RankReport) -> bool:
    return not EVIDENCE[report.run.source].partial


def _granted(report: Report, rank: RankReport) -> bool:
    return rank.budget.engine_kv_cache_bytes is not None


CONDITIONS: dict[str, Condition] = {
    "recorded": _recorded,
    "granted": _granted,
    "sampled": lambda report, rank: rank.samples,
    "oom-told": lambda report, rank: rank.oom is not None or _recorded(report, rank),
    "cycles-told": lambda report, rank: rank.cycles or _recorded(report, rank),
    "refusal-told": lambda report, rank: (
        rank.figures.get("no_cache_blocks") or _granted(report, rank)
    ),
    "recomputed": lambda report, rank: rank.budget.balanced is not None,
    "compared": lambda report, rank: any(row.agrees is not None for row in rank.budget.audit),
    "peak-known": lambda report, rank: rank.budget.headroom_bytes is not None,
    "growth-judged": lambda report, rank: any(row.verdict != TOO_SHORT for row in rank.growth),
    "kv-cache-allocated": lambda report, rank: any(
        span.phase == "kv_cache_alloc" and span.after is not None for span in rank.phases
    ),
}


@dataclass(frozen=True)
class Need:
    """What has to be known of a rank."""

    said: str  # completes "looked for where ..."
    conditions: Mapping[str, str] = field(default_factory=dict)  # -> the reason where it is not met
    item: str | None = None  # that the equation does not subtract, and has to be known

    def lacking(self, report: Report, rank: RankReport) -> str | None:
        """Return why something is not known, None where all is; a run without the item has it."""
        for name, reason in self.conditions.items():
            if not CONDITIONS[name](report, rank):
                return titled(reason)
        items = (one for one in rank.budget.not_subtracted if one.name == self.item)
        item = next(items, None)
        if self.item is None or (item is None and rank.budget.equation):
            return None
        if item is None:
            return text("the budget equation is not known")
        if item.bytes is not None or (self.item == "graph" and report.run.eager):
            return None
        return item.reason or text("{item} is not known", item=item.title)
