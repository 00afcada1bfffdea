"""Findings about memory that grows from cycle to cycle of sleep mode, pauses and weight updates.

Read in public: reserved memory that grows with each weight update until the device is full
(sgl-project/sglang#24854); +240 MB with each sleep and wake-up (vllm-ascend#9563).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from vllm_memprof.accounting.findings.needs import CYCLES_TOLD, HOOKS
from vllm_memprof.accounting.findings.registry import WARNING, Found, RankContext, finding, known
from vllm_memprof.accounting.model import Cycle, RankReport
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB

#: From this growth per cycle on, in every cycle, memory is said to grow: half a large block of the
#: caching allocator.
GROWTH_BYTES = MIB
#: Cycles that it takes to speak of growth; the first may take what the engine needs only once.
LEAST_CYCLES = 3
_KINDS = {
    "sleep": text("sleep and wake-up"),
    "pause": text("pause, weight update and continue"),
    "weight_update": text("weight update"),
}


@finding(
    "reserved-grows-without-empty-cache",
    severity=WARNING,
    title=text("Reserved memory grows from cycle to cycle, and empty_cache is never called"),
    needs=HOOKS,
)
def reserved_grows_without_empty_cache(context: RankContext) -> Iterator[Found]:
    """Find cycles after which more is reserved and not allocated than after the one before.

    Meaning:
        Every cycle leaves blocks in the caching allocator that the next one does not use. Without
        an empty_cache the device is full after some more cycles.

    Computed:
        Reserved less allocated after each cycle less the same after the one before; 1 MiB or more
        in every cycle but the first, of three or more, and no empty_cache in any of them
        (`vllm_memprof/accounting/empty_cache.py::cycles`). The bytes are their sum.

    To do:
        Call `torch.npu.empty_cache()` once after each cycle, before requests run again. SGLang's
        `/continue_generation` does it unless `torch_empty_cache` is false.
    """
    for kind, cycles in _series(context.rank):
        grown = _growing([cycle.cached_residue_bytes for cycle in cycles[1:]])
        if grown is None or any(cycle.emptied for cycle in cycles[1:]):
            continue
        total = sum(grown)
        evidence = text(
            "reserved, not allocated {sizes} over {count} cycles, no empty_cache in between",
            sizes=_sizes(grown),
            count=len(cycles),
        )
        action = text(
            "torch.npu.empty_cache() once after each {cycle}, before requests run again, releases "
            "up to {size:gib4} GiB here",
            cycle=_KINDS[kind],
            size=total,
        )
        if kind == "pause":
            action = text(
                "leave torch_empty_cache of /continue_generation true: the call before requests "
                "run again releases up to {size:gib4} GiB here",
                size=total,
            )
        title = text(
            "Reserved memory grows with every {cycle}, and empty_cache is never called",
            cycle=_KINDS[kind],
        )
        yield Found(_until_full(evidence, cycles, round(median(grown))), total, action, title)


@finding(
    "residue-per-cycle",
    severity=WARNING,
    title=text("Every cycle leaves memory behind"),
    needs=CYCLES_TOLD,
)
def residue_per_cycle(context: RankContext) -> Iterator[Found]:
    """Find cycles after which more memory is in use than after the one before.

    Meaning:
        Tensors stay alive, or memory outside torch does, with every cycle; empty_cache cannot
        release it.

    Computed:
        Growth of allocated memory, of non-torch memory, and, where empty_cache was called in every
        cycle, of reserved less allocated; each counts where it is 1 MiB or more in every cycle but
        the first, of three or more (`vllm_memprof/accounting/empty_cache.py::cycles`). The bytes
        are the median of their sum per cycle. From a log: growth of what the engine prints as still
        in use while asleep.

    To do:
        Allocated, or asleep: compare two `torch.npu.memory_snapshot()`. Non-torch after a sleep:
        `enable_sleep_mode_extra_cleanup` ends communicators and graph workspaces (vllm-ascend 0.23
        on).
    """
    for kind, cycles in _series(context.rank):
        later = cycles[1:]
        allocated = _growing([cycle.allocated_residue_bytes for cycle in later])
        non_torch = _growing([cycle.non_torch_residue_bytes for cycle in later])
        kept = None
        if all(cycle.emptied_inside for cycle in later):
            kept = _growing([cycle.cached_residue_bytes for cycle in later])
        rows = [
            (text("allocated {sizes}"), allocated),
            (text("non-torch {sizes}"), non_torch),
            (text("reserved, not allocated (empty_cache does not free it) {sizes}"), kept),
            (
                text("in use while asleep {sizes}"),
                _growing([cycle.asleep_residue_bytes for cycle in later]),
            ),
        ]
        growing = [sizes for _, sizes in rows if sizes is not None]
        if not growing:
            continue
        parts = known(*((said, sizes and _sizes(sizes)) for said, sizes in rows), name="sizes")
        per_cycle = round(median(sum(sizes) for sizes in zip(*growing, strict=True)))
        evidence = text("{growth} over {count} cycles", growth=join("; ", parts), count=len(cycles))
        action: str = ""
        if allocated is not None:
            action = text(
                "tensors stay alive: take torch.npu.memory_snapshot() after two cycles and compare "
                "the blocks of the size {size:bytes} bytes",
                size=allocated[-1],
            )
        elif kind == "sleep" and non_torch is not None:
            action = text(
                "--additional-config '{setting}' (vllm-ascend 0.23 on) ends communicators and "
                "graph workspaces with each sleep",
                setting='{"enable_sleep_mode_extra_cleanup": true}',
            )
        elif kind == "sleep" and kept is None:
            action = text(
                "sleep mode gives back weights and KV cache alone: compare "
                "torch.npu.memory_snapshot() of two sleeps"
            )
        title = text("Every {cycle} leaves memory behind", cycle=_KINDS[kind])
        yield Found(_until_full(evidence, cycles, per_cycle), per_cycle, action, title)


def _series(rank: RankReport) -> Iterator[tuple[str, list[Cycle]]]:
    for kind in _KINDS:
        cycles = [cycle for cycle in rank.cycles if cycle.kind == kind]
        if len(cycles) >= LEAST_CYCLES:
            yield kind, cycles


def _growing(sizes: Sequence[int | None]) -> list[int] | None:
    """Return the sizes if all of them are known and grow; None otherwise."""
    known = [size for size in sizes if size is not None and size >= GROWTH_BYTES]
    return known if len(known) == len(sizes) else None


def _sizes(sizes: Sequence[int]) -> str:
    """Return ``+240.0 MiB x 4``, or each size where they differ."""
    texts = [f"{size / MIB:+.1f}" for size in sizes]
    return f"{texts[0]} MiB x {len(texts)}" if len(set(texts)) == 1 else f"{', '.join(texts)} MiB"


def _until_full(evidence: Text, cycles: list[Cycle], per_cycle: int) -> Text:
    left = cycles[-1].free_bytes
    if cycles[-1].used_bytes is None or left is None or per_cycle <= 0:
        return evidence
    full = text(
        "{size:gib} GiB are free: full after {count} more", size=left, count=left // per_cycle
    )
    return join("; ", [evidence, full])
