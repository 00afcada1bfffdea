"""Findings: facts about a run that change what its figures mean, each priced in bytes and KV tokens.

One function per finding, listed in ``FINDINGS``; each looks at the finished ranks and yields nothing where it does
not apply. A finding without a figure behind it does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from vllm_memprof.ledger.honest import CONTEXT_CEILING_BYTES
from vllm_memprof.ledger.kv import worth_in_tokens
from vllm_memprof.ledger.model import Finding, RankReport, UnchargedItem
from vllm_memprof.record.loader import Run
from vllm_memprof.units import MIB, format_bytes, format_gib

#: From this size on, an uncharged item is a warning rather than a remark.
WARNING_BYTES = 128 * MIB

Finder = Callable[[Run, list[RankReport]], Iterator[Finding]]


def find(run: Run, ranks: list[RankReport]) -> list[Finding]:
    """All findings of a run, the gravest first, then by bytes."""
    gravity = {"error": 0, "warning": 1, "info": 2}
    found = [finding for finder in FINDINGS for finding in finder(run, ranks)]
    return sorted(found, key=lambda finding: (gravity[finding.severity], -abs(finding.bytes or 0)))


def _uncharged(finding_id: str, item_name: str, title: str) -> Finder:
    """A finding that is an item of the honest budget, where it is worth a KV block at least."""

    def finder(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
        for rank in ranks:
            item = next((item for item in rank.budget.uncharged if item.name == item_name), None)
            if item is not None and item.bytes is not None and item.bytes > 0 and item.kv_tokens != 0:
                yield _priced(finding_id, title, rank, item, item.bytes, ranks)

    return finder


def _priced(
    finding_id: str, title: str, rank: RankReport, item: UnchargedItem, size: int, ranks: list[RankReport]
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
    """The arguments that charge an uncharged amount, to the byte where the engine takes bytes.

    They hold for all ranks, so the rank with the smallest grant sets the figure.
    """
    grants = [other.budget.engine_kv_cache_bytes for other in ranks]
    granted = min((grant for grant in grants if grant is not None), default=None)
    total, utilization = rank.device_total_bytes, rank.budget.gpu_memory_utilization
    if granted is None or granted <= size:
        return ""
    text = f"--kv-cache-memory-bytes {granted - size} charges it"
    if total and utilization and rank.budget.override is None:
        lower = math.floor((utilization - size / total) * 10_000) / 10_000
        text += f", as does --gpu-memory-utilization {lower:.4f}" if lower > 0 else ""
    return text


def _negative_kv(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if granted is None or granted > 0:
            continue
        wanted = rank.budget.requested_bytes
        yield Finding(
            id="negative-kv",
            severity="error",
            rank=rank.rank,
            label=rank.label,
            bytes=granted,
            title="The budget leaves nothing for the KV cache",
            evidence=f"requested {format_gib(wanted)} GiB, KV cache {format_gib(granted)} GiB",
            action=_raise_utilization(rank, -granted),
        )


def _raise_utilization(rank: RankReport, missing: int) -> str:
    total, utilization = rank.device_total_bytes, rank.budget.gpu_memory_utilization
    if not total or not utilization:
        return ""
    needed = math.ceil((utilization + missing / total) * 10_000) / 10_000
    if needed >= 1:
        return "no --gpu-memory-utilization below 1 is enough: lower --max-num-batched-tokens or use more devices"
    return f"more than --gpu-memory-utilization {needed:.4f} leaves a positive KV cache"


def _unbalanced(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    for rank in ranks:
        budget = rank.budget
        if budget.balanced is False:
            yield Finding(
                id="equation-unbalanced",
                severity="error",
                rank=rank.rank,
                label=rank.label,
                bytes=budget.residual_bytes,
                kv_tokens=worth_in_tokens(rank.kv, budget.residual_bytes),
                title=f"The engine granted another KV cache than its equation {budget.equation} gives",
                evidence=f"engine {format_bytes(budget.engine_kv_cache_bytes)}, "
                f"recomputed {format_bytes(budget.kv_cache_bytes)} bytes ({budget.cite})",
            )


def _rank_skew(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Ranks that hold the same layers get unequal budgets; all of them serve with the smallest."""
    peers: dict[tuple[int | None, int | None], list[tuple[int, RankReport]]] = {}
    for rank in ranks:
        granted = rank.budget.engine_kv_cache_bytes
        if granted is not None:
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
    for rank in ranks:
        if rank.device_total_bytes is None or rank.initial_free_bytes is None:
            continue
        used = rank.device_total_bytes - rank.initial_free_bytes
        if used > CONTEXT_CEILING_BYTES:
            yield Finding(
                id="co-tenant",
                severity="warning",
                rank=rank.rank,
                label=rank.label,
                bytes=used,
                kv_tokens=worth_in_tokens(rank.kv, used),
                title="The device was in use before the engine began",
                evidence=f"free {format_gib(rank.initial_free_bytes)} of {format_gib(rank.device_total_bytes)} GiB "
                "at the engine's first snapshot",
            )


def _hooks(run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
    """Required hooks that did not bind, or that bound and were never called: their phases are not measured."""
    troubled = {"missing": "hook-not-bound", "error": "hook-not-bound", "overwritten": "hook-overwritten"}
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
    _negative_kv,
    _unbalanced,
    _hooks,
    _uncharged(
        "uncharged-persistent-torch",
        "persistent_torch",
        "Torch memory outside the weights is charged by no term",
    ),
    _uncharged("graph-not-charged", "graph", "Graph memory is not subtracted from the KV cache"),
    _uncharged(
        "non-torch-read-after-empty-cache",
        "non_torch_cleared",
        "Non-torch memory was read after empty_cache had freed a part of it",
    ),
    _rank_skew,
    _co_tenant,
)
