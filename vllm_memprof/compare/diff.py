"""Why one run has another KV cache than another: two reports enter, causes leave that add up to the difference.

Both budgets are written in the same quantities (``accounting.account``). A quantity that both equations charge is a cause
as far as its size differs; one that a single equation subtracts is a cause by its whole size. What a run does not tell
apart stays together under the names of all it may be, so that no row holds anything that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from vllm_memprof.accounting.decomposition import Decomposition, Line, decompose, granted_bytes
from vllm_memprof.accounting.model import Kv, RankReport, Report, RunSummary
from vllm_memprof.accounting.quantities import QUANTITIES, title_of
from vllm_memprof.compare.changes import Change, changes
from vllm_memprof.compare.moments import OwnerDiff, PhaseDiff, owner_diffs, phase_diffs
from vllm_memprof.record.codec import computed
from vllm_memprof.units import minus

DIFF_SCHEMA = "memprof.diff/2"

#: Kinds of causes. request: what was asked of the device. state: subtracted by both, of another size. method: subtracted by
#: one equation alone. mixed: quantities that a run does not tell apart, of which one equation subtracts more. size: a
#: fixed size. rank: another rank has the least. blocks: whole blocks, of the tokens alone. rounding, residual: as in
#: each run's own report. unknown: what the rest leaves.
REQUEST, STATE, METHOD, MIXED, SIZE, RANK = "request", "state", "method", "mixed", "size", "rank"
BLOCKS, ROUNDING, RESIDUAL, UNKNOWN = "blocks", "rounding", "residual", "unknown"

_STEPS = {
    "rounding": ROUNDING,
    "printed_digits": ROUNDING,
    "clamped": ROUNDING,
    "residual": RESIDUAL,
    "fixed_size": SIZE,
    "halved": METHOD,
}


@dataclass(frozen=True)
class Side:
    """One run's part in a cause."""

    held_bytes: int | None  # what the run held of it; None: unknown, or not a thing that is held
    subtracted_bytes: (
        int | None
    )  # what its equation subtracts; 0: it subtracts nothing of it; None: unknown
    subtracts: tuple[str, ...] = ()  # which of the quantities its equation subtracts


@dataclass(frozen=True)
class Cause:
    """What one quantity does to the KV cache: B less A."""

    names: tuple[str, ...]  # several: not told apart
    title: str
    kind: str
    bytes: int | None  # None: unknown
    a: Side
    b: Side
    kv_tokens: int | None = None


@dataclass(frozen=True)
class TermDiff:
    """A figure of the equations, run by run; None where a run does not have it."""

    name: str
    a: int | float | None
    b: int | float | None
    a_subtracted: bool | None = None  # None: not a term of this run's equation, or no term at all
    b_subtracted: bool | None = None


@dataclass(frozen=True)
class RankDiff:
    """One rank of A against one of B. The causes' sum is the difference of what they were granted, to the byte."""

    a_label: str
    b_label: str
    a_granted: int | None
    b_granted: int | None
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
        return (
            None
            if self.a_granted is None or self.b_granted is None
            else self.b_granted - self.a_granted
        )

    @property
    @computed
    def causes_bytes(self) -> int | None:
        """The sum of the causes; None where one of them is unknown."""
        sizes = [cause.bytes for cause in self.causes]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True)
class Diff:
    """Two runs. ``served`` is the difference of what they serve with: the rank with the least KV cache of each."""

    a: RunSummary
    b: RunSummary
    changed: list[Change]
    served: RankDiff | None  # None where a run has no worker
    ranks: list[
        RankDiff
    ]  # ranks of the same label; the ones of ``served`` where no label is in both
    kv: list[TermDiff]
    a_kv_tokens: int | None = None
    b_kv_tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    a_findings: list[str] = field(default_factory=list)  # ids that B lacks
    b_findings: list[str] = field(default_factory=list)
    SCHEMA: ClassVar[str] = DIFF_SCHEMA

    @property
    @computed
    def difference_tokens(self) -> int | None:
        return (
            None
            if self.a_kv_tokens is None or self.b_kv_tokens is None
            else self.b_kv_tokens - self.a_kv_tokens
        )


