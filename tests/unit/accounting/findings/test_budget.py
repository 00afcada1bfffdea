"""Findings about the granted KV cache."""

from __future__ import annotations

from pathlib import Path

from tests.unit.accounting.findings.test_every_finding import found_in, read


def test_a_budget_that_was_clamped_to_0_is_priced_by_its_terms(tmp_path: Path) -> None:
    """57.91 - (56.00 + 4.00) = -2.09 GiB, printed as 0: the advice has to make up for all of it."""
    lines = (
        "results of real profiling:\npeak_memory after profiling is 56.00 G\n"
        "non_torch_memory after profiling is 4.00 G"
    )
    reports = read(tmp_path, f"vllm serve m --gpu-memory-utilization 0.95\n{lines}\n{CLAMPED}")
    (found,) = found_in(reports, "negative-kv")
    assert found.bytes == 0
    assert "the equation gives -2.09 GiB" in found.evidence
    assert "computed, not tried: more than --gpu-memory-utilization 0.9843; " in found.action
    (unknown,) = found_in(read(tmp_path, CLAMPED), "negative-kv")
    assert unknown.action.startswith(
        "raise --gpu-memory-utilization, or lower --max-num-batched-tokens; "
    )


CLAMPED = "Available memory: 0, total memory: 65455301591"
