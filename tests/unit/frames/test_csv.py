"""The csv in pandas: the same figures and totals as report.json, for recorded runs and for logs."""

from __future__ import annotations

import io
import json

import pandas as pd
import pytest

from tests.support.render import render_json
from tests.support.runs import LOGS, RUNS, report_of
from tests.unit.accounting.builders import device_memory as device_edges
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.frames.csv import COLUMNS, report_csv
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.schema import SNAPSHOT_FIELDS
from vllm_memprof.record.spans import edges_of

WHEN = ["label", "order", "edge"]


def frame(*reports: Report) -> pd.DataFrame:
    """As pandas reads it without being told anything."""
    return pd.read_csv(io.StringIO("".join(report_csv(*reports))))


@pytest.mark.parametrize("name", RUNS)
def test_pandas_gets_every_row_of_report_json(name: str) -> None:
    report = report_of(name)
    data, rows = json.loads(render_json(report)), frame(report)
    assert list(rows.columns) == list(COLUMNS)
    found = {
        (kind, label, order, edge, component): (size, how)
        for kind, label, order, edge, component, size, how in rows[rows.order.notna()][
            ["kind", *WHEN, "component", "bytes", "how"]
        ].itertuples(index=False)
    }
    wanted = {}
    for rank in data["ranks"]:
        phases = {row["order"]: row for row in rank["phases"]}
        for memory in device_edges(rank):
            at = (rank["label"], memory["order"], memory["edge"])
            for row in memory["owners"]:
                wanted[("owner", *at, row["component"])] = (row["bytes"], row["how"])
            wanted[("owner", *at, "unexplained")] = (
                memory["unexplained_bytes"],
                memory["unexplained_how"],
            )
            for row in memory["parts"]:
                wanted[("part", *at, row["component"])] = (row["bytes"], row["how"])
            snapshot = phases[memory["order"]][memory["edge"]]
            for field in SNAPSHOT_FIELDS:
                if field.endswith("_bytes"):
                    wanted[("reading", *at, field)] = (snapshot[field], None)
    assert found.keys() == wanted.keys()
    assert len(found) == len(rows[rows.order.notna()])  # no row twice
    for key, (size, how) in wanted.items():
        got, got_how = found[key]
        assert (None if pd.isna(got) else int(got)) == size, key
        assert how is None or got_how == how, key


@pytest.mark.parametrize("name", RUNS)
def test_owners_add_up_to_the_device_in_pandas(name: str) -> None:
    report = report_of(name)
    rows = frame(report)
    named = [*WHEN, "kind", "component"]
    moments = (
        rows[rows.order.notna()]
        .groupby(named)["bytes"]
        .sum(min_count=1)
        .unstack(["kind", "component"])
    )
    totals = moments["reading"]["device_total_bytes"].dropna()
    assert len(totals) == sum(
        edge.owners is not None and edge.owners.unexplained_bytes is not None
        for rank in report.ranks
        for _, edge in edges_of(rank.phases)
    )
    assert len(totals)
    assert (moments["owner"].sum(axis=1).loc[totals.index] == totals).all()


def same_budget(reports: list[Report]) -> None:
    rows = frame(*reports)
    for report in reports:
        for rank in json.loads(render_json(report))["ranks"]:
            mine = rows[
                (rows.run == report.run.id) & (rows.label == rank["label"]) & rows.order.isna()
            ]
            figures = mine.set_index(["kind", "component"]).bytes.sort_index()
            for name in (
                "requested_bytes",
                "kv_cache_bytes",
                "engine_kv_cache_bytes",
                "fits_request_bytes",
            ):
                got = figures["budget", name]
                assert (None if pd.isna(got) else got) == rank["budget"][name], name
            for term in rank["budget"]["terms"]:
                got = figures["term", term["name"]]
                assert (None if pd.isna(got) else got) == term["bytes"], term
            for row in rank["budget"]["audit"]:
                for kind, size in (
                    ("", row["bytes"]),
                    ("_difference", row["difference_bytes"]),
                ):
                    got = figures[f"audit{kind}", row["name"]]
                    assert (None if pd.isna(got) else got) == size, row


@pytest.mark.parametrize("name", RUNS)
def test_the_budget_is_that_of_report_json(name: str) -> None:
    same_budget([report_of(name)])


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_a_log_has_its_budget_and_several_starts_share_a_header(log) -> None:
    same_budget([build_report(run) for run in read_log(str(log))])


def test_names_of_any_kind_stay_in_their_cell() -> None:
    hostile = 'a,b"c\n=1+1'
    rows = frame(report_of("graph_tp2", id=hostile))
    assert set(rows.run) == {hostile}
    assert set(rows.label) == {"TP0", "TP1"}


def test_readings_outside_torch_are_modelled_on_a_simulated_device_only() -> None:
    for simulated, how in ((True, "modelled"), (False, "derived")):
        rows = frame(report_of("graph_tp2", simulated=simulated))
        readings = rows[rows.kind == "reading"]
        assert set(readings[readings.component == "non_torch_bytes"].how) == {how}
        assert set(readings[readings.component == "allocated_bytes"].how) == {"measured"}


def test_seconds_count_from_the_launch() -> None:
    report = report_of("recorded_tp2")
    rows = frame(report)
    first = next(row.before for row in report.ranks[0].phases if row.before is not None)
    start = rows[(rows.label == report.ranks[0].label) & (rows.edge == "before")].seconds.iloc[0]
    assert report.run.start_t_ns is not None
    assert start == pytest.approx((first.t_ns - report.run.start_t_ns) / 1e9)
