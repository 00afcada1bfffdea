"""What a run must have measured before the absence of a finding means anything.

``needs`` of ``findings.toml`` say which conditions each takes, and the reason where one is not met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.serving.trend import TOO_SHORT
from vllm_memprof.text import text, titled

#: Whether something of a rank is known.
Condition = Callable[[Report, RankReport], object]


CONDITIONS: dict[str, Condition] = {
    "recorded": lambda report, rank: not report.run.evidence.partial,
    "granted": lambda report, rank: rank.budget.engine_kv_cache_bytes is not None,
    "refused": lambda report, rank: rank.figures.get("no_cache_blocks"),
    "sampled": lambda report, rank: rank.samples,
    "ran-out": lambda report, rank: rank.oom is not None,
    "slept": lambda report, rank: rank.cycles,
    "recomputed": lambda report, rank: rank.budget.balanced is not None,
    "compared": lambda report, rank: any(row.agrees is not None for row in rank.budget.audit),
    "weighed": lambda report, rank: rank.weights,
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
    #: Conditions, each of ``CONDITIONS`` or several with "or" between -> why it is not met.
    conditions: Mapping[str, str] = field(default_factory=dict)
    item: str | None = None  # that the equation does not subtract, and has to be known

    def lacking(self, report: Report, rank: RankReport) -> str | None:
        """Return why something is not known, None where all is; a run without the item has it."""
        for name, reason in self.conditions.items():
            if not any(CONDITIONS[one](report, rank) for one in name.split(" or ")):
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
