"""Findings: facts about a run that change what its figures mean, each priced in bytes and KV tokens.

One function per finding, listed in ``FINDINGS``; each looks at the finished ranks and yields nothing where it does
not apply. A finding without a figure behind it does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from vllm_memprof.accounting import findings_attribution, findings_empty_cache, findings_oom
from vllm_memprof.accounting.headroom import profile_peak
from vllm_memprof.accounting.honest import CONTEXT_CEILING_BYTES, others_at_start
from vllm_memprof.accounting.kv import ALLOCATED, is_hybrid, tokens_for_blocks, worth_in_tokens
from vllm_memprof.accounting.model import Finding, NotSubtracted, RankReport
from vllm_memprof.record.loader import Run
from vllm_memprof.units import GIB, MIB, format_bytes, format_gib

#: Equations whose last term holds what other processes have on the device. (vllm-ascend#7308)
DOUBLE_COUNTING = ("E3", "E4p")
#: The most that one process is known to have held outside torch: 14 GiB, by a communication library.
NON_TORCH_CEILING_BYTES = 16 * GIB
#: What engines leave free in the sizes that they suggest.
_SUGGESTION_MARGIN_BYTES = 150 * MIB
_PEAK_FIGURES = (
    "profile_end_reserved_bytes",
    "profile_end_non_torch_bytes",
    "kv_cache_bytes",
    "requested_bytes",
)
#: From this size on, an not_subtracted item is a warning rather than a remark.
WARNING_BYTES = 128 * MIB

Finder = Callable[[Run, list[RankReport]], Iterator[Finding]]


def find(run: Run, ranks: list[RankReport]) -> list[Finding]:
    """All findings of a run, the gravest first, then by bytes."""
    gravity = {"error": 0, "warning": 1, "info": 2}
    found = [finding for finder in FINDINGS for finding in finder(run, ranks)]
    return sorted(found, key=lambda finding: (gravity[finding.severity], -abs(finding.bytes or 0)))


def _not_subtracted(finding_id: str, item_name: str, title: str) -> Finder:
    """A finding that is an item of the honest budget, where it is worth a KV block at least."""

    def finder(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
        for rank in ranks:
            item = next(
                (item for item in rank.budget.not_subtracted if item.name == item_name), None
            )
            if (
                item is not None
                and item.bytes is not None
                and item.bytes > 0
                and item.kv_tokens != 0
            ):
                yield _priced(finding_id, title, rank, item, item.bytes, ranks)

    return finder


def _priced(
    finding_id: str,
    title: str,
    rank: RankReport,
    item: NotSubtracted,
    size: int,
    ranks: list[RankReport],
) -> Finding:
    return Finding(
        id=finding_id,
        severity="warning" if size >= WARNING_BYTES else "info",
        rank=rank.rank,
        label=rank.label,
        bytes=size,
        kv_tokens=worth_in_tokens(rank.kv, size),
        title=title,
        evidence=f"{item.formula} = {format_bytes(size)} bytes, {item.source} ({item.how})",
        action=_charge_action(rank, size, ranks),
    )


def _charge_action(rank: RankReport, size: int, ranks: list[RankReport]) -> str:
    """The arguments that charge an not_subtracted amount, to the byte where the engine takes bytes.

    They hold for all ranks, so the rank with the smallest grant sets the figure.
    """
    grants = [other.budget.engine_kv_cache_bytes for other in ranks]
    granted = min((grant for grant in grants if grant is not None), default=None)
    total, utilization = rank.device_total_bytes, rank.budget.gpu_memory_utilization
    if granted is None or granted <= size:
        return ""
    choices = [f"--kv-cache-memory-bytes {granted - size}"] if rank.budget.takes_fixed_size else []
    if total and utilization and rank.budget.override is None:
        lower = math.floor((utilization - size / total) * 10_000) / 10_000
        choices += [f"--gpu-memory-utilization {lower:.4f}"] if lower > 0 else []
    return f"{', as does '.join([f'{choices[0]} charges it', *choices[1:]])}" if choices else ""


def _negative_kv(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if granted is None or granted > 0:
            continue
        known = {
            "requested": rank.budget.requested_bytes,
            "weights": rank.figures.get("weights_bytes"),
        }
        parts = [
            f"{name} {format_gib(size)} GiB" for name, size in known.items() if size is not None
        ]
        missing = -granted or _below_zero(rank)  # some releases print 0 for less
        if missing and not granted:
            parts.append(f"the equation gives -{format_gib(missing)} GiB")
        yield Finding(
            id="negative-kv",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=granted,
            title="The budget leaves nothing for the KV cache",
            evidence=", ".join([*parts, f"KV cache {format_gib(granted)} GiB"]),
            action=_raise_utilization(rank, missing),
        )


def _below_zero(rank: RankReport) -> int:
    """How far the charged terms go beyond the request, bytes; 0 where that is not known."""
    sizes = [row.bytes for row in rank.budget.terms if row.charged]
    asked = rank.budget.requested_bytes
    if asked is None or not sizes or None in sizes:
        return 0
    return max(0, sum(size for size in sizes if size is not None) - asked)


def _raise_utilization(rank: RankReport, missing: int) -> str:
    """The utilization that gives so much more; where the device is not known, by how much to raise it."""
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    if not missing:
        return "raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
    missing *= 2 if rank.budget.equation == "E4p" else 1
    if not total or not utilization:
        more = format_gib(missing)
        return f"raise --gpu-memory-utilization by more than {more} / the device's GiB"
    needed = math.ceil((utilization + missing / total) * 10_000) / 10_000
    if needed >= 1:
        return "no --gpu-memory-utilization below 1 is enough: lower --max-num-batched-tokens or use more devices"
    return f"more than --gpu-memory-utilization {needed:.4f} leaves a positive KV cache"


def device_total(rank: RankReport) -> int | None:
    """The device's total; where it was not recorded, the request over the share that it is."""
    if rank.device_total_bytes is not None:
        return rank.device_total_bytes
    asked, utilization = rank.figures.get("requested_bytes"), rank.budget.gpu_memory_utilization
    return None if asked is None or not utilization else round(asked / utilization)


