"""Tables of recorded runs: their shapes and types, and figures against the report behind them."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.support.runs import LOGS, RUNS, report_of
from tests.support.served import leaking
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.frames import tables
from vllm_memprof.logs.to_record import read_log

WHEN = ["label", "order", "edge"]
TABLES = (
    tables.phases,
    tables.snapshots,
    tables.device_memory,
    tables.budget,
    tables.audit,
    tables.kv,
    tables.empty_cache,
    tables.requests,
    tables.samples,
    tables.growth,
    tables.findings,
)


def made(table, reports: list[Report]) -> pd.DataFrame:
    return table(reports if table is tables.findings else tables.rank_sources(reports))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_units_decide_the_types(table, name: str) -> None:
    frame = made(table, [report_of(name)])
    for column, dtype in frame.dtypes.items():
        if str(column).endswith("_bytes") or column == "bytes":
            assert str(dtype) == "Int64", column
        assert str(dtype) in ("Int64", "Float64", "string", "boolean"), column
    assert "run" in frame.columns


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_a_run_without_ranks_has_the_same_columns(table) -> None:
    report = report_of("recorded_tiny_tp2")
    empty = made(table, [])
    assert list(empty.columns) == list(made(table, [report]).columns)
    assert len(empty) == 0


@pytest.mark.parametrize("name", RUNS)
def test_owners_add_up_to_the_device(name: str) -> None:
    report = report_of(name)
    owners = made(tables.device_memory, [report])
    whole = owners[owners.part_of.isna()].groupby(WHEN)["bytes"].sum(min_count=1)
    totals = made(tables.snapshots, [report]).set_index(WHEN)["device_total_bytes"]
    known = totals.dropna().index.intersection(
        owners[(owners.component == "unexplained") & owners["bytes"].notna()].set_index(WHEN).index
    )
    assert len(known)
    assert (whole.loc[known] == totals.loc[known]).all()


@pytest.mark.parametrize("name", RUNS)
def test_phases_hold_what_their_edges_read(name: str) -> None:
    report = report_of(name)
    frame = made(tables.phases, [report]).set_index(["label", "order"])
    assert len(frame) == sum(len(rank.phases) for rank in report.ranks)
    for rank in report.ranks:
        for span in rank.phases:
            row = frame.loc[(rank.label, span.order)]
            if span.before is None or span.after is None or span.after.reserved_bytes is None:
                continue
            assert row.reserved_after_bytes == span.after.reserved_bytes
            if span.before.reserved_bytes is not None:
                grown = span.after.reserved_bytes - span.before.reserved_bytes
                assert row.reserved_change_bytes == grown


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_what_a_log_does_not_print_is_missing_not_zero(log) -> None:
    reports = [build_report(run) for run in read_log(str(log))]
    budget = made(tables.budget, reports)
    for report in reports:
        for rank in report.ranks:
            mine = budget[(budget.run == report.run.id) & (budget.label == rank.label)]
            mine = mine[mine.kind == "term"]
            for term in rank.budget.terms:
                got = mine[mine.name == term.name]["bytes"].iloc[0] if len(mine) else None
                assert (None if pd.isna(got) else int(got)) == term.bytes


def test_tokens_and_concurrency() -> None:
    report = report_of("recorded_tiny_tp2")
    frame = made(tables.kv, [report])
    assert list(frame.tokens) == [rank.kv.tokens for rank in report.ranks]
    assert list(frame.max_concurrency) == [rank.kv.max_concurrency for rank in report.ranks]


def test_growth_is_that_of_the_report() -> None:
    report = build_report(leaking())
    frame = made(tables.growth, [report])
    assert list(frame.owner) == [row.owner for row in report.ranks[0].growth]
    assert frame.bytes_per_request[0] == report.ranks[0].growth[0].bytes_per_request
    assert frame.requests_until_full.isna().all()  # no available KV cache is known
