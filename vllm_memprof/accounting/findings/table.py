"""Findings: facts about a run that change what its figures mean, priced in bytes and KV tokens.

The finished ranks enter, the list of findings leaves, the gravest first. One function per finding,
listed in ``FINDINGS`` here, or in the folder of the engine that alone has it; a finding without a
figure behind it does not exist.
"""

from __future__ import annotations

from importlib import import_module

from vllm_memprof.accounting.findings import (
    budget,
    cycles,
    empty_cache,
    engine_lines,
    equation,
    fits_device,
    hosts,
    kv_cache,
    multimodal,
    neighbours,
    not_subtracted,
    oom,
    outside_torch,
    serving_growth,
    setup,
)
from vllm_memprof.accounting.findings.registry import ERROR, INFO, WARNING, FindingRule
from vllm_memprof.accounting.model import Finding, RankReport, Report
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.loader import Run

_GRAVITY = {ERROR: 0, WARNING: 1, INFO: 2}

#: id -> rule. Of findings as grave and as large as each other, the first here comes first.
FINDINGS: dict[str, FindingRule] = {
    rule.id: rule
    for rule in (
        oom.out_of_memory,
        budget.negative_kv,
        budget.kv_too_small,
        kv_cache.block_override_beyond_budget,
        kv_cache.kv_allocation_off_plan,
        fits_device.kv_cache_beyond_device,
        budget.startup_refused,
        oom.fragmentation,
        equation.equation_unbalanced,
        equation.engine_term_off,
        setup.allocator_config_conflict,
        setup.hook_not_bound,
        setup.hook_overwritten,
        setup.hook_never_called,
        setup.events_lost,
        hosts.hosts_differ,
        fits_device.reserved_peak_beyond_device,
        fits_device.headroom_small,
        not_subtracted.uncharged_persistent_torch,
        not_subtracted.graph_not_charged,
        not_subtracted.non_torch_read_after_empty_cache,
        multimodal.mm_profile_under,
        multimodal.merge_not_profiled,
        budget.rank_skew,
        neighbours.co_tenant,
        engine_lines.graph_estimate_high,
        engine_lines.engine_suggestion_wrong,
        fits_device.engine_suggestion_beyond_device,
        engine_lines.requested_base_mistaken,
        kv_cache.hybrid_concurrency,
        kv_cache.budget_halved,
        engine_lines.gb_is_gib,
        empty_cache.empty_cache_in_hot_path,
        empty_cache.observation_empties_cache,
        empty_cache.empty_cache_refilled,
        cycles.reserved_grows_without_empty_cache,
        cycles.residue_per_cycle,
        serving_growth.growth_while_serving,
        outside_torch.allocation_outside_torch,
        outside_torch.communicator_buffers,
        multimodal.mm_profile_over,
        *(
            rule
            for row in ENGINES.values()
            if row.findings is not None
            for rule in import_module(row.findings).FINDINGS
        ),
    )
}


def find(run: Run, ranks: list[RankReport]) -> list[Finding]:
    """Return all findings of a run, the gravest first, then by bytes."""
    return in_order([one for rule in FINDINGS.values() for one in rule.findings(run, ranks)])


def in_order(found: list[Finding]) -> list[Finding]:
    """Return findings, the gravest first, then by bytes."""
    return sorted(found, key=lambda one: (_GRAVITY[one.severity], -abs(one.bytes or 0)))


def blind_ranks(report: Report, name: str) -> list[tuple[RankReport, str]]:
    """Return the ranks on which a finding could not have been made, with the reason.

    Args:
        report: the run.
        name: of the finding, one of ``FINDINGS``.
    """
    found = [(rank, FINDINGS[name].needs.lacking(report, rank)) for rank in report.ranks]
    return [(rank, reason) for rank, reason in found if reason is not None]
