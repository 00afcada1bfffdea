"""Findings about the device: what it holds at the peak, other processes, memory outside torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import divisor_of
from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import (
    device_total,
    higher_share,
    keep_apart,
    leave_room,
)
from vllm_memprof.accounting.findings.rules import INFO, Context, Found
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.owners.growth import Growth, growth_by_owner
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.accounting.readings.startup import others_at_start, others_in
from vllm_memprof.record.spans import AFTER, edges_of, first_of, is_within
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, MIB, minus, sum_or_none

#: Less than this, of other processes or outside torch, is no finding.
NOTEWORTHY_BYTES = 16 * MIB
#: One process is known to have held 14 GiB outside torch, by a communication library.
NON_TORCH_CEILING_BYTES = 16 * GIB
#: On 310P a context takes about 1 GiB: of 43.24 GiB 23.45 were free beside a process with 18.86
#: (vllm-ascend#14004).
CONTEXT_CEILING_310P_BYTES = 3 * GIB // 2
#: Communicators that hold as much together are a finding, whatever sizes them.
_MANY_BUFFERS_BYTES = 1 * GIB
_DEFAULT_BUFFERS_BYTES = 2 * 200 * MIB
_VARIABLE = "HCCL_BUFFSIZE"


def serving_peak(verdict: str, rank: RankReport, run: Context) -> Iterator[Found]:
    """Find KV caches whose verdict is that they exceed the device, or nearly do.

    ``exceeds``: whatever the allocator releases. ``release``: unless it releases what is reserved,
    not allocated. ``narrow``: not, and less is left than profiling is known to miss.
    """
    budget, headroom = rank.budget, rank.budget.headroom_bytes
    if verdict != budget.device_verdict or (verdict == "exceeds" and rank.oom is not None):
        return  # of an allocation that failed, out-of-memory says more
    fits, size, margin = budget.fits_device_bytes, headroom, 0
    if verdict == "exceeds":
        fits, size = budget.fits_device_released_bytes, budget.released_headroom_bytes
    elif verdict == "narrow":
        margin = budget.unprofiled_bytes or 0
    if size is None or (verdict == "release" and worth_in_tokens(rank.kv, size) == 0):
        return
    sizes = [each.budget.fits_device_bytes for each in run.ranks]
    least = min((known - margin for known in sizes if known is not None), default=0)
    fixed = budget.takes_fixed_size and None not in sizes and least > 0
    items = [item for item in budget.held_at_peak if item.bytes]
    yield Found(
        size if verdict == "narrow" else -size,
        {
            "total": device_total(rank),
            "held": join(" + ", [text("{bytes:gib} {title}", item) for item in items]),
            "fits": fits,
            "granted": minus(fits, size),
            "argument": fixed and f"--kv-cache-memory-bytes {least}",
            "partly": any(item.bytes is None for item in budget.held_at_peak),
        },
    )


def engine_suggestion_beyond_device(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find sizes for ``--kv-cache-memory-bytes`` that the engine prints, beyond the device."""
    fits, slack = rank.budget.fits_device_bytes, rank.budget.device_tolerance_bytes
    for each in rank.budget.suggestions:
        if fits is not None and each.headroom_bytes is not None and each.headroom_bytes < -slack:
            yield Found(-each.headroom_bytes, {each.limit: each.bytes})


