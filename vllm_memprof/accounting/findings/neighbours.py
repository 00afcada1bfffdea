"""The finding about other processes on the device: at the start, or later."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import divisor_of, form_of
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import keep_apart, make_up_for
from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import WARNING, Found, RankContext, finding
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.accounting.readings.startup import others_at_start, others_in
from vllm_memprof.record.spans import edges_of
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, MIB

#: One process is known to have held 14 GiB outside torch, by a communication library.
NON_TORCH_CEILING_BYTES = 16 * GIB
#: On 310P a context takes about 1 GiB: of 43.24 GiB 23.45 were free beside a process with 18.86
#: (vllm-ascend#14004).
CONTEXT_CEILING_310P_BYTES = 3 * GIB // 2
#: Less than this of other processes is no finding.
NOTEWORTHY_BYTES = 16 * MIB


@finding(
    "co-tenant",
    severity=WARNING,
    title=text("The device was in use before the engine began"),
    needs=NOTHING,
)
def co_tenant(context: RankContext) -> Iterator[Found]:
    """Find memory of other processes on the device.

    Meaning:
        The engine's request is a share of the whole device, whoever else uses it. What another
        process holds is missing when the KV cache is in use, and equations E2, E3 and E4p take it
        from the KV cache as well, half of it on 310P (E4p). Where the engine refuses to start for
        it, or runs out of memory, `startup-refused` and `out-of-memory` say so instead.

    Computed:
        - At the start: what the driver's list of processes says (16 MiB or more), else device
          total less free memory, or non-torch memory, of the engine's first snapshot (more than
          1 GiB, on 310P 1.5 GiB: a runtime context alone holds less).
        - Of E3 and E4p alone: the last term, cleared by empty_cache, or what the granted KV cache
          leaves for it, with the same limits.
        - Of E2: what is used on the device beside torch's allocations, more than 16 GiB.
        - Later: the most that the driver's list showed in any phase, less what it showed first.

        Sources: `vllm_memprof/accounting/readings/startup.py::others_in`,
        `vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory` (vllm-ascend#7308).

    To do:
        End the other process, or take another device. For E2, E3 and E4p the finding names the
        utilization that makes up for it, where the engine would start with it; vllm-ascend from
        0.18 subtracts no other process's memory, except on 310P.
    """
    # a front end of the engine may hold a context of its own
    own = context.whole.pids.get(context.rank.host, frozenset())
    yield from _at_the_start(context.rank, own, context.ranks)
    first = others_at_start(context.rank.phases, own)
    if first is None:
        return
    held = [
        (others, span.phase)
        for span, edge in edges_of(context.rank.phases)
        if (others := others_in(edge.snapshot, own)) is not None
    ]
    most, phase = max(held, key=lambda entry: entry[0])
    if most - first >= NOTEWORTHY_BYTES:
        evidence = text(
            "other processes held {first:gib} GiB at the start and {most:gib} GiB in {phase} (the "
            "driver's list of processes)",
            first=first,
            most=most,
            phase=phase,
        )
        title = text("Another process took device memory while this one ran")
        yield Found(evidence, most - first, title=title)


def _at_the_start(
    rank: RankReport, own: frozenset[str], ranks: list[RankReport]
) -> Iterator[Found]:
    """Yield what others held, from the driver, the device's free memory, or the equation alone.

    E2, E3 and E4p subtract it although the request is a share of the whole device.
    """
    if rank.figures.get("startup_refused"):
        return  # one finding for one cause
    budget, row = rank.budget, form_of(rank.budget.equation)
    subtracts = row is not None and row.subtracts_neighbours
    parts, ceiling = divisor_of(budget.equation), _context_ceiling(rank)
    non_torch = rank.figures.get("initial_non_torch_bytes")
    used = others_at_start(rank.phases, own)
    least, evidence = NOTEWORTHY_BYTES, None
    if used is not None:
        evidence = text("{size:gib} GiB by the driver's list of processes", size=used)
    elif rank.device_total_bytes is not None and rank.initial_free_bytes is not None:
        used, least = rank.device_total_bytes - rank.initial_free_bytes, ceiling + 1
        evidence = text(
            "free {free:gib} of {total:gib} GiB at the engine's first snapshot",
            free=rank.initial_free_bytes,
            total=rank.device_total_bytes,
        )
    elif non_torch is not None:
        used, least = int(non_torch), ceiling + 1
        evidence = text("non-torch {size:gib} GiB at the engine's first snapshot", size=non_torch)
    elif subtracts:
        yield from _by_the_equation(rank, parts, ranks)
        return
    if used is None or evidence is None or used < least:
        return
    if not subtracts:
        yield Found(evidence, used)
        return
    subtracted = _subtracted_as_cleared(rank, parts)
    if subtracted is not None:
        cleared = text("cleared by empty_cache {size:gib} GiB", size=subtracted)
        evidence = join(", ", [evidence, cleared])
    title = text(
        "The device was in use before the engine began, and equation {equation} takes that from "
        "the KV cache",
        equation=budget.equation,
    )
    if parts != 1:
        title = text(
            "The device was in use before the engine began, and equation {equation} takes half of "
            "that from the KV cache",
            equation=budget.equation,
        )
    tokens = worth_in_tokens(rank.kv, used // parts)
    yield Found(evidence, used, _instead(rank, used, ranks), title, kv_tokens=tokens)


def _by_the_equation(rank: RankReport, parts: int, ranks: list[RankReport]) -> Iterator[Found]:
    """Yield what the equation subtracts beyond what one process holds, where nothing else tells."""
    budget = rank.budget
    granted, used = budget.engine_kv_cache_bytes or 0, budget.term("used_by_device")
    if used is not None and used > NON_TORCH_CEILING_BYTES:
        evidence = text(
            "used on the device beside torch's allocations {size:gib} GiB, more than a process is "
            "known to hold outside torch",
            size=used,
        )
        title = text(
            "Equation {equation} subtracts all that is in use on the device, the memory of other "
            "processes with it",
            equation=budget.equation,
        )
        yield Found(evidence, used, keep_apart(rank), title)
    subtracted = _subtracted_as_cleared(rank, parts)
    if subtracted is None or subtracted <= _context_ceiling(rank):
        return
    evidence = text(
        "cleared by empty_cache {size:gib} GiB; without it the KV cache is {right:gib}, not "
        "{granted:gib} GiB ({issue})",
        size=subtracted,
        right=granted + subtracted // parts,
        granted=granted,
        issue="vllm-ascend#7308" if parts == 1 else "vllm-ascend#14274",
    )
    title = text(
        "Equation {equation} subtracts what was in use before the engine began, as if "
        "empty_cache had cleared it",
        equation=budget.equation,
    )
    tokens = worth_in_tokens(rank.kv, subtracted // parts)
    yield Found(evidence, subtracted, _instead(rank, subtracted, ranks), title, kv_tokens=tokens)


def _instead(rank: RankReport, size: int, ranks: list[RankReport]) -> str:
    """Return the utilization that makes up for others' memory, and what avoids it."""
    said = make_up_for(rank, size, ranks)
    return join("; ", [said, keep_apart(rank)]) if said else keep_apart(rank)


def _context_ceiling(rank: RankReport) -> int:
    """Return the most that a runtime context alone holds on the rank's device, bytes."""
    on_310p = rank.budget.equation == "E4p"
    return CONTEXT_CEILING_310P_BYTES if on_310p else CONTEXT_CEILING_BYTES


def _subtracted_as_cleared(rank: RankReport, parts: int) -> int | None:
    """Return the last term of E3 and E4p, or what is missing between request and KV cache."""
    budget = rank.budget
    asked, granted = budget.requested_bytes, budget.engine_kv_cache_bytes
    cleared = budget.term("cleared")
    if budget.equation not in ("E3", "E4p") or cleared is not None:
        return cleared
    if asked is None or granted is None:
        return None
    together = rank.figures.get("non_kv_cache_bytes")
    if together is None:
        terms = [budget.term(name) for name in ("weights", "peak_activation", "non_torch")]
        known = [size for size in terms if size is not None]
        together = sum(known) if len(known) == len(terms) else None
    return None if together is None else asked - int(together) - granted * parts
