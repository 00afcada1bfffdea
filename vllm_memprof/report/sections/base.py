"""What reports, comparisons and checks say of a run."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_memprof.accounting.model import RankReport, RunSummary
from vllm_memprof.tables import UNKNOWN
from vllm_memprof.text import text


def least_grant(ranks: Sequence[RankReport]) -> RankReport | None:
    """Return the rank with the smallest KV cache, which all of them serve with; None: no grant."""
    known = [rank for rank in ranks if rank.budget.engine_kv_cache_bytes is not None]
    return min(known, key=lambda rank: rank.budget.engine_kv_cache_bytes or 0, default=None)


def engine_text(run: RunSummary) -> str:
    """Return the engine of a run with its version."""
    engine = " ".join(part for part in (run.engine, run.engine_version) if part)
    return engine or text("engine unknown")


def device_text(run: RunSummary) -> str:
    """Return the device of a run, and what simulates it."""
    device = run.device or text("device unknown")
    if not run.simulated:
        return device
    profile = run.device_profile or UNKNOWN
    return text("{device} [simulated: profile {profile}]", device=device, profile=profile)
