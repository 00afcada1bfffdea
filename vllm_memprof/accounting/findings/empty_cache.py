"""Findings about calls of ``empty_cache``, and about memory that grows from cycle to cycle.

Read in public: a call while requests run synchronises every stream (sgl-project#22998); a debug
line that empties the cache, and so changes what it reports on (sgl-project#24397); reserved memory
that grows with each weight update until the device is full (sgl-project#24854); +240 MB with each
sleep and wake-up (vllm-ascend#9563).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TypeVar

from vllm_memprof.accounting.findings.observers import observer_of
from vllm_memprof.accounting.findings.rules import (
    INFO,
    WARNING,
    WARNING_BYTES,
    Context,
    Found,
)
from vllm_memprof.accounting.model import ENGINE, Cycle, EmptyCacheCall, RankReport
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.text import join, text
from vllm_memprof.units import MIB, largest, only_known

#: From this share on, what was freed counts as reallocated.
REFILLED_SHARE = 0.8
#: Seconds from which on calls of the start-up, which keep no request waiting, are a finding.
START_UP_COST_S = 0.1
#: From this growth per cycle on, in every cycle, memory is said to grow: half a large block of the
#: caching allocator.
GROWTH_BYTES = MIB
#: Cycles that it takes to speak of growth; the first may take what the engine needs only once.
LEAST_CYCLES = 3


_Key = TypeVar("_Key")


def empty_cache_in_hot_path(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find calls of empty_cache while requests run, by place."""
    serving = (call for call in rank.empty_cache if call.while_serving)
    for site, calls in _grouped(serving, _site).items():
        freed = only_known(call.freed_bytes for call in calls)
        again = [call.refilled_bytes or 0 for call in calls if call.refilled_by is not None]
        yield Found(
            largest(freed),
            {
                "inside": sum(1 for call in calls if call.in_step) or None,
                "requests": largest(call.requests for call in calls),
                "freed": freed and sum(freed),
                "again": again and freed and sum(again),
                **_calls_at(site, calls),
            },
        )