def co_tenant(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find memory of other processes on the device: at the start, or later."""
    # a front end of the engine may hold a context of its own
    own = run.pids.get(rank.host, frozenset())
    first = others_at_start(rank.phases, own)
    if not rank.figures.get("startup_refused"):  # one finding for one cause
        yield from _at_the_start(rank, run, first)
    held = [
        (others, span.phase)
        for span, edge in edges_of(rank.phases)
        if (others := others_in(edge.snapshot, own)) is not None
    ]
    if first is not None:
        later, phase = max(held, key=lambda entry: entry[0])
        if later - first >= NOTEWORTHY_BYTES:
            yield Found(later - first, {"first": first, "later": later, "phase": phase})


def _at_the_start(rank: RankReport, run: Context, driver: int | None) -> Iterator[Found]:
    """Yield what others held, from the driver, the device's free memory, or the equation alone.

    E2, E3 and E4p subtract it although the request is a share of the whole device.
    """
    budget, total, free = rank.budget, rank.device_total_bytes, rank.initial_free_bytes
    apart, parts = keep_apart(rank), divisor_of(budget.equation)
    cleared = _subtracted_as_cleared(rank, parts) if apart else None
    ceiling = CONTEXT_CEILING_BYTES if budget.equation != "E4p" else CONTEXT_CEILING_310P_BYTES
    non_torch = rank.figures.get("initial_non_torch_bytes")
    seen: dict[str, object] = {}
    if driver is not None:
        used, seen, ceiling = driver, {"driver": driver}, NOTEWORTHY_BYTES - 1
    elif total is not None and free is not None:
        used, seen = total - free, {"free": free, "total": total}
    elif non_torch is not None:
        used, seen = int(non_torch), {"non_torch": non_torch}
    else:  # what the equation subtracts beyond what one process holds
        everything = budget.term("used_by_device") or 0
        if apart and everything > NON_TORCH_CEILING_BYTES:
            yield Found(everything, {"everything": everything, **apart})
        used, granted = cleared or 0, budget.engine_kv_cache_bytes or 0
        issue = "vllm-ascend#7308" if parts == 1 else "vllm-ascend#14274"
        seen, cleared = {"taken": used, "right": granted + used // parts, "issue": issue}, None
    if used > ceiling:
        seen |= {"cleared": cleared, "halved": parts != 1, **apart}
        if apart:
            seen |= higher_share(rank, used, run.ranks)
        yield Found(used, seen, kv_tokens=worth_in_tokens(rank.kv, used // parts))


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
        together = sum_or_none(terms)
    return None if together is None else asked - int(together) - granted * parts


def allocation_outside_torch(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find memory that the process took from the device past torch's allocators, and kept."""
    shutdown, profile = (first_of(rank.phases, phase) for phase in ("shutdown", "profile_run"))
    # of the last moment before the shutdown at which the device was divided
    others = [
        row.bytes
        for span, edge in edges_of(rank.phases)
        if shutdown is None or (span.order, edge.side == AFTER) <= (shutdown.order, False)
        for row in (edge.owners.remainders() if edge.owners is not None else ())
        if row.component == "other" and row.bytes is not None
    ]
    last = others[-1] if others else None
    if last is None or last < NOTEWORTHY_BYTES:
        return
    for row, size in _own_growth(rank):
        if size >= NOTEWORTHY_BYTES:
            figures: dict[str, object] = {"after": row.after, "phase": row.phase, "last": last}
            if (
                profile is None
                or row.order <= profile.order
                or is_within(rank.phases, rank.phases[row.order], profile.order)
            ):
                yield Found(size, figures, severity=INFO)
            else:
                room = leave_room(rank, size, run.least_granted_bytes)
                yield Found(size, figures | {"late": True} | room)


def _own_growth(rank: RankReport) -> Iterator[tuple[Growth, int]]:
    """Yield the growth of ``other`` by phase, less that of the phases inside it."""
    table = growth_by_owner(rank)
    parents = {row.order: row.parent for row in rank.phases}
    inside: Counter[int | None] = Counter()
    for row in table:
        if row.after is None:
            inside[parents.get(row.order)] += row.remainders.get("other") or 0
    for row in table:
        size = row.remainders.get("other")
        if size is not None:
            yield row, size - (inside[row.order] if row.after is None else 0)


def communicator_buffers(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find communicators with large buffers, and a variable that sizes none of them."""
    buffers = []
    for span in rank.phases:
        size, source = span.integer("buffer_bytes"), span.string("buffer_source")
        if span.phase == "communicator" and size is not None and source is not None:
            name = f"{span.detail.get('group')}{' p2p' if span.detail.get('p2p') else ''}"
            buffers.append((name, size, source))
    said = [
        text(
            "{name} 2 x {size} MiB by {source}",
            name=name,
            size=size // 2 // MIB,
            source=text("HCCL's default") if source == "default" else source,
        )
        for name, size, source in buffers
    ]
    evidence, total = join(", ", said), sum(size for _, size, _ in buffers)
    by_variable = [size for _, size, source in buffers if source == _VARIABLE]
    over = sum(size - _DEFAULT_BUFFERS_BYTES for size in by_variable)
    asked = run.run.info.env.get(_VARIABLE)
    if over >= NOTEWORTHY_BYTES:
        yield Found(over, {"buffers": evidence, "over": over})
    elif asked and buffers and not by_variable:
        yield Found(total, {"buffers": evidence, "setting": f"{_VARIABLE}={asked}"}, severity=INFO)
    elif total >= _MANY_BUFFERS_BYTES:
        yield Found(total, {"buffers": evidence, "count": len(buffers)}, severity=INFO)
