"""Why a value does not pass, from the reports of two plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_memprof.accounting.model import (
    Budget,
    Finding,
    Kv,
    Oom,
    RankReport,
    Reading,
    Report,
    RunSummary,
)
from vllm_memprof.plans.first_failure import beyond
from vllm_memprof.plans.model import Miss, PlanRow, Try

GIB = 1 << 30
RUN = RunSummary("1", "plan", "m", [], status="ok", until="ready")


def rank(label: str, activation: int, kv_cache: int, headroom: int | None) -> RankReport:
    held = [
        Reading(5 * GIB + activation, name="reserved_peak"),
        Reading(GIB, name="non_torch_peak"),
        Reading(None, reason="not reached", name="late_device"),
    ]
    budget = Budget(
        headroom_bytes=headroom,
        held_at_peak=held,
    )
    read = {
        "weights": Reading(4 * GIB),
        "persistent_torch": Reading(GIB // 2),
        "peak_activation": Reading(activation),
    }
    return RankReport(
        rank=0, label=label, pid=None, host=None, dp_rank=None, pp_rank=None, tp_rank=None,
        ep_rank=None, device_total_bytes=64 * GIB, initial_free_bytes=None, phases=[],
        budget=budget, readings=read, kv=Kv(planned_bytes=kv_cache), empty_cache=[],
    )  # fmt: skip


def report(*ranks: RankReport, status: str = "ok", findings: tuple[Finding, ...] = ()) -> Report:
    return Report(replace(RUN, status=status), list(ranks), list(findings))


def tried(status: str, *missing: Miss) -> Try:
    return Try("9", PlanRow({}, status), list(missing))


ANSWER = report(rank("TP0", GIB, 40 * GIB, 9 * GIB), rank("TP1", GIB, 40 * GIB, 3 * GIB))


def test_headroom_names_the_rank_with_the_least_and_the_owner_that_grew_most() -> None:
    failing = report(rank("TP0", GIB, 39 * GIB, 9 * GIB), rank("TP1", 3 * GIB, 39 * GIB, GIB))
    found = beyond(tried("ok", Miss("headroom", "headroom", GIB)), failing, ANSWER)
    assert (found.value, found.kind, found.label, found.short_bytes) == ("9", "want", "TP1", GIB)
    assert found.text == "1.0000 GiB short; headroom"
    grown = {row.name: row.difference_bytes for row in found.owners}
    assert grown == {
        "peak_activation": 2 * GIB, "weights": 0, "persistent_torch": 0, "reserved_rest": 0,
        "beside": 0, "kv_cache": -GIB,
    }  # fmt: skip
    assert found.owners[0].name == "peak_activation"
    assert {row.name: row.answer_bytes for row in found.owners}["reserved_rest"] == GIB // 2


@pytest.mark.parametrize(("free", "short"), [(GIB, GIB), (3 * GIB, None)])
def test_an_oom_is_short_of_what_was_asked_for_less_what_was_free(
    free: int, short: int | None
) -> None:
    oom = Oom(
        requested_bytes=2 * GIB, device_total_bytes=64 * GIB, allocated_bytes=None,
        reserved_bytes=None, free_bytes=free, active_bytes=None, device=None,
        fragmentation_bytes=None, other_bytes=None, components=None, phase="request",
        site="linear.py:58",
    )  # fmt: skip
    failing = report(rank("TP0", GIB, 41 * GIB, 2 * GIB),
                     replace(rank("TP1", GIB, 41 * GIB, 2 * GIB), oom=oom), status="oom")  # fmt: skip
    found = beyond(tried("oom", Miss("ran out", "plan")), failing, ANSWER)
    assert (found.kind, found.label, found.oom) == ("oom", "TP1", oom)
    assert found.short_bytes == short  # enough, in pieces: not known
    assert found.text.endswith("called at linear.py:58; ran out")
    assert ("GiB short" in found.text) is (short is not None)
    assert (found.owners[0].name, found.owners[0].difference_bytes) == ("kv_cache", GIB)


@pytest.mark.parametrize(
    ("finding", "size", "kind", "short", "at_least"),
    [
        ("kv-too-small", GIB, "kv-cache", GIB, False),
        ("negative-kv", -GIB, "kv-cache", GIB, True),
        ("negative-kv", 0, "kv-cache", None, False),
        ("startup-refused", 2 * GIB, "in-use", 2 * GIB, False),
        ("another", GIB, "failed", None, False),
    ],
)
def test_a_refusal_lacks_what_its_finding_says(
    finding: str, size: int, kind: str, short: int | None, at_least: bool
) -> None:
    said = Finding(finding, "error", 0, "TP0", "title", "evidence", size)
    failing = report(rank("TP0", GIB, 0, None), status="failed", findings=(said,))
    found = beyond(tried("failed", Miss("ValueError: no", "plan")), failing, None)
    assert (found.kind, found.short_bytes, found.at_least) == (kind, short, at_least)
    assert found.text.endswith("ValueError: no")
    assert ("GiB short; " in found.text, "at least" in found.text) == (short is not None, at_least)
    assert found.owners == []


def test_a_plan_without_a_report_has_its_reason_alone() -> None:
    found = beyond(tried("failed", Miss("unrecognized arguments: --x", "refused")), None, ANSWER)
    assert (found.kind, found.text, found.short_bytes) == (
        "failed", "unrecognized arguments: --x", None,
    )  # fmt: skip


def test_a_kv_cache_that_is_too_small_for_a_request_lacks_the_rest_of_it() -> None:
    """At least so much: the engine prints two digits."""
    said = "ValueError: To serve (0.06 GiB KV cache is needed, which is larger than the available"
    refused = rank("TP0", GIB, 0, None)
    refused = replace(refused, budget=replace(refused.budget, engine_kv_cache_bytes=32 << 20))
    failing = report(refused, status="failed")
    found = beyond(tried("failed", Miss(said, "room")), failing, ANSWER)
    short = round(0.055 * GIB) - (32 << 20)
    assert (found.kind, found.short_bytes, found.at_least) == ("kv-cache", short, True)
