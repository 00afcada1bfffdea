"""The books of logs: reported cases with the residual that their row implies; two methods on the same cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.names import LOG_FIGURES
from tests.support.render import render_json, table
from tests.unit.accounting.builders import DATA, gib, process, run_of
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.equations import EQUATIONS
from vllm_memprof.accounting.model import Finding, RankReport, Report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import FIGURES
from vllm_memprof.report.markdown import render_markdown

LOGS = DATA / "logs"
EXPECTED = json.loads((LOGS / "expected.json").read_text())
SEED = json.loads((DATA / "hardware_910b_tp2.json").read_text())
MIB, GIB = 1 << 20, 1 << 30


def reports(name: str) -> list[Report]:
    return [build_report(run) for run in read_log(str(LOGS / name))]


def explained(tmp_path: Path, *lines: str) -> Report:
    path = tmp_path / "engine.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (report,) = [build_report(run) for run in read_log(str(path))]
    return report


def ids(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


def finding(report: Report, finding_id: str) -> Finding:
    return next(found for found in report.findings if found.id == finding_id)


def rank_of(report: Report) -> RankReport:
    assert len(report.ranks) == 1
    return report.ranks[0]


# -- reported cases ---------------------------------------------------------------------------------------------------

#: (equation, residual in GiB as the row's two digits imply it, findings); None: the log does not tell.
ROWS: dict[str, list[tuple[str | None, float | None, set[str]]]] = {
    "baidu__vLLM-Kunlun-330.log": [(None, None, set())],
    "guqiong96__Lvllm-35.log": [(None, None, set())],
    "noonghunna__club-3090-127.log": [(None, None, set())],
    "noonghunna__club-3090-612.log": [(None, None, set())],
    "noonghunna__club-3090-652.log": [(None, None, set())],
    "pytorch__pytorch-175666.log": [(None, None, {"startup-refused"})],
    "vllm-project__vllm-10511.log": [
        ("E0", 53.29 - (71.29 - 14.96 - 1.79 - 1.26), set()),
        ("E0", None, set()),
    ],
    "vllm-project__vllm-11251.log": [("E0", 3.76 - (14.2 - 7.51 - 0.39 - 2.53), set())],
    "vllm-project__vllm-13061.log": [("E0", None, set())],
    "vllm-project__vllm-27706.log": [(None, None, set())],
    "vllm-project__vllm-57475.log": [(None, None, set())],
    "vllm-project__vllm-ascend-14004.log": [("E4p", None, {"budget-halved"})],
    "vllm-project__vllm-ascend-1617.log": [(None, None, {"out-of-memory", "fragmentation"})],
    "vllm-project__vllm-ascend-19.log": [(None, None, {"out-of-memory", "fragmentation"})],
    "vllm-project__vllm-ascend-9372.log": [(None, None, {"negative-kv", "gb-is-gib"})],
    "vllm-project__vllm-omni-276.log": [(None, None, {"startup-refused"})],
    "wtdcode__vllm-backport-34.log": [
        ("E6", 1.95 - (22.03 - 19.47 - 0.6), {"engine-suggestion-wrong", "graph-estimate-high"})
    ],
}


def test_every_reported_case_is_here() -> None:
    assert set(ROWS) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_reported_case_has_its_row(name: str) -> None:
    found = reports(name)
    assert len(found) == len(ROWS[name])
    for report, (equation, residual, findings) in zip(found, ROWS[name], strict=True):
        budget = report.ranks[0].budget
        assert budget.equation == equation
        assert ids(report) == findings
        if residual is None:
            assert budget.residual_bytes is None
            assert budget.balanced is None
        else:
            assert budget.residual_bytes is not None
            assert abs(budget.residual_bytes / GIB - residual) < 1e-6
            assert budget.balanced


@pytest.mark.parametrize("name", sorted(ROWS))
def test_nothing_is_made_up(name: str) -> None:
    """What no line says is null, in every row of every start."""
    for report, start in zip(reports(name), EXPECTED[name]["starts"], strict=False):
        assert report.run.source == "log"
        budget = report.ranks[0].budget
        if "kv_cache_bytes" not in start:
            assert budget.engine_kv_cache_bytes is None
        if budget.kv_cache_bytes is None:
            assert budget.residual_bytes is budget.fits_request_bytes is None
        # no log of these prints what the profile run had reserved
        assert budget.headroom_bytes is budget.fits_device_bytes is None
        json.dumps(to_json(report), allow_nan=False)


def test_a_request_that_is_not_printed_follows_from_the_rest() -> None:
    (report,) = reports("vllm-project__vllm-13061.log")
    assert f"{(rank_of(report).budget.implied_requested_bytes or 0) / GIB:.2f}" == "23.08"
    assert rank_of(report).budget.requested_bytes is None


def test_the_refused_starts_name_the_share_that_is_free() -> None:
    (report,) = reports("pytorch__pytorch-175666.log")
    found = finding(report, "startup-refused")
    assert abs((found.bytes or 0) - gib(0.07)) < 3
    # free may be 19.765 GiB, the total 22.055: 0.8965 of it would be refused again
    assert "--gpu-memory-utilization 0.8961 " in found.action
    assert "co-tenant" not in ids(report)  # one finding for one cause
    assert "2.28 GiB were in use, with this process's own runtime context" in found.action
    (crowded,) = reports("vllm-project__vllm-omni-276.log")
    assert finding(crowded, "startup-refused").action == (
        "ending what else is on the device makes room: 78.83 GiB were in use, with this process's own "
        "runtime context"
    )


def test_ooms_are_divided() -> None:
    (report,) = reports("vllm-project__vllm-ascend-1617.log")
    oom = rank_of(report).oom
    assert oom is not None
    assert oom.requested_bytes == int(4.5 * GIB)
    assert [
        round(getattr(oom, key) / GIB, 2) for key in ("fragmentation_bytes", "other_bytes")
    ] == [
        4.02,
        1.30,
    ]
    (shared,) = reports("vllm-project__vllm-ascend-19.log")
    assert [rank.oom.device for rank in shared.ranks] == ["6", "4"]
    for rank in shared.ranks:
        assert rank.oom is not None
        assert [
            round(getattr(rank.oom, key) / GIB, 2) for key in ("fragmentation_bytes", "other_bytes")
        ] == [0.41, 50.30]
    assert "co-tenant" not in ids(shared)
    for found in (one for one in shared.findings if one.id == "out-of-memory"):
        assert found.severity == "error"
        assert "the largest: memory outside this process's allocator, 50.30 GiB" in found.evidence
        assert found.action.startswith(
            f"stop other processes on {found.label} or use a different one"
        )


def test_negative_kv_has_a_figure_in_its_advice() -> None:
    (report,) = reports("vllm-project__vllm-ascend-9372.log")
    found = finding(report, "negative-kv")
    assert found.bytes == rank_of(report).budget.engine_kv_cache_bytes
    assert "by more than 0.88 / the device's GiB" in found.action  # 0.87 as printed, rounded


def test_a_suggestion_that_takes_graphs_twice() -> None:
    (report,) = reports("wtdcode__vllm-backport-34.log")
    found = finding(report, "engine-suggestion-wrong")
    assert abs((found.bytes or 0) - gib(0.58)) < 3
    assert f"--kv-cache-memory-bytes {1_828_800_984 + (found.bytes or 0)} " in found.action


def test_the_reported_suggestion_below_zero(tmp_path: Path) -> None:
    """vllm#57936: -20.83 GiB suggested where 36.62 are right."""
    report = explained(
        tmp_path,
        "INFO [gpu_worker.py:1] Free memory on device (175.81/178.35 GiB) on startup. Desired GPU "
        "memory utilization is (0.92, 164.08 GiB). Actual usage is 58.44 GiB for consumed memory (weights + "
        "non-torch), 62.33 GiB for peak activation, and 63.99 GiB for CUDAGraph memory. "
        f"Replace gpu_memory_utilization config with `--kv-cache-memory={round(-20.83 * GIB)}` (-20.83 GiB) "
        f"to fit into requested memory, or `--kv-cache-memory={round(-9.1 * GIB)}` (-9.1 GiB) to fully "
        "utilize gpu memory. Current kv cache memory in use is 43.31 GiB.",
        "INFO 01-01 00:00:00 [gpu_worker.py:1] CUDA graph pool memory: 63.99 GiB (actual), 57.45 GiB (estimated), "
        "difference: 6.54 GiB (10.2%).",
    )
    budget = rank_of(report).budget
    assert (budget.equation, budget.balanced) == ("E6", True)
    assert round((budget.term("transient_headroom") or 0) / GIB, 2) == 4.88
    found = finding(report, "engine-suggestion-wrong")
    assert "(36.62 GiB)" in found.action
    short = finding(report, "graph-not-charged")  # the estimate was less than the pools took
    assert round((short.bytes or 0) / GIB, 2) == 6.54


