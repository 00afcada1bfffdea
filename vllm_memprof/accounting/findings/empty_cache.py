"""Findings about single calls of ``empty_cache``.

Read in public: a call while requests run synchronises every stream (sgl-project/sglang#22998); a
debug line that empties the cache, and so changes what it reports on (sglang#24397).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_memprof.accounting.findings.needs import HOOKS
from vllm_memprof.accounting.findings.observers import observer_of
from vllm_memprof.accounting.findings.registry import (
    INFO,
    WARNING,
    WARNING_BYTES,
    Found,
    RankContext,
    finding,
    known,
)
from vllm_memprof.accounting.model import ENGINE, EmptyCacheCall
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import MIB

#: From this share on, what was freed counts as reallocated.
REFILLED_SHARE = 0.8
#: Seconds from which on calls of the start-up, which keep no request waiting, are a finding.
START_UP_COST_S = 0.1


@finding(
    "empty-cache-in-hot-path",
    severity=WARNING,
    title=text("empty_cache is called while requests run: each call waits for the whole device"),
    needs=HOOKS,
)
def empty_cache_in_hot_path(context: RankContext) -> Iterator[Found]:
    """Find calls of empty_cache while requests run, by place.

    Meaning:
        The call synchronises the device and gives blocks back that the next step allocates again.
        Every running request waits.

    Computed:
        Calls of the engine after it was ready, inside a step or while the model runner held
        requests, with their seconds and what they freed
        (`vllm_memprof/accounting/empty_cache.py::empty_cache_calls`). The bytes are those of the
        call that freed most.

    To do:
        Remove the call. One call after the warm-up releases what is left over from the start-up;
        `memprof offline --empty-cache-at warm_up` shows how much.
    """
    serving = [call for call in context.rank.empty_cache if call.while_serving]
    for site, calls in _by_site(serving).items():
        freed = [call.freed_bytes for call in calls if call.freed_bytes is not None]
        seconds = [call.seconds for call in calls if call.seconds is not None]
        requests = [call.requests for call in calls if call.requests is not None]
        inside = sum(1 for call in calls if call.in_step)
        again = [
            call.refilled_bytes
            for call in calls
            if call.refilled_by is not None and call.refilled_bytes is not None
        ]
        parts = [
            _calls_at(site, calls),
            *known((text("{count} of them inside a step"), inside or None), name="count"),
            text("up to {count} request(s) held", count=max(requests))
            if requests
            else text("requests not known"),
            text("{time:ms} ms in all", time=sum(seconds)),
            text("{time:ms} ms at most", time=max(seconds, default=None)),
            text("device synchronised"),
        ]
        if freed:
            parts += [
                text("freed {size:gib4} GiB in all", size=sum(freed)),
                text("{size:gib4} GiB reallocated by the next reading", size=sum(again))
                if again
                else text("reallocated: not known"),
            ]
        action = text(
            "remove the call from {where}; one call after the warm-up releases what is left over: "
            "memprof offline --empty-cache-at warm_up shows how much that is",
            where=_place(calls, site),
        )
        yield Found(join(", ", parts), max(freed, default=None), action)


@finding(
    "observation-empties-cache",
    severity=WARNING,
    title=text("A memory reading calls empty_cache, and so changes what it reads"),
    needs=HOOKS,
)
def observation_empties_cache(context: RankContext) -> Iterator[Found]:
    """Find calls of empty_cache from functions that read memory or write a log.

    Meaning:
        The figure that such a function prints is what was left after the call, not what the run
        held. A warning where requests were running, or 128 MiB or more were freed; info
        otherwise.

    Computed:
        The call chain of each call, from the innermost function outwards, against the patterns of
        `vllm_memprof/accounting/findings/observers.py::OBSERVERS`. vLLM's own profiling, which
        empties the cache on purpose, is left out.

    To do:
        Read free memory without empty_cache there.
    """
    found: dict[tuple[str, Text], list[EmptyCacheCall]] = {}
    for call in context.rank.empty_cache:
        observer = observer_of(call.chain) if call.by == ENGINE else None
        if observer is not None:
            found.setdefault(observer, []).append(call)
    for (entry, what), calls in found.items():
        freed = sum(call.freed_bytes or 0 for call in calls)
        phases: dict[str, int] = {}
        for call in calls:
            phase = call.phase or text("no phase")
            phases[phase] = phases.get(phase, 0) + (call.freed_bytes or 0)
        sizes = [text("{phase} {size:gib4}", phase=each, size=n) for each, n in phases.items()]
        count = len(calls)
        evidence = text(
            "{caller} ({what}): {calls}, {time:ms} ms, freed {size:gib4} GiB before it read: "
            "{phases}",
            caller=entry,
            what=what,
            calls=text("1 call") if count == 1 else text("{count:,} calls", count=count),
            phases=join(", ", sizes),
            time=sum(call.seconds or 0 for call in calls),
            size=freed,
        )
        action = text(
            "read free memory without empty_cache in {where}; what it printed is what was left "
            "after the call, not what the run held",
            where=entry,
        )
        grave = freed >= WARNING_BYTES or any(call.while_serving for call in calls)
        yield Found(evidence, freed, action, severity=WARNING if grave else INFO)


@finding(
    "empty-cache-refilled",
    severity=WARNING,
    title=text("What empty_cache freed was reallocated at once: the call takes time, frees little"),
    needs=HOOKS,
)
def empty_cache_refilled(context: RankContext) -> Iterator[Found]:
    """Find calls of empty_cache whose freed memory was taken again by the next reading.

    Meaning:
        The device is synchronised, segments are given back and reserved again, and hardly any
        memory is free afterwards. A warning while requests run, info otherwise.

    Computed:
        By place: freed bytes of all calls (2 MiB or more), and growth of reserved and non-torch
        memory until the next reading, 80 % or more of them
        (`vllm_memprof/accounting/empty_cache.py::empty_cache_calls`). Calls of the start-up count
        where they took 0.1 s or more together. The bytes are what stayed free.

    To do:
        Remove the call.
    """
    own = [call for call in context.rank.empty_cache if call.refilled_by is not None]
    for site, members in _by_site(own).items():
        slow = sum(call.seconds or 0 for call in members) >= START_UP_COST_S
        calls = [call for call in members if call.after_ready] or (members if slow else [])
        freed = sum(call.freed_bytes or 0 for call in calls)
        again = sum(call.refilled_bytes or 0 for call in calls)
        if freed < 2 * MIB or again < REFILLED_SHARE * freed:
            continue
        evidence = text(
            "{calls}: freed {freed:bytes} bytes, {again:bytes} of them reallocated by {phase}, "
            "{time:ms} ms",
            calls=_calls_at(site, calls),
            freed=freed,
            again=again,
            phase=calls[-1].refilled_by,
            time=sum(call.seconds or 0 for call in calls),
        )
        action = text(
            "remove the call from {where}: it leaves {size:gib4} GiB free",
            where=_place(calls, site),
            size=freed - again,
        )
        severity = WARNING if any(call.while_serving for call in calls) else INFO
        yield Found(evidence, freed - again, action, severity=severity)


def _by_site(calls: Iterable[EmptyCacheCall]) -> dict[str, list[EmptyCacheCall]]:
    found: dict[str, list[EmptyCacheCall]] = {}
    for call in calls:
        if call.by == ENGINE:
            found.setdefault(call.site or text("an unknown place"), []).append(call)
    return found


def _names(calls: list[EmptyCacheCall]) -> list[str]:
    return list(dict.fromkeys(call.function for call in calls if call.function))


def _calls_at(site: str, calls: list[EmptyCacheCall]) -> Text:
    """Return the number of calls and their place: file.py:line, and the functions there."""
    names = _names(calls)
    where = text("{site} ({functions})", site=site, functions=", ".join(names)) if names else site
    if len(calls) == 1:
        return text("1 call at {where}", where=where)
    return text("{count:,} calls at {where}", count=len(calls), where=where)


def _place(calls: list[EmptyCacheCall], site: str) -> str:
    names = _names(calls)
    return names[0] if len(names) == 1 else site
