"""The budget equations: which row belongs to a release, and every step of its rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.names import LOG_FIGURES
from tests.unit.accounting.builders import TOTAL, gib
from vllm_memprof.accounting.budget.equations import (
    EQUATIONS,
    evaluate,
    select,
)
from vllm_memprof.engines.equation import Equation, Term
from vllm_memprof.record.schema import FIGURES
from vllm_memprof.units import GIB

SEED = json.loads((Path(__file__).parents[2] / "data" / "hardware_910b_tp2.json").read_text())
E4 = select("vllm-ascend", "0.23.0")[0]
assert E4 is not None


def figures(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": 0.9,
        "requested_bytes": TOTAL * 0.9,
        "weights_bytes": gib(9.19),
        "peak_activation_bytes": gib(3.86),
        "non_torch_increase_bytes": gib(0.56),
        "kv_cache_memory_bytes_arg": None,
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("engine", "version", "found"),
    [
        ("vllm-ascend", "0.23.0", "E4"),
        ("vllm-ascend", "0.23.0rc1", "E4"),
        ("vllm-ascend", "0.23.0.post1+gabc", "E4"),
        ("vllm-ascend", "0.25.1rc1", "E4"),
        ("vllm-ascend", "0.18.0", "E4"),
        ("vllm-ascend", "0.18.0rc1", "E4"),
        ("vllm-ascend", "99.0", None),  # nobody has read it
        ("vllm-ascend", "not a version", None),
        ("vllm-ascend", "0.7.3", "E1"),
        ("vllm-ascend", "0.8.5rc1", "E1"),
        ("vllm-ascend", "0.9.0rc1", "E2"),
        ("vllm-ascend", "0.9.1", "E2"),
        ("vllm-ascend", "0.13.0", "E2"),
        ("vllm-ascend", "0.14.0rc1", "E2"),
        ("vllm-ascend", "0.15.0rc1", "E3"),
        ("vllm-ascend", "0.17.0rc1", "E3"),
        ("vllm-ascend", "0.21.0rc1", "E4"),
        ("vllm-ascend", "0.26.0rc1", "E4"),
        ("vllm", "0.8.5", None),  # V0 and V1 are in it, and nothing tells which
        ("vllm", "0.10.2", "E5"),
        ("vllm", "0.14.0", "E5"),
        ("vllm", "0.17.1", "E5"),
        ("vllm", "0.18.0", "E5"),
        ("vllm", "0.23.0", "E5"),
        ("vllm", "0.27.1", "E6"),
        ("vllm", "0.33.0", "E6"),
        (None, "0.23.0", None),
        ("vllm-ascend", None, None),
    ],
)
def test_the_row_of_a_release(engine: str | None, version: str | None, found: str | None) -> None:
    row, how = select(engine, version)
    assert (row.id if row else None) == found
    assert how == (f"{engine} {version}" if found else None)


def test_without_a_version_the_form_of_the_lines_decides() -> None:
    row, how = select("vllm-ascend", None, ["E4"])
    assert row is not None
    assert (row.id, row.versions) == ("E4", ">=0.28.0rc1,<0.31")
    assert how is not None
    assert "form of its lines" in how
    assert select("vllm-ascend", None, []) == (None, None)
    assert select("vllm", None, ["E4"]) == (None, None)
    assert select("vllm-ascend", "99.0", ["E4"]) == (
        None,
        None,
    )  # the version is known, and nobody has read it


def test_rows_are_well_formed() -> None:
    for row in EQUATIONS:
        names = [term.name for term in row.terms]
        assert len(names) == len(set(names))
        assert "::" in row.cite
        used = [
            name for term in row.terms for name in (term.figure, *term.plus, *term.minus) if name
        ]
        passing = {  # computed on the way, and neither kept nor printed
            *("profile_end_free_bytes", "profile_after_allocated_bytes", "cleared_bytes"),
            *("half_page_bytes", "least_free_before_load_bytes", "least_free_after_load_bytes"),
        }
        known = {*FIGURES, *LOG_FIGURES, *passing}
        assert set(used) <= known
        assert {term.subtracted_if for term in row.terms} <= {None, *LOG_FIGURES}


def test_the_measured_cards() -> None:
    """57.91 - (0.56 + 3.86 + 9.19) = 44.30, within the rounding of the printed figures."""
    new = SEED["new_method"]
    assert E4 is not None
    given_figures = {
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": new["gpu_memory_utilization"],
        "weights_bytes": round(new["weights"] * GIB),
        "peak_activation_bytes": round(new["torch_peak_increase"] * GIB),
        "non_torch_increase_bytes": round(new["non_torch_increase"] * GIB),
        "kv_cache_bytes": round(new["kv_cache"] * GIB),
    }
    half = round(0.005 * GIB)
    halves = dict.fromkeys(
        ["weights_bytes", "peak_activation_bytes", "non_torch_increase_bytes", "kv_cache_bytes"],
        half,
    )
    result = evaluate(E4, given_figures, halves)
    assert result.kv_cache_bytes is not None
    assert f"{result.kv_cache_bytes / GIB:.2f}" == "44.30"
    assert abs(result.kv_cache_bytes - given_figures["kv_cache_bytes"]) <= result.tolerance_bytes
    assert result.tolerance_bytes == 4 * half


def test_the_engine_truncates_once_at_the_end() -> None:
    assert E4 is not None
    result = evaluate(
        E4,
        figures(
            gpu_memory_utilization=0.95,
            requested_bytes=100.75,
            weights_bytes=10,
            peak_activation_bytes=20,
            non_torch_increase_bytes=30,
        ),
    )
    assert result.kv_cache_bytes == 40
    assert result.requested == 100.75


def test_a_negative_budget_is_truncated_towards_zero_and_not_clamped() -> None:
    assert E4 is not None
    result = evaluate(
        E4,
        figures(
            requested_bytes=0.5,
            weights_bytes=10,
            peak_activation_bytes=0,
            non_torch_increase_bytes=0,
        ),
    )
    assert result.kv_cache_bytes == -9  # int(-9.5)


def test_the_request_is_computed_where_it_was_not_recorded() -> None:
    assert E4 is not None
    result = evaluate(E4, figures(requested_bytes=None))
    assert result.requested == TOTAL * 0.9


@pytest.mark.parametrize("missing", ["weights_bytes", "peak_activation_bytes"])
def test_an_unknown_term_makes_the_result_unknown(missing: str) -> None:
    assert E4 is not None
    result = evaluate(E4, figures(**{missing: None}))
    assert result.kv_cache_bytes is None
    assert (
        next(row for row in result.terms if row.name == missing.removesuffix("_bytes")).bytes
        is None
    )


def test_a_term_is_derived_from_its_ingredients() -> None:
    assert E4 is not None
    parts = {"profile_after_non_torch_bytes": 91, "initial_non_torch_bytes": 35}
    result = evaluate(E4, figures(non_torch_increase_bytes=None, **parts))
    assert next(row for row in result.terms if row.name == "non_torch").bytes == 56


def test_a_graph_is_reported_and_not_charged() -> None:
    assert E4 is not None
    without, with_graph = evaluate(E4, figures()), evaluate(E4, figures(graph_bytes=gib(0.3)))
    assert without.kv_cache_bytes == with_graph.kv_cache_bytes
    rows = {row.name: row for row in with_graph.terms}
    assert (rows["graph"].bytes, rows["graph"].subtracted) == (gib(0.3), False)
    assert {row.name: row.bytes for row in without.terms}["graph"] is None


def test_a_fixed_size_replaces_the_equation() -> None:
    assert E4 is not None
    result = evaluate(E4, figures(kv_cache_memory_bytes_arg=gib(40), peak_activation_bytes=None))
    assert (result.kv_cache_bytes, result.override) == (gib(40), "kv_cache_memory_bytes")


def test_the_fixed_size_was_ignored_before_it_was_implemented() -> None:
    row = select("vllm-ascend", "0.18.0")[0]
    assert row is not None
    result = evaluate(row, figures(kv_cache_memory_bytes_arg=gib(40)))
    assert result.override is None
    assert result.kv_cache_bytes == int(TOTAL * 0.9 - (gib(9.19) + gib(3.86) + gib(0.56)))


@pytest.mark.parametrize(("rounding", "expected"), [("float", 100.5), ("int", 100), ("ceil", 101)])
def test_roundings_of_the_request(rounding: str, expected: float) -> None:
    row = Equation("T", "vllm", "", "", "f::s", (), request=rounding)
    result = evaluate(row, {"device_total_bytes": 201, "gpu_memory_utilization": 0.5})
    assert result.requested == expected


def test_divisor_and_clamps() -> None:
    row = Equation(
        "T", "vllm", "", "", "f::s", (Term("weights", "weights_bytes"),), divisor=2, floor_zero=True
    )
    assert evaluate(row, {"requested_bytes": 11.0, "weights_bytes": 2}).kv_cache_bytes == 4
    assert evaluate(row, {"requested_bytes": 1.0, "weights_bytes": 9}).kv_cache_bytes == 0
    assert (
        evaluate(
            replace(row, floor_zero=False), {"requested_bytes": 1.0, "weights_bytes": 9}
        ).kv_cache_bytes
        == -4
    )
    term = Term(
        "used_by_device",
        plus=("device_total_bytes",),
        minus=("initial_free_bytes",),
        floor_zero=True,
    )
    assert term.value({"device_total_bytes": 5, "initial_free_bytes": 9}) == 0


bytes_of_a_card = st.integers(0, 2**37)


@given(
    total=st.integers(2**30, 2**37),
    utilization=st.floats(0.01, 1.0),
    weights=bytes_of_a_card,
    peak=bytes_of_a_card,
    non_torch=st.integers(-(2**36), 2**36),
    change=st.integers(-(2**35), 2**35),
)
def test_e4_is_the_engine_s_arithmetic(
    total: int, utilization: float, weights: int, peak: int, non_torch: int, change: int
) -> None:
    """Byte for byte what determine_available_memory computes, and linear in every term."""
    assert E4 is not None
    values = figures(
        device_total_bytes=total,
        gpu_memory_utilization=utilization,
        requested_bytes=total * utilization,
        weights_bytes=weights,
        peak_activation_bytes=peak,
        non_torch_increase_bytes=non_torch,
    )
    result = evaluate(E4, values).kv_cache_bytes
    assert result == int(total * utilization - (non_torch + peak + weights))
    changed = evaluate(E4, {**values, "weights_bytes": weights + change}).kv_cache_bytes
    assert result is not None
    assert changed is not None
    # a float of this size has a fraction of a byte: it may round, or be cut, by less than one
    assert abs((result - changed) - change) <= (0 if float(total * utilization).is_integer() else 1)


#: One release per row of the table, the figures that its engine reads, and its result.
def _e1(f: dict[str, Any]) -> int:
    return int(max(f["device_total_bytes"] * f["gpu_memory_utilization"] - f["consumed_bytes"], 0))


def _e2(f: dict[str, Any], clamped: bool = True) -> int:
    peak = f["profile_after_allocated_peak_bytes"]
    if f["used_less_allocated_bytes"] > 0:
        peak += f["used_less_allocated_bytes"]
    available = int(f["device_total_bytes"] * f["gpu_memory_utilization"] - peak)
    return max(available, 0) if clamped else available


def _relative(f: dict[str, Any]) -> int:
    weights, peak = f["weights_bytes"], f["peak_activation_bytes"]
    return int(f["non_torch_increase_bytes"] + peak + weights)


def _e3(f: dict[str, Any]) -> int:
    return int(
        f["device_total_bytes"] * f["gpu_memory_utilization"] - _relative(f) - f["cleared_bytes"]
    )


def _e4p(f: dict[str, Any]) -> int:
    return int(
        (f["device_total_bytes"] * f["gpu_memory_utilization"] - _relative(f) - f["cleared_bytes"])
        // 2
    )


def _plain(f: dict[str, Any]) -> int:
    return int(f["device_total_bytes"] * f["gpu_memory_utilization"] - _relative(f))


def _ceiled(f: dict[str, Any]) -> int:
    return math.ceil(f["device_total_bytes"] * f["gpu_memory_utilization"])


ENGINES: list[tuple[str, str, str, tuple[str, ...], Callable[[dict[str, Any]], int]]] = [
    ("vllm-ascend", "0.7.3", "", ("consumed_bytes",), _e1),
    (
        "vllm-ascend",
        "0.9.0rc1",
        "",
        ("profile_after_allocated_peak_bytes", "used_less_allocated_bytes"),
        lambda f: _e2(f, clamped=False),
    ),
    (
        "vllm-ascend",
        "0.13.0",
        "",
        ("profile_after_allocated_peak_bytes", "used_less_allocated_bytes"),
        _e2,
    ),
    ("vllm-ascend", "0.15.0rc1", "", ("cleared_bytes",), _e3),
    ("vllm-ascend", "0.18.0", "", (), _plain),
    (
        "vllm-ascend",
        "0.21.0rc1",
        "",
        ("graph_estimate_bytes",),
        lambda f: _plain_less(f, "graph_estimate_bytes"),
    ),
    ("vllm-ascend", "0.23.0", "", (), _plain),
    ("vllm-ascend", "0.26.0rc1", "", (), _plain),  # stages: test_stages.py
    ("vllm-ascend", "0.30.0rc2", "", (), _plain),
    ("vllm-ascend", "0.23.0", "Ascend310P3", ("cleared_bytes",), _e4p),
    ("vllm-ascend", "0.30.0rc2", "Ascend310P3", ("cleared_bytes",), _e4p),
    (
        "vllm",
        "0.6.4.post1",
        "",
        ("profile_after_allocated_peak_bytes", "used_less_allocated_bytes"),
        lambda f: _e2(f, clamped=False),
    ),
    ("vllm", "0.6.5", "E0", (), _plain),
    ("vllm", "0.11.0", "", (), _plain),
    ("vllm", "0.16.0", "", (), lambda f: _ceiled(f) - _relative(f)),
    ("vllm", "0.18.0", "", (), lambda f: _ceiled(f) - _relative(f)),
    (
        "vllm",
        "0.23.0",
        "",
        ("graph_estimate_bytes",),
        lambda f: _ceiled(f) - _relative(f) - f["graph_estimate_bytes"],
    ),
    (
        "vllm",
        "0.33.0",
        "",
        ("consumed_bytes", "graph_estimate_bytes"),
        lambda f: (
            _ceiled(f)
            - (f["consumed_bytes"] + f["peak_activation_bytes"])
            - f["graph_estimate_bytes"]
        ),
    ),
    (
        "vllm",
        "0.23.0+cpu",
        "cpu",
        ("consumed_bytes",),
        lambda f: int(_ceiled(f) - f["consumed_bytes"]),
    ),
]


def _plain_less(f: dict[str, Any], name: str) -> int:
    return int(f["device_total_bytes"] * f["gpu_memory_utilization"] - _relative(f) - f[name])


def test_the_request_is_rounded_up_from_0_14_on() -> None:
    """request_memory came with 0.14.0; 0.13.0 keeps the float and cuts the difference."""
    values = figures(device_total_bytes=1001, gpu_memory_utilization=0.5, requested_bytes=None)
    values |= {"weights_bytes": 100, "peak_activation_bytes": 10, "non_torch_increase_bytes": 1}
    budgets = {}
    for version in ("0.11.0", "0.13.0", "0.14.0", "0.16.0", "0.17.0", "0.18.0"):
        row, _ = select("vllm", version)
        assert row is not None
        budgets[version] = evaluate(row, values).kv_cache_bytes
    assert budgets == {"0.11.0": 389, "0.13.0": 389} | dict.fromkeys(
        ("0.14.0", "0.16.0", "0.17.0", "0.18.0"), 390
    )


def _row(engine: str, version: str, where: str) -> Equation:
    row, _ = select(engine, version, [where] if where == "E0" else [], device=where)
    assert row is not None
    return row


def test_every_row_is_tried() -> None:
    tried = {
        (row.id, row.versions)
        for row in (_row(engine, version, where) for engine, version, where, _, _ in ENGINES)
    }
    left = {(row.id, row.versions) for row in EQUATIONS} - tried
    sglang = {row for row in left if row[0] == "S1"}  # tests/unit/logs/test_sglang.py
    assert len(sglang) == 4
    assert left - sglang == {("E4", ">=0.19.0rc1,<0.21.0rc1")}  # the same terms as its successor


@pytest.mark.parametrize(("engine", "version", "where", "more", "engine_s"), ENGINES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_each_row_is_its_engine_s_arithmetic(
    engine: str,
    version: str,
    where: str,
    more: tuple[str, ...],
    engine_s: Callable[[dict[str, Any]], int],
    data: st.DataObject,
) -> None:
    """To the byte, also below zero; and a term that changes moves the KV cache by exactly that."""
    row = _row(engine, version, where)
    total = data.draw(st.integers(2**30, 2**37))
    values = figures(
        device_total_bytes=total,
        gpu_memory_utilization=data.draw(st.floats(0.01, 1.0)),
        requested_bytes=None,
        **{
            name: data.draw(
                st.integers(-(2**33) if "non_torch" in name or "cleared" in name else 0, 2**36)
            )
            for name in (
                "weights_bytes",
                "peak_activation_bytes",
                "non_torch_increase_bytes",
                *more,
            )
        },
    )
    found = evaluate(row, values).kv_cache_bytes
    assert found == engine_s(values)
    for term in row.terms:
        before = None if term.figure is None else values.get(term.figure)
        if before is None or term.figure is None or not term.is_subtracted(values) or found is None:
            continue
        change = data.draw(st.integers(0, 2**33))
        after = evaluate(row, {**values, term.figure: before + change}).kv_cache_bytes
        assert after is not None
        wanted = change if not term.floor_zero else max(0, before + change) - max(0, before)
        if row.floor_zero and after == 0:
            continue  # at the clamp
        # a request that is a fraction of bytes is cut once, at the end
        slack = (
            0
            if row.request == "ceil" or float(total * values["gpu_memory_utilization"]).is_integer()
            else 1
        )
        assert abs((found - after) * row.divisor - wanted) <= slack * row.divisor + row.divisor - 1


def test_a_graph_estimate_is_subtracted_where_the_engine_says_so() -> None:
    values = figures(requested_bytes=None, graph_estimate_bytes=gib(0.5))
    for version, default in (("0.18.0", False), ("0.23.0", True)):
        row = _row("vllm", version, "")
        charged = {}
        for said in (None, 0, 1):
            result = evaluate(row, {**values, "graph_estimate_charged": said})
            charged[said] = next(
                term.subtracted for term in result.terms if term.name == "graph_estimate"
            )
        assert charged == {None: default, 0: False, 1: True}
    row = _row("vllm", "0.23.0", "")
    with_it, without = (
        evaluate(row, {**values, "graph_estimate_charged": said}).kv_cache_bytes or 0
        for said in (1, 0)
    )
    assert without - with_it == gib(0.5)


def test_an_estimate_that_is_subtracted_and_unknown_leaves_the_result_unknown() -> None:
    assert evaluate(_row("vllm", "0.23.0", ""), figures()).kv_cache_bytes is None
    assert (
        evaluate(_row("vllm", "0.23.0", ""), figures(graph_estimate_charged=0)).kv_cache_bytes
        is not None
    )


def test_multi_modal_decoding_takes_its_share_where_there_is_one() -> None:
    row = _row("vllm", "0.25.1", "")
    values = figures(requested_bytes=None, graph_estimate_bytes=0)
    without, with_it = evaluate(row, values), evaluate(row, {**values, "mm_ipc_bytes": gib(1)})
    assert "mm_ipc" not in {term.name for term in without.terms}
    assert (without.kv_cache_bytes or 0) - (with_it.kv_cache_bytes or 0) == gib(1)


def test_a_chip_or_the_form_of_its_lines_has_its_own_row() -> None:
    assert _row("vllm-ascend", "0.23.0", "Ascend910B4").id == "E4"
    assert _row("vllm-ascend", "0.23.0", "ascend310p3").id == "E4p"
    row, how = select("vllm-ascend", "0.23.0", ["E4p"])
    assert row is not None
    assert row.id == "E4p"
    assert how == "vllm-ascend 0.23.0 and the form of its lines"
    assert select("vllm", "0.8.5", ["E0"])[0] is not None
    row, _ = select("vllm", None, ["CPU"])
    assert row is not None
    assert row.id == "CPU"


def test_of_the_rows_of_one_form_the_one_counts_that_the_figures_fill() -> None:
    known = (
        "weights_bytes",
        "peak_activation_bytes",
        "non_torch_increase_bytes",
        "requested_bytes",
    )
    plain, _ = select("vllm", None, ["E5"], known=known)
    estimated, _ = select("vllm", None, ["E5"], known=(*known, "graph_estimate_bytes"))
    assert plain is not None
    assert estimated is not None
    assert (plain.versions, estimated.versions) == (
        ">=0.18.0rc1,<0.21.0rc1",
        ">=0.21.0rc1,<0.27.0rc1",
    )
    assert select("vllm-ascend", None, ["E2", "E4"]) == (None, None)


def test_half_units_of_what_was_derived_add_up() -> None:
    row = _row("vllm", "0.33.0", "")
    values = figures(
        peak_activation_bytes=None,
        consumed_bytes=100,
        printed_peak_activation_bytes=60,
        graph_estimate_bytes=58,
    )
    half = {
        "consumed_bytes": 5,
        "printed_peak_activation_bytes": 5,
        "graph_estimate_bytes": 5,
        "kv_cache_bytes": 5,
    }
    result = evaluate(row, values, half)
    assert {term.name: term.half_unit_bytes for term in result.terms if term.subtracted} == {
        "consumed": 5,
        "transient_headroom": 10,
        "graph_estimate": 5,
    }
    assert result.tolerance_bytes == 25


def test_the_old_method_on_the_measured_cards() -> None:
    """The method before E4 at utilization 0.9: 54.86 - (13.30 + 1.21) = 40.35 GiB."""
    old = SEED["old_method"][1]
    row = _row("vllm-ascend", "0.13.0", "")
    used, allocated = gib(old["result"]["non_torch"] + 9.45), gib(9.45)
    values = {
        "device_total_bytes": TOTAL,
        "gpu_memory_utilization": old["gpu_memory_utilization"],
        "profile_after_allocated_peak_bytes": gib(old["after_profile_run"]["torch_peak"]),
        "profile_after_free_bytes": TOTAL - used,
        "profile_after_allocated_bytes": allocated,
    }
    result = evaluate(row, values).kv_cache_bytes
    assert result is not None
    assert f"{result / GIB:.2f}" == f"{old['result']['available']:.2f}"
