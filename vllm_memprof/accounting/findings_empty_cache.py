"""Findings about ``empty_cache``, sleep cycles and weight updates. One function each, as in findings.py.

Read in public: a call while requests run synchronises every stream (sgl-project/sglang#22998); reserved memory that
grows with each weight update until the device is full (sglang#24854); a debug line that empties the cache, and so
changes what it reports on (sglang#24397); +240 MB with each sleep and wake-up (vllm-ascend#9563).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from vllm_memprof.accounting.kv import worth_in_tokens
from vllm_memprof.accounting.model import Finding, RankReport
from vllm_memprof.accounting.reclaim import ENGINE, Cycle, EmptyCacheCall
from vllm_memprof.record.loader import Run
from vllm_memprof.units import MIB, format_bytes, format_gib

#: From this growth per cycle on, in every cycle, memory is said to grow: half a large block of the caching allocator.
GROWTH_BYTES = MIB
#: Cycles that it takes to speak of growth; the first may take what the engine needs only once.
LEAST_CYCLES = 3
#: From this share on, what was freed counts as taken again.
REFILLED_SHARE = 0.8
#: Seconds from which on calls of the start-up, which keep no request waiting, are worth speaking of.
START_UP_COST_S = 0.1


@dataclass(frozen=True)
class Observer:
    """Functions that read memory or write a log: whoever calls ``empty_cache`` from there changes what is observed."""

    module: str  # pattern of the whole module name
    function: str  # pattern of the function's name, without its class
    what: str


#: The most specific first.
OBSERVERS: tuple[Observer, ...] = (
    Observer(
        r"vllm\.platforms\.\w+",
        r"get_current_memory_usage",
        "vLLM's reading of memory around the weight load",
    ),
    Observer(
        r"vllm\.utils(\.mem_utils)?",
        r"(measure|current_memory_usage|__enter__|__exit__)",
        "a memory reading",
    ),
    Observer(
        r"sglang\..*",
        r"get_available_gpu_memory",
        "sglang's reading of free memory, also for its log lines",
    ),
    Observer(
        r"(logging|loguru|structlog|prometheus_client)(\..*)?", r".*", "writing a log or a metric"
    ),
    Observer(
        r".*",
        r"_?(get|read|query|check|log|print|report|dump|show|current|available)_"
        r"(\w+_)?(memory|mem|hbm|vram)(_\w+)?",
        "a memory reading",
    ),
)
#: vLLM empties the cache on purpose before it measures what is left for the KV cache: not a side effect.
_ON_PURPOSE = re.compile(r"(:|\.)(memory_profiling|determine_available_memory)$")


def observer_of(chain: Sequence[str]) -> tuple[str, str] | None:
    """(caller as module:function, what it is) of the first observer in a call chain, from the innermost outwards."""
    for entry in chain:
        if _ON_PURPOSE.search(entry):
            return None
        module, _, name = entry.partition(":")
        function = name.rpartition(".")[2]
        for row in OBSERVERS:
            if re.fullmatch(row.module, module) and re.fullmatch(row.function, function):
                return entry, row.what
    return None


def _in_hot_path(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        for site, calls in _by_site(
            call for call in rank.empty_cache if call.while_serving
        ).items():
            freed = [call.freed_bytes for call in calls if call.freed_bytes is not None]
            seconds = [call.seconds for call in calls if call.seconds is not None]
            requests = [call.requests for call in calls if call.requests is not None]
            inside = sum(1 for call in calls if call.in_step)
            parts = [f"{_times(len(calls))} at {site}{_function(calls)}"]
            parts += [f"{inside} of them inside a step"] if inside else []
            parts += (
                [f"up to {max(requests)} request(s) held"] if requests else ["requests not known"]
            )
            parts += [
                f"{_ms(sum(seconds))} in all, {_ms(max(seconds))} at most, device synchronised"
            ]
            parts += (
                [f"freed {format_gib(sum(freed), 4)} GiB in all, {_again(calls)}"] if freed else []
            )
            most = max(freed, default=None)
            yield Finding(
                id="empty-cache-in-hot-path",
                severity="warning",
                rank=rank.rank,
                label=rank.label,
                bytes=most,
                kv_tokens=None if most is None else worth_in_tokens(rank.kv, most),
                title="empty_cache is called while requests run: each call waits for the whole device",
                evidence=", ".join(parts),
                action=f"take the call out of {_place(calls, site)}; one call after the warm-up gives back what is "
                "left over: memprof offline --empty-cache-at warm_up shows how much that is",
            )


def _observation(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        found: dict[tuple[str, str], list[EmptyCacheCall]] = {}
        for call in rank.empty_cache:
            who = observer_of(call.chain) if call.by == ENGINE else None
            if who is not None:
                found.setdefault(who, []).append(call)
        for (entry, what), calls in found.items():
            freed = sum(call.freed_bytes or 0 for call in calls)
            serving = any(call.while_serving for call in calls)
            phases = list(dict.fromkeys(call.phase or "no phase" for call in calls))
            yield Finding(
                id="observation-empties-cache",
                severity="warning" if serving or freed >= 128 * MIB else "info",
                rank=rank.rank,
                label=rank.label,
                bytes=freed,
                kv_tokens=worth_in_tokens(rank.kv, freed),
                title="Looking at memory changes it: a reading calls empty_cache",
                evidence=f"{entry} ({what}): {_times(len(calls))} in {', '.join(phases)}, "
                f"{_ms(sum(call.seconds or 0 for call in calls))}, freed {format_gib(freed, 4)} GiB before it read",
                action=f"read free memory without empty_cache in {entry}; what it printed is what was left after the "
                "call, not what the run held",
            )


def _refilled(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        calls = [
            call for call in rank.empty_cache if call.by == ENGINE and call.refilled_by is not None
        ]
        for site, members in _by_site(calls).items():
            slow = sum(call.seconds or 0 for call in members) >= START_UP_COST_S
            habit = [call for call in members if call.after_ready] or (members if slow else [])
            freed = sum(call.freed_bytes or 0 for call in habit)
            again = sum(call.refilled_bytes or 0 for call in habit)
            if freed < 2 * MIB or again < REFILLED_SHARE * freed:
                continue
            yield Finding(
                id="empty-cache-refilled",
                severity="warning" if any(call.while_serving for call in habit) else "info",
                rank=rank.rank,
                label=rank.label,
                bytes=freed - again,
                kv_tokens=worth_in_tokens(rank.kv, freed - again),
                title="What empty_cache freed was taken again at once: a cost without a gain",
                evidence=f"{_times(len(habit))} at {site}{_function(habit)}: freed {format_bytes(freed)} bytes, "
                f"{format_bytes(again)} of them taken again by {habit[-1].refilled_by}, "
                f"{_ms(sum(call.seconds or 0 for call in habit))}",
                action=f"take the call out of {_place(habit, site)}: it leaves {format_gib(freed - again, 4)} GiB free",
            )


def _reserved_grows(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank, kind, cycles in _series(ranks):
        grown = [cycle.cached_residue_bytes for cycle in cycles[1:]]
        if not _always(grown) or any(cycle.emptied for cycle in cycles[1:]):
            continue
        per_cycle = round(median(_known(grown)))
        total = sum(_known(grown))
        yield Finding(
            id="reserved-grows-without-empty-cache",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=total,
            kv_tokens=worth_in_tokens(rank.kv, total),
            title=f"Reserved memory grows with every {_NAMES[kind]}, and nobody gives it back",
            evidence=f"cached blocks (reserved - allocated) {_list(grown)} over {len(cycles)} cycles, "
            f"no empty_cache in between{_until_full(cycles, per_cycle)}",
            action=f"torch.npu.empty_cache() once after each {_NAMES[kind]}, before requests run again, gives back "
            f"up to {format_gib(total, 4)} GiB here",
        )


def _residue(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank, kind, cycles in _series(ranks):
        parts = {
            "allocated": [cycle.allocated_residue_bytes for cycle in cycles[1:]],
            "non-torch": [cycle.non_torch_residue_bytes for cycle in cycles[1:]],
        }
        if all(cycle.emptied_inside for cycle in cycles[1:]):
            parts["cached (empty_cache leaves it)"] = [
                cycle.cached_residue_bytes for cycle in cycles[1:]
            ]
        growing = {name: _known(sizes) for name, sizes in parts.items() if _always(sizes)}
        if not growing:
            continue
        sums = [sum(sizes) for sizes in zip(*growing.values(), strict=True)]
        per_cycle = round(median(sums))
        yield Finding(
            id="residue-per-cycle",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=per_cycle,
            kv_tokens=worth_in_tokens(rank.kv, per_cycle),
            title=f"Every {_NAMES[kind]} leaves memory behind",
            evidence=f"{'; '.join(f'{name} {_list(sizes)}' for name, sizes in growing.items())} "
            f"over {len(cycles)} cycles{_until_full(cycles, per_cycle)}",
            action=_residue_action(kind, growing),
        )


def _residue_action(kind: str, growing: dict[str, list[int]]) -> str:
    if "allocated" in growing:
        return (
            "tensors stay alive: take torch.npu.memory_snapshot() after two cycles and compare the blocks of the size "
            f"{format_bytes(growing['allocated'][-1])} bytes"
        )
    if kind == "sleep" and "non-torch" in growing:
        return (
            "--additional-config '{\"enable_sleep_mode_extra_cleanup\": true}' (vllm-ascend 0.23 on) ends "
            "communicators and graph workspaces with each sleep"
        )
    return ""


_NAMES = {"sleep": "sleep and wake-up", "weight_update": "weight update"}

FINDINGS: tuple[Callable[[Run, list[RankReport]], Iterator[Finding]], ...] = (
    _in_hot_path,
    _observation,
    _refilled,
    _reserved_grows,
    _residue,
)


def _series(ranks: list[RankReport]) -> Iterator[tuple[RankReport, str, list[Cycle]]]:
    for rank in ranks:
        for kind in _NAMES:
            cycles = [cycle for cycle in rank.cycles if cycle.kind == kind]
            if len(cycles) >= LEAST_CYCLES:
                yield rank, kind, cycles


def _always(sizes: list[int | None]) -> bool:
    return all(size is not None and size >= GROWTH_BYTES for size in sizes)


def _known(sizes: list[int | None]) -> list[int]:
    return [size for size in sizes if size is not None]


def _list(sizes: Sequence[int | None]) -> str:
    """``+240.0 MiB x 4``, or each where they differ."""
    known = [size for size in sizes if size is not None]
    texts = [f"{size / MIB:+.1f}" for size in known]
    return f"{texts[0]} MiB x {len(texts)}" if len(set(texts)) == 1 else f"{', '.join(texts)} MiB"


def _until_full(cycles: list[Cycle], per_cycle: int) -> str:
    used = cycles[-1].used_bytes
    if used is None or cycles[-1].free_bytes is None or per_cycle <= 0:
        return ""
    left = cycles[-1].free_bytes
    return f"; {format_gib(left)} GiB are free: full after {left // per_cycle} more"


def _by_site(
    calls: Iterator[EmptyCacheCall] | list[EmptyCacheCall],
) -> dict[str, list[EmptyCacheCall]]:
    found: dict[str, list[EmptyCacheCall]] = {}
    for call in calls:
        if call.by == ENGINE:
            found.setdefault(call.site or "an unknown place", []).append(call)
    return found


def _function(calls: list[EmptyCacheCall]) -> str:
    names = list(dict.fromkeys(call.function for call in calls if call.function))
    return f" ({', '.join(names)})" if names else ""


def _place(calls: list[EmptyCacheCall], site: str) -> str:
    names = list(dict.fromkeys(call.function for call in calls if call.function))
    return names[0] if len(names) == 1 else site


def _again(calls: list[EmptyCacheCall]) -> str:
    known = [
        call for call in calls if call.refilled_bytes is not None and call.refilled_by is not None
    ]
    if not known:
        return "taken again: not known"
    return f"{format_gib(sum(call.refilled_bytes or 0 for call in known), 4)} GiB taken again by the next reading"


def _times(count: int) -> str:
    return "1 call" if count == 1 else f"{count:,} calls"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