def diff_reports(a: Report, b: Report) -> Diff:
    """Compares two runs of any model, engine and device, A being the one to start from.

    The differences are B less A. Ranks are compared with the rank of the same label; what the runs serve with
    follows from the rank with the least room of each.
    """
    pairs = _pairs(a, b)
    ranks = [_rank_diff(a, b, left, right) for left, right in pairs]
    least_a, least_b = least_rank(a.ranks), least_rank(b.ranks)
    served = _served(a, b, least_a, least_b)
    tokens = (least_a.kv.tokens if least_a else None, least_b.kv.tokens if least_b else None)
    if served is not None and least_a is not None and least_b is not None:
        served = replace(served, causes=_priced(served, least_a.kv, least_b.kv))
    return Diff(
        a=a.run,
        b=b.run,
        changed=changes(a, b),
        served=served,
        ranks=ranks or ([served] if served is not None else []),
        kv=_kv_rows(least_a, least_b),
        a_kv_tokens=tokens[0],
        b_kv_tokens=tokens[1],
        notes=_notes(a, b, least_a, least_b, bool(pairs)),
        a_findings=_only(a, b),
        b_findings=_only(b, a),
    )


def least_rank(ranks: Sequence[RankReport]) -> RankReport | None:
    """The rank that decides how many blocks all serve with; the first one where nothing was granted."""
    known = [rank for rank in ranks if granted_bytes(rank) is not None]
    if not known:
        return ranks[0] if ranks else None
    if all(rank.kv.bytes_per_block for rank in known):
        return min(known, key=lambda rank: (_blocks(rank), granted_bytes(rank)))
    return min(known, key=lambda rank: granted_bytes(rank) or 0)


def _blocks(rank: RankReport) -> int:
    return (granted_bytes(rank) or 0) // (rank.kv.bytes_per_block or 1)


def _pairs(a: Report, b: Report) -> list[tuple[RankReport, RankReport]]:
    right = {rank.label: rank for rank in b.ranks}
    return [(rank, right[rank.label]) for rank in a.ranks if rank.label in right]


def _served(
    a: Report, b: Report, least_a: RankReport | None, least_b: RankReport | None
) -> RankDiff | None:
    """The least rank of B against the same rank of A, and what that one has over the least of A as its own cause."""
    if least_a is None or least_b is None:
        return None
    same = next((rank for rank in a.ranks if rank.label == least_b.label), None)
    over = None if same is None else minus(granted_bytes(same), granted_bytes(least_a))
    if same is None or over is None:
        return _rank_diff(a, b, least_a, least_b)
    found = _rank_diff(a, b, same, least_b)
    if over:
        title = f"{least_a.label} has the least of A, not {same.label}"
        cause = Cause(("least_rank",), title, RANK, over, Side(None, None), Side(None, None))
        found = replace(found, causes=_ordered([*found.causes, cause]))
    return replace(found, a_label=least_a.label, a_granted=granted_bytes(least_a))


def _rank_diff(a: Report, b: Report, left: RankReport, right: RankReport) -> RankDiff:
    accounts = decompose(left, a.run.simulated), decompose(right, b.run.simulated)
    return RankDiff(
        a_label=left.label,
        b_label=right.label,
        a_granted=accounts[0].granted,
        b_granted=accounts[1].granted,
        causes=_ordered(compare(*accounts, left, right)),
        terms=_term_rows(left, right),
        phases=phase_diffs(left, right),
        owners=owner_diffs(left, right),
        tolerance_bytes=_tolerance(left) + _tolerance(right),
        a_equation=left.budget.equation,
        b_equation=right.budget.equation,
        a_formula=left.budget.formula,
        b_formula=right.budget.formula,
    )


def _tolerance(rank: RankReport) -> int:
    """Half-units of what was printed, bytes; where no equation is known, those of the granted KV cache."""
    return rank.budget.tolerance_bytes or rank.half_units.get("kv_cache_bytes", 0)


