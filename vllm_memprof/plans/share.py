"""Several instances on one device, computed: figures of each alone enter, their shares leave. Pure.

Equations treat neighbours in three ways (``accounting.budget.equations``):

* E4 subtracts its own memory alone, and refuses to start where less is free than it requests;
* E2 subtracts all that is used on the device, and checks nothing at its start;
* E3 does both.

One prediction, ``predict``, follows instances through their starts, one after the other. The shares
are found by asking it: each instance gets the KV cache that it needs and the same bytes more, as
much as still passes. Then they are rounded to hundredths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.plans.share_rows import Flags, SharingPlan, SoloPlan, UtilizationStep
from vllm_memprof.record.schema import READY, SERVED
from vllm_memprof.text import Text, text

#: Equations for which shares are computed. E4p (310P) halves what is left and E5, E6 are of vLLM on
#: CUDA devices: neither can be started here.
EQUATIONS = ("E2", "E3", "E4")
#: A step more, of which ``UtilizationStep`` tells the effect; in hundredths.
STEP = 2


@dataclass(frozen=True)
class SharingRule:
    """How an equation treats the memory of others on the device."""

    subtracts: bool  # from the KV cache
    checks: bool  # at the start: that the request is free

    @classmethod
    def of(cls, equation: str) -> SharingRule:
        row = form_of(equation)
        assert row is not None
        return cls(row.subtracts_neighbours, row.checks_free)

    @property
    def moments(self) -> tuple[str, ...]:
        """What neighbours may have done that makes a difference to the next start.

        Where a neighbour is subtracted, one that has only become ready leaves more for the KV cache
        and grows afterwards. Elsewhere, one that has served is the harder case.
        """
        return (SERVED, READY) if self.subtracts else (SERVED,)


@dataclass(frozen=True)
class SharedDevice:
    """The device that is shared; bytes."""

    total: int
    rule: SharingRule
    beside: int = 0  # held by somebody else from before the first start
    headroom: int = 0  # to stay free at the end


@dataclass(frozen=True)
class Figures:
    """One instance, all known; bytes as in ``SoloPlan``."""

    name: str
    subtracted: int
    ready: int
    peak: int
    context: int
    need: int
    block: int
    _: KW_ONLY
    block_tokens: float | None = None
    fixed: float | None = None  # utilization

    @classmethod
    def of(cls, row: SoloPlan) -> Figures | None:
        """Return the figures of a row; None where one is unknown."""
        sizes = [
            row.subtracted_bytes, row.held_ready_bytes, row.held_peak_bytes, row.context_bytes,
            row.need_bytes, row.bytes_per_block,
        ]  # fmt: skip
        if None in sizes or not row.bytes_per_block:
            return None
        tokens, fixed = row.tokens_per_block, row.fixed_utilization
        return cls(row.name, *(size or 0 for size in sizes), block_tokens=tokens, fixed=fixed)

    def whole(self, size: int) -> int:
        """Return the bytes of the whole blocks in a size."""
        return size // self.block * self.block


@dataclass(frozen=True)
class InstanceSize:
    """What an instance is started with: utilization, and blocks where they are fixed."""

    utilization: float
    blocks: int | None = None


_WHY = {
    "refused": text(
        "{order}: {name} is refused at its start, {size:gib} GiB less are free than it requests"
    ),
    "no-room": text("{order}: {name} is granted {size:gib} GiB less KV cache than it needs"),
    "share": text("{order}: {name}: a utilization above 1 is refused, {size:gib} GiB too much"),
    "device": text(
        "{order}: all together need {size:gib} GiB more than there is, once {name} serves"
    ),
}


@dataclass(frozen=True)
class Problem:
    """Why starts in one order do not pass."""

    kind: str  # of _WHY
    name: str  # of the instance at which it is seen
    short: int  # bytes
    order: tuple[str, ...] = ()

    @property
    def why(self) -> Text:
        order = ", ".join(self.order)
        return text(_WHY[self.kind], order=order, name=self.name, size=self.short)


_Instance = TypeVar("_Instance")
#: KV cache of each instance, or why there is none.
Outcome = dict[str, int] | Problem
Orders = Sequence[Sequence[Figures]]
Settings = Mapping[str, InstanceSize]
#: What gives each instance its KV cache, from the bytes wanted; or why it cannot be had.
Giving = Callable[[Mapping[str, int]], Settings | Problem]


def predict(card: SharedDevice, order: Sequence[Figures], given: Settings, moment: str) -> Outcome:
    """Follow instances through their starts, one after the other.

    Args:
        card: that they share.
        order: the instances in the order of starting.
        given: by name.
        moment: what those before have done when the next is started: READY or SERVED.

    Returns:
        The KV cache of each, bytes of whole blocks; or the first problem.
    """
    names = tuple(each.name for each in order)
    held, granted = card.beside, dict[str, int]()
    for each in order:
        setting = given[each.name]
        asked = card.total * setting.utilization
        if setting.utilization > 1:
            return Problem("share", each.name, math.ceil(asked - card.total), names)
        free = card.total - held - each.context
        if card.rule.checks and asked > free:
            return Problem("refused", each.name, math.ceil(asked - free), names)
        available = int(asked - each.subtracted - (held if card.rule.subtracts else 0))
        if available < each.need:
            return Problem("no-room", each.name, each.need - available, names)
        fixed = setting.blocks
        granted[each.name] = each.whole(available) if fixed is None else fixed * each.block
        if granted[each.name] < each.need:
            return Problem("no-room", each.name, each.need - granted[each.name], names)
        held += granted[each.name] + (each.peak if moment == SERVED else each.ready)
    most = card.beside + sum(granted[each.name] + each.peak for each in order)
    if most + card.headroom > card.total:
        return Problem("device", order[-1].name, most + card.headroom - card.total, names)
    return granted


def rotations(instances: Sequence[_Instance]) -> list[list[_Instance]]:
    """Return orders in which each instance is the last once, the others as they are.

    Whoever is last meets the most: what passes there passes earlier as well.
    """
    return [[*(each for each in instances if each is not last), last]
            for last in reversed(instances)]  # fmt: skip


def predict_all(card: SharedDevice, orders: Orders, given: Settings) -> Outcome:
    """Return the least KV cache of each over orders and moments; or the first problem."""
    least: dict[str, int] = {}
    for order in orders:
        for moment in card.rule.moments:
            found = predict(card, order, given, moment)
            if isinstance(found, Problem):
                return found
            for name, size in found.items():
                least[name] = min(size, least.get(name, size))
    return least


def ways(card: SharedDevice, figures: Sequence[Figures]) -> list[SharingPlan]:
    """Return the ways in which instances can share a device, each with its flags or without.

    By utilization alone: in any order of starting where the equation subtracts no neighbour; else
    the shares are those of one order (of two instances, of both). There the number of blocks, given
    as a flag, divides the device in any order.
    """
    every = rotations(figures)
    if not card.rule.subtracts:
        return [_way(card, figures, every, "utilization", None, _by_utilization(card, figures))]
    found = [_none_in_any_order(figures)] if len(figures) > 1 else []
    for order in every if len(figures) == 2 else [list(figures)]:
        names = [each.name for each in order]
        found.append(_way(card, order, [order], "utilization", names, _by_utilization(card, order)))
    if len(figures) > 1:
        found.append(_way(card, figures, every, "blocks", None, _by_blocks(card, figures)))
    return found


def more_of(card: SharedDevice, orders: Orders, given: Settings) -> list[UtilizationStep]:
    """Return what ``STEP`` more does to each instance, all else as it is."""
    before, rows = predict_all(card, orders, given), []
    assert not isinstance(before, Problem)
    for name, setting in given.items():
        utilization = round(setting.utilization + STEP / 100, 2)
        more = {**given, name: replace(setting, utilization=utilization)}
        after = predict_all(card, orders, more)
        why = text("still starts")
        if isinstance(after, Problem):
            why = after.why
        elif setting.blocks is not None:
            why = text("still starts: the number of blocks is fixed")
        elif losers := [other for other in after if other != name and after[other] < before[other]]:
            why = text(
                "still starts, at the cost of others: {size:gib} GiB of KV cache of {names}",
                size=sum(before[other] - after[other] for other in losers),
                names=", ".join(losers),
            )
        rows.append(UtilizationStep(name, utilization, not isinstance(after, Problem), why))
    return rows


def _way(
    card: SharedDevice,
    figures: Sequence[Figures],
    orders: Orders,
    name: str,
    order: list[str] | None,
    giving: Giving,
) -> SharingPlan:
    """Return the largest equal addition to what each needs that passes, rounded to hundredths."""

    def attempt(addition: int) -> tuple[Settings, Outcome]:
        found = giving({each.name: each.need + addition for each in figures})
        if isinstance(found, Problem):
            return {}, found
        return found, predict_all(card, orders, found)

    _, first = attempt(0)
    if isinstance(first, Problem):
        needed = sum(each.need + each.peak for each in figures) + card.beside + card.headroom
        if needed > card.total:  # in any order, by any shares
            names = tuple(each.name for each in figures)
            first = Problem("device", names[-1], needed - card.total, names)
        return SharingPlan(name, order, [], first.why, first.short)
    low, high = 0, card.total
    while high - low > 1:
        middle = (low + high) // 2
        passes = not isinstance(attempt(middle)[1], Problem)
        low, high = (middle, high) if passes else (low, middle)
    found = _rounded(card, figures, orders, attempt(low)[0])
    if isinstance(found, Problem):
        return SharingPlan(name, order, [], found.why, found.short)
    given, sizes = found
    flags = []
    for each in figures:
        setting, size = given[each.name], sizes[each.name]
        per_block = each.block_tokens
        tokens = None if per_block is None else int(size // each.block * per_block)
        flags.append(Flags(each.name, setting.utilization, setting.blocks, size, tokens))
    return SharingPlan(name, order, flags, more=more_of(card, orders, given))


def _rounded(
    card: SharedDevice, figures: Sequence[Figures], orders: Orders, exact: Settings
) -> tuple[Settings, dict[str, int]] | Problem:
    """Return utilizations in hundredths, and the KV caches: rounded down, or up where an instance
    then lacks what it needs; then each a hundredth more where that costs no other any KV cache."""
    given, free = dict(exact), [each.name for each in figures if each.fixed is None]
    for name in free:  # 0.58 is not 0.57 for its last binary digit
        hundredths = math.floor(given[name].utilization * 100 + 1e-9)
        given[name] = replace(given[name], utilization=hundredths / 100)

    def raised(name: str) -> dict[str, InstanceSize]:
        utilization = round(given[name].utilization + 0.01, 2)
        return {**given, name: replace(given[name], utilization=utilization)}

    sizes = predict_all(card, orders, given)
    for _ in figures:
        if isinstance(sizes, Problem) and sizes.kind == "no-room" and sizes.name in free:
            given = raised(sizes.name)
            sizes = predict_all(card, orders, given)
    if isinstance(sizes, Problem):
        return sizes
    for name in reversed(free):
        if given[name].blocks is not None:
            continue
        while not isinstance(after := predict_all(card, orders, raised(name)), Problem):
            if any(after[other] < size for other, size in sizes.items()):
                break
            given, sizes = raised(name), after
    return given, sizes


def _by_utilization(card: SharedDevice, order: Sequence[Figures]) -> Giving:
    """A share contains what the equation subtracts: its own memory, and where neighbours are
    subtracted, all that those before hold."""

    def giving(wanted: Mapping[str, int]) -> Settings:
        held, given = card.beside, dict[str, InstanceSize]()
        for each in order:
            subtracted = each.subtracted + (held if card.rule.subtracts else 0)
            share = each.fixed
            if share is None:
                share = (subtracted + wanted[each.name]) / card.total
            given[each.name] = InstanceSize(share)
            held += int(card.total * share - subtracted) + each.peak
        return given

    return giving


def _by_blocks(card: SharedDevice, figures: Sequence[Figures]) -> Giving:
    """The KV cache is a number of blocks; the share is what lets the instance start as the last."""

    def giving(wanted: Mapping[str, int]) -> Settings | Problem:
        blocks, given = dict[str, int](), dict[str, InstanceSize]()
        for each in figures:  # what it needs may be no whole blocks
            needed = -(-each.need // each.block)
            blocks[each.name] = max(wanted[each.name] // each.block, needed)
        held = {each.name: each.peak + blocks[each.name] * each.block for each in figures}
        for each in figures:
            others = card.beside + sum(held.values()) - held[each.name]
            share = each.fixed
            if share is None:
                share = (each.subtracted + others + each.need) / card.total
                share = math.ceil(share * 100 - 1e-9) / 100
                if share > 1:
                    short = math.ceil((share - 1) * card.total)
                    return Problem("share", each.name, short, tuple(held))
            given[each.name] = InstanceSize(share, blocks[each.name])
        return given

    return giving


def _none_in_any_order(figures: Sequence[Figures]) -> SharingPlan:
    """Return why one share each does not serve both orders, and the bytes that are missing.

    With B later, (uB - uA) x total >= own B - own A + held A + need B; with A later the same, the
    names changed. Added up: 0 >= held A + held B + need A + need B.
    """
    short = min(
        a.peak + b.peak + a.need + b.need for i, a in enumerate(figures) for b in figures[:i]
    )
    why = text(
        "the equation subtracts what a neighbour holds, so that the later one needs the larger "
        "share; with the same shares in both orders {size:gib} GiB are missing",
        size=short,
    )
    return SharingPlan("utilization", None, [], why, short)
