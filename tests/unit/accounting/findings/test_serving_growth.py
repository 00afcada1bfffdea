"""The finding about growth while serving, from samples by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.series import MIB
from tests.support.served import engine_core, leaking, worker
from tests.unit.accounting.builders import gib, run_of
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.findings.table import blind_ranks
from vllm_memprof.accounting.model import Finding
from vllm_memprof.record.allocations import AliveStack, AllocationTrace
from vllm_memprof.record.loader import Run

NAME = "growth-while-serving"


def found(run: Run) -> list[Finding]:
    return [one for one in build_report(run).findings if one.id == NAME]


def test_a_leak_on_the_device_and_one_on_the_host() -> None:
    device, host = found(leaking(300))
    assert device.title == "Grows while the engine serves: allocated by tensors"
    assert device.label == "TP0"
    assert device.bytes == pytest.approx(256 * MIB, rel=0.1)
    assert "MiB over 269 requests; +1.00" in device.evidence
    assert "--trace-allocations" in device.action
    assert host.title == "Grows while the engine serves: host memory of engine core, pid 2"
    assert host.kv_tokens is None  # the host's memory is no KV cache
    assert "+0.500 MiB per request" in host.evidence


def test_steady_memory_is_no_finding() -> None:
    clean = run_of(worker([gib(20)] * 300), engine_core(300, [gib(2)] * 300))
    assert found(clean) == []
    assert blind_ranks(build_report(clean), NAME) == []


def test_a_run_that_was_not_sampled_was_not_looked_at() -> None:
    run = leaking(300)
    unsampled = replace(run, processes=[replace(each, served=type(each.served)())
                                        for each in run.processes])  # fmt: skip
    [(rank, reason)] = blind_ranks(build_report(unsampled), NAME)
    assert (rank.label, reason) == ("TP0", "too little was sampled while it served")


def test_what_has_a_fixed_room_is_no_finding() -> None:
    cache = [MIB * at for at in range(300)]
    filling = worker([gib(20) + size for size in cache], encoder_cache=cache)
    assert found(run_of(filling, engine_core(300))) == []


def test_traced_lines_of_code_are_named() -> None:
    run = leaking(300)
    frames = [["/site/torch/_tensor.py", 5, "clone"], ["/app/leak.py", 12, "keep"]]
    stack = AliveStack(frames, 100, 100 * MIB, 50, 50 * MIB)
    trace = AllocationTrace("device", 100, 100, 50, stacks=[stack])
    run = replace(run, processes=[replace(run.processes[0], allocations=[trace]), run.processes[1]])
    device, _ = found(run)
    assert "grew most while traced: leak.py:12, +50.0 MiB in 50 requests" in device.evidence
    [traced] = build_report(run).allocations
    assert [site.site for site in traced.sites] == ["leak.py:12"]
    assert traced.sites[0].function == "keep"