def test_310p_charges_its_neighbour(tmp_path: Path) -> None:
    """vllm-ascend#14004: (21.62 - 1.71) / 2 = 9.95 GiB, 0.09 granted; a neighbour of 19,313 MB is called cleared."""
    report = explained(
        tmp_path,
        "DEBUG [gpu_worker.py:1] Initial free memory: 23.45 GiB; Requested memory: 0.50 (util), 21.62 GiB",
        "DEBUG [worker_310p.py:1] Memory profiling takes 1.00 seconds. Total non KV cache memory: 1.71GiB; "
        "torch peak memory increase: 0.30GiB; non-torch forward increase memory: 0.21GiB; weights memory: 1.20GiB.",
        "INFO 01-01 00:00:00 [worker_310p.py:1] Available KV cache memory: 0.09 GiB (halved for workspace)",
    )
    assert rank_of(report).budget.equation == "E4p"
    found = finding(report, "co-tenant")
    assert round((found.bytes or 0) / GIB, 2) == round(21.62 - 1.71 - 2 * 0.09, 2)
    assert "the KV cache is 9.9" in found.evidence
    assert "budget-halved" in ids(report)


def test_hybrid_concurrency(tmp_path: Path) -> None:
    """vllm-ascend#5020: 282,240 / 4,096 = 68.9, and 210.07x is printed."""
    report = explained(
        tmp_path,
        "INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: 282,240 tokens",
        "INFO 01-01 00:00:00 [kv_cache_utils.py:1] Maximum concurrency for 4,096 tokens per request: 210.07x",
        "INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 20.00 GiB",
    )
    assert "68.91" in finding(report, "hybrid-concurrency").evidence
    assert rank_of(report).kv.bytes_per_token is None  # nothing follows from tokens alone


