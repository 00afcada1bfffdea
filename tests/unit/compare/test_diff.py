"""Two runs: the causes are what was changed, and add up to the difference, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.accounting.builders import (
    DATA,
    TOTAL,
    gib,
    process,
    recorded,
    run_of,
    snapshot,
    span,
)
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.accounting.readings.quantities import CONTEXT_CEILING_BYTES
from vllm_memprof.compare.diff import Diff, diff_reports
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import from_json, to_json

RELEASES = [
    ("vllm-ascend", "0.7.3", "E1"),
    ("vllm-ascend", "0.9.0rc1", "E2"),
    ("vllm-ascend", "0.13.0", "E2"),
    ("vllm-ascend", "0.16.0rc1", "E3"),
    ("vllm-ascend", "0.18.0", "E4"),
    ("vllm-ascend", "0.21.0rc1", "E4"),
    ("vllm-ascend", "0.23.0", "E4"),
    ("vllm", "0.11.0", "E5"),
    ("vllm", "0.23.0", "E5"),
    ("vllm", "0.33.0", "E6"),
]
UNREAD = ("vllm", "99.0", None)
RUNS = [
    "recorded_tp2",
    "recorded_tp1",
    "recorded_killed_tp2",
    "graph_tp2",
    "skewed_tp2",
    "killed_tp2",
    "plan_tp2",
]


def physical(**changes: int | float) -> dict[str, Any]:
    """What a device held, in quantities that no two of which overlap."""
    return {
        "total": TOTAL,
        "share": 0.95,
        "weights": gib(9.19),
        "persistent_torch": gib(0.26),
        "peak_activation": gib(3.85),
        "reserved_not_allocated": gib(0.30),
        "initial_non_torch": gib(0.35),
        "non_torch": gib(0.56),
        "non_torch_cleared": gib(0.16),
        "reserved_at_end": gib(5.5),
        "graph_estimate": gib(0.1),
        **changes,
    }


def run_with(state: dict[str, Any], engine: str, version: str, **figures: Any) -> Report:
    """Return the report of a release on such a device; its grant is what the equation gives."""
    report = build_report(_run(state, engine, version, {}, figures))
    granted = report.ranks[0].budget.kv_cache_bytes
    return build_report(_run(state, engine, version, {"kv_cache_bytes": granted}, figures))


def _run(
    state: dict[str, Any], engine: str, version: str, grant: dict[str, Any], figures: dict[str, Any]
) -> Any:
    total, before = state["total"], state["weights"] + state["persistent_torch"]
    peak, cached = before + state["peak_activation"], before + state["reserved_not_allocated"]
    end_reserved = peak + state["reserved_not_allocated"] + state["reserved_at_end"]
    non_torch = state["initial_non_torch"] + state["non_torch"]
    end_non_torch = non_torch + state["non_torch_cleared"]

    def at(allocated: int, reserved: int, outside: int, peak: int) -> Any:
        return snapshot(
            device_total_bytes=total,
            device_free_bytes=total - reserved - outside,
            allocated_bytes=allocated,
            allocated_peak_bytes=peak,
            reserved_bytes=reserved,
            non_torch_bytes=outside,
        )

    phases = [
        span(
            "profile_run",
            at(before, cached, state["initial_non_torch"], before),
            at(before, cached, non_torch, peak),
        ),
        span(
            "empty_cache",
            at(before, end_reserved, end_non_torch, peak),
            at(before, cached, non_torch, peak),
            order=1,
            parent=0,
            depth=1,
        ),
    ]
    known = {
        "device_total_bytes": total,
        "gpu_memory_utilization": state["share"],
        "initial_free_bytes": total - state["initial_non_torch"],
        "initial_non_torch_bytes": state["initial_non_torch"],
        "weights_bytes": state["weights"],
        "peak_activation_bytes": state["peak_activation"],
        "non_torch_increase_bytes": state["non_torch"],
        "profile_before_allocated_peak_bytes": before,
        "profile_after_allocated_peak_bytes": peak,
        "profile_after_non_torch_bytes": non_torch,
        "profile_after_free_bytes": total - cached - non_torch,
        "profile_after_allocated_bytes": before,
        "graph_estimate_bytes": state["graph_estimate"],
    }
    worker = process(phases, {**known, **grant, **figures})
    return run_of(worker, engine=engine, engine_version=version)


def causes(diff: Diff) -> dict[str, int | None]:
    """The causes that are not 0, by name."""
    assert diff.served is not None
    return {
        " + ".join(cause.names): cause.bytes for cause in diff.served.causes if cause.bytes != 0
    }


def assert_adds_up(diff: Diff) -> None:
    for rank in [*diff.ranks, *([diff.served] if diff.served else [])]:
        if rank.difference_bytes is not None:
            assert rank.causes_bytes == rank.difference_bytes
    tokens = [] if diff.served is None else [cause.kv_tokens for cause in diff.served.causes]
    if tokens and None not in tokens:
        assert sum(tokens) == diff.difference_tokens


sizes = st.integers(min_value=0, max_value=gib(20))
quantities = st.sampled_from(sorted(physical()))
states = st.fixed_dictionaries(
    {name: sizes for name in physical() if name not in ("total", "share")},
    optional={"total": st.integers(gib(16), gib(128)), "share": st.floats(0.05, 0.99)},
).map(lambda values: physical(**values))


@given(a=states, b=states, left=st.sampled_from(RELEASES), right=st.sampled_from(RELEASES))
@settings(max_examples=150)
def test_the_causes_add_up_for_any_two_recomputed_budgets(
    a: Any, b: Any, left: Any, right: Any
) -> None:
    reports = run_with(a, *left[:2]), run_with(b, *right[:2])
    assert [report.ranks[0].budget.equation for report in reports] == [left[2], right[2]]
    assert all(report.ranks[0].budget.balanced for report in reports)
    diff = diff_reports(*reports)
    assert diff.served is not None
    assert diff.served.difference_bytes is not None
    assert_adds_up(diff)
    assert not {"unknown", "residual"} & {cause.kind for cause in diff.served.causes}


figure_names = st.sampled_from(
    [
        "weights_bytes",
        "peak_activation_bytes",
        "non_torch_increase_bytes",
        "initial_free_bytes",
        "initial_non_torch_bytes",
        "profile_before_allocated_peak_bytes",
        "profile_after_allocated_peak_bytes",
        "device_total_bytes",
        "gpu_memory_utilization",
        "graph_estimate_bytes",
    ]
)


@given(
    a=states,
    b=states,
    left=st.sampled_from(RELEASES),
    right=st.sampled_from([*RELEASES, UNREAD]),
    missing=st.sets(figure_names, max_size=5),
    granted=st.one_of(st.none(), sizes),
    fixed=st.one_of(st.none(), sizes),
    device=st.sampled_from([None, "Ascend310P3"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_causes_add_up_whatever_is_missing(
    a: Any,
    b: Any,
    left: Any,
    right: Any,
    missing: set[str],
    granted: int | None,
    fixed: int | None,
    device: str | None,
) -> None:
    """Figures unknown, grants that differ, a fixed size, the device that halves its budget."""
    figures = {
        **dict.fromkeys(missing),
        "kv_cache_bytes": granted,
        "kv_cache_memory_bytes_arg": fixed,
    }
    run = _run(b, right[0], right[1], {}, figures)
    right_report = build_report(replace(run, info=replace(run.info, device=device)))
    for pair in ((run_with(a, *left[:2]), right_report), (right_report, run_with(a, *left[:2]))):
        assert_adds_up(diff_reports(*pair))


@given(state=states, left=st.sampled_from(RELEASES), right=st.sampled_from(RELEASES))
@settings(max_examples=100)
def test_on_the_same_device_only_the_methods_are_causes(state: Any, left: Any, right: Any) -> None:
    diff = diff_reports(run_with(state, *left[:2]), run_with(state, *right[:2]))
    assert diff.served is not None
    kinds = {cause.kind for cause in diff.served.causes if cause.bytes}
    assert kinds <= {"method", "rounding", "request"}  # the requests are rounded in two ways
    assert all(
        abs(cause.bytes or 0) <= 1 for cause in diff.served.causes if cause.kind == "request"
    )


@given(state=states)
@settings(max_examples=50)
def test_the_old_method_and_the_new_one(state: Any) -> None:
    """E4 leaves out three things that E2 subtracts: 0.35 + 0.26 + 0.30 GiB on the reported cards.

    More than a context at the start may be another process's: then the two are one cause.
    """
    old, new = run_with(state, "vllm-ascend", "0.13.0"), run_with(state, "vllm-ascend", "0.23.0")
    at_start = "initial_non_torch"
    if state[at_start] > CONTEXT_CEILING_BYTES:
        at_start += " + other_processes_at_start"
    left_out = {
        at_start: state["initial_non_torch"],
        "persistent_torch": state["persistent_torch"],
        "reserved_not_allocated": state["reserved_not_allocated"],
    }
    left_out = {name: size for name, size in left_out.items() if size}
    found = causes(diff_reports(old, new))
    found.pop("rounding", None)
    found.pop("clamped", None)  # E2 raises a budget below 0 to 0
    assert found == left_out


@pytest.mark.parametrize(
    ("release", "quantity"),
    [
        *(
            (("vllm-ascend", "0.23.0"), name)
            for name in ("weights", "peak_activation", "non_torch")
        ),
        *(
            (("vllm-ascend", "0.13.0"), name)
            for name in (
                "weights",
                "persistent_torch",
                "peak_activation",
                "reserved_not_allocated",
                "initial_non_torch",
                "non_torch",
            )
        ),
        *(
            (("vllm-ascend", "0.16.0rc1"), name)
            for name in (
                "weights",
                "peak_activation",
                "initial_non_torch",
                "non_torch",
                "non_torch_cleared",
            )
        ),
        *(
            (("vllm-ascend", "0.7.3"), name)
            for name in ("weights", "peak_activation", "reserved_at_end")
        ),
        *(
            (("vllm", "0.33.0"), name)
            for name in ("weights", "peak_activation", "reserved_not_allocated", "graph_estimate")
        ),
    ],
)
def test_one_change_is_one_cause(release: tuple[str, str], quantity: str) -> None:
    more = physical()[quantity] + 1_234_567
    diff = diff_reports(
        run_with(physical(), *release), run_with(physical(**{quantity: more}), *release)
    )
    assert causes(diff) == {quantity: -1_234_567}
    assert diff.served is not None
    assert {cause.kind for cause in diff.served.causes if cause.bytes} == {"state"}


@pytest.mark.parametrize(
    "quantity",
    ["persistent_torch", "initial_non_torch", "reserved_not_allocated", "non_torch_cleared"],
)
def test_what_no_term_subtracts_is_no_cause(quantity: str) -> None:
    more = physical(**{quantity: physical()[quantity] + gib(1)})
    diff = diff_reports(
        run_with(physical(), "vllm-ascend", "0.23.0"), run_with(more, "vllm-ascend", "0.23.0")
    )
    assert causes(diff) == {}
    assert diff.served is not None
    assert diff.served.difference_bytes == 0


def test_the_request_is_split_into_share_and_device() -> None:
    release = ("vllm-ascend", "0.23.0")
    both = diff_reports(
        run_with(physical(), *release),
        run_with(physical(total=TOTAL + gib(3), share=0.9), *release),
    )
    by_share = int(TOTAL * 0.9) - int(TOTAL * 0.95)
    assert causes(both) == {
        "gpu_memory_utilization": by_share,
        "device_total": int((TOTAL + gib(3)) * 0.9) - int(TOTAL * 0.9),
    }


def test_a_fixed_size_is_a_cause_of_its_own() -> None:
    release = ("vllm-ascend", "0.23.0")
    a, b = (
        run_with(physical(), *release),
        run_with(physical(), *release, kv_cache_memory_bytes_arg=gib(20)),
    )
    diff = diff_reports(a, b)
    assert causes(diff) == {"fixed_size": gib(20) - (a.ranks[0].budget.kv_cache_bytes or 0)}
    assert diff.served is not None
    assert next(cause.kind for cause in diff.served.causes if cause.bytes) == "size"


def test_a_budget_that_differs_shows_its_residual() -> None:
    release = ("vllm-ascend", "0.23.0")
    a = run_with(physical(), *release)
    granted = a.ranks[0].budget.kv_cache_bytes or 0
    b = build_report(_run(physical(), *release, {"kv_cache_bytes": granted - 77}, {}))
    assert causes(diff_reports(a, b)) == {"residual": -77}


def test_a_term_that_one_run_lacks_is_named_and_the_sum_holds() -> None:
    release = ("vllm-ascend", "0.23.0")
    a, whole = run_with(physical(), *release), run_with(physical(weights=gib(10)), *release)
    granted = whole.ranks[0].budget.kv_cache_bytes
    lacking = dict.fromkeys(
        ("weights_bytes", "non_torch_increase_bytes", "profile_after_non_torch_bytes")
    )
    b = build_report(
        _run(physical(weights=gib(10)), *release, {"kv_cache_bytes": granted}, lacking)
    )
    diff = diff_reports(a, b)
    assert causes(diff) == {"weights + non_torch": gib(9.19) - gib(10)}
    assert diff.served is not None
    cause = next(cause for cause in diff.served.causes if cause.bytes)
    assert cause.kind == "unknown"
    assert cause.a.subtracted_bytes == gib(9.19) + gib(0.56)


def test_without_an_equation_nothing_is_told_apart() -> None:
    """What an unread release subtracts is not known, so nothing of the other run is a cause."""
    a = build_report(_run(physical(), "vllm", "99.0", {"kv_cache_bytes": gib(40)}, {}))
    b = run_with(physical(), "vllm-ascend", "0.23.0")
    diff = diff_reports(a, b)
    assert diff.served is not None
    assert [(cause.names, cause.kind) for cause in diff.served.causes] == [
        (("equation",), "unknown")
    ]
    assert_adds_up(diff)


def test_without_a_grant_nothing_is_claimed() -> None:
    diff = diff_reports(build_report(recorded("killed_tp2")), build_report(recorded("plan_tp2")))
    assert diff.served is not None
    assert diff.served.difference_bytes is None
    assert diff.served.causes_bytes is None
    assert all(cause.bytes is None for cause in diff.served.causes)
    assert any("no KV cache was sized" in note for note in diff.notes)


def test_the_rank_with_the_least_decides() -> None:
    """In A TP1 holds 0.25 GiB more outside torch; B has no such skew."""
    diff = diff_reports(build_report(recorded("skewed_tp2")), build_report(recorded("graph_tp2")))
    assert causes(diff) == {"least_rank": gib(0.25)}
    assert [rank.difference_bytes for rank in diff.ranks] == [0, gib(0.25)]
    assert_adds_up(diff)
    back = diff_reports(build_report(recorded("graph_tp2")), build_report(recorded("skewed_tp2")))
    assert causes(back) == {"non_torch": -gib(0.25)}
    assert back.difference_tokens == -(diff.difference_tokens or 0)


def test_other_models_and_world_sizes_are_compared_and_said() -> None:
    diff = diff_reports(
        build_report(recorded("recorded_tp1")), build_report(recorded("recorded_tp2"))
    )
    text = " ".join(diff.notes)
    assert "different models" in text
    assert "1 and 2 ranks" in text
    assert_adds_up(diff)
    assert diff.served is not None
    assert "bytes_per_token" in {name for cause in diff.served.causes for name in cause.names}


def test_ranks_of_other_names_are_compared_by_the_least() -> None:
    a, b = build_report(recorded("skewed_tp2")), build_report(recorded("graph_tp2"))
    b = replace(b, ranks=[replace(rank, label=f"PP{rank.rank}") for rank in b.ranks])
    diff = diff_reports(a, b)
    assert len(diff.ranks) == 1
    assert (diff.ranks[0].a_label, diff.ranks[0].b_label) == ("TP1", "PP0")
    assert any("no rank has the same name" in note for note in diff.notes)
    assert_adds_up(diff)


def test_the_reported_run_from_its_log() -> None:
    """Both methods on the same cards, as printed: 0.35 + 0.26 + 0.30 GiB, within the digits."""
    starts = [build_report(run) for run in read_log(str(DATA / "logs" / "two_methods_910b_tp2.md"))]
    diff = diff_reports(starts[1], starts[2])
    assert_adds_up(diff)
    found = causes(diff)
    within = pytest.approx
    assert found["initial_non_torch + other_processes_at_start + non_torch"] == within(
        gib(0.35), abs=gib(0.01)
    )
    assert found["reserved_not_allocated"] == within(gib(0.30), abs=gib(0.01))
    assert found["weights + persistent_torch"] == within(gib(0.26), abs=gib(0.01))
    assert found["requested"] == within(gib(3.05), abs=gib(0.01))
    assert diff.served is not None
    assert diff.served.tolerance_bytes > 0
    assert abs(found["printed_digits"] or 0) <= diff.served.tolerance_bytes


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_not_differ_from_itself(name: str) -> None:
    report = build_report(recorded(name))
    diff = diff_reports(report, report)
    assert diff.changed == []
    assert diff.a_findings == diff.b_findings == []
    assert diff.served is not None
    assert all(not cause.bytes for cause in diff.served.causes)
    assert diff.served.difference_bytes in (0, None)


@pytest.mark.parametrize("a", RUNS)
@pytest.mark.parametrize("b", RUNS)
def test_a_report_read_again_gives_the_same_comparison(a: str, b: str) -> None:
    reports = build_report(recorded(a)), build_report(recorded(b))
    again = [from_json(Report, json.loads(json.dumps(to_json(report)))) for report in reports]
    diff = diff_reports(*reports)
    assert to_json(diff_reports(*again)) == to_json(diff)
    assert_adds_up(diff)
    json.dumps(to_json(diff), allow_nan=False)


def test_a_report_of_an_older_release_is_read() -> None:
    """Without the figures, what its terms and items hold still gives the causes."""
    reports = []
    for name in ("skewed_tp2", "graph_tp2"):
        data = json.loads(json.dumps(to_json(build_report(recorded(name)))))
        for rank in data["ranks"]:
            del rank["figures"]
        del data["run"]["versions"], data["run"]["env"]
        reports.append(from_json(Report, data))
    diff = diff_reports(*reports)
    assert causes(diff) == {"least_rank": gib(0.25)}
    assert_adds_up(diff)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "Expected `object`"),
        ({}, "None"),
        ({"schema": "memprof.report/1"}, "memprof.report/1"),
        ({"schema": "memprof.report/3"}, "required field `run`"),
        (
            {"schema": "memprof.report/3", "run": {"status": "ok", "command": []}, "ranks": []},
            "missing",
        ),
        ({"schema": "memprof.report/3", "run": 3, "ranks": []}, r"Expected `object`, .* `\$.run`"),
    ],
)
def test_what_is_no_report_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(Report, data)


def test_what_was_given() -> None:
    a = build_report(
        recorded("recorded_tp2", env={"HCCL_BUFFSIZE": "200", "MEMPROF_RUN_DIR": "/a"})
    )
    command = [
        *a.run.command,
        "--enforce_eager",
        "-tp",
        "4",
        "--gpu-memory-utilization=0.9",
        "--run-dir",
        "/b",
    ]
    command[command.index("--max-num-seqs") : command.index("--max-num-seqs") + 2] = []
    run = replace(
        a.run,
        command=command,
        env={"HCCL_BUFFSIZE": "400"},
        versions={**a.run.versions, "torch": "3"},
    )
    found = {
        (row.kind, row.name): (row.a, row.b) for row in diff_reports(a, replace(a, run=run)).changed
    }
    assert found == {
        ("version", "torch"): (a.run.versions["torch"], "3"),
        ("argument", "--max-num-seqs"): ("8", None),
        ("argument", "--tensor-parallel-size"): ("2", "2 4"),
        ("argument", "--gpu-memory-utilization"): ("0.95", "0.95 0.9"),
        ("argument", "--enforce-eager"): (None, "given"),
        ("environment", "HCCL_BUFFSIZE"): ("200", "400"),
    }


def test_a_quantity_that_its_term_and_its_reading_give_in_two_sizes_is_said() -> None:
    release = ("vllm-ascend", "0.13.0")
    a = run_with(physical(), *release)
    b = run_with(physical(), *release, non_torch_increase_bytes=gib(0.56) - 4096)
    assert not any("read apart" in note for note in diff_reports(a, a).notes)
    note = next(note for note in diff_reports(a, b).notes if "read apart" in note)
    assert f"B: non-torch increase is what its term leaves, {gib(0.56):,} bytes" in note
    assert f"{gib(0.56) - 4096:,}" in note


def test_what_a_log_does_not_print_has_not_changed() -> None:
    log = build_report(read_log(str(DATA / "logs" / "recorded_tp2_0.23.0.log"))[0])
    hooks = build_report(recorded("recorded_tp2"))
    for diff in (diff_reports(log, hooks), diff_reports(hooks, log)):
        assert {row.kind for row in diff.changed} <= {"engine", "device"}
        assert {row.name for row in diff.changed} <= {"read from", "device total"}
        assert not any(note.startswith("different") for note in diff.notes)
        assert_adds_up(diff)
        assert diff.served is not None
        assert abs(diff.served.difference_bytes or 0) <= diff.served.tolerance_bytes
        assert diff.difference_tokens == 0


def test_a_quiet_run_is_not_a_quantized_one() -> None:
    a = build_report(recorded("recorded_tp2"))
    quiet = replace(a, run=replace(a.run, command=[*a.run.command, "-q"]))
    awq = replace(a, run=replace(a.run, command=[*a.run.command, "-q", "awq"]))
    assert diff_reports(a, quiet).changed == []
    assert [(row.name, row.b) for row in diff_reports(a, awq).changed] == [
        ("--quantization", "awq")
    ]


plans = st.tuples(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(1, 10**9))


@given(a=states, b=states, left=plans, right=plans)
@settings(max_examples=100)
def test_the_tokens_add_up_for_any_two_plans(a: Any, b: Any, left: Any, right: Any) -> None:
    """Of any size: blocks that the budget does not set are a cause of their own."""
    reports = []
    for state, (tokens, blocks, per_block) in ((a, left), (b, right)):
        report = run_with(state, "vllm-ascend", "0.23.0")
        kv = replace(report.ranks[0].kv, tokens=tokens, blocks=blocks, bytes_per_block=per_block)
        reports.append(replace(report, ranks=[replace(report.ranks[0], kv=kv)]))
    diff = diff_reports(*reports)
    assert diff.served is not None
    assert None not in [cause.kv_tokens for cause in diff.served.causes]
    assert diff.difference_tokens == right[0] - left[0]
    assert_adds_up(diff)
