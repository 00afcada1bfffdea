"""Why one rank got another KV cache than another: causes that add up to the difference.

Both budgets are taken apart into the same quantities (``accounting.budget.decomposition``). A
quantity that both equations subtract is a cause as far as its size differs; one that a single
equation subtracts is a cause by its whole size. Quantities that a run does not tell apart stay
together under all of their names, so that no cause holds anything that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from vllm_memprof.accounting.budget.decomposition import Decomposition, KvChange
from vllm_memprof.accounting.model import Kv, RankReport
from vllm_memprof.accounting.readings.quantities import QUANTITIES, title_of
from vllm_memprof.text import join, text
from vllm_memprof.units import Amount, minus

#: Kinds of causes. request: what was asked of the device. state: subtracted by both, of another
#: size. method: subtracted by one equation alone. mixed: quantities that a run does not tell apart,
#: of which one equation subtracts more. size: a fixed size. rank: a different rank has the least.
#: blocks: whole blocks, of the tokens alone. rounding, residual: as in each run's own report.
#: unknown: what the rest leaves.
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
#: Quantities that are not held by a run, nor subtracted.
_NOT_HELD = {"requested", *_STEPS} - {"halved"}
_ORDER = list(QUANTITIES)


@dataclass(frozen=True)
class CausePart:
    """One run's part in a cause."""

    held_bytes: Amount  # None: unknown, or not a thing that is held
    subtracted_bytes: Amount  # by its equation; 0: nothing of it; None: unknown
    subtracts: tuple[str, ...] = ()  # which of the quantities its equation subtracts


_NEITHER = CausePart(None, None)


@dataclass(frozen=True)
class Cause:
    """What one quantity does to the KV cache: B less A."""

    names: tuple[str, ...]  # several: not told apart
    title: str
    kind: str
    bytes: Amount  # None: unknown
    a: CausePart = _NEITHER
    b: CausePart = _NEITHER
    kv_tokens: Amount = None


def in_order(causes: Iterable[Cause]) -> list[Cause]:
    """Sort by bytes, the largest first; then the unknown; whole blocks and roundings last."""
    late = (BLOCKS, ROUNDING)
    return sorted(
        causes, key=lambda cause: (cause.kind in late, cause.bytes is None, -abs(cause.bytes or 0))
    )


def find_causes(
    a: Decomposition, b: Decomposition, rank_a: RankReport, rank_b: RankReport
) -> list[Cause]:
    """Return the causes of ``b.granted - a.granted``; they add up to it where both are known."""
    if "equation" in a.subtracted | b.subtracted:  # nothing tells what that run subtracts
        size = minus(b.granted, a.granted)
        return [Cause(("equation",), title_of("equation"), UNKNOWN, size)]
    unknown = {*a.unknown, *b.unknown}
    # quantities, each with all those that one of the runs does not tell it apart from
    groups: list[set[str]] = []
    for together in [
        *(line.names for line in (*a.lines, *b.lines)),
        *((name,) for name in (*a.unknown, *b.unknown)),
    ]:
        touched = [group for group in groups if group & set(together)]
        groups = [group for group in groups if group not in touched]
        groups.append(set(together).union(*touched))
    ordered = [sorted(group, key=_place) for group in groups]
    found = []
    for names in sorted(ordered, key=lambda group: _place(group[0])):
        size = None if set(names) & unknown else _sum(b, names) - _sum(a, names)
        if names == ["requested"]:
            found += _request_causes(size, rank_a, rank_b)
            continue
        implied = any(line.implied for run in (a, b) for line in _within(run, names))
        left, right = set(names) & a.subtracted, set(names) & b.subtracted
        if implied or set(names) & unknown:
            kind = UNKNOWN
        elif len(names) == 1 and names[0] in _STEPS:
            kind = _STEPS[names[0]]
        elif left == right:
            kind = STATE
        else:
            kind = METHOD if not left or not right else MIXED
        title = join(" + ", map(title_of, names)) if len(names) > 1 else title_of(names[0])
        found.append(Cause(tuple(names), title, kind, size, _side(a, names), _side(b, names)))
    return found


def _place(name: str) -> tuple[int, str]:
    """Return the place of a quantity in the table; what the table does not have comes last."""
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _within(run: Decomposition, names: Iterable[str]) -> list[KvChange]:
    return [line for line in run.lines if set(line.names) & set(names)]


def _sum(run: Decomposition, names: Iterable[str]) -> int:
    return sum(line.bytes for line in _within(run, names))


