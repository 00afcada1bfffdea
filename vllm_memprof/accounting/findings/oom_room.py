"""What gives enough room after an OOM: arguments of the engine, each with the bytes it gives."""

from __future__ import annotations

import math

from vllm_memprof.accounting.engine_options import is_cuda, options_of, share_of
from vllm_memprof.accounting.equations import divisor_of
from vllm_memprof.accounting.findings.registry import WARNING_BYTES, RankContext
from vllm_memprof.accounting.model import Oom, RankReport
from vllm_memprof.record.spans import ancestors, first_of
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, format_gib


def gib_of(rank: RankReport, size: int | None) -> str:
    """Return GiB with as many digits as are known: a log prints two, or MiB."""
    logged = "oom_requested_bytes" in rank.figures or "oom_reserved_bytes" in rank.figures
    return format_gib(size, 2 if logged and size is not None and abs(size) >= GIB else 4)


def room_for(context: RankContext, oom: Oom, kv_cache: bool | None, missing: int | None) -> str:
    """Return the arguments that give enough, each with the bytes that it gives."""
    rank, engine = context.rank, context.run.info.engine
    options = options_of(engine)
    needed = oom.requested_bytes if missing is None else missing
    if needed is not None:  # a log rounds both
        needed += sum(
            rank.half_units.get(name, 0) for name in ("oom_requested_bytes", "oom_free_bytes")
        )
    choices: list[str] = []
    split = oom.process_non_torch_bytes is not None
    outside = oom.other_processes_bytes if split else oom.other_bytes
    if outside is not None and outside > (oom.device_total_bytes or outside) // 3:
        return _end_the_others(oom, outside, split)
    idle = oom.fragmentation_bytes
    enough_idle = idle is not None and idle >= max(needed or 0, WARNING_BYTES)
    if enough_idle and not is_expandable(oom):
        setting = f"{allocator_variable(context)}=expandable_segments:True"
        size = gib_of(rank, idle)
        choices.append(text("{argument} gives up to {size} GiB", argument=setting, size=size))
    if kv_cache or "kv_cache_alloc" in (oom.phase, *_around(rank)):
        choices += _smaller_kv_cache(rank, oom, needed, engine)
        phases = (oom.phase or "", *_around(rank))
        choices += [options.beside_kv[phase] for phase in phases if phase in options.beside_kv][:1]
        pools = oom.graph_pools_bytes
        if pools is not None and needed is not None and pools >= needed:
            size = gib_of(rank, pools)
            choices.append(
                text("{argument} gives {size} GiB", argument=options.no_graphs, size=size)
            )
        elif oom.phase == "graph_capture" or "graph_capture" in _around(rank):
            choices.append(options.no_graphs_said)
        if not choices or oom.phase is None:
            return join(", or ", choices)
        return text(
            "{choices}; what the rest of {phase} takes is not known",
            choices=join(", or ", choices),
            phase=oom.phase,
        )
    if kv_cache is False:
        phases = (oom.phase or "", *_around(rank))
        before = next(
            (options.before_kv[phase] for phase in phases if phase in options.before_kv), None
        )
        if before is not None:
            choices.append(text("{argument} (by how much is not known)", argument=before))
        return join(", or ", choices)
    cases: list[str] = [join(", or ", choices)] if choices else []
    smaller = _smaller_kv_cache(rank, oom, needed, engine) or [options.lower_share]
    cases.append(
        text("after the KV cache was allocated: {choices}", choices=join(", or ", smaller))
    )
    cases.append(options.before_kv_else)
    return join("; ", cases)


def _end_the_others(oom: Oom, outside: int, split: bool) -> str:
    """Return the advice where most of the device is outside this process's allocator."""
    device = text("the device")
    if oom.device is not None:
        device = text("device {device}", device=oom.device)
    if split:
        return text(
            "end what else is on {device}: other processes hold {size:gib} GiB",
            device=device,
            size=outside,
        )
    return text(
        "end what else is on {device}, or take another one: {size:gib} GiB, with what this process "
        "holds outside torch",
        device=device,
        size=outside,
    )


def _around(rank: RankReport) -> list[str]:
    """Return the phases in which the allocation failed, the innermost first."""
    failure = first_of(rank.phases, "oom")
    return [] if failure is None else [s.phase for s in ancestors(rank.phases, failure)]


def is_expandable(oom: Oom) -> bool:
    """Return whether the allocator's segments could grow already."""
    if oom.free_blocks is not None and oom.free_blocks.expandable:
        return True
    return "expandable_segments:true" in (oom.allocator_settings or "").lower()


def allocator_variable(context: RankContext) -> str:
    info = context.run.info
    chip = "CUDA" if is_cuda(info.engine, info.device) else "NPU"
    return f"PYTORCH_{chip}_ALLOC_CONF"


def _smaller_kv_cache(
    rank: RankReport, oom: Oom, needed: int | None, engine: str | None
) -> list[str]:
    """Return the arguments that make the KV cache smaller by the bytes needed, at least."""
    budget = rank.budget
    asked = share_of(rank, engine)
    granted, utilization, option = budget.engine_kv_cache_bytes, asked.value, asked.option
    total = asked.base_bytes
    if option == "--gpu-memory-utilization":
        total = total or oom.device_total_bytes
    if needed is None or (granted is not None and granted <= needed):
        return []
    choices: list[str] = []
    if granted is not None and budget.equation is not None and budget.takes_fixed_size:
        fixed = granted - rank.half_units.get("kv_cache_bytes", 0) - needed
        argument = f"--kv-cache-memory-bytes {fixed}"
        choices.append(
            text("{argument} gives {size} GiB", argument=argument, size=gib_of(rank, needed))
        )
    if total is None or budget.override is not None:
        return choices
    parts = divisor_of(budget.equation)
    lower = math.ceil(needed * parts / total * 10_000) / 10_000
    gives = int(lower * total / parts)
    if utilization is None:
        choices.append(
            text(
                "{option} lower by {share:.4f} gives {size} GiB",
                option=option,
                share=lower,
                size=gib_of(rank, gives),
            )
        )
    else:
        share = math.floor((utilization - lower) * 10_000 + 1e-6) / 10_000
        if share > 0:
            argument = f"{option} {share:.4f}"
            given = int((utilization - share) * total / parts)
            size = gib_of(rank, given)
            choices.append(text("{argument} gives {size} GiB", argument=argument, size=size))
    return choices