def _ordered(causes: Iterable[Cause]) -> list[Cause]:
    """By bytes, the largest first; then those that are unknown; whole blocks and roundings last."""
    late = (BLOCKS, ROUNDING)
    return sorted(
        causes, key=lambda cause: (cause.kind in late, cause.bytes is None, -abs(cause.bytes or 0))
    )


def compare(
    a: Decomposition, b: Decomposition, rank_a: RankReport, rank_b: RankReport
) -> list[Cause]:
    """The causes of ``b.granted - a.granted``; they add up to it wherever both are known."""
    if any(
        "equation" in account.subtracted for account in (a, b)
    ):  # nothing tells what that run subtracts
        size = None if a.granted is None or b.granted is None else b.granted - a.granted
        return [
            Cause(
                ("equation",),
                title_of("equation"),
                UNKNOWN,
                size,
                Side(None, None),
                Side(None, None),
            )
        ]
    found = []
    for names in _groups(a, b):
        left, right = _side(a, names), _side(b, names)
        known = not (set(names) & {*a.unknown, *b.unknown})
        size = _sum(b, names) - _sum(a, names) if known else None
        if names == ["requested"]:
            found += _request_causes(size, rank_a, rank_b)
        else:
            found.append(Cause(tuple(names), _title(names), _kind(names, a, b), size, left, right))
    return found


def _groups(a: Decomposition, b: Decomposition) -> list[list[str]]:
    """Quantities, each with all those that one of the runs does not tell it apart from."""
    sets: list[set[str]] = []
    for names in [
        *(line.names for line in (*a.lines, *b.lines)),
        *((name,) for name in (*a.unknown, *b.unknown)),
    ]:
        touched = [group for group in sets if group & set(names)]
        merged = set(names).union(*touched)
        sets = [group for group in sets if group not in touched] + ([merged] if merged else [])
    order = list(QUANTITIES)
    groups = [
        sorted(group, key=lambda name: (order.index(name) if name in order else 99, name))
        for group in sets
    ]
    return sorted(
        groups, key=lambda group: (order.index(group[0]) if group[0] in order else 99, group)
    )


def _within(account: Decomposition, names: Iterable[str]) -> list[Line]:
    return [line for line in account.lines if set(line.names) & set(names)]


def _sum(account: Decomposition, names: Iterable[str]) -> int:
    return sum(line.bytes for line in _within(account, names))


def _side(account: Decomposition, names: Sequence[str]) -> Side:
    subtracts = tuple(name for name in names if name in account.subtracted)
    unknown = bool(set(names) & set(account.unknown))
    subtracted = None if unknown else -_sum(account, names)
    if set(names) & {"requested", *_STEPS} - {"halved"}:
        return Side(None, None, subtracts)  # not a thing that is held or subtracted
    if subtracted is not None and len(subtracts) == len(names):
        return Side(subtracted, subtracted, subtracts)
    sizes = [account.held.get(name) for name in names]
    known = [size for size in sizes if size is not None]
    return Side(sum(known) if len(known) == len(sizes) else None, subtracted, subtracts)


def _title(names: Sequence[str]) -> str:
    return " + ".join(title_of(name) for name in names)


def _kind(names: Sequence[str], a: Decomposition, b: Decomposition) -> str:
    pooled = any(line.implied for account in (a, b) for line in _within(account, names))
    if pooled or set(names) & {*a.unknown, *b.unknown}:
        return UNKNOWN
    if len(names) == 1 and names[0] in _STEPS:
        return _STEPS[names[0]]
    left, right = set(names) & a.subtracted, set(names) & b.subtracted
    if left == right:
        return STATE
    return METHOD if not left or not right else MIXED


