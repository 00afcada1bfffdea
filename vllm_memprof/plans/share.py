"""Several instances on one device (``memprof.share/1``): what each takes, and shares of it. Pure.

*Computed* figures come from a plan of each instance alone and the engine's equation; *observed*
ones from starts of all of them beside each other (``share_starts``). Bytes are integers, None is
unknown. Equations treat neighbours in three ways (``accounting.budget.equations``):

* E4 subtracts its own memory alone, and refuses to start where less is free than it requests;
* E2 subtracts all that is used on the device, and checks nothing at its start;
* E3 does both.

One prediction, ``predict``, follows instances through their starts, one after the other. The shares
are found by asking it: each instance gets the KV cache that it needs and the same bytes more, as
much as still passes. Then they are rounded to hundredths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from vllm_memprof.errors import UsageError
from vllm_memprof.files import read_table
from vllm_memprof.plans.model import TABLES, Answer, PlanRow, Try
from vllm_memprof.record.codec import computed, from_json, one_of
from vllm_memprof.record.schema import MOMENTS, READY, SERVED
from vllm_memprof.text import text

#: Equations for which shares are computed. E4p (310P) halves what is left and E5, E6 are of vLLM on
#: CUDA devices: neither can be started here.
EQUATIONS = ("E2", "E3", "E4")


@dataclass(frozen=True)
class Figures:
    """What one instance takes of a device that it has to itself."""

    subtracted_bytes: int  # from the request, by the engine's equation
    #: Held beside the KV cache when the engine is ready, and at the serving peak.
    ready_bytes: int
    peak_bytes: int
    context_bytes: int  # used on the device when the engine first looks
    #: KV cache that it needs: a request of max_model_len, which the engine requires, or its wants.
    need_bytes: int
    block_bytes: int
    _: KW_ONLY
    block_tokens: float | None = None
    fixed_utilization: float | None = None  # given by the user, and kept; None: memprof chooses it


@dataclass(frozen=True)
class SoloPlan:
    """One instance, from a plan in which it had the device to itself."""

    name: str  # A, B, ... in the order as typed
    model: str
    engine_args: list[str]  # secrets redacted
    wanted: list[str]  # conditions of its own, in words
    plan: PlanRow
    figures: Figures | None = None  # None: one of them is unknown


@dataclass(frozen=True)
class Flags:
    """What one instance is started with, and what that gives it; computed."""

    name: str
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None = None
    #: Least KV cache in any order of starting that the answer is for, whole blocks.
    kv_cache_bytes: int | None = None
    tokens: int | None = None

    @property
    @computed
    def flags(self) -> str:
        """As the engine takes them."""
        given = f"--gpu-memory-utilization {self.gpu_memory_utilization:.2f}"
        if self.num_gpu_blocks_override is None:
            return given
        return f"{given} --num-gpu-blocks-override {self.num_gpu_blocks_override}"


@dataclass(frozen=True)
class InstanceStart:
    """All instances, started one after the other on one device; observed."""

    order: list[str]
    #: What the earlier ones had done when the next was started: become ready, or served their
    #: largest batches. At the end all have served them, and hold what that took at once.
    neighbours: Annotated[str, one_of(*MOMENTS)]
    #: By their names; the KV cache is that of the blocks that the engine made. Those behind one
    #: that failed were not started.
    results: list[Try]
    least_free_bytes: int | None = None  # of the device, at any reading of any of them

    @property
    @computed
    def passes(self) -> bool:
        return len(self.results) == len(self.order) and all(each.holds for each in self.results)


@dataclass(frozen=True)
class SharingPlan:
    """One way to share the device, for one order of starting or for all."""

    name: Annotated[str, one_of("utilization", "blocks")]  # what divides the KV cache
    order: list[str] | None  # None: any
    flags: list[Flags]  # empty: none
    #: Where there are none: why, and how many bytes are missing.
    why_none: str | None = None
    short_bytes: int | None = None
    starts: list[InstanceStart] = field(default_factory=list)

    @property
    @computed
    def holds(self) -> bool:
        """There are flags, and every start with them passed."""
        return bool(self.flags and self.starts) and all(start.passes for start in self.starts)


@dataclass(frozen=True)
class DeviceShare(Answer):
    """Several instances on one device: the shares with which all start and survive."""

    instances: list[SoloPlan]
    equation: str | None  # of the engine, as ``accounting.budget.equations`` names it
    device_total_bytes: int | None
    beside_bytes: int  # held by somebody else, before the first instance starts
    headroom_bytes: int  # that must stay free
    ways: list[SharingPlan] = field(default_factory=list)
    why_none: str | None = None  # where nothing could be computed
    SCHEMA: ClassVar[str] = "memprof.share/1"

    @property
    @computed
    def found(self) -> bool:
        return any(way.holds for way in self.ways)


@dataclass(frozen=True)
class SharedDevice:
    """The device that is shared, and the instances on it by name; bytes."""

    total: int
    instances: Mapping[str, Figures]
    subtracts: bool  # the equation subtracts the memory of others from the KV cache
    checks: bool  # the engine checks at its start that the request is free
    beside: int = 0  # held by somebody else from before the first start
    headroom: int = 0  # to stay free at the end

    @property
    def moments(self) -> tuple[str, ...]:
        """What neighbours may have done that makes a difference to the next start.

        Where a neighbour is subtracted, one that has only become ready leaves more for the KV cache
        and grows afterwards. Elsewhere, one that has served is the harder case.
        """
        return (SERVED, READY) if self.subtracts else (SERVED,)


class Problem(Exception):
    """Why starts in one order do not pass.

    Args:
        kind: of the table of problems.
        name: of the instance at which it is seen.
        short: bytes.
        order: names.
    """

    def __init__(self, kind: str, name: str, short: float, order: Sequence[str]) -> None:
        self.kind, self.name, self.short = kind, name, math.ceil(short)
        self.why = text(
            TABLES["problems"][kind], order=", ".join(order), name=name, size=self.short
        )
        super().__init__(self.why)


Orders = Sequence[Sequence[str]]
Settings = Mapping[str, Flags]


def predict(
    card: SharedDevice, order: Sequence[str], given: Settings, moment: str
) -> dict[str, int]:
    """Follow instances through their starts, one after the other.

    Args:
        card: that they share.
        order: the instances in the order of starting.
        given: by name.
        moment: what those before have done when the next is started: READY or SERVED.

    Returns:
        The KV cache of each, bytes of whole blocks.

    Raises:
        Problem: the first that is met.
    """
    held, granted = card.beside, dict[str, int]()
    for name in order:
        each, flags = card.instances[name], given[name]
        asked = card.total * flags.gpu_memory_utilization
        subtracted = each.subtracted_bytes + (held if card.subtracts else 0)
        available = int(asked - subtracted)
        free = card.total - held - each.context_bytes
        blocks = flags.num_gpu_blocks_override
        size = (available // each.block_bytes if blocks is None else blocks) * each.block_bytes
        for kind, short in (
            ("share", asked - card.total),
            ("refused", asked - free if card.checks else 0),
            ("no-room", each.need_bytes - available),
            ("no-room", each.need_bytes - size),
        ):
            if short > 0:
                raise Problem(kind, name, short, order)
        granted[name] = size
        held += size + (each.peak_bytes if moment == SERVED else each.ready_bytes)
    most = sum(granted[name] + card.instances[name].peak_bytes for name in order)
    short = card.beside + most + card.headroom - card.total
    if short > 0:
        raise Problem("device", order[-1], short, order)
    return granted


def rotations(names: Sequence[str]) -> list[list[str]]:
    """Return orders in which each instance is the last once, the others as they are.

    Whoever is last meets the most: what passes there passes earlier as well.
    """
    return [[*(each for each in names if each != last), last] for last in reversed(names)]


def predict_all(card: SharedDevice, orders: Orders, given: Settings) -> dict[str, int]:
    """Return the least KV cache of each over orders and moments.

    Raises:
        Problem: the first that is met.
    """
    found = [predict(card, order, given, moment) for order in orders for moment in card.moments]
    return {name: min(sizes[name] for sizes in found) for name in given}


def ways(card: SharedDevice) -> list[SharingPlan]:
    """Return the ways in which instances can share a device, each with its flags or without.

    By utilization alone, in any order of starting. Where the equation subtracts what neighbours
    hold, that is never enough: with B later, (uB - uA) x total >= own B - own A + held A + need B;
    with A later the same, the names changed; added up, 0 >= held A + held B + need A + need B.
    There the shares are those of one order (of two instances, of both), and the number of blocks,
    given as a flag, divides the device in any order.
    """
    names = [*card.instances]
    every = rotations(names)
    found = [_way(card, every, "utilization", None)]
    if card.subtracts and len(names) > 1:
        in_order = every if len(names) == 2 else [names]
        found += [_way(card, [order], "utilization", order) for order in in_order]
        found.append(_way(card, every, "blocks", None))
    return found


def _raised(given: Settings, name: str) -> dict[str, Flags]:
    """Return the same flags with a hundredth more of utilization for one instance."""
    utilization = round(given[name].gpu_memory_utilization + 0.01, 2)
    return {**given, name: replace(given[name], gpu_memory_utilization=utilization)}


def _way(card: SharedDevice, orders: Orders, name: str, order: list[str] | None) -> SharingPlan:
    """Return the largest equal addition to what each needs that passes, rounded to hundredths."""
    giving = _by_blocks if name == "blocks" else _by_utilization

    def attempt(addition: int) -> Settings:
        wanted = {name: each.need_bytes + addition for name, each in card.instances.items()}
        given = giving(card, orders[0], wanted)
        predict_all(card, orders, given)
        return given

    try:
        given, low, high = attempt(0), 0, card.total
        while high - low > 1:
            middle = (low + high) // 2
            try:
                given, low = attempt(middle), middle
            except Problem:
                high = middle
        given = _rounded(card, orders, given)
        sizes = predict_all(card, orders, given)
    except Problem as problem:
        found, names = problem, [*card.instances]
        together = (each.need_bytes + each.peak_bytes for each in card.instances.values())
        short = sum(together) + card.beside + card.headroom - card.total
        if short > 0:  # in any order, by any shares
            found = Problem("device", names[-1], short, names)
        return SharingPlan(name, order, [], found.why, found.short)
    flags = []
    for each in given.values():
        figures, size = card.instances[each.name], sizes[each.name]
        rate, tokens = figures.block_tokens, None
        if rate is not None:
            tokens = int(size // figures.block_bytes * rate)
        flags.append(replace(each, kv_cache_bytes=size, tokens=tokens))
    return SharingPlan(name, order, flags)


def _rounded(card: SharedDevice, orders: Orders, exact: Settings) -> Settings:
    """Return utilizations in hundredths: rounded down, or up where an instance then lacks what it
    needs; then each a hundredth more where that costs no other any KV cache.

    Raises:
        Problem: they do not pass.
    """
    free = [name for name in exact if card.instances[name].fixed_utilization is None]
    given = dict(exact)
    for name in free:  # 0.58 is not 0.57 for its last binary digit
        hundredths = math.floor(given[name].gpu_memory_utilization * 100 + 1e-9)
        given[name] = replace(given[name], gpu_memory_utilization=hundredths / 100)
    for _ in given:
        try:
            predict_all(card, orders, given)
        except Problem as problem:
            if problem.kind != "no-room" or problem.name not in free:
                raise
            given = _raised(given, problem.name)
    sizes = predict_all(card, orders, given)
    for name in reversed(free):
        while given[name].num_gpu_blocks_override is None:
            more = _raised(given, name)
            try:
                after = predict_all(card, orders, more)
            except Problem:
                break
            if any(after[other] < size for other, size in sizes.items()):
                break
            given, sizes = more, after
    return given


def _by_utilization(
    card: SharedDevice, order: Sequence[str], wanted: Mapping[str, int]
) -> Settings:
    """A share contains what the equation subtracts: its own memory, and where neighbours are
    subtracted, all that those before hold."""
    held, given = card.beside, dict[str, Flags]()
    for name in order:
        each = card.instances[name]
        subtracted = each.subtracted_bytes
        subtracted += held if card.subtracts else 0
        share = each.fixed_utilization or (subtracted + wanted[name]) / card.total
        given[name] = Flags(name, share)
        held += int(card.total * share - subtracted) + each.peak_bytes
    return given


def _by_blocks(card: SharedDevice, order: Sequence[str], wanted: Mapping[str, int]) -> Settings:
    """The KV cache is a number of blocks; the share is what lets the instance start as the last."""
    given, instances = dict[str, Flags](), card.instances
    sizes = {  # what it needs may be no whole blocks
        name: max(wanted[name] // each.block_bytes, -(-each.need_bytes // each.block_bytes))
        for name, each in instances.items()
    }
    for name in order:
        each = instances[name]
        held = card.beside + sum(
            other.peak_bytes + sizes[its] * other.block_bytes
            for its, other in instances.items()
            if its != name
        )
        share = (each.subtracted_bytes + held + each.need_bytes) / card.total
        share = each.fixed_utilization or math.ceil(share * 100 - 1e-9) / 100
        given[name] = Flags(name, share, sizes[name])
    return given


@dataclass(frozen=True)
class Typed:
    """One instance, as the user wrote it: a row of a TOML file, or words of the command."""

    model: str
    args: list[str] = field(default_factory=list)
    want: list[str] = field(default_factory=list)


def read_instances(path: Path) -> list[Typed]:
    """Return the instances of a TOML file, in their order.

    Raises:
        UsageError: it cannot be read, or has something else than instances.
    """
    try:
        rows = read_table(path)["instance"]
        return [from_json(Typed, vars(Typed(**row))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = '[[instance]] with model = "...", and optional args = [...] and want = [...]'
        raise UsageError(f"memprof share cannot read {path}: {error}", hint) from error
