"""Compare two runs: two reports enter, a ``Diff`` leaves, whose causes add up to the difference.

Every difference is B less A, A being the run to start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from vllm_memprof.accounting.budget.decomposition import decompose, granted_bytes
from vllm_memprof.accounting.model import RankReport, Report, RunSummary
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.compare.causes import RANK, Cause, find_causes, in_order, in_tokens
from vllm_memprof.compare.changes import Change, changes
from vllm_memprof.compare.phases import OwnerDiff, PhaseDiff, owner_diffs, phase_diffs
from vllm_memprof.engines import row_of_run
from vllm_memprof.record.codec import computed
from vllm_memprof.tables import TableFile
from vllm_memprof.text import Text, text, titled
from vllm_memprof.units import Amount, minus, sum_or_none

TABLES = TableFile(__file__)
DIFF_SCHEMA = "memprof.diff/3"

#: Figures of the KV cache that are compared, by their names in ``Kv``.
_KV_FIGURES = (
    "tokens",
    "blocks",
    "block_size",
    "bytes_per_token",
    "bytes_per_block",
    "max_model_len",
    "max_concurrency",
)


@dataclass(frozen=True)
class TermDiff:
    """A figure of the equations, run by run; None where a run does not have it."""

    name: str
    a: int | float | None
    b: int | float | None
    a_subtracted: bool | None = None  # None: no term of this run's equation
    b_subtracted: bool | None = None


@dataclass(frozen=True)
class RankDiff:
    """One rank of A against one of B; the causes add up to the difference of their KV caches."""

    a_label: str
    b_label: str
    a_granted: Amount
    b_granted: Amount
    causes: list[Cause]  # by bytes, the largest first
    terms: list[TermDiff]
    phases: list[PhaseDiff]
    owners: list[OwnerDiff]
    tolerance_bytes: int = 0  # of the difference, from printed digits
    a_equation: str | None = None
    b_equation: str | None = None
    a_formula: str | None = None
    b_formula: str | None = None

    @property
    @computed
    def difference_bytes(self) -> int | None:
        return minus(self.b_granted, self.a_granted)

    @property
    @computed
    def causes_bytes(self) -> int | None:
        """The sum of the causes; None where one of them is unknown."""
        return sum_or_none(cause.bytes for cause in self.causes)


@dataclass(frozen=True)
class Diff:
    """Two runs. ``served`` compares the ranks with the least KV cache: all serve with that."""

    a: RunSummary
    b: RunSummary
    changed: list[Change]
    served: RankDiff | None  # None where a run has no worker
    ranks: list[RankDiff]  # of the same label; that of ``served`` where no label is in both
    kv: list[TermDiff]
    a_kv_tokens: Amount = None
    b_kv_tokens: Amount = None
    notes: list[Text] = field(default_factory=list)
    a_findings: list[str] = field(default_factory=list)  # ids that B lacks
    b_findings: list[str] = field(default_factory=list)
    SCHEMA: ClassVar[str] = DIFF_SCHEMA

    @property
    def simulated(self) -> bool:
        return self.a.simulated or self.b.simulated

    @property
    @computed
    def difference_tokens(self) -> int | None:
        return minus(self.b_kv_tokens, self.a_kv_tokens)


def diff_reports(a: Report, b: Report) -> Diff:
    """Compare two runs of any model, engine and device.

    Ranks are compared with the rank of the same label; the difference of what the runs serve with
    follows from the rank with the least KV cache of each.
    """
    right = {rank.label: rank for rank in b.ranks}
    ranks = [_rank_diff(rank, right[rank.label]) for rank in a.ranks if rank.label in right]
    groups, others = (list(dict.fromkeys(rank.group for rank in each.ranks)) for each in (a, b))
    group = None  # whose KV cache is compared, where engines have budgets of their own
    if len(groups) > 1 or len(others) > 1:
        group = next((name for name in groups if name in others), None)
    least_a, least_b = (
        least_rank([rank for rank in each.ranks if group is None or rank.group == group])
        for each in (a, b)
    )
    served = None
    if least_a is not None and least_b is not None:
        # the least rank of B with the same rank of A; what that one has over the least rank of A
        # is a cause of its own
        same = next((rank for rank in a.ranks if rank.label == least_b.label), least_a)
        granted = granted_bytes(least_a)
        over = minus(granted_bytes(same), granted)
        found = _rank_diff(least_a if over is None else same, least_b)
        causes, rounded = found.causes, bool(found.tolerance_bytes)
        if over:
            title = text(
                "{least} has the least of A, not {same}", least=least_a.label, same=same.label
            )
            causes = in_order([*causes, Cause(("least_rank",), title, RANK, over)])
        causes = in_tokens(causes, granted, least_a.kv, found.b_granted, least_b.kv, rounded)
        served = replace(found, a_label=least_a.label, a_granted=granted, causes=causes)
    kv_a, kv_b = (None if least is None else least.kv for least in (least_a, least_b))
    kv = [
        TermDiff(name, getattr(kv_a, name, None), getattr(kv_b, name, None)) for name in _KV_FIGURES
    ]
    notes = _notes(a, b, least_a, least_b, bool(ranks))
    if group is not None:
        alone = text(
            "each group of engines has a budget of its own: the KV cache is that of {group}, the "
            "ranks of the others are compared below it",
            group=group,
        )
        notes.insert(0, alone)
    found_a, found_b = (
        dict.fromkeys(finding.id for finding in report.findings) for report in (a, b)
    )
    return Diff(
        a=a.run,
        b=b.run,
        changed=changes(a, b),
        served=served,
        ranks=ranks or ([served] if served is not None else []),
        kv=kv,
        a_kv_tokens=None if kv_a is None else kv_a.tokens,
        b_kv_tokens=None if kv_b is None else kv_b.tokens,
        notes=notes,
        a_findings=[name for name in found_a if name not in found_b],
        b_findings=[name for name in found_b if name not in found_a],
    )


def least_rank(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank that decides how many blocks all serve with; else the first one."""
    known = [(size, rank) for rank in ranks if (size := granted_bytes(rank)) is not None]
    if not known:
        return ranks[0] if ranks else None
    blocks = all(rank.kv.bytes_per_block for _, rank in known)  # ranks' blocks may differ in size

    def room(entry: tuple[int, RankReport]) -> tuple[int, int]:
        size, rank = entry
        return (size // (rank.kv.bytes_per_block or 1) if blocks else 0, size)

    return min(known, key=room)[1]


def _rank_diff(left: RankReport, right: RankReport) -> RankDiff:
    parts, a, b = (decompose(left), decompose(right)), left.budget, right.budget
    of_a, of_b = ({term.name: term for term in budget.terms} for budget in (a, b))
    terms = []
    for name in dict.fromkeys([*of_a, *of_b]):
        each_bytes = (getattr(side.get(name), "bytes", None) for side in (of_a, of_b))
        subtracted = (getattr(side.get(name), "subtracted", None) for side in (of_a, of_b))
        terms.append(TermDiff(name, *each_bytes, *subtracted))
    terms.sort(key=lambda row: not (row.a_subtracted or row.b_subtracted))

    def row(name: str, field_name: str | None = None) -> TermDiff:
        return TermDiff(name, *(getattr(each, field_name or f"{name}_bytes") for each in (a, b)))

    return RankDiff(
        a_label=left.label,
        b_label=right.label,
        a_granted=parts[0].granted,
        b_granted=parts[1].granted,
        causes=in_order(find_causes(*parts, left, right)),
        terms=[
            TermDiff("device_total", left.device_total_bytes, right.device_total_bytes),
            row("gpu_memory_utilization", "gpu_memory_utilization"),
            row("requested"),
            *terms,
            row("kv_cache", "engine_kv_cache_bytes"),
            *map(row, ("residual", "fits_request", "fits_device", "headroom")),
        ],
        phases=phase_diffs(left, right),
        owners=owner_diffs(left, right),
        tolerance_bytes=_tolerance(left) + _tolerance(right),
        a_equation=a.equation,
        b_equation=b.equation,
        a_formula=a.formula,
        b_formula=b.formula,
    )


def _tolerance(rank: RankReport) -> int:
    """Return the half-units of what was printed, bytes; without an equation, of the KV cache."""
    return rank.budget.tolerance_bytes or rank.half_units.get("kv_cache_bytes", 0)


def _notes(
    a: Report, b: Report, least_a: RankReport | None, least_b: RankReport | None, matched: bool
) -> list[Text]:
    """Say where the two runs are not alike, and what could not be compared."""
    models = a.run.model != b.run.model and "unknown" not in (a.run.model, b.run.model)
    notes = TABLES.said("models", {"models": models})
    rows = [row_of_run(report.run.engine) for report in (a, b)]
    if rows[0] != rows[1] and None not in (a.run.engine, b.run.engine):
        notes += [titled(row.compared) for row in rows if row.compared is not None]
    from_log = "log" in (a.run.source, b.run.source)
    simulated = not from_log and a.run.simulated != b.run.simulated
    known = None not in (a.run.device, b.run.device)
    labels = [{rank.label for rank in report.ranks} for report in (a, b)]
    unlike: dict[str, object] = {"devices": simulated or (known and a.run.device != b.run.device)}
    if a.world_size != b.world_size and not from_log:  # a log need not print every rank
        unlike |= {"a_ranks": a.world_size, "b_ranks": b.world_size}
    if matched:
        lone = labels[0] - labels[1], labels[1] - labels[0]
        unlike |= {"a_lone": len(lone[0]) or None, "b_lone": len(lone[1]) or None}
    elif least_a is not None and least_b is not None:
        unlike |= {"a_least": least_a.label, "b_least": least_b.label}
    notes += TABLES.said("unlike", unlike)
    return [*notes, *_run_notes("A", a, least_a), *_run_notes("B", b, least_b)]


def _run_notes(run: str, report: Report, least: RankReport | None) -> list[Text]:
    status, budget = report.run.status, None if least is None else least.budget
    ended = status not in ("ok", "running")
    known = {
        "run": run,
        "ended": ended and text("{run} ended as {status}", run=run, status=status),
        "reason": report.run.exit_reason,
        "no_worker": least is None,
        "unsized": least is not None and granted_bytes(least) is None,
        "unknown": budget is not None and budget.engine_kv_cache_bytes is None,
        "differs": budget is not None and budget.balanced is False,
    }
    notes = TABLES.said("run", known)
    for quantity, left, read in decompose(least).differing if least is not None else ():
        notes.append(
            text(
                "{run}: {quantity} is what its term leaves, {left:,} bytes; read apart it is "
                "{read:,}",
                run=run,
                quantity=title_of(quantity),
                left=left,
                read=read,
            )
        )
    if any(rank.half_units for rank in report.ranks):
        notes.append(
            text("{run} is read from a log: its figures count to their last printed digit", run=run)
        )
    return notes
