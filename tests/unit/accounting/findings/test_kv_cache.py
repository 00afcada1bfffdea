"""Findings about the plan of the KV cache and its allocation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.accounting.builders import gib, process, run_of, snapshot, span
from tests.unit.accounting.findings.test_every_finding import found_in
from vllm_memprof.accounting import build_report


@pytest.mark.parametrize(("allocated", "found"), [(4 * 2**30, True), (2**30 + 4096, False)])
def test_a_kv_cache_that_is_not_the_plan(allocated: int, found: bool) -> None:
    """One tensor per layer instead of one per group: four times the plan. (vllm-ascend 0.11)"""
    before, after = snapshot(allocated_bytes=gib(10)), snapshot(allocated_bytes=gib(10) + allocated)
    worker = process([span("kv_cache_alloc", before, after)], {"kv_cache_bytes": 2**30})
    layers = {"type": "FullAttentionSpec", "layers": 4, "block_size": 128, "page_size_bytes": 2**18}
    core = {
        "blocks": 1024,
        "block_size": 128,
        "tokens": 131_072,
        "max_model_len": 4096,
        "max_concurrency": 32.0,
    }
    core |= {"planned_bytes": [2**30], "available_bytes": [2**30], "groups": [layers]}
    run = run_of(
        worker,
        replace(process([], role="engine_core", roles=frozenset({"engine_core"})), kv_plan=core),
    )
    findings_of = found_in([build_report(run)], "kv-allocation-off-plan")
    assert [finding.bytes for finding in findings_of] == ([3 * 2**30] if found else [])