def observation_empties_cache(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find calls of empty_cache from functions that read memory or write a log."""
    observed = _grouped(rank.empty_cache, lambda call: observer_of(call.chain))
    for (caller, what), calls in observed.items():
        by_phase = _grouped(calls, lambda call: call.phase or text("no phase"))
        sizes = {phase: _freed(each) for phase, each in by_phase.items()}
        said = [text("{phase} {size:gib4}", phase=each, size=n) for each, n in sizes.items()]
        freed = _freed(calls)
        grave = freed >= WARNING_BYTES or any(call.while_serving for call in calls)
        figures = {"caller": caller, "what": what, "phases": join(", ", said)}
        severity = WARNING if grave else INFO
        yield Found(freed, figures | _calls_at("", calls), severity)


def empty_cache_refilled(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find calls of empty_cache whose freed memory was taken again by the next reading."""
    refilled = (call for call in rank.empty_cache if call.refilled_by is not None)
    for site, members in _grouped(refilled, _site).items():
        slow = sum(call.seconds or 0 for call in members) >= START_UP_COST_S
        calls = [call for call in members if call.after_ready] or (members if slow else [])
        freed, again = _freed(calls), sum(call.refilled_bytes or 0 for call in calls)
        if freed >= 2 * MIB and again >= REFILLED_SHARE * freed:
            figures = {"freed": freed, "again": again, "phase": calls[-1].refilled_by}
            severity = WARNING if any(call.while_serving for call in calls) else INFO
            yield Found(freed - again, figures | _calls_at(site, calls), severity)


def _grouped(
    calls: Iterable[EmptyCacheCall], key: Callable[[EmptyCacheCall], _Key | None]
) -> dict[_Key, list[EmptyCacheCall]]:
    """Return the engine's calls by a key, those without one left out."""
    found: dict[_Key, list[EmptyCacheCall]] = {}
    for call in calls:
        name = key(call) if call.by == ENGINE else None
        if name is not None:
            found.setdefault(name, []).append(call)
    return found


def _site(call: EmptyCacheCall) -> str:
    return call.site or text("an unknown place")


def _freed(calls: list[EmptyCacheCall]) -> int:
    return sum(call.freed_bytes or 0 for call in calls)


def _calls_at(site: str, calls: list[EmptyCacheCall]) -> dict[str, object]:
    """Return number and time of calls, and ``where``: with the functions; ``place``: the only."""
    names = list(dict.fromkeys(call.function for call in calls if call.function))
    where = text("{site} ({functions})", site=site, functions=", ".join(names)) if names else site
    seconds = only_known(call.seconds for call in calls)
    return {
        "count": len(calls),
        "time": sum(seconds),
        "longest": max(seconds, default=None),
        "where": where,
        "place": names[0] if len(names) == 1 else site,
    }


def reserved_grows_without_empty_cache(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find cycles after which more is reserved, not allocated than after the one before."""
    for kind, cycles in _series(rank):
        grown = _growing(cycle.cached_residue_bytes for cycle in cycles[1:])
        if grown and not any(cycle.emptied for cycle in cycles[1:]):
            yield Found(
                sum(grown),
                {
                    "sizes": _sizes(grown),
                    "pause": kind == "pause",
                    **_until_full(kind, cycles, round(median(grown))),
                },
            )


def residue_per_cycle(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find cycles after which more memory is in use than after the one before."""
    for kind, cycles in _series(rank):
        later = cycles[1:]
        emptied = all(cycle.emptied_inside for cycle in later)
        growing = {
            "allocated": _growing(cycle.allocated_residue_bytes for cycle in later),
            "non_torch": _growing(cycle.non_torch_residue_bytes for cycle in later),
            "kept": _growing(cycle.cached_residue_bytes if emptied else None for cycle in later),
            "asleep": _growing(cycle.asleep_residue_bytes for cycle in later),
        }
        known = [sizes for sizes in growing.values() if sizes]
        if known:
            per_cycle = round(median(sum(sizes) for sizes in zip(*known, strict=True)))
            asleep = kind == "sleep"
            yield Found(
                per_cycle,
                {
                    **{name: _sizes(sizes) for name, sizes in growing.items() if sizes},
                    "block": growing["allocated"] and growing["allocated"][-1],
                    "cleanup": asleep and growing["non_torch"],
                    "compare": asleep and not growing["kept"],
                    **_until_full(kind, cycles, per_cycle),
                },
            )


def _series(rank: RankReport) -> Iterator[tuple[str, list[Cycle]]]:
    for kind in TITLES["cycles"]:
        cycles = [cycle for cycle in rank.cycles if cycle.kind == kind]
        if len(cycles) >= LEAST_CYCLES:
            yield kind, cycles


def _growing(sizes: Iterable[int | None]) -> list[int]:
    """Return the sizes if all of them are known and grow; none otherwise."""
    listed = list(sizes)
    known = [size for size in listed if size is not None and size >= GROWTH_BYTES]
    return known if len(known) == len(listed) else []


def _sizes(sizes: list[int]) -> str:
    """Return ``+240.0 MiB x 4``, or each size where they differ."""
    texts = [f"{size / MIB:+.1f}" for size in sizes]
    return f"{texts[0]} MiB x {len(texts)}" if len(set(texts)) == 1 else f"{', '.join(texts)} MiB"


def _until_full(kind: str, cycles: list[Cycle], per_cycle: int) -> dict[str, object]:
    """Return the cycles, and where the device tells it how many more it has room for."""
    left = None if cycles[-1].used_bytes is None else cycles[-1].free_bytes
    return {
        "cycle": TITLES["cycles"][kind],
        "count": len(cycles),
        "free": left,
        "more": None if left is None or per_cycle <= 0 else left // per_cycle,
    }