def _request_causes(size: int | None, a: RankReport, b: RankReport) -> list[Cause]:
    """The request is the device's total x the utilization: each as far as it differs, the share at A's total."""
    none = Side(None, None)
    whole = Cause(("requested",), title_of("requested"), REQUEST, size, none, none)
    total_a, total_b = a.device_total_bytes, b.device_total_bytes
    share_a, share_b = a.budget.gpu_memory_utilization, b.budget.gpu_memory_utilization
    if size is None or share_a is None or share_b is None:
        return [whole]
    text = f"gpu_memory_utilization {share_a} → {share_b}"
    if total_a is None or total_b is None:
        return [whole if share_a == share_b else replace(whole, title=f"requested, {text}")]
    share = replace(whole, names=("gpu_memory_utilization",), title=text)
    total = replace(whole, names=("device_total",), title="device total")
    if total_a == total_b:
        return [whole if share_a == share_b else share]
    if share_a == share_b:
        return [total]
    first = int(total_a * share_b) - int(total_a * share_a)
    return [replace(share, bytes=first), replace(total, bytes=size - first)]


def _priced(served: RankDiff, a: Kv, b: Kv) -> list[Cause]:
    """The causes with what each is worth in KV tokens, whole blocks as a cause of their own; the sum is exact.

    Tokens = the bytes of whole blocks x the tokens that a byte holds, those of B. The blocks follow from the grant,
    less what is left over of it; another layout in A is a cause by what it makes of A's blocks.
    """
    left = _token_facts(served.a_granted, a, bool(served.tolerance_bytes))
    right = _token_facts(served.b_granted, b, bool(served.tolerance_bytes))
    if left is None or right is None or served.causes_bytes is None:
        return served.causes
    rate_a, over_a, other_a = left
    rate, over_b, other_b = right
    assert served.a_granted is not None
    exact = [(cause, rate * (cause.bytes or 0)) for cause in served.causes]
    exact += [
        (_of_tokens("whole_blocks", "whole blocks"), rate * (over_a - over_b)),
        (
            _of_tokens("other_blocks", "blocks that the budget does not set"),
            rate * (other_a - other_b),
        ),
        (
            _of_tokens("bytes_per_token", "bytes per token"),
            (rate - rate_a) * (served.a_granted - over_a - other_a),
        ),
    ]
    exact = [(cause, worth) for cause, worth in exact if worth or cause.kind != BLOCKS]
    shares = apportion([worth for _, worth in exact])
    return [
        replace(cause, kv_tokens=tokens) for (cause, _), tokens in zip(exact, shares, strict=True)
    ]


def _of_tokens(name: str, title: str) -> Cause:
    return Cause((name,), title, BLOCKS, 0, Side(None, None), Side(None, None))


def _token_facts(granted: int | None, kv: Kv, rounded: bool) -> tuple[Fraction, int, int] | None:
    """(tokens per byte, bytes of the grant that make no whole block, bytes of blocks that were not planned).

    A grant that is known to its printed digits alone does not tell the last two apart.
    """
    if granted is None or not kv.tokens or not kv.blocks or not kv.bytes_per_block:
        return None
    rest = granted - kv.blocks * kv.bytes_per_block
    over = rest if rounded else rest % kv.bytes_per_block
    return Fraction(kv.tokens, kv.blocks * kv.bytes_per_block), over, rest - over