def _kv_too_small(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """The engine refused to serve: not even one request of the length that was asked for fits."""
    for rank in ranks:
        wanted, granted = (
            rank.figures.get("kv_cache_minimum_bytes"),
            rank.budget.engine_kv_cache_bytes,
        )
        if wanted is None or granted is None or granted >= wanted:
            continue
        length = rank.figures.get("estimated_max_model_len")
        yield Finding(
            id="kv-too-small",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=int(wanted) - granted,
            title="The KV cache does not hold one request of max_model_len tokens",
            evidence=f"one request takes {format_gib(wanted)} GiB, KV cache {format_gib(granted)} GiB",
            action=f"--max-model-len {int(length)} fits"
            if length
            else _raise_utilization(rank, int(wanted) - granted),
        )


def _startup_refused(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        total, free = rank.device_total_bytes, rank.initial_free_bytes
        asked = rank.budget.requested_bytes
        if not rank.figures.get("startup_refused") or not total or free is None or asked is None:
            continue
        share = math.floor(free / total * 10_000) / 10_000
        yield Finding(
            id="startup-refused",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=asked - free,
            title="The engine asks for more than is free, and refuses to start",
            evidence=f"requested {format_gib(asked)} GiB = {rank.budget.gpu_memory_utilization} of {format_gib(total)}"
            f" GiB, free {format_gib(free)} GiB",
            action=(
                f"--gpu-memory-utilization {share:.4f} asks for what is free; or "
                if free * 2 >= asked
                else ""
            )
            + f"end what holds the other {format_gib(total - free)} GiB",
        )


def _unbalanced(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    printed = run.source == "log"
    for rank in ranks:
        budget = rank.budget
        if budget.balanced is False:
            said = "The printed KV cache is not what the printed figures give"
            evidence = f"engine {format_bytes(budget.engine_kv_cache_bytes)}, "
            evidence += f"recomputed {format_bytes(budget.kv_cache_bytes)}"
            if budget.tolerance_bytes:
                known = (
                    budget.engine_kv_cache_bytes,
                    budget.kv_cache_bytes,
                    budget.tolerance_bytes,
                )
                granted, given, slack = (format_gib(size) for size in known)
                evidence = f"engine {granted} GiB, recomputed {given} +-{slack} GiB: {evidence}"
            yield Finding(
                id="equation-unbalanced",
                severity="warning" if printed else "error",
                rank=rank.rank,
                label=rank.label,
                bytes=budget.residual_bytes,
                kv_tokens=worth_in_tokens(rank.kv, budget.residual_bytes),
                title=f"{said} by equation {budget.equation}: of two runs, or of another release"
                if printed
                else f"The engine granted another KV cache than its equation {budget.equation} gives",
                evidence=f"{evidence} bytes" if printed else f"{evidence} bytes ({budget.cite})",
            )


def _rank_skew(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Ranks that hold the same layers get unequal budgets; all of them serve with the smallest."""
    peers: dict[tuple[int | None, int | None], list[tuple[int, RankReport]]] = {}
    for rank in ranks:
        granted = rank.budget.engine_kv_cache_bytes
        unnamed = run.source == "log" and rank.rank is None  # a log may print one rank twice
        if granted is not None and not unnamed:
            peers.setdefault((rank.dp_rank, rank.pp_rank), []).append((granted, rank))
    for group in peers.values():
        low, least = min(group, key=lambda pair: pair[0])
        high, most = max(group, key=lambda pair: pair[0])
        tokens = worth_in_tokens(least.kv, high - low)
        if high > low and tokens != 0:
            yield Finding(
                id="rank-skew",
                severity="warning" if high - low >= WARNING_BYTES else "info",
                rank=least.rank,
                label=least.label,
                bytes=high - low,
                kv_tokens=tokens,
                title="Ranks get unequal KV caches, and all of them serve with the smallest",
                evidence=f"{least.label} {format_gib(low)} GiB, {most.label} {format_gib(high)} GiB",
            )


def _co_tenant(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Other processes on the device, from its free memory or from non-torch memory at the start."""
    own = {str(rank.pid) for rank in ranks}
    for rank in ranks:
        non_torch, charged = rank.figures.get("initial_non_torch_bytes"), _charged_as_cleared(rank)
        measured = others_at_start(rank.phases, own)
        if measured is not None:
            if measured >= findings_attribution.NOTEWORTHY_BYTES:
                evidence = f"{format_gib(measured)} GiB by the driver's list of processes"
                yield _held_by_others(rank, measured, charged, evidence)
            continue
        if rank.device_total_bytes is not None and rank.initial_free_bytes is not None:
            used = rank.device_total_bytes - rank.initial_free_bytes
            evidence = f"free {format_gib(rank.initial_free_bytes)} of {format_gib(rank.device_total_bytes)} GiB"
        elif non_torch is not None:
            used, evidence = int(non_torch), f"non-torch {format_gib(non_torch)} GiB"
        elif charged is not None:
            yield from _charged_for_others(rank, charged)
            continue
        else:
            continue
        if used > CONTEXT_CEILING_BYTES:
            yield _held_by_others(rank, used, charged, f"{evidence} at the engine's first snapshot")


def _held_by_others(rank: RankReport, used: int, charged: int | None, evidence: str) -> Finding:
    """E3 and its 310P kin charge what others hold, although the request is a share of the whole device."""
    budget = rank.budget
    cost, action, title = used, "", "The device was in use before the engine began"
    if budget.equation in DOUBLE_COUNTING and not rank.figures.get("startup_refused"):
        title += f", and equation {budget.equation} takes that from the KV cache"
        cost = used // 2 if budget.equation == "E4p" else used
        evidence += "" if charged is None else f", cleared by empty_cache {format_gib(charged)} GiB"
        action = _give_back(rank, used)
    return Finding(
        id="co-tenant",
        severity="warning",
        rank=rank.rank,
        label=rank.label,
        bytes=used,
        kv_tokens=worth_in_tokens(rank.kv, cost),
        title=title,
        evidence=evidence,
        action=action,
    )


def _charged_for_others(rank: RankReport, charged: int) -> Iterator[Finding]:
    """The last term of E3 alone shows it: empty_cache frees operator workspace, not what others hold."""
    if charged > CONTEXT_CEILING_BYTES:
        budget = rank.budget
        granted = budget.engine_kv_cache_bytes or 0
        parts = 2 if budget.equation == "E4p" else 1
        yield Finding(
            id="co-tenant",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=charged,
            kv_tokens=worth_in_tokens(rank.kv, charged // parts),
            title=f"Equation {budget.equation} charges what was in use before the engine began, "
            "as if empty_cache had cleared it",
            evidence=f"cleared by empty_cache {format_gib(charged)} GiB; without it the KV cache is "
            f"{format_gib(granted + charged // parts)}, not {format_gib(granted)} GiB (vllm-ascend#7308)",
            action=_give_back(rank, charged),
        )


def _charged_as_cleared(rank: RankReport) -> int | None:
    """The last term of E3 and E4p: as it is, or as what is missing between the request and the KV cache."""
    budget = rank.budget
    asked, granted = budget.requested_bytes, budget.engine_kv_cache_bytes
    if budget.equation not in DOUBLE_COUNTING:
        return None
    cleared = budget.term("cleared")
    if cleared is not None or asked is None or granted is None:
        return cleared
    terms = [budget.term(name) for name in ("weights", "peak_activation", "non_torch")]
    known = [size for size in terms if size is not None]
    together = rank.figures.get(
        "non_kv_cache_bytes", sum(known) if len(known) == len(terms) else None
    )
    return (
        None
        if together is None
        else asked - int(together) - granted * (2 if budget.equation == "E4p" else 1)
    )


def _give_back(rank: RankReport, size: int) -> str:
    total, utilization = device_total(rank), rank.budget.gpu_memory_utilization
    if not total or not utilization:
        return ""
    wanted = math.ceil((utilization + size / total) * 10_000) / 10_000
    return f"--gpu-memory-utilization {wanted:.4f} gives it back" if wanted < 1 else ""


def _oom_fragmentation(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Segments that the allocator held at an OOM and that no tensor used."""
    for rank in ranks:
        oom = rank.oom
        if oom is None:
            continue
        size, wanted = oom.fragmentation_bytes, oom.requested_bytes
        if size is None or size < WARNING_BYTES:
            continue
        reserved, free = oom.reserved_bytes or 0, oom.free_bytes
        held = oom.allocated_bytes
        evidence = f"reserved {format_gib(reserved)} GiB, "
        evidence += f"allocated {format_gib(reserved - size)} GiB" + (
            " at its peak" if held is None else ""
        )
        evidence += "" if wanted is None else f", {format_gib(wanted)} GiB were asked for"
        evidence += "" if free is None else f", {format_gib(free)} GiB free"
        variable = (
            "PYTORCH_CUDA_ALLOC_CONF" if run.info.engine == "vllm" else "PYTORCH_NPU_ALLOC_CONF"
        )
        yield Finding(
            id="fragmentation",
            severity="warning" if wanted is None or size + (free or 0) >= wanted else "info",
            rank=rank.rank,
            label=rank.label,
            bytes=size,
            kv_tokens=worth_in_tokens(rank.kv, size),
            title="At the OOM the allocator held memory that no tensor used",
            evidence=evidence,
            action=f"{variable}=expandable_segments:True, without max_split_size_mb: the two exclude each other",
        )


def _oom_others(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Memory outside this allocator at an OOM, more than one process is known to hold besides its tensors."""
    for rank in ranks:
        oom = rank.oom
        if oom is None:
            continue
        size, total = oom.other_bytes, oom.device_total_bytes
        if size is None or total is None or size <= min(NON_TORCH_CEILING_BYTES, total // 3):
            continue
        yield Finding(
            id="co-tenant",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=size,
            kv_tokens=worth_in_tokens(rank.kv, size),
            title="At the OOM most of what was missing was held outside this process's allocator",
            evidence=f"total {format_gib(total)} - free {format_gib(oom.free_bytes)} - reserved "
            f"{format_gib(oom.reserved_bytes)} = {format_gib(size)} GiB",
            action=f"end what else is on device {oom.device}, or take another one"
            if oom.device is not None
            else "end what else is on the device, or take another one",
        )


def _estimate_high(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """The engine charged more for graphs than their pools took."""
    for rank in ranks:
        row = next(
            (row for row in rank.budget.terms if row.name == "graph_estimate" and row.charged), None
        )
        actual = rank.figures.get("graph_bytes")
        if row is None or row.bytes is None or actual is None:
            continue
        over = row.bytes - max(0, int(actual))
        if over < WARNING_BYTES:
            continue
        yield Finding(
            id="graph-estimate-high",
            severity="info",
            rank=rank.rank,
            label=rank.label,
            bytes=over,
            kv_tokens=worth_in_tokens(rank.kv, over),
            title="The engine took more from the KV cache for graphs than they used",
            evidence=f"estimated {format_gib(row.bytes)}, captured {format_gib(actual)} GiB",
            action=_give_back(rank, over),
        )


def _suggestion_wrong(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """E6 suggests a KV cache from which it takes graph memory twice: the peak that it prints holds the estimate.

    vllm 0.33.0, vllm/v1/worker/gpu_worker.py::Worker.compile_or_warm_up_model. (vllm#57936)
    """
    for rank in ranks:
        f, half = rank.figures, rank.half_units
        names = (
            "requested_bytes",
            "consumed_bytes",
            "printed_peak_activation_bytes",
            "graph_bytes",
        )
        parts = [f.get(name) for name in names]
        estimate = f.get("graph_estimate_bytes")
        printed = f.get("suggested_requested_bytes", f.get("suggested_requested_printed_bytes"))
        if rank.budget.equation != "E6" or not estimate or printed is None or None in parts:
            continue
        asked, *rest = (part for part in parts if part is not None)
        slack = sum(half.get(name, 0) for name in (*names, "suggested_requested_printed_bytes"))
        if abs(asked - sum(rest) - _SUGGESTION_MARGIN_BYTES - printed) > slack + 1:
            continue
        right = int(printed) + int(estimate)
        evidence = (
            f"{format_gib(asked)} - {' - '.join(format_gib(part) for part in rest)} - 0.15 = "
        )
        evidence += f"{format_gib(printed)} GiB, and the peak activation holds the estimate of "
        yield Finding(
            id="engine-suggestion-wrong",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=int(estimate),
            kv_tokens=worth_in_tokens(rank.kv, int(estimate)),
            title="The KV cache that the engine suggests is too small: it subtracts graph memory twice",
            evidence=f"{evidence}{format_gib(estimate)} GiB already (vllm#57936)",
            action=f"--kv-cache-memory-bytes {right} ({format_gib(right)} GiB) is the same suggestion without that"
            if right > 0
            else "",
        )


def _base_mistaken(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """The author of a log takes the request for a share of the free memory; it is one of the total."""
    for rank in ranks:
        base, asked = (
            rank.figures.get("claimed_request_base_bytes"),
            rank.figures.get("requested_bytes"),
        )
        share = rank.budget.gpu_memory_utilization
        total = device_total(rank)
        if base is None or asked is None or share is None or total is None:
            continue
        off = round(asked - base * share)
        if abs(off) <= rank.half_units.get("requested_bytes", 0) + rank.half_units.get(
            "claimed_request_base_bytes", 0
        ):
            continue
        yield Finding(
            id="requested-base-mistaken",
            severity="info",
            rank=rank.rank,
            label=rank.label,
            bytes=off,
            kv_tokens=worth_in_tokens(rank.kv, off),
            title="The request is a share of the device's total, not of what was free at the start",
            evidence=f"{format_gib(base)} x {share} = {format_gib(base * share)}, not {format_gib(asked)} GiB: "
            f"{format_gib(asked)} / {share} = {format_gib(total)} GiB",
        )


def _headroom(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """What the profile run held at its worst moment and the KV cache do not fit on the device together."""
    for rank in ranks:
        total, granted = device_total(rank), rank.budget.engine_kv_cache_bytes
        peak = profile_peak(rank.phases, total)
        if total is None or granted is None or peak is None:
            continue
        over = peak + granted - total
        slack = sum(rank.half_units.get(name, 0) for name in _PEAK_FIGURES)
        if over <= slack or worth_in_tokens(rank.kv, over) == 0:
            continue
        fits = total - peak
        yield Finding(
            id="headroom-below-observed-peak",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=over,
            kv_tokens=worth_in_tokens(rank.kv, over),
            title="What the profile run held at its peak and the KV cache do not fit together: "
            "the allocator has to give cached blocks back while serving",
            evidence=f"{format_gib(peak)} GiB at the worst moment of the profile run, cached blocks included, "
            f"+ KV cache {format_gib(granted)} = {format_gib(peak + granted)} of {format_gib(total)} GiB",
            action=f"--kv-cache-memory-bytes {fits} leaves room for it"
            if fits > 0 and rank.budget.takes_fixed_size
            else "",
        )


def _hybrid(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Layers that do not grow with a request: the printed size tells nothing about how many requests fit."""
    for rank in ranks:
        kv = rank.kv
        if not is_hybrid(kv) or not kv.tokens or not kv.max_model_len:
            continue
        yield Finding(
            id="hybrid-concurrency",
            severity="info",
            rank=None,
            label=None,
            title="KV cache tokens over max_model_len is not the number of requests that fit: "
            "some layers do not grow with the length of a request",
            evidence=f"{kv.tokens:,} / {kv.max_model_len:,} = {kv.tokens / kv.max_model_len:.2f}, "
            f"the engine's concurrency is {kv.max_concurrency:.2f}x",
        )
        return  # the plan is the same on every rank


def _override_beyond_budget(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """More blocks were asked for than the budget holds: the engine takes the number as it is."""
    for rank in ranks:
        kv = rank.kv
        if (
            kv.override_blocks is None
            or kv.fitting_blocks is None
            or kv.override_blocks <= kv.fitting_blocks
        ):
            continue
        over = kv.override_blocks - kv.fitting_blocks
        yield Finding(
            id="block-override-beyond-budget",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=None if kv.bytes_per_block is None else over * kv.bytes_per_block,
            kv_tokens=tokens_for_blocks(kv, over),
            title="--num-gpu-blocks-override plans more KV blocks than the budget holds",
            evidence=f"{kv.override_blocks:,} blocks, and the budget holds {kv.fitting_blocks:,}: {over:,} too many",
            action=f"--num-gpu-blocks-override {kv.fitting_blocks} fits, as does none at all",
        )


def _allocated_beyond_plan(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """The tensors of the KV cache took more than the plan, beyond what padding explains."""
    for rank in ranks:
        check = next((check for check in rank.kv.checks if check.name == ALLOCATED), None)
        if check is None or check.ok is not False or check.found is None or check.expected is None:
            continue
        over = check.found - check.expected
        yield Finding(
            id="kv-allocation-off-plan",
            severity="warning",
            rank=rank.rank,
            label=rank.label,
            bytes=over,
            kv_tokens=worth_in_tokens(rank.kv, over),
            title="The KV cache took another amount of memory than the engine planned for it",
            evidence=f"planned {format_gib(check.expected)} GiB, allocated {format_gib(check.found)} GiB",
        )


def _halved(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if rank.figures.get("halved") and granted is not None and granted > 0:
            yield Finding(
                id="budget-halved",
                severity="info",
                rank=rank.rank,
                label=rank.label,
                bytes=granted,
                kv_tokens=worth_in_tokens(rank.kv, granted),
                title="On this device the engine grants half of its budget and keeps as much for operator workspace",
                evidence=f"KV cache {format_gib(granted)} GiB, halved for workspace",
            )


def _gb_is_gib(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """vllm-ascend prints the weights as GB and divides by 2**30."""
    if run.source != "log" or run.info.engine != "vllm-ascend":
        return
    for rank in ranks:
        size = rank.figures.get("weights_bytes")
        if size is None or rank.half_units.get("weights_bytes", GIB) > GIB // 10_000:
            continue  # other lines print two digits, and GiB
        value = size / GIB
        yield Finding(
            id="gb-is-gib",
            severity="info",
            rank=rank.rank,
            label=rank.label,
            bytes=round(size - value * 10**9),
            title='"Loading model weights took ... GB" prints GiB',
            evidence=f"{value:.4f} GB is {value:.4f} GiB = {format_bytes(round(size))} bytes, "
            "by NPUModelRunner.load_model",
        )


#: Settings of the caching allocator that it refuses beside expandable_segments:True.
#: (torch_npu 2.10, NPUAllocatorConfig.cpp::NPUAllocatorConfig::parseArgs)
_NOT_WITH_EXPANDABLE = ("max_split_size_mb", "garbage_collection_threshold")


def _allocator_config(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for variable, value in sorted(run.info.env.items()):
        if not variable.endswith("ALLOC_CONF"):
            continue
        settings = dict(entry.strip().partition(":")[::2] for entry in value.split(","))
        both = [name for name in _NOT_WITH_EXPANDABLE if name in settings]
        if (
            settings.get("expandable_segments", "").lower() == "true"
            and both
            and variable != "PYTORCH_CUDA_ALLOC_CONF"
        ):
            yield Finding(
                id="allocator-config-conflict",
                severity="error",
                rank=None,
                label=None,
                title=f"{both[0]} and expandable_segments:True exclude each other",
                evidence=f"{variable}={value}",
                action=f"{variable}=expandable_segments:True",
            )


def _hooks(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Required hooks that did not bind, or that bound and were never called: their phases are not measured."""
    troubled = {
        "missing": "hook-not-bound",
        "error": "hook-not-bound",
        "overwritten": "hook-overwritten",
    }
    troubled["never_called"] = "hook-never-called"
    for process in run.processes:
        who = process.identity
        for hook in process.hooks.values():
            if hook.need == "required" and hook.state in troubled:
                yield Finding(
                    id=troubled[hook.state],
                    severity="warning",
                    rank=who.rank,
                    label=who.label,
                    title=f"Required hook {hook.hook} is {hook.state.replace('_', ' ')}: {hook.phase} is not measured",
                    evidence=f"{hook.target or 'no target'}, {process.file}, {hook.detail or hook.state}",
                    action="memprof doctor shows which hooks bind with the installed versions",
                )


FINDINGS: tuple[Finder, ...] = (
    *findings_oom.FINDINGS,
    _negative_kv,
    _kv_too_small,
    _override_beyond_budget,
    _allocated_beyond_plan,
    _startup_refused,
    _oom_others,
    _oom_fragmentation,
    _unbalanced,
    _allocator_config,
    _hooks,
    _not_subtracted(
        "uncharged-persistent-torch",
        "persistent_torch",
        "Torch memory outside the weights is charged by no term",
    ),
    _not_subtracted(
        "graph-not-charged", "graph", "Graph memory is not subtracted from the KV cache"
    ),
    _not_subtracted(
        "non-torch-read-after-empty-cache",
        "non_torch_cleared",
        "Non-torch memory was read after empty_cache had freed a part of it",
    ),
    _headroom,
    _rank_skew,
    _co_tenant,
    _estimate_high,
    _suggestion_wrong,
    _base_mistaken,
    _hybrid,
    _halved,
    _gb_is_gib,
    *findings_empty_cache.FINDINGS,
    *findings_attribution.FINDINGS,
)
