"""Findings that a budget file may forbid, and what a run must have measured before their absence means anything."""

from __future__ import annotations

from collections.abc import Callable

from vllm_memprof.accounting.findings import device_total
from vllm_memprof.accounting.headroom import profile_peak
from vllm_memprof.accounting.model import RankReport, Report

#: Why a finding could not have been made on a rank; None where it could.
Blind = Callable[[Report, RankReport], str | None]


def _seen(report: Report, rank: RankReport) -> str | None:
    """A finding that is made of whatever figures there are."""
    return None


def _hooks(report: Report, rank: RankReport) -> str | None:
    return "a log does not tell" if report.run.source == "log" else None


def _not_subtracted(name: str) -> Blind:
    """A finding that is an item of the honest budget; an equation without the item charges it."""

    def blind(report: Report, rank: RankReport) -> str | None:
        item = next((item for item in rank.budget.not_subtracted if item.name == name), None)
        if item is None:
            return None if rank.budget.equation else "the budget equation is not known"
        if item.bytes is not None or (name == "graph" and report.run.eager):
            return None
        return item.reason or f"{item.title} is not known"

    return blind


def _headroom(report: Report, rank: RankReport) -> str | None:
    if rank.budget.engine_kv_cache_bytes is None:
        return "no KV cache was granted"
    if profile_peak(rank.phases, device_total(rank)) is None:
        return "what the profile run held at its peak is not known"
    return None


def _granted(report: Report, rank: RankReport) -> str | None:
    return "no KV cache was granted" if rank.budget.engine_kv_cache_bytes is None else None


def _balance(report: Report, rank: RankReport) -> str | None:
    return "the equation could not be checked" if rank.budget.balanced is None else None


def _allocation(report: Report, rank: RankReport) -> str | None:
    stands = any(row.phase == "kv_cache_alloc" and row.after is not None for row in rank.phases)
    return None if stands else "the KV cache was not allocated"


#: All findings of ``accounting.findings`` (a test compares) -> what makes a run blind for them.
FINDINGS: dict[str, Blind] = {
    "allocation-outside-torch": _hooks,
    "allocator-config-conflict": _hooks,
    "block-override-beyond-budget": _seen,
    "budget-halved": _seen,
    "co-tenant": _seen,
    "communicator-buffers": _hooks,
    "empty-cache-in-hot-path": _hooks,
    "empty-cache-refilled": _hooks,
    "engine-suggestion-wrong": _seen,
    "equation-unbalanced": _balance,
    "fragmentation": _seen,
    "gb-is-gib": _seen,
    "graph-estimate-high": _seen,
    "graph-not-charged": _not_subtracted("graph"),
    "headroom-below-observed-peak": _headroom,
    "hook-never-called": _hooks,
    "hook-not-bound": _hooks,
    "hook-overwritten": _hooks,
    "hybrid-concurrency": _seen,
    "kv-allocation-off-plan": _allocation,
    "kv-too-small": _seen,
    "negative-kv": _granted,
    "non-torch-read-after-empty-cache": _not_subtracted("non_torch_cleared"),
    "observation-empties-cache": _hooks,
    "out-of-memory": _hooks,
    "rank-skew": _granted,
    "requested-base-mistaken": _seen,
    "reserved-grows-without-empty-cache": _hooks,
    "residue-per-cycle": _hooks,
    "startup-refused": _seen,
    "uncharged-persistent-torch": _not_subtracted("persistent_torch"),
}


def blind_ranks(report: Report, name: str) -> list[tuple[RankReport, str]]:
    """Ranks on which a finding could not have been made, with the reason.

    Args:
        report: the run.
        name: of the finding, one of ``FINDINGS``.
    """
    found = [(rank, FINDINGS[name](report, rank)) for rank in report.ranks]
    return [(rank, reason) for rank, reason in found if reason is not None]