def apportion(worth: Sequence[Fraction]) -> list[int]:
    """Whole numbers next to these, with their sum where it is whole: the largest remainders are rounded up."""
    floors = [int(value // 1) for value in worth]
    left = round(sum(worth, Fraction(0))) - sum(floors)
    by_rest = sorted(range(len(worth)), key=lambda i: worth[i] - floors[i], reverse=True)
    for i in by_rest[: max(0, left)]:
        floors[i] += 1
    return floors


def _term_rows(rank_a: RankReport, rank_b: RankReport) -> list[TermDiff]:
    a, b = rank_a.budget, rank_b.budget
    rows = [
        TermDiff("device_total", rank_a.device_total_bytes, rank_b.device_total_bytes),
        TermDiff("gpu_memory_utilization", a.gpu_memory_utilization, b.gpu_memory_utilization),
        TermDiff("requested", a.requested_bytes, b.requested_bytes),
    ]
    left, right = ({term.name: term for term in budget.terms} for budget in (a, b))
    subtracted = {term.name for term in (*a.terms, *b.terms) if term.subtracted}
    for name in sorted(dict.fromkeys([*left, *right]), key=lambda name: name not in subtracted):
        term_a, term_b = left.get(name), right.get(name)
        rows.append(
            TermDiff(
                name,
                term_a.bytes if term_a else None,
                term_b.bytes if term_b else None,
                term_a.subtracted if term_a else None,
                term_b.subtracted if term_b else None,
            )
        )
    rows.append(TermDiff("kv_cache", a.engine_kv_cache_bytes, b.engine_kv_cache_bytes))
    rows.append(TermDiff("residual", a.residual_bytes, b.residual_bytes))
    rows.append(
        TermDiff(
            "fits_request_kv_cache", a.fits_request_kv_cache_bytes, b.fits_request_kv_cache_bytes
        )
    )
    return rows


def _kv_rows(a: RankReport | None, b: RankReport | None) -> list[TermDiff]:
    names = (
        "tokens",
        "blocks",
        "block_size",
        "bytes_per_token",
        "bytes_per_block",
        "max_model_len",
        "max_concurrency",
    )
    return [
        TermDiff(
            name,
            None if a is None else getattr(a.kv, name),
            None if b is None else getattr(b.kv, name),
        )
        for name in names
    ]


def _notes(
    a: Report, b: Report, least_a: RankReport | None, least_b: RankReport | None, matched: bool
) -> list[str]:
    """What a reader has to know before the figures: where the two are not alike, and what could not be compared."""
    notes = []
    if a.run.model != b.run.model and "unknown" not in (a.run.model, b.run.model):
        notes.append(
            "different models: weights, activations and the layout of the KV cache differ with them"
        )
    from_log = "log" in (a.run.source, b.run.source)
    simulated = not from_log and a.run.simulated != b.run.simulated
    if simulated or (a.run.device != b.run.device and None not in (a.run.device, b.run.device)):
        notes.append("different devices")
    if a.world_size != b.world_size and not from_log:  # a log need not print every rank
        notes.append(
            f"different world sizes: {a.world_size} and {b.world_size} ranks, each holding another share"
        )
    labels = [{rank.label for rank in report.ranks} for report in (a, b)]
    for name, lone in (("A", labels[0] - labels[1]), ("B", labels[1] - labels[0])):
        if lone and matched:
            notes.append(
                f"ranks of {name} without a counterpart, not compared one by one: {len(lone)}"
            )
    if not matched and least_a is not None and least_b is not None:
        notes.append(
            f"no rank has the same name in both: {least_a.label} of A is compared with {least_b.label} of B"
        )
    for name, report, least in (("A", a, least_a), ("B", b, least_b)):
        if report.run.status not in ("ok", "running"):
            reason = f": {report.run.exit_reason}" if report.run.exit_reason else ""
            notes.append(f"{name} ended as {report.run.status}{reason}")
        if least is None:
            notes.append(f"{name} has no worker: nothing to compare")
        elif granted_bytes(least) is None:
            notes.append(f"{name}: no KV cache was sized, so there is no difference to explain")
        elif least.budget.engine_kv_cache_bytes is None:
            notes.append(
                f"{name}: the engine's figure is unknown, its equation's result stands in for it"
            )
        elif least.budget.balanced is False:
            notes.append(
                f"{name}: the engine's figure is not what its equation gives; the residual is a cause"
            )
        for quantity, left, read in (
            decompose(least, report.run.simulated).differing if least is not None else ()
        ):
            what = title_of(quantity)
            notes.append(
                f"{name}: {what} is what its term leaves, {left:,} bytes; read apart it is {read:,}"
            )
        if report.run.source == "log":
            notes.append(
                f"{name} is read from a log: its figures count to their last printed digit"
            )
    return notes


def _only(a: Report, b: Report) -> list[str]:
    there = {finding.id for finding in b.findings}
    return list(dict.fromkeys(finding.id for finding in a.findings if finding.id not in there))
