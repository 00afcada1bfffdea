"""The finding of a run out of memory: the phase, what was missing, the advice, no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import Finding
from vllm_memprof.record.schema import Snapshot


def level(used: float, **values: Any) -> Snapshot:
    total = gib(60)
    sizes = {"allocated_bytes": gib(used - 2), "reserved_bytes": gib(used - 1)}
    return snapshot(
        device_total_bytes=total, device_free_bytes=total - gib(used), **{**sizes, **values}
    )


def run_out_in(
    *phases: str, kv_cache: bool = False, wanted: float = 2, free: float = 1, **figures: Any
) -> Report:
    """An allocation fails inside nested phases, the outermost first."""
    before = [span("kv_cache_alloc", level(20), level(50), 0)] if kv_cache else []
    inside = [
        span(
            name,
            level(51 if kv_cache else 20),
            None,
            len(before) + i,
            parent=len(before) + i - 1 if i else None,
        )
        for i, name in enumerate(phases)
    ]
    order = len(before) + len(inside)
    detail = {
        "requested_bytes": gib(wanted),
        "device_total_bytes": gib(60),
        "device_free_bytes": gib(free),
    }
    at = snapshot(allocated_bytes=gib(55), reserved_bytes=gib(58))
    failure = span(
        "oom", None, at, order, parent=order - 1 if inside else None, detail={**detail, "device": 0}
    )
    given = {"device_total_bytes": gib(60), **figures}
    return build_report(
        run_of(process([*before, *inside, failure], given), status="oom", exit_code=1)
    )


def finding(report: Report) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == "out-of-memory")
    return found


@pytest.mark.parametrize(
    ("phases", "title", "flag"),
    [
        (("weight_load",), "weight_load", "--tensor-parallel-size"),
        (("profile_run",), "profile_run", "--max-num-seqs"),
        (("profile_run", "mm_profile"), "mm_profile", "--limit-mm-per-prompt"),
        (("profile_run", "mm_profile", "communicator"), "communicator", "--limit-mm-per-prompt"),
        (("device_init",), "device_init", ""),
    ],
)
def test_before_the_kv_cache_its_size_is_not_to_blame(
    phases: tuple[str, ...], title: str, flag: str
) -> None:
    found = finding(run_out_in(*phases))
    assert found.title == f"The device ran out of memory in {title}"
    assert (found.severity, found.bytes) == ("error", gib(1))
    assert found.evidence == (
        "2.0000 GiB were asked for; 1.0000 GiB free; reserved 58.0000 GiB; allocated 55.0000 GiB; "
        "outside this process's allocator 1.0000 GiB; the largest: tensors, 55.0000 GiB"
    )
    assert flag in found.action
    setting = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True gives up to 3.0000 GiB"
    assert found.action.startswith(setting)
    assert ("by how much is not known" in found.action) == bool(flag)
    assert "kv-cache" not in found.action


def test_after_it_the_kv_cache_gives_way() -> None:
    figures = {"gpu_memory_utilization": 0.99, "kv_cache_bytes": gib(30)}
    found = finding(run_out_in("request", kv_cache=True, **figures))
    assert found.evidence.endswith("; taken since kv_cache_alloc: 9.0000 GiB")
    assert found.action == (
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True gives up to 3.0000 GiB, or "
        "--gpu-memory-utilization 0.97 gives 1.2000 GiB, or "
        f"--kv-cache-memory-bytes {gib(29)} gives 1.0000 GiB; what the rest of request takes is "
        "not known"
    )
    assert (
        "--enforce-eager"
        in finding(run_out_in("warm_up", "graph_capture", kv_cache=True, **figures)).action
    )


def test_free_memory_in_pieces_has_no_price() -> None:
    found = finding(run_out_in("weight_load", wanted=1, free=3))
    assert (found.bytes, found.kv_tokens) == (None, None)
    assert "1.0000 GiB were asked for; 3.0000 GiB free" in found.evidence


def test_a_failure_without_a_phase_is_found_as_well() -> None:
    found = finding(run_out_in())
    assert found.title == "The device ran out of memory"
    assert found.evidence.endswith("the phase is not known")


def test_without_a_failure_there_is_no_such_finding() -> None:
    report = build_report(recorded("recorded_oom"))
    run = recorded("recorded_oom")
    survivors = [
        replace(p, phases=[span for span in p.phases if span.phase != "oom"]) for p in run.processes
    ]
    assert "out-of-memory" in {finding.id for finding in report.findings}
    assert "out-of-memory" not in {
        finding.id for finding in build_report(replace(run, processes=survivors)).findings
    }


def test_a_recorded_failure_while_graphs_were_captured() -> None:
    """Qwen3-14B at utilization 0.99: the device is full before the last graph is captured."""
    report = build_report(recorded("recorded_oom"))
    found, rank = finding(report), report.ranks[0]
    assert rank.oom is not None
    assert report.run.status == "oom"
    assert rank.budget.residual_bytes == 0
    assert found.title == "The device ran out of memory in graph_capture"
    assert found.bytes == rank.oom.requested_bytes - rank.oom.free_bytes > 0
    assert (
        f"--kv-cache-memory-bytes {rank.budget.engine_kv_cache_bytes - found.bytes} gives "
        in found.action
    )
    used = rank.oom.device_total_bytes - rank.oom.free_bytes
    assert used == rank.oom.reserved_bytes + rank.oom.other_bytes