def test_a_kv_cache_that_is_too_small(tmp_path: Path) -> None:
    report = explained(
        tmp_path,
        "ValueError: To serve at least one request with the models's max seq len (131072), (1.34 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.3 GiB). Based on the available memory, "
        "the estimated maximum model length is 720. "
        "Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    )
    found = finding(report, "kv-too-small")
    assert round((found.bytes or 0) / GIB, 2) == 1.04
    assert found.action == "--max-model-len 720 fits"


OVERRIDDEN = (
    "INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 44.30 GiB",
    "(EngineCore pid=1) INFO 01-01 00:00:00 [kv_cache_utils.py:1] Overriding num_gpu_blocks=5040 with "
    "num_gpu_blocks_override={blocks}",
    "(EngineCore pid=1) INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: {tokens:,} tokens",
    "INFO 01-01 00:00:00 [worker.py:1] NPUWorker is up",
)


@pytest.mark.parametrize(("blocks", "found"), [(4096, False), (5040, False), (6000, True)])
def test_an_override_of_the_number_of_blocks(tmp_path: Path, blocks: int, found: bool) -> None:
    """44.30 GiB hold 5,040 blocks of 9,437,184 bytes, whatever number of them the engine was told to take."""
    lines = [line.format(blocks=blocks, tokens=blocks * 128) for line in OVERRIDDEN]
    report = explained(tmp_path, *lines)
    kv = rank_of(report).kv
    assert (kv.blocks, kv.override_blocks, kv.fitting_blocks) == (blocks, blocks, 5040)
    assert (kv.bytes_per_token, kv.bytes_per_block) == (73_728, 9_437_184)
    assert all(check.ok is not False for check in kv.checks)
    shown = table(report, 120)
    assert f"--num-gpu-blocks-override {blocks} replaced the number of blocks" in shown
    assert "5,040 blocks fit the budget" in shown
    assert ("block-override-beyond-budget" in ids(report)) == found
    if found:
        over = finding(report, "block-override-beyond-budget")
        assert (over.bytes, over.kv_tokens) == (960 * 9_437_184, 960 * 128)
        assert "--num-gpu-blocks-override 5040 " in over.action


@pytest.mark.parametrize(
    "how",
    [
        "vllm serve m --num-gpu-blocks-override 4096",
        "INFO non-default args: {'num_gpu_blocks_override': 4096}",
    ],
)
def test_an_override_that_the_arguments_alone_tell(tmp_path: Path, how: str) -> None:
    """The granted memory says nothing about the tokens then: no layout is made of the two."""
    lines = (OVERRIDDEN[0], OVERRIDDEN[2].format(tokens=4096 * 128), OVERRIDDEN[3])
    kv = rank_of(explained(tmp_path, how, *lines)).kv
    assert (kv.blocks, kv.override_blocks, kv.fitting_blocks) == (4096, 4096, None)
    assert (kv.bytes_per_block, kv.derived) == (None, False)


PROFILED = (
    "INFO [__init__.py:1] vLLM API server version {version}",
    "(EngineCore pid=1) INFO [gpu_model_runner.py:1] Model loading took 14.99 GiB memory and 3.2 seconds",
    "(EngineCore pid=1) INFO [gpu_model_runner.py:1] Estimated CUDA graph memory: 0.50 GiB total",
    "(EngineCore pid=1) DEBUG [gpu_worker.py:1] Initial free memory: 78.70 GiB; Requested memory: 0.920000 (util), "
    "72.88 GiB",
    "(EngineCore pid=1) DEBUG [gpu_worker.py:1] Free memory after profiling: 63.15 GiB (total), 57.33 GiB (within "
    "requested)",
    "(EngineCore pid=1) DEBUG [gpu_worker.py:1] Memory profiling takes 5.10 seconds. Total non KV cache memory: "
    "16.80GiB; torch peak memory increase: 1.25GiB; {third}; weights memory: 14.99GiB.",
    "(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: {granted} GiB",
)
ENABLED = (
    "(EngineCore pid=1) INFO [gpu_worker.py:1] CUDA graph memory profiling is enabled (default since v0.21.0). The "
    "current --gpu-memory-utilization=0.9200 is equivalent to --gpu-memory-utilization=0.9137 without CUDA graph "
    "memory profiling."
)
DISABLED = (
    "(EngineCore pid=1) WARNING [gpu_worker.py:1] CUDA graph memory profiling is disabled "
    "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it, CUDA graph memory is not accounted for during KV cache "
    "allocation, which may require lowering --gpu-memory-utilization to avoid OOM. Consider re-enabling it (the "
    "default as of v0.21.0) and increasing --gpu-memory-utilization from 0.9200 to 0.9263."
)
NON_TORCH, CONSUMED = (
    "non-torch forward increase memory: 0.56GiB",
    "total consumed (from mem_get_info): 15.55GiB",
)


@pytest.mark.parametrize(
    ("version", "third", "granted", "said", "equation", "charged"),
    [
        ("0.23.0", NON_TORCH, "55.58", ENABLED, "E5", True),
        ("0.23.0", NON_TORCH, "55.58", None, "E5", True),  # by default
        ("0.23.0", NON_TORCH, "56.08", DISABLED, "E5", False),  # switched off, and the log says so
        ("0.18.0", NON_TORCH, "56.08", None, "E5", False),
        ("0.18.0", NON_TORCH, "55.58", ENABLED, "E5", True),  # on request
        ("0.33.0", CONSUMED, "55.58", ENABLED, "E6", True),
        ("0.33.0", CONSUMED, "56.08", DISABLED, "E6", False),
    ],
)
def test_debug_lines_of_a_cuda_engine(
    tmp_path: Path,
    version: str,
    third: str,
    granted: str,
    said: str | None,
    equation: str,
    charged: bool,
) -> None:
    lines = [line.format(version=version, third=third, granted=granted) for line in PROFILED]
    report = explained(tmp_path, *lines, *([said] if said else []))
    budget = rank_of(report).budget
    assert (budget.equation, budget.chosen_by) == (equation, f"vllm {version}")
    assert next(row.subtracted for row in budget.terms if row.name == "graph_estimate") == charged
    assert budget.balanced
    assert all(check.ok is not False for check in budget.checks)


def test_the_only_unknown_term_follows_from_what_was_granted(tmp_path: Path) -> None:
    lines = [line.format(version="0.23.0", third=NON_TORCH, granted="55.58") for line in PROFILED]
    report = explained(tmp_path, *(line for line in lines if "Estimated" not in line))
    budget = rank_of(report).budget
    assert (budget.kv_cache_bytes, budget.balanced) == (None, None)
    name, size = budget.implied_term() or ("", 0)
    assert (name, round(size / GIB, 2)) == ("graph_estimate", 0.50)
    assert "leaves 0.50 GiB for graph_estimate" in table(report, 120)


def test_ranks_with_a_name_are_compared(tmp_path: Path) -> None:
    report = explained(
        tmp_path,
        "(Worker_TP1 pid=12) INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 40.10 GiB",
        "(Worker_TP0 pid=11) INFO 01-01 00:00:00 [worker.py:1] Available KV cache memory: 41.10 GiB",
    )
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    found = finding(report, "rank-skew")
    assert (found.label, round((found.bytes or 0) / GIB, 2)) == ("TP1", 1.0)


def test_an_eager_engine_estimates_no_graphs(tmp_path: Path) -> None:
    lines = [line.format(version="0.23.0", third=NON_TORCH, granted="56.08") for line in PROFILED]
    report = explained(
        tmp_path,
        "vllm serve some/model --enforce-eager",
        *(line for line in lines if "Estimated" not in line),
    )
    assert rank_of(report).budget.term("graph_estimate") == 0
    assert rank_of(report).budget.balanced


def test_a_cpu_has_no_honest_budget(tmp_path: Path) -> None:
    report = explained(
        tmp_path,
        "INFO [__init__.py:1] vLLM API server version 0.23.0",
        "INFO [cpu_worker.py:1] Auto set (20.00/64.00) GiB for KV cache on node 0, with 32.00 GiB requested memory for "
        "the worker. 12.00 GiB memory was consumed by non-kv usages.",
    )
    budget = rank_of(report).budget
    assert (budget.equation, budget.balanced, budget.fits_request_bytes) == (
        "CPU",
        True,
        None,
    )


# -- two methods on two cards -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def methods() -> list[Report]:
    return reports("two_methods_910b_tp2.md")


def test_both_methods_are_recognised_and_balanced(methods: list[Report]) -> None:
    assert [report.ranks[0].budget.equation for report in methods] == ["E2", "E2", "E4", None, "E2"]
    for number, granted in ((1, 40.35), (2, 44.30), (4, 43.39)):
        budget = rank_of(methods[number]).budget
        assert round((budget.engine_kv_cache_bytes or 0) / GIB, 2) == granted
        assert budget.balanced
        assert budget.tolerance_bytes <= gib(0.0201)
        assert budget.chosen_by is not None
        assert "form of its lines" in budget.chosen_by
        assert all(check.ok is not False for check in budget.checks)


def test_figures_of_two_runs_under_one_heading_do_not_balance(methods: list[Report]) -> None:
    """57.91 - (13.11 + 1.26) = 43.54, and 43.40 is printed: the peak is another run's (13.30 in the next section)."""
    found = [f for f in methods[0].findings if f.id == "equation-unbalanced"]
    assert len(found) == 1
    assert found[0].severity == "warning"
    assert round((found[0].bytes or 0) / GIB, 2) == -0.14
    assert "engine 43.40 GiB, recomputed 43.54 +-0.02 GiB, off by -0.1420" in found[0].evidence


def test_ranks_without_a_name_are_not_compared(methods: list[Report]) -> None:
    assert "rank-skew" not in ids(methods[0])


def test_what_lies_between_the_methods(methods: list[Report]) -> None:
    budget = rank_of(methods[2]).budget
    sizes = {item.name: item.bytes for item in budget.not_subtracted}
    parts = [
        sizes[name] for name in ("initial_non_torch", "persistent_torch", "reserved_not_allocated")
    ]
    assert [None if size is None else round(size / GIB, 2) for size in parts] == [0.35, 0.26, 0.30]
    old = next(row for row in budget.corrections if row.name == "as_e2")
    assert f"{old.bytes / GIB:.2f}" == f"{SEED['old_method'][0]['available'][0]:.2f}"
    between = (budget.engine_kv_cache_bytes or 0) - old.bytes
    assert abs(between - sum(size for size in parts if size is not None)) <= budget.tolerance_bytes


def test_the_author_s_correction(methods: list[Report]) -> None:
    wanted = SEED["new_method"]["corrected_by_author"]
    row = next(row for row in rank_of(methods[2]).budget.corrections if row.name == "at_the_peaks")
    assert round(row.bytes / GIB, 2) == wanted["kv_cache"][1] == 43.54
    assert row.kv_tokens == wanted["kv_tokens"] == 633_984


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_report_says_what_lies_between_the_methods(methods: list[Report], width: int) -> None:
    """As a reader sees it, at any width and in markdown."""
    for text in (table(methods[2], width), render_markdown(methods[2])):
        flat = " ".join(text.split())
        assert (
            "0.90 GiB less = 0.26 torch memory outside the weights + 0.35 non-torch in use at the start "
            "+ 0.30 reserved but not allocated" in flat
        )
        assert "633,984" in flat
        assert "derived: non-torch in use at the start; reserved but not allocated" in flat
        assert (
            "npu-smi: used, MiB: 3,409 before the start, 59,614 after it, 56,257 by the process"
            in flat
        )


def test_parts_that_do_not_add_up_are_not_shown(methods: list[Report]) -> None:
    (rank,) = methods[2].ranks
    row = next(row for row in rank.budget.corrections if row.name == "as_e2")
    budget = replace(rank.budget, corrections=[replace(row, bytes=row.bytes - gib(0.5))])
    text = render_markdown(replace(methods[2], ranks=[replace(rank, budget=budget)]))
    assert "GiB less" not in text


def test_a_log_knows_no_time_and_names_what_it_lacks_once(methods: list[Report]) -> None:
    text = table(methods[2], 100)
    assert "0.000" not in text
    assert "came back" not in text
    assert "slowest rank" not in text
    assert (
        " ".join(text.split()).count(
            "NOT MEASURED: device_init, weight_load, kv_cache_alloc, graph_capture, warm_up (no snapshot of memory in the log)"
        )
        == 1
    )
    calls = text[text.index("Calls of empty_cache") :].splitlines()
    at = next(i for i, line in enumerate(calls) if line.split()[:1] == ["profile_run"])
    assert calls[at].split() == ["profile_run", "1", "-", "9.38", "-", "0.16", "-"]
    assert calls[at + 1].split() == ["unknown"]
    (report,) = reports("wtdcode__vllm-backport-34.log")
    assert "Phases" not in table(report, 120)
    assert table(report, 120).count("no phase was measured: the log has no snapshot of memory") == 1


def test_the_verdict_of_an_oom_says_how_much_was_held(methods: list[Report]) -> None:
    assert "out of memory: 59.38 of 60.96 GiB reserved, 4.61 GiB of it not allocated" in table(
        methods[3], 120
    )


def test_the_layout_follows_from_tokens_and_size(methods: list[Report]) -> None:
    kv = rank_of(methods[2]).kv
    assert (kv.tokens, kv.blocks, kv.block_size) == (645_120, 5_040, 128)
    assert (kv.bytes_per_token, kv.bytes_per_block) == (73_728, 9_437_184)
    assert to_json(kv)["derived"] is True


def test_the_request_is_a_share_of_the_total(methods: list[Report]) -> None:
    found = finding(methods[2], "requested-base-mistaken")
    assert round((found.bytes or 0) / GIB, 2) == 0.33
    assert "60.61 x 0.95 = 57.58, not 57.91 GiB: 57.91 / 0.95 = 60.96 GiB" in found.evidence


def test_the_profile_s_reserved_peak_does_not_fit_beside_the_kv_cache(
    methods: list[Report],
) -> None:
    found = finding(methods[2], "reserved-peak-beyond-device")
    assert round((found.bytes or 0) / GIB, 2) == round(19.13 + 1.07 + 44.30 - 60.96, 2)


def test_the_second_export_replaces_the_first(methods: list[Report]) -> None:
    note = "PYTORCH_NPU_ALLOC_CONF is set 2 times: expandable_segments:True replaces max_split_size_mb:256"
    assert [note in report.run.notes for report in methods] == [False, False, False, False, True]
    assert all("allocator-config-conflict" not in ids(report) for report in methods)


def test_fragmentation_at_the_oom(methods: list[Report]) -> None:
    found = finding(methods[3], "fragmentation")
    assert round((found.bytes or 0) / GIB, 1) == 4.6
    assert "expandable_segments:True" in found.action
    oom = rank_of(methods[3]).oom
    assert oom is not None
    assert round(oom.free_bytes / GIB, 2) == 0.43
    assert oom.allocated_bytes is None


def test_a_recorded_log_balances_on_both_ranks() -> None:
    (report,) = reports("recorded_tp2_0.23.0.log")
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    assert {rank.budget.balanced for rank in report.ranks} == {True}
    assert {rank.budget.equation for rank in report.ranks} == {"E4"}
    assert "graph-not-charged" in ids(report)


def test_every_equation_has_a_source() -> None:
    known = {"E0", "E0a", "E1", "E2", "E3", "E4", "E4p", "E5", "E6", "CPU", "S1"}
    assert {row.id for row in EQUATIONS} == known


# -- whatever a log says ----------------------------------------------------------------------------------------------

#: Findings that a log may have without a figure of their size.
UNPRICED = {
    "hybrid-concurrency",
    "negative-kv",
    "kv-too-small",
    "startup-refused",
    "static-share-too-small",
    "out-of-memory",
}
NAMES = sorted({*FIGURES, *LOG_FIGURES} - {"gpu_memory_utilization"})


@settings(deadline=None, max_examples=150)
@given(
    figures=st.dictionaries(st.sampled_from(NAMES), st.integers(-(2**38), 2**38), max_size=14),
    utilization=st.one_of(st.none(), st.floats(0.01, 1)),
    half_unit=st.sampled_from([0, 53_688, 5_368_710]),
    engine=st.sampled_from([None, "vllm", "vllm-ascend", "sglang"]),
    version=st.sampled_from(
        [
            None,
            "0.5.23",
            "0.7.3",
            "0.8.5",
            "0.13.0",
            "0.16.0rc1",
            "0.23.0",
            "0.33.0",
            "0.23.0+cpu",
            "what",
        ]
    ),
    forms=st.lists(
        st.sampled_from(["E0", "E0a", "E2", "E4", "E4p", "E5", "E6", "CPU", "S1"]),
        max_size=2,
        unique=True,
    ),
    plan=st.dictionaries(
        st.sampled_from(["tokens", "max_model_len", "blocks", "block_size"]), st.integers(0, 2**24)
    ),
)
def test_any_figures_make_a_report(
    figures: dict[str, int],
    utilization: float | None,
    half_unit: int,
    engine: str | None,
    version: str | None,
    forms: list[str],
    plan: dict[str, int],
) -> None:
    """Absurd as they may be: null for what they do not give, a residual that is a difference, advice with a figure."""
    worker = replace(
        process(
            [], {**figures, "gpu_memory_utilization": utilization}, rank=None, label="the worker"
        ),
        versions={},
        figures_half_units=dict.fromkeys(figures, half_unit),
    )
    core = replace(
        process([], role="engine_core", roles=frozenset({"engine_core"})), versions={}, kv_plan=plan
    )
    run = run_of(worker, core, engine=engine, engine_version=version, mode="log")
    report = build_report(replace(run, source="log", forms=forms))
    data = json.loads(render_json(report))
    budget = data["ranks"][0]["budget"]
    if budget["kv_cache_bytes"] is not None and budget["engine_kv_cache_bytes"] is not None:
        assert (
            budget["residual_bytes"] == budget["engine_kv_cache_bytes"] - budget["kv_cache_bytes"]
        )
        assert budget["balanced"] == (abs(budget["residual_bytes"]) <= budget["tolerance_bytes"])
    else:
        assert budget["residual_bytes"] is budget["balanced"] is None
    if engine is None:
        assert budget["equation"] is None
    for found in data["findings"]:
        assert found["bytes"] is not None or found["id"] in UNPRICED
        assert "None" not in found["evidence"] + found["action"] + found["title"]
        assert "nan" not in found["evidence"]
    for width in (60, 120):
        table(report, width)
    render_markdown(report)
