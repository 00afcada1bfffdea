"""Findings on memory outside torch: each with a run that has it, and one that has not."""

from __future__ import annotations

from typing import Any

from tests.unit.accounting.builders import process, run_of, span
from tests.unit.accounting.test_owners import BUFFERS, taken
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.accounting.owners.outside_torch import ATB_POOL_BYTES
from vllm_memprof.record.spans import Span
from vllm_memprof.units import GIB, MIB

LEAK = 96 * MIB


def report(spans: list[Span], **env: str) -> Report:
    figures = {"kv_cache_bytes": 20 * GIB, "requested_bytes": 40 * GIB}
    return build_report(
        run_of(process(spans, figures), env=env, engine="vllm-ascend", engine_version="0.23.0")
    )


def found(result: Report, name: str) -> list[Finding]:
    return [finding for finding in result.findings if finding.id == name]


def start_up(
    profile: int = 0, gap: int = 0, warm_up: int = 0, end: int | None = None
) -> list[Span]:
    """Return spans with memory past torch of the profile run, the gap after it, and the warm-up.

    ``end`` is what is left at the shutdown.
    """
    after_gap, after_warm_up = profile + gap, profile + gap + warm_up
    left = after_warm_up if end is None else end
    return [
        span("profile_run", taken(1), taken(4, past_torch=profile), 0),
        span("mm_profile", taken(2), taken(3, past_torch=profile), 1, parent=0, depth=1),
        span(
            "kv_cache_alloc", taken(5, past_torch=after_gap), taken(6, GIB, past_torch=after_gap), 2
        ),
        span(
            "warm_up",
            taken(7, GIB, past_torch=after_gap),
            taken(8, GIB, past_torch=after_warm_up),
            3,
        ),
        span("shutdown", taken(9, GIB, past_torch=left), taken(10), 4),
    ]


def test_memory_past_torch_after_profiling_is_not_subtracted() -> None:
    [finding] = found(report(start_up(gap=LEAK)), "allocation-outside-torch")
    assert (finding.bytes, finding.severity) == (LEAK, "warning")
    assert "between profile_run and kv_cache_alloc" in finding.evidence
    assert f"--kv-cache-memory-bytes {20 * GIB - LEAK}" in finding.action


def test_memory_past_torch_has_the_innermost_phase() -> None:
    [finding] = found(report(start_up(profile=LEAK)), "allocation-outside-torch")
    assert (finding.bytes, finding.severity, finding.action) == (LEAK, "info", "")
    assert "in mm_profile" in finding.evidence
    [finding] = found(report(start_up(warm_up=LEAK)), "allocation-outside-torch")
    assert finding.severity == "warning"
    assert "in warm_up" in finding.evidence


def test_what_was_given_back_or_is_small_is_no_finding() -> None:
    assert not found(report(start_up(gap=LEAK, end=0)), "allocation-outside-torch")
    assert not found(report(start_up(gap=4 * MIB)), "allocation-outside-torch")
    assert not found(report(start_up()), "allocation-outside-torch")


def test_atb_s_pool_is_not_memory_of_nobody() -> None:
    spans = [
        *start_up()[:4],
        span("atb_warm_up", taken(8, GIB), taken(9, GIB, past_torch=ATB_POOL_BYTES), 4),
    ]
    assert not found(report(spans), "allocation-outside-torch")


def test_atb_s_pool_may_wait_in_the_task_queue_until_the_warm_up_ends() -> None:
    atb = span("atb_warm_up", taken(7.2, GIB), taken(7.4, GIB), 4, parent=3, depth=1)
    assert not found(
        report([*start_up(warm_up=ATB_POOL_BYTES)[:4], atb]), "allocation-outside-torch"
    )
    early = span("atb_warm_up", *[taken(at, GIB, past_torch=LEAK) for at in (7.2, 7.4)], 4,
                 parent=3, depth=1)  # fmt: skip
    assert found(report([*start_up(warm_up=LEAK)[:4], early]), "allocation-outside-torch")


def communicators(*given: tuple[str, int, str]) -> list[Span]:
    spans, held = [], 0
    for order, (group, size, source) in enumerate(given):
        detail: dict[str, Any] = {"group": group, "buffer_bytes": size, "buffer_source": source}
        before, held = taken(2 * order + 1, HCCL=held), held + size
        spans.append(
            span("communicator", before, taken(2 * order + 2, HCCL=held), order, detail=detail)
        )
    return spans


def test_buffers_that_the_environment_makes_larger() -> None:
    spans = communicators(
        ("tp:0", BUFFERS, "hccl_config"), ("mc2:0", 2 * 1024 * MIB, "HCCL_BUFFSIZE")
    )
    [finding] = found(report(spans, HCCL_BUFFSIZE="1024"), "communicator-buffers")
    assert (finding.bytes, finding.severity) == (2 * 1024 * MIB - BUFFERS, "warning")
    assert "HCCL_BUFFSIZE=200" in finding.action
    assert "mc2:0 2 x 1024 MiB by HCCL_BUFFSIZE" in finding.evidence


def test_an_environment_that_sizes_no_communicator() -> None:
    spans = communicators(("tp:0", BUFFERS, "hccl_config"))
    [finding] = found(report(spans, HCCL_BUFFSIZE="400"), "communicator-buffers")
    assert (finding.severity, finding.action) == ("info", "")
    assert "sizes none" in finding.title


def test_many_communicators_are_a_finding_and_few_are_not() -> None:
    names = ("tp:0", "ep:0", "dp:0")
    [finding] = found(
        report(communicators(*((n, BUFFERS, "hccl_config") for n in names))), "communicator-buffers"
    )
    assert (finding.bytes, finding.severity) == (3 * BUFFERS, "info")
    assert not found(report(communicators(("tp:0", BUFFERS, "default"))), "communicator-buffers")
    assert not found(report(communicators(("tp:0", BUFFERS, "HCCL_BUFFSIZE")), HCCL_BUFFSIZE="200"),
                     "communicator-buffers")  # fmt: skip
