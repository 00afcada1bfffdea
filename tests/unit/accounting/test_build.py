"""build_report on whole runs: report.json's names, balance, partial runs, findings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import (
    SECOND,
    TOTAL,
    gib,
    process,
    recorded,
    rest_of,
    run_of,
    snapshot,
    span,
)
from tests.unit.accounting.builders import device_memory as device_edges
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.engines import VLLM
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.loader import HookState, Loss
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.record.spans import edges_of

RUNS = (
    "recorded_tp2",
    "recorded_tp1",
    "recorded_killed_tp2",
    "graph_tp2",
    "eager_tp2",
    "skewed_tp2",
    "killed_tp2",
    "plan_tp2",
)

#: What other programs rely on, in the order of the schema memprof.report/3.
RUN_KEYS = [
    "id",
    "source",
    "status",
    "model",
    "engine",
    "engine_version",
    "device",
    "command",
    "started",
    "seconds",
]
RANK_KEYS = [
    "rank",
    "label",
    "pid",
    "device_total_bytes",
    "initial_free_bytes",
    "phases",
    "budget",
]
RANK_KEYS += ["kv", "empty_cache", "oom"]
BUDGET_KEYS = ["equation", "requested_bytes", "gpu_memory_utilization", "terms", "kv_cache_bytes"]
BUDGET_KEYS += [
    "engine_kv_cache_bytes",
    "residual_bytes",
    "tolerance_bytes",
    "balanced",
    "fits_request_bytes",
]
KV_KEYS = ["tokens", "block_size", "blocks", "bytes_per_token", "max_model_len", "max_concurrency"]
EMPTY_KEYS = [
    "phase",
    "site",
    "seconds",
    "freed_cached_bytes",
    "freed_npu_workspace_bytes",
    "freed_other_bytes",
]
EMPTY_KEYS += ["while_serving"]
FINDING_KEYS = ["id", "severity", "rank", "bytes", "kv_tokens", "title", "evidence", "action"]


def missing(data: dict[str, Any], wanted: list[str]) -> list[str]:
    return [name for name in wanted if name not in data]


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def rank_of(report: Report, label: str) -> RankReport:
    return next(rank for rank in report.ranks if rank.label == label)


@pytest.mark.parametrize("name", RUNS)
def test_names_of_the_schema(name: str) -> None:
    data = to_json(build_report(recorded(name)))
    assert list(data)[:4] == ["schema", "run", "ranks", "findings"]
    assert data["schema"] == "memprof.report/3"
    assert missing(data["run"], RUN_KEYS) == []
    assert data["run"]["outcome"] in ("ok", "failed", "oom", "truncated")
    assert data["ranks"]
    for rank in data["ranks"]:
        assert missing(rank, RANK_KEYS) == []
        assert missing(rank["budget"], BUDGET_KEYS) == []
        assert missing(rank["kv"], KV_KEYS) == []
        for phase in rank["phases"]:
            assert {"phase", "order", "seconds", "before", "after", "delta"} <= set(phase)
            for edge in ("before", "after"):
                assert phase[edge] is None or set(SNAPSHOT_FIELDS) <= set(phase[edge])
        for memory in device_edges(rank):
            assert {"phase", "edge", "owners", "unexplained_bytes"} <= set(memory)
        for term in rank["budget"]["terms"]:
            assert {"name", "bytes", "half_unit_bytes"} <= set(term)
        for call in rank["empty_cache"]:
            assert missing(call, EMPTY_KEYS) == []
    for finding in data["findings"]:
        assert missing(finding, FINDING_KEYS) == []
    assert json.loads(json.dumps(data, allow_nan=False)) == data


@pytest.mark.parametrize("name", RUNS)
def test_every_snapshot_balances(name: str) -> None:
    for rank in build_report(recorded(name)).ranks:
        for _, edge in edges_of(rank.phases):
            memory = edge.owners
            assert memory is not None
            known = sum(row.bytes for row in memory.rows if row.bytes is not None)
            assert rest_of(memory) in (0, None)  # None: before a worker has chosen its device
            assert known + (memory.unexplained_bytes or 0) == (TOTAL if rest_of(memory) == 0 else 0)


def test_a_run_of_the_real_engine() -> None:
    """vllm-ascend 0.23.0 on a simulated 910B against the figures of the hardware.

    Those are 9.1948 GiB of weights and 44.30 GiB of KV cache.
    """
    report = build_report(recorded("recorded_tp2"))
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    assert report.not_measured == []
    for rank in report.ranks:
        budget = rank.budget
        assert (budget.residual_bytes, budget.balanced) == (0, True)
        assert budget.term("weights") == pytest.approx(9.1948 * 2**30, rel=0.005)
        assert budget.engine_kv_cache_bytes == pytest.approx(44.30 * 2**30, rel=0.01)
        assert all(check.ok for check in budget.checks)
        # its layers were recorded without their layout, and it has no engine.log
        assert [check.ok for check in rank.kv.checks] == [None, *[True] * 5, None]
        assert (budget.term("graph") or 0) > 0
        assert budget.fits_request_bytes is not None
        held = next(row for row in rank.phases if row.phase == "device_init").after
        assert held is not None
        outside = next(item for item in budget.not_subtracted if item.name == "persistent_torch")
        assert (
            outside.bytes == held.allocated_bytes
        )  # the model runner's own buffers, made before the weights


def test_engine_core_and_worker_in_one_process() -> None:
    """The real engine with one rank: the plan and the phases come from the same process."""
    report = build_report(recorded("recorded_tp1"))
    (rank,) = report.ranks
    assert rank.label == "TP0"
    assert rank.budget.residual_bytes == 0
    assert rank.kv.tokens == 29_359_232  # as the engine printed it
    unknown = [check.name for check in rank.kv.checks if check.ok is None]
    assert unknown == [  # its layers were recorded without their layout, and it has no engine.log
        "planned bytes = blocks x bytes per block of their layers, by type",
        "tokens and concurrency as the engine printed them",
    ]
    assert [check.ok for check in rank.kv.checks].count(True) == 5
    late = next(item for item in rank.budget.not_subtracted if item.name == "late_non_torch")
    assert late.bytes == 96 * 2**20  # ATB's pool, which its first operation takes in warm-up
    assert not any(call.while_serving for call in rank.empty_cache)


def test_a_worker_of_the_real_engine_killed_in_weight_load() -> None:
    report = build_report(recorded("recorded_killed_tp2"))
    assert report.run.exit_reason is not None
    assert report.run.exit_reason.endswith("was killed by SIGKILL in weight_load")
    assert [rank.open_phases for rank in report.ranks] == [[], ["weight_load"]]
    assert rank_of(report, "TP0").budget.term("weights") is not None
    assert rank_of(report, "TP1").budget.term("weights") is None


def test_the_equation_balances_to_the_byte() -> None:
    for rank in build_report(recorded("graph_tp2")).ranks:
        budget = rank.budget
        assert (
            budget.equation,
            budget.residual_bytes,
            budget.tolerance_bytes,
            budget.balanced,
        ) == ("E4", 0, 0, True)
        assert f"{(budget.kv_cache_bytes or 0) / 2**30:.2f}" == "44.30"
        assert rank.kv.tokens == 645_120
        assert budget.kv_tokens == 645_120
        assert [check.ok for check in budget.checks] == [True, True]
        items = [item.bytes for item in budget.not_subtracted]
        assert None not in items
        assert budget.fits_request_bytes == (budget.kv_cache_bytes or 0) - sum(
            i for i in items if i is not None
        )


def test_eager_has_no_graph_figure() -> None:
    report = build_report(recorded("eager_tp2"))
    rank = report.ranks[0]
    assert rank.budget.term("graph") is None
    assert not [row for row in rank.phases if row.phase == "graph_capture"]
    assert [(gap.phase, gap.reason) for gap in report.not_measured] == [
        ("graph_capture", "eager mode")
    ]
    assert "graph-not-charged" not in ids(report)


def test_a_killed_run_tells_what_it_knows() -> None:
    report = build_report(recorded("killed_tp2"))
    assert report.run.truncated
    assert report.run.outcome == "failed"
    killed = rank_of(report, "TP1")
    assert killed.open_phases == ["weight_load"]
    assert killed.budget.kv_cache_bytes is None
    assert killed.budget.balanced is None
    assert killed.kv.tokens is None
    assert {gap.phase for gap in report.not_measured} == {
        "profile_run",
        "kv_cache_alloc",
        "graph_capture",
        "warm_up",
    }
    assert all("weight_load was not finished" in gap.reason for gap in report.not_measured)


def test_a_run_without_workers() -> None:
    report = build_report(run_of(status="failed"))
    assert (report.ranks, report.findings, report.not_measured) == ([], [], [])


@pytest.mark.parametrize(
    ("status", "truncated", "shown"),
    [
        ("running", False, "truncated"),
        ("ok", True, "truncated"),
        ("failed", True, "failed"),
        ("oom", False, "oom"),
    ],
)
def test_status_is_one_of_the_schema_s(status: str, truncated: bool, shown: str) -> None:
    run = replace(recorded("graph_tp2", status=status), truncated=truncated)
    data = to_json(build_report(run))["run"]
    assert (data["outcome"], data["status"]) == (shown, status)


def test_an_engine_that_nobody_has_read() -> None:
    report = build_report(recorded("graph_tp2", engine_version="77.0"))
    budget = report.ranks[0].budget
    assert (budget.equation, budget.kv_cache_bytes, budget.residual_bytes, budget.balanced) == (
        None,
        None,
        None,
        None,
    )
    assert budget.engine_kv_cache_bytes is not None


def test_a_fixed_size_has_no_honest_figure() -> None:
    run = recorded("graph_tp2")
    fixed = {"kv_cache_memory_bytes_arg": gib(40), "kv_cache_bytes": gib(40)}
    processes = [
        replace(p, figures={**p.figures, **fixed} if p.figures else {}) for p in run.processes
    ]
    budget = build_report(replace(run, processes=processes)).ranks[0].budget
    assert (budget.override, budget.residual_bytes, budget.fits_request_bytes) == (
        "kv_cache_memory_bytes",
        0,
        None,
    )


def test_a_log_has_half_units_and_says_what_it_lacks() -> None:
    """57.91 - (9.19 + 3.86 + 0.56) = 44.30, each figure with the half of its last printed digit."""
    printed = {
        "requested": 57.91,
        "weights": 9.19,
        "peak_activation": 3.86,
        "non_torch_increase": 0.56,
        "kv_cache": 44.3,
    }
    figures = {f"{name}_bytes": gib(value) for name, value in printed.items()}
    worker = replace(
        process([], figures), versions={}, figures_half_units=dict.fromkeys(figures, gib(0.005))
    )
    run = replace(run_of(worker, engine="vllm-ascend"), source="log", forms=["E4"])
    report = build_report(run)
    budget = report.ranks[0].budget
    assert (budget.equation, budget.balanced, budget.tolerance_bytes) == (
        "E4",
        True,
        5 * gib(0.005),
    )
    assert budget.chosen_by == "the form of its lines, as vllm-ascend prints them"
    assert {gap.reason for gap in report.not_measured} == {"no snapshot of memory in the log"}
    assert [gap.phase for gap in report.not_measured] == list(VLLM.phases)
    assert to_json(report)["run"]["source"] == "log"


def test_each_replica_has_its_own_plan() -> None:
    plans = [{"blocks": 10 + rank, "planned_bytes": [1], "available_bytes": [2]} for rank in (0, 1)]
    cores = [
        replace(
            process([], dp_rank=rank, role="engine_core", roles=frozenset({"engine_core"})),
            kv_plan=plans[rank],
        )
        for rank in (0, 1)
    ]
    report = build_report(run_of(process([], dp_rank=0), process([], dp_rank=1), *cores))
    assert [rank.kv.blocks for rank in report.ranks] == [10, 11]


def test_empty_cache_calls() -> None:
    calls = build_report(recorded("graph_tp2")).ranks[0].empty_cache
    assert [(call.phase, call.site, call.while_serving) for call in calls] == [
        ("profile_run", "mem_utils.py:247", False),
        ("profile_run", "mem_utils.py:261", False),
    ]
    last = calls[-1]
    assert last.freed_cached_bytes is not None
    assert f"{last.freed_cached_bytes / 2**30:.2f}" == "9.38"
    assert f"{(last.freed_npu_workspace_bytes or 0) / 2**30:.2f}" == "0.16"
    assert last.seconds == pytest.approx(0.031)


def test_empty_cache_while_serving() -> None:
    taken = snapshot(reserved_bytes=5, non_torch_bytes=3)
    late = span("empty_cache", taken, taken, start_t_ns=100, end_t_ns=200)
    report = build_report(run_of(replace(process([late]), ready_t_ns={"server": 50})))
    (call,) = report.ranks[0].empty_cache
    assert (call.while_serving, call.freed_cached_bytes, call.freed_npu_workspace_bytes) == (
        True,
        0,
        None,
    )


def test_empty_cache_at_the_end_is_not_serving() -> None:
    taken = snapshot(reserved_bytes=5, non_torch_bytes=3)
    spans = [
        span("shutdown", taken, taken, 0, start_t_ns=90),
        span("empty_cache", taken, taken, 1, parent=0, start_t_ns=95),
        span(
            "empty_cache", taken, taken, 2, start_t_ns=99
        ),  # by whoever cleans up after the worker
    ]
    calls = (
        build_report(run_of(replace(process(spans), ready_t_ns={"server": 50})))
        .ranks[0]
        .empty_cache
    )
    assert [(call.phase, call.while_serving) for call in calls] == [
        ("shutdown", False),
        (None, False),
    ]


def test_empty_cache_s_own_time_wins() -> None:
    taken = snapshot(reserved_bytes=5)
    call = (
        build_report(run_of(process([span("empty_cache", taken, taken, detail={"seconds": 0.25})])))
        .ranks[0]
        .empty_cache
    )
    assert call[0].seconds == 0.25


def test_less_than_a_block_is_no_finding() -> None:
    run = recorded("graph_tp2")
    small = {"profile_before_allocated_peak_bytes": 9_872_841_216 + 512}
    processes = [
        replace(p, figures={**p.figures, **small} if p.figures else {}) for p in run.processes
    ]
    assert "uncharged-persistent-torch" not in ids(build_report(replace(run, processes=processes)))


# -- findings ------------------------------------------------------------


def test_findings_of_a_graph_run() -> None:
    report = build_report(recorded("graph_tp2"))
    assert set(ids(report)) == {
        "graph-not-charged",
        "uncharged-persistent-torch",
        "non-torch-read-after-empty-cache",
        "reserved-peak-beyond-device",
        "engine-suggestion-beyond-device",
    }
    graph = next(finding for finding in report.findings if finding.id == "graph-not-charged")
    granted = report.ranks[0].budget.engine_kv_cache_bytes
    assert granted is not None
    assert (graph.bytes, graph.kv_tokens) == (322_122_752, 34 * 128)
    assert f"--kv-cache-memory-bytes {granted - 322_122_752} " in graph.action
    assert "--gpu-memory-utilization 0.9450" in graph.action


def test_advice_for_all_ranks_follows_the_smallest() -> None:
    report = build_report(recorded("skewed_tp2"))
    least = min(rank.budget.engine_kv_cache_bytes or 0 for rank in report.ranks)
    texts = {f.action for f in report.findings if f.id == "uncharged-persistent-torch"}
    assert len(texts) == 1
    assert f" {least - 274_018_816} " in texts.pop()


def test_rank_skew() -> None:
    (skew,) = [f for f in build_report(recorded("skewed_tp2")).findings if f.id == "rank-skew"]
    assert (skew.label, skew.bytes, skew.kv_tokens) == ("TP1", gib(0.25), 28 * 128)
    assert "rank-skew" not in ids(build_report(recorded("graph_tp2")))


def test_stages_of_a_pipeline_are_not_skewed() -> None:
    figures = [{"kv_cache_bytes": gib(10)}, {"kv_cache_bytes": gib(20)}]
    stages = [process([], figures[i], pp_rank=i, rank=i, label=f"PP{i}") for i in (0, 1)]
    assert ids(build_report(run_of(*stages))) == []


def test_a_negative_budget() -> None:
    figures = {
        "kv_cache_bytes": -gib(1.33),
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": 0.4,
    }
    (finding,) = build_report(run_of(process([], figures))).findings
    assert (finding.id, finding.severity, finding.bytes) == ("negative-kv", "error", -gib(1.33))
    assert "--gpu-memory-utilization 0.4219" in finding.action


def test_a_budget_that_no_utilization_saves() -> None:
    figures = {
        "kv_cache_bytes": -gib(30),
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": 0.95,
    }
    (finding,) = build_report(run_of(process([], figures))).findings
    assert "no --gpu-memory-utilization below 1" in finding.action


def test_an_unbalanced_ledger_is_a_finding() -> None:
    run = recorded("graph_tp2")
    processes = [
        replace(p, figures={**p.figures, "weights_bytes": 9_872_841_216 + 512})
        for p in run.processes
    ]
    report = build_report(replace(run, processes=processes))
    (first, _) = [finding for finding in report.findings if finding.id == "equation-unbalanced"]
    assert (first.severity, first.bytes) == ("error", 512)
    assert report.ranks[0].budget.balanced is False


def test_a_neighbour_on_the_device() -> None:
    figures = {"device_total_bytes": TOTAL, "initial_free_bytes": TOTAL - gib(20)}
    (finding,) = build_report(run_of(process([], figures))).findings
    assert (finding.id, finding.bytes) == ("co-tenant", gib(20))


@pytest.mark.parametrize(
    ("state", "need", "found"),
    [
        ("missing", "required", "hook-not-bound"),
        ("error", "required", "hook-not-bound"),
        ("never_called", "required", "hook-never-called"),
        ("overwritten", "required", "hook-overwritten"),
        ("missing", "optional", None),
        ("bound", "required", None),
        ("absent_ok", "required", None),
    ],
)
def test_hooks_in_trouble(state: str, need: str, found: str | None) -> None:
    hook = HookState("w.load", "weight_load", need, state, "worker:load_model", None)
    report = build_report(run_of(replace(process([]), hooks={"w.load": hook})))
    assert ids(report) == ([found] if found else [])
    if state == "missing":
        gap = next(gap for gap in report.not_measured if gap.phase == "weight_load")
        assert gap.reason == "its hook is missing"


@pytest.mark.parametrize(
    ("loss", "evidence"),
    [
        (
            Loss(5 * SECOND, None, None, "No space left on device"),
            "no events from 4.0 s after the launch to the end of its record: No space left on device "
            "(h-1.jsonl)",
        ),
        (
            Loss(5 * SECOND, 65 * SECOND, 12, "File too large"),
            "no events from 4.0 s after the launch to 64.0 s after the launch, 12 events not written: "
            "File too large (h-1.jsonl)",
        ),
    ],
)
def test_events_that_could_not_be_written(loss: Loss, evidence: str) -> None:
    run = run_of(replace(process([]), losses=[loss]), start_t_ns=SECOND, status="ok")
    report = build_report(run)
    (found,) = [each for each in report.findings if each.id == "events-lost"]
    assert (found.severity, found.label, str(found.evidence)) == ("warning", "TP0", evidence)
    clean = build_report(run_of(process([]), start_t_ns=SECOND, status="ok"))
    assert "events-lost" not in ids(clean)


def test_gravest_first() -> None:
    order = [finding.severity for finding in build_report(recorded("skewed_tp2")).findings]
    assert order == sorted(order, key=["error", "warning", "info"].index)