def _side(run: Decomposition, names: Sequence[str]) -> CausePart:
    subtracts = tuple(name for name in names if name in run.subtracted)
    if set(names) & _NOT_HELD:
        return CausePart(None, None, subtracts)
    subtracted = None if set(names) & set(run.unknown) else -_sum(run, names)
    if subtracted is not None and len(subtracts) == len(names):
        return CausePart(subtracted, subtracted, subtracts)
    sizes = [run.held.get(name) for name in names]
    held = None if None in sizes else sum(size or 0 for size in sizes)
    return CausePart(held, subtracted, subtracts)


def _request_causes(size: Amount, a: RankReport, b: RankReport) -> list[Cause]:
    """Divide the request's difference: the share at A's total, then the device's total."""
    whole = Cause(("requested",), title_of("requested"), REQUEST, size)
    total_a, total_b = a.device_total_bytes, b.device_total_bytes
    share_a, share_b = a.budget.gpu_memory_utilization, b.budget.gpu_memory_utilization
    if size is None or share_a is None or share_b is None:
        return [whole]
    shares = text("gpu_memory_utilization {a} → {b}", a=share_a, b=share_b)
    if total_a is None or total_b is None:
        title = text("requested, {shares}", shares=shares)
        return [whole if share_a == share_b else replace(whole, title=title)]
    share = replace(whole, names=("gpu_memory_utilization",), title=shares)
    total = replace(whole, names=("device_total",), title=text("device total"))
    if total_a == total_b:
        return [whole if share_a == share_b else share]
    if share_a == share_b:
        return [total]
    first = int(total_a * share_b) - int(total_a * share_a)
    return [replace(share, bytes=first), replace(total, bytes=size - first)]


def in_tokens(
    causes: list[Cause], a_granted: Amount, a: Kv, b_granted: Amount, b: Kv, rounded: bool
) -> list[Cause]:
    """Return the causes in KV tokens, whole blocks as causes of their own; the sum is exact.

    Tokens = the bytes of whole blocks x the tokens that a byte holds, those of B. The blocks follow
    from the grant, less what is left over of it; another layout in A is a cause by what it makes of
    A's blocks. Where this is not known, the causes stay without tokens.

    Args:
        causes: that add up to ``b_granted - a_granted``.
        a_granted: KV cache of A, bytes.
        a: its layout.
        b_granted: KV cache of B, bytes.
        b: its layout.
        rounded: a grant is known to its printed digits alone.
    """
    left, right = _token_facts(a_granted, a, rounded), _token_facts(b_granted, b, rounded)
    if left is None or right is None or any(cause.bytes is None for cause in causes):
        return causes
    rate_a, over_a, other_a = left
    rate, over_b, other_b = right
    assert a_granted is not None
    exact = [(cause, rate * (cause.bytes or 0)) for cause in causes]
    for name, title, share in (
        ("whole_blocks", text("whole blocks"), rate * (over_a - over_b)),
        (
            "other_blocks",
            text("blocks that the budget does not set"),
            rate * (other_a - other_b),
        ),
        (
            "bytes_per_token",
            text("bytes per token"),
            (rate - rate_a) * (a_granted - over_a - other_a),
        ),
    ):
        if share:
            exact.append((Cause((name,), title, BLOCKS, 0), share))
    tokens = apportion([share for _, share in exact])
    return [
        replace(cause, kv_tokens=count) for (cause, _), count in zip(exact, tokens, strict=True)
    ]


def _token_facts(granted: Amount, kv: Kv, rounded: bool) -> tuple[Fraction, int, int] | None:
    """Return (tokens per byte, bytes that make no whole block, bytes of blocks without a plan).

    A grant that is known to its printed digits alone does not tell the last two apart.
    """
    if granted is None or not kv.tokens or not kv.blocks or not kv.bytes_per_block:
        return None
    rest = granted - kv.blocks * kv.bytes_per_block
    over = rest if rounded else rest % kv.bytes_per_block
    return Fraction(kv.tokens, kv.blocks * kv.bytes_per_block), over, rest - over


def apportion(shares: Sequence[Fraction]) -> list[int]:
    """Return whole numbers next to these, with their sum: the largest remainders are rounded up."""
    floors = [int(share // 1) for share in shares]
    left = round(sum(shares, Fraction(0))) - sum(floors)
    by_rest = sorted(range(len(shares)), key=lambda i: shares[i] - floors[i], reverse=True)
    for i in by_rest[: max(0, left)]:
        floors[i] += 1
    return floors
