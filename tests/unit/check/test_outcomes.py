"""Every limit in both directions, what is not measured, planted regressions, other baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import DATA, recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.accounting.model import Finding, HostMemory, HostOwner, RankReport, Report
from vllm_memprof.check.baseline import differences
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.limits import AT_LEAST, BUDGET, FIGURES, KEYS, REGRESSION
from vllm_memprof.check.outcomes import CheckResult, Outcome, check_report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import DeviceMemory

#: Read off the reports of recorded runs: key -> (run, figure of the worst rank, that rank).
MEASURED = {
    "min_kv_cache": ("skewed_tp2", 47_303_029_760, "TP1"),
    "min_kv_cache_tokens": ("graph_tp2", 645_120, "TP0"),
    "max_weights": ("graph_tp2", 9_872_841_216, "TP0"),
    "max_peak_activation": ("graph_tp2", 4_133_906_432, "TP0"),
    "max_non_torch": ("skewed_tp2", 869_730_816, "TP1"),
    "max_graph": ("graph_tp2", 322_122_752, "TP0"),
    "max_unexplained": ("unexplained", 5, "TP0"),
    "min_headroom": ("recorded_023_tp2", 2_220_426_138, "TP0"),
    "max_host": ("host", 10, "TP0"),
    "max_pinned": ("host", 3, "TP0"),
    "max_shm": ("host", 2, "TP0"),
    "max_rank_skew": ("skewed_tp2", 268_435_456, "TP1"),
}
#: Of one worker.
HOST = HostMemory(
    [HostOwner("rest", 5), HostOwner("pinned:kv_offload", 3), HostOwner("shm:message_queues", 2)]
)
LOG = DATA / "logs" / "recorded_tp2_0.23.0.log"


def report_of(name: str) -> Report:
    if name == "host":
        report = report_of("graph_tp2")
        return replace(report, ranks=[replace(report.ranks[0], host_memory=HOST)])
    if name == "unexplained":
        report = report_of("graph_tp2")
        first = report.ranks[0]
        spans = [
            replace(
                first.phases[-1],
                phase="request",
                order=n,
                before=None,
                after=Snapshot(t_ns=0),
                owners={"after": DeviceMemory([], size)},
            )
            for n, size in enumerate((3, -5, 4, None))
        ]
        return replace(report, ranks=[replace(first, phases=spans)])
    return build_report(recorded(name))


def log_report() -> Report:
    return build_report(read_log(str(LOG))[0])


def check(report: Report, text: str, baseline: Report | None = None) -> CheckResult:
    return check_report(report, parse_budget(text, "budget.toml"), baseline)


def outcome(report: Report, text: str, baseline: Report | None = None) -> Outcome:
    """The one limit of a budget; the run itself ended well."""
    ended, found = check(report, text, baseline).limits
    assert ended.ok
    return found


def test_every_key_has_a_case() -> None:
    assert [key.name for key in KEYS if key.table == BUDGET] == list(MEASURED)
    assert all(key.figure in FIGURES.values() for key in KEYS)
    assert {key.name for key in KEYS if key.table == REGRESSION} == set(PLANT)


@pytest.mark.parametrize("key", MEASURED)
def test_a_limit_at_the_figure_holds_and_one_unit_further_fails(key: str) -> None:
    run, figure, label = MEASURED[key]
    report = report_of(run)
    tighter = 1 if key.startswith("min_") else -1
    for limit, margin in ((figure, 0), (figure + tighter, -1), (figure - tighter, 1)):
        found = outcome(report, f"[budget]\n{key} = {limit}\n")
        worst = min(
            found.readings, key=lambda row: row.margin if row.margin is not None else -(10**18)
        )
        assert (worst.label, worst.value, worst.limit, worst.margin) == (
            label,
            figure,
            limit,
            margin,
        )
        assert found.ok is (margin >= 0)
        assert found.line == 2


def test_a_rank_that_holds_does_not_hide_one_that_fails() -> None:
    found = outcome(report_of("skewed_tp2"), "[budget]\nmax_non_torch = 700_000_000\n")
    assert [(row.label, row.ok, row.margin) for row in found.readings] == [
        ("TP0", True, 98_704_640),
        ("TP1", False, -169_730_816),
    ]


def test_skew_as_a_share_of_the_largest_kv_cache() -> None:
    """268,435,456 of 47,571,465,216 bytes are 0.5643%."""
    report = report_of("skewed_tp2")
    wide = outcome(report, '[budget]\nmax_rank_skew = "0.57%"\n')
    assert wide.readings[0].limit == 271_157_351  # 47,571,465,216 * 57 // 10,000
    assert wide.ok
    found = outcome(report, '[budget]\nmax_rank_skew = "0.56%"\n')
    assert found.readings[0].limit == 266_400_205  # 47,571,465,216 * 56 // 10,000
    assert not found.ok


def test_ranks_of_other_pipeline_stages_are_no_skew() -> None:
    report = report_of("skewed_tp2")
    stages = [replace(rank, pp_rank=number) for number, rank in enumerate(report.ranks)]
    assert outcome(replace(report, ranks=stages), "[budget]\nmax_rank_skew = 0\n").ok


def test_every_limit_is_checked_in_the_order_of_the_file() -> None:
    result = check(
        report_of("skewed_tp2"),
        (DATA / "budgets" / "guard.toml").read_text(),
        report_of("eager_tp2"),
    )
    assert [found.key for found in result.limits] == [
        "status",
        "min_kv_cache",
        "max_weights",
        "max_non_torch",
        "max_graph",
        "min_headroom",
        "max_rank_skew",
        "max_kv_cache_drop",
        "max_non_torch_growth",
        "max_weights_growth",
        "fail_on co-tenant",
        "fail_on rank-skew",
    ]
    assert len(result.failures) == 8
    assert not result.ok


@pytest.mark.parametrize(
    ("run", "key", "reason"),
    [
        ("plan_tp2", "max_graph", "graph_capture: memprof plan stops after the KV plan"),
        ("plan_tp2", "min_headroom", "warm_up: memprof plan stops after the KV plan"),
        ("eager_tp2", "max_graph", "graph_capture: eager mode"),
        ("log", "min_headroom", "the log does not print it"),
        ("log", "max_unexplained", "the log does not print it"),
        ("none", "min_kv_cache", "no worker was recorded"),
        ("none", "max_rank_skew", "no worker was recorded"),
    ],
)
def test_what_was_not_measured_fails_with_the_reason(run: str, key: str, reason: str) -> None:
    whole = report_of("graph_tp2")
    report = {"log": log_report, "none": lambda: replace(whole, ranks=[])}.get(
        run, lambda: report_of(run)
    )()
    limit = 0 if key.startswith("min_") else (1 << 62)  # met by whatever is measured
    found = outcome(report, f"[budget]\n{key} = {limit}\n")
    assert not found.ok
    assert found.unmeasured
    assert {row.reason for row in found.readings} == {reason}


@pytest.mark.parametrize(
    "key", [key.name for key in KEYS if key.table == BUDGET and key.name != "max_unexplained"]
)
def test_a_run_that_was_killed_meets_no_limit(key: str) -> None:
    report = report_of("recorded_killed_tp2")
    limit = 0 if key.startswith("min_") else (1 << 62)
    ended, found = check(report, f"[budget]\n{key} = {limit}\n").limits
    assert not ended.ok
    assert "SIGKILL" in (ended.readings[0].reason or "")
    assert not found.ok
    assert any(row.value is None for row in found.readings)


@pytest.mark.parametrize(
    ("status", "truncated"), [("failed", False), ("oom", False), ("running", False), ("ok", True)]
)
def test_a_run_that_did_not_end_well_fails_with_all_limits_met(
    status: str, truncated: bool
) -> None:
    report = report_of("graph_tp2")
    result = check(
        replace(report, run=replace(report.run, status=status, truncated=truncated)),
        "[budget]\nmax_graph = '1GiB'",
    )
    assert [found.key for found in result.failures] == ["status"]


def test_a_rank_without_a_figure_fails_beside_one_that_has_it() -> None:
    report = report_of("graph_tp2")
    budget = replace(report.ranks[1].budget, engine_kv_cache_bytes=None)
    half = replace(report, ranks=[report.ranks[0], replace(report.ranks[1], budget=budget)])
    for key in ("min_kv_cache = 0", "max_rank_skew = '1TiB'"):
        found = outcome(half, f"[budget]\n{key}\n")
        assert [row.label for row in found.readings if not row.ok] == ["TP1"]


# --- regressions


def _reading(name: str) -> Callable[[RankReport, float], RankReport]:
    def plant(rank: RankReport, factor: float) -> RankReport:
        read = rank.readings[name]
        grown = replace(read, bytes=round((read.bytes or 0) * factor))
        return replace(rank, readings={**rank.readings, name: grown})

    return plant


def _grant(rank: RankReport, factor: float) -> RankReport:
    granted = round((rank.budget.engine_kv_cache_bytes or 0) * factor)
    return replace(rank, budget=replace(rank.budget, engine_kv_cache_bytes=granted))


def _tokens(rank: RankReport, factor: float) -> RankReport:
    return replace(rank, kv=replace(rank.kv, tokens=round((rank.kv.tokens or 0) * factor)))


def _headroom(rank: RankReport, factor: float) -> RankReport:
    return replace(
        rank,
        budget=replace(
            rank.budget, headroom_bytes=round((rank.budget.headroom_bytes or 0) * factor)
        ),
    )


def _skew(rank: RankReport, factor: float) -> RankReport:
    """What TP1 of the skewed run lacks, made larger: 268,435,456 bytes by a factor."""
    return _grant_less(rank, round(268_435_456 * (factor - 1)))


def _grant_less(rank: RankReport, size: int) -> RankReport:
    granted = (rank.budget.engine_kv_cache_bytes or 0) - size
    return replace(rank, budget=replace(rank.budget, engine_kv_cache_bytes=granted))


#: key -> what makes a rank worse by a factor.
PLANT: dict[str, Callable[[RankReport, float], RankReport]] = {
    "max_kv_cache_drop": _grant,
    "max_kv_cache_tokens_drop": _tokens,
    "max_weights_growth": _reading("weights"),
    "max_peak_activation_growth": _reading("peak_activation"),
    "max_non_torch_growth": _reading("non_torch"),
    "max_graph_growth": _reading("graph"),
    "max_headroom_drop": _headroom,
    "max_rank_skew_growth": _skew,
}


#: A run with two unlike ranks, and one with memory to spare.
PLANTED_IN = {"max_rank_skew_growth": "skewed_tp2", "max_headroom_drop": "recorded_023_tp2"}


def planted(report: Report, key: str, factor: float) -> Report:
    """The run with its second rank worse by a factor."""
    first, second = report.ranks
    return replace(report, ranks=[first, PLANT[key](second, factor)])


@pytest.mark.parametrize("key", PLANT)
def test_a_planted_regression_of_1_percent(key: str) -> None:
    """Caught by a limit of 0.5%, passed by one of 2%; a gain is no regression."""
    baseline = report_of(PLANTED_IN.get(key, "graph_tp2"))
    worse, better = (0.99, 1.01) if key.endswith("drop") else (1.01, 0.99)
    run = planted(baseline, key, worse)
    caught = outcome(run, f'[regression]\n{key} = "0.5%"\n', baseline)
    assert [row.label for row in caught.readings if not row.ok] == ["TP1"]
    assert outcome(run, f'[regression]\n{key} = "2%"\n', baseline).ok
    assert outcome(planted(baseline, key, better), f"[regression]\n{key} = 0\n", baseline).ok
    assert outcome(baseline, f"[regression]\n{key} = 0\n", baseline).ok


@pytest.mark.parametrize("key", PLANT)
def test_an_allowed_amount_is_met_to_the_unit(key: str) -> None:
    baseline = report_of(PLANTED_IN.get(key, "graph_tp2"))
    run = planted(baseline, key, 0.99 if key.endswith("drop") else 1.01)
    strict = outcome(run, f"[regression]\n{key} = 0\n", baseline)
    worst = next(row for row in strict.readings if not row.ok)
    assert worst.margin is not None
    change = -worst.margin
    assert outcome(run, f"[regression]\n{key} = {change}\n", baseline).ok
    assert not outcome(run, f"[regression]\n{key} = {change - 1}\n", baseline).ok


def test_the_kv_cache_is_held_against_the_least_of_the_baseline() -> None:
    """All ranks serve with the least: that another rank has it is no regression."""
    baseline = report_of("skewed_tp2")
    first, second = baseline.ranks
    swapped = replace(
        baseline, ranks=[replace(first, budget=second.budget), replace(second, budget=first.budget)]
    )
    assert outcome(swapped, "[regression]\nmax_kv_cache_drop = 0\n", baseline).ok
    assert not outcome(swapped, "[regression]\nmax_kv_cache_drop = 0\n", report_of("eager_tp2")).ok


def test_memory_is_held_against_the_same_rank() -> None:
    """A stage that grows is caught below a stage that always was larger."""
    baseline = planted(report_of("graph_tp2"), "max_weights_growth", 2.0)
    first, second = baseline.ranks
    grown = replace(baseline, ranks=[PLANT["max_weights_growth"](first, 1.5), second])
    found = outcome(grown, "[regression]\nmax_weights_growth = '1%'\n", baseline)
    assert [row.ok for row in found.readings] == [False, True]


def test_a_baseline_that_does_not_tell() -> None:
    run = report_of("graph_tp2")
    found = outcome(run, '[regression]\nmax_graph_growth = "100%"\n', report_of("plan_tp2"))
    assert found.unmeasured
    assert found.readings[0].reason == (
        "the baseline does not tell: graph_capture: memprof plan stops after the KV plan"
    )
    one = replace(run, ranks=run.ranks[:1])
    found = outcome(run, '[regression]\nmax_weights_growth = "100%"\n', one)
    assert [row.reason for row in found.readings] == [
        None,
        "the baseline does not tell: no rank TP1 in it",
    ]


# --- printed digits


def test_a_log_says_where_its_digits_end() -> None:
    """44.13 GiB is printed: 44.125 to 44.135 GiB."""
    report = log_report()
    near = outcome(report, '[budget]\nmin_kv_cache = "44.126GiB"\n')
    assert (near.ok, near.readings[0].within_digits) == (True, True)
    over = outcome(report, '[budget]\nmin_kv_cache = "44.134GiB"\n')
    assert (over.ok, over.readings[0].within_digits) == (False, True)
    far = outcome(report, '[budget]\nmin_kv_cache = "44.1GiB"\n')
    assert (far.ok, far.readings[0].within_digits) == (True, False)


def test_digits_of_both_sides_of_a_regression_count() -> None:
    report = log_report()
    found = outcome(report, '[regression]\nmax_kv_cache_drop = "8MiB"\n', report)
    assert found.readings[0].half_unit == 2 * 5_368_710
    assert found.readings[0].within_digits


def test_a_report_of_a_log_keeps_its_digits() -> None:
    report = log_report()
    again = from_json(Report, to_json(report))
    text = (
        '[budget]\nmin_kv_cache = "44.126GiB"\nmax_weights = "9.1716GiB"\nmax_graph = "0.27GiB"\n'
    )
    assert to_json(check(again, text))["limits"] == to_json(check(report, text))["limits"]


@pytest.mark.parametrize(
    "run", ["graph_tp2", "skewed_tp2", "recorded_tp1", "recorded_013_tp2", "plan_tp2"]
)
def test_a_report_json_is_judged_as_its_run_folder(run: str) -> None:
    report = report_of(run)
    text = "[budget]\n" + "".join(f"{key.name} = 1\n" for key in KEYS if key.table == BUDGET)
    text += "fail_on = [" + ", ".join(f'"{name}"' for name in FINDINGS) + "]\n"
    assert to_json(check(from_json(Report, to_json(report)), text)) == to_json(check(report, text))


def test_an_older_equation_is_read_in_the_same_quantities() -> None:
    """E2 charges one absolute peak; weights and activations are taken apart (vllm-ascend 0.13)."""
    report = report_of("recorded_013_tp2")
    text = "[budget]\nmax_weights = '9.2GiB'\nmax_peak_activation = '4.3GiB'\n"
    text += "max_non_torch = '1.5GiB'\n"
    result = check(report, text)
    assert result.ok
    weights, peak = (found.readings[0].value for found in result.limits[1:3])
    assert 0 < (weights or 0) + (peak or 0) < 14_249_981_952


# --- findings


def test_a_forbidden_finding_fails_on_every_rank_that_has_it() -> None:
    report = report_of("graph_tp2")
    found = outcome(report, '[budget]\nfail_on = ["graph-not-charged"]\n')
    assert [(row.label, row.ok) for row in found.readings] == [("TP0", False), ("TP1", False)]
    assert outcome(report, '[budget]\nfail_on = ["co-tenant"]\n').ok


@pytest.mark.parametrize(
    ("run", "finding"),
    [
        ("log", "hook-not-bound"),
        ("log", "reserved-peak-beyond-device"),
        ("plan_tp2", "graph-not-charged"),
        ("plan_tp2", "kv-allocation-off-plan"),
    ],
)
def test_a_finding_that_could_not_be_made_is_not_passed(run: str, finding: str) -> None:
    report = log_report() if run == "log" else report_of(run)
    assert all(row.id != finding for row in report.findings)
    found = outcome(report, f'[budget]\nfail_on = ["{finding}"]\n')
    assert not found.ok
    assert found.unmeasured
    assert all((row.reason or "").startswith("not judged: ") for row in found.readings)


def test_eager_mode_has_no_graphs_to_charge() -> None:
    assert outcome(report_of("eager_tp2"), '[budget]\nfail_on = ["graph-not-charged"]\n').ok


def test_a_finding_of_the_run_as_a_whole() -> None:
    report = replace(
        report_of("graph_tp2"),
        findings=[Finding("co-tenant", "warning", None, None, "Somebody else", "")],
    )
    assert (
        outcome(report, '[budget]\nfail_on = ["co-tenant"]\n').readings[0].reason == "Somebody else"
    )


# --- baselines


def other(report: Report, **changed: Any) -> Report:
    return replace(report, run=replace(report.run, **changed))


def with_command(report: Report, *extra: str) -> Report:
    return other(report, command=[*report.run.command, *extra])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: other(r, model="Qwen/Qwen3-14B"), "model"),
        (lambda r: other(r, engine="vllm"), "engine"),
        (lambda r: other(r, engine_version="0.24.0"), "engine"),
        (lambda r: other(r, device="Ascend910_9382"), "device"),
        (lambda r: other(r, device_profile="ascend310p"), "device kind"),
        (lambda r: other(r, simulated=False), "device kind"),
        (lambda r: replace(r, ranks=r.ranks[:1]), "device ranks"),
        (
            lambda r: replace(r, ranks=[replace(k, device_total_bytes=1 << 35) for k in r.ranks]),
            "device total",
        ),
        (lambda r: with_command(r, "--kv-cache-dtype", "fp8"), "argument --kv-cache-dtype"),
        (lambda r: with_command(r, "--some-new-argument", "1"), "argument --some-new-argument"),
        (
            lambda r: other(r, env={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}),
            "environment",
        ),
        (lambda r: other(r, env={"HCCL_BUFFSIZE": "400"}), "environment HCCL_BUFFSIZE"),
    ],
)
def test_what_forbids_a_comparison(change: Callable[[Report], Report], what: str) -> None:
    report = report_of("graph_tp2")
    found = differences(report, change(report))
    assert any(row.startswith(what) for row in found), found
    swapped = [(row.params["b"], row.params["a"]) for row in differences(change(report), report)]
    assert swapped == [(row.params["a"], row.params["b"]) for row in found]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r,
        lambda r: with_command(
            r, "--port", "8001", "--run-dir", "elsewhere", "--prompt", "hello", "--api-key=***"
        ),
        lambda r: other(r, mode="serve", started="2027-01-01T00:00:00Z", id="other"),
        lambda r: other(r, versions={**r.run.versions, "torch": "2.11.0"}),
        lambda r: other(
            r,
            env={
                "ASCEND_HOME_PATH": "/opt/b",
                "VLLM_LOGGING_LEVEL": "DEBUG",
                "MEMPROF_RUN_DIR": "x",
            },
        ),
        lambda r: other(r, env={"ASCEND_RT_VISIBLE_DEVICES": "2,3", "HCCL_IF_IP": "10.0.0.1"}),
        lambda r: other(r, env={"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}),
    ],
)
def test_what_does_not_forbid_a_comparison(change: Callable[[Report], Report]) -> None:
    report = report_of("graph_tp2")
    assert differences(report, change(report)) == []


def test_another_torch_is_a_remark() -> None:
    report = report_of("graph_tp2")
    run = other(report, versions={**report.run.versions, "torch": "2.11.0"})
    result = check(run, "[regression]\nmax_kv_cache_drop = 0\n", report)
    assert result.ok
    assert any("torch 2.10.0 in the baseline, 2.11.0 in the run" in note for note in result.notes)


def test_a_log_is_compared_with_its_run() -> None:
    """What a log does not print has not changed, and its device is one to the printed digits."""
    found = differences(report_of("recorded_tp2"), log_report())
    assert [row for row in found if not row.startswith("model")] == []


def test_a_forced_comparison_says_what_differs() -> None:
    report = report_of("graph_tp2")
    result = check(other(report, model="B"), "[regression]\nmax_kv_cache_drop = 0\n", report)
    assert any(
        note.startswith("not comparable, compared all the same: model Qwen/")
        for note in result.notes
    )


def test_senses_are_those_of_the_names() -> None:
    for key in KEYS:
        least = key.name.startswith("min_") or key.name.endswith("_drop")
        assert (key.sense == AT_LEAST) is least, key.name


def test_a_device_of_which_only_a_remainder_is_known_does_not_pass() -> None:
    """Without the runtime's counters all that is not named is one remainder, whoever holds it."""
    found = outcome(report_of("graph_tp2"), "[budget]\nmax_unexplained = '64GiB'\n")
    assert not found.ok
    assert found.unmeasured
    assert {row.reason for row in found.readings} == {
        "only the remainder is known: the runtime's counters were not read"
    }


def test_unexplained_memory_of_a_counted_run_is_limited() -> None:
    """What HCCL holds beside the buffers of its communicator, and nobody names: 76 MiB."""
    report = report_of("recorded_023_tp2")
    assert outcome(report, "[budget]\nmax_unexplained = '76MiB'\n").ok
    assert not outcome(report, "[budget]\nmax_unexplained = '75MiB'\n").ok
