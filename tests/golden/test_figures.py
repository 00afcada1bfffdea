"""Figures of JSON, csv and trace against the lines of the record, read without memprof's loader."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import tomlkit

from tests.golden.update import CHECKS, DIFFS
from tests.support.record import Worker, read_record
from tests.support.render import render_json
from tests.support.runs import DATA, LOGS, RUNS, check_result, diff_of, reports_of
from tests.unit.accounting.builders import device_memory
from vllm_memprof.accounting.model import Report
from vllm_memprof.frames.csv import report_csv
from vllm_memprof.record.codec import from_json
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.trace import report_trace

EDGES = ("before", "after")
#: Term of the equation E4 -> the engine's figure that it is, and whether E4 subtracts it.
E4_TERMS = {
    "weights": ("weights_bytes", True),
    "peak_activation": ("peak_activation_bytes", True),
    "non_torch": ("non_torch_increase_bytes", True),
    "graph": ("graph_bytes", False),
}
#: Log -> its figures as people wrote them down, by start and rank.
REPORTED = json.loads((DATA / "logs" / "expected.json").read_text())
Json = dict[str, Any]


def report_json(name: str) -> Json:
    (report,) = reports_of(name)
    data: Json = json.loads(render_json(report))
    return data


def with_workers(name: str) -> Iterator[tuple[Json, Worker]]:
    """Every rank of report.json beside its worker in the record."""
    workers, _ = read_record(DATA / name)
    ranks = report_json(name)["ranks"]
    assert [rank["label"] for rank in ranks] == sorted(workers)
    return zip(ranks, (workers[rank["label"]] for rank in ranks), strict=True)


def readings(worker: Worker) -> dict[tuple[int, str], Json]:
    """(Order of the passage, edge) -> the snapshot, as it was written."""
    return {
        (order, edge): passage[edge]["snapshot"]
        for order, passage in enumerate(worker.phases)
        for edge in EDGES
        if passage.get(edge, {}).get("snapshot") is not None
    }


def owners(rank: Json) -> dict[tuple[int, str], Json]:
    """(Order of the phase, edge) -> component -> bytes, what no owner explains included."""
    return {
        (memory["order"], memory["edge"]): {
            **{row["component"]: row["bytes"] for row in memory["owners"]},
            "unexplained": memory["unexplained_bytes"],
        }
        for memory in device_memory(rank)
    }


def adds_up(sizes: Json, snapshot: Json) -> bool:
    """Whether all owners are the device; without its total, no remainder is known."""
    if snapshot["device_total_bytes"] is None:
        return sizes["unexplained"] is None
    known = sum(size for size in sizes.values() if size is not None)
    return bool(known == snapshot["device_total_bytes"])


@pytest.mark.parametrize("name", RUNS)
def test_phases_of_the_json_are_those_of_the_record(name: str) -> None:
    for rank, worker in with_workers(name):
        written = readings(worker)
        for order, (phase, passage) in enumerate(zip(rank["phases"], worker.phases, strict=True)):
            assert {event["phase"] for event in passage.values()} == {phase["phase"]}
            assert phase["order"] == order
            for edge in EDGES:
                snapshot = written.get((order, edge))
                assert (phase[edge] is None) == (snapshot is None)
                for field, value in (snapshot or {}).items():
                    assert field in ("t_ns", "read_again") or phase[edge][field] == value, field
            if "before" in passage and "after" in passage:
                end = passage["after"]["snapshot"].get("t_ns", passage["after"]["t_ns"])
                assert phase["seconds"] == (end - passage["before"]["t_ns"]) / 1e9
            else:
                assert phase["seconds"] is None
            assert phase["open"] == ("after" not in passage)


@pytest.mark.parametrize("name", RUNS)
def test_owners_of_the_json_add_up_to_the_device_of_the_record(name: str) -> None:
    for rank, worker in with_workers(name):
        written, found = readings(worker), owners(rank)
        assert found.keys() == written.keys()
        for at, sizes in found.items():
            assert adds_up(sizes, written[at]), at
            assert sizes["free"] == written[at]["device_free_bytes"]
            assert sizes["allocated"] == written[at]["allocated_bytes"]


@pytest.mark.parametrize("name", RUNS)
def test_differences_of_the_json_are_those_of_the_record(name: str) -> None:
    for rank, worker in with_workers(name):
        written = readings(worker)
        calls = iter(rank["empty_cache"])
        for phase in rank["phases"]:
            before, after = (written.get((phase["order"], edge)) for edge in EDGES)
            assert (phase["delta"] is None) == (None in (before, after))
            for field in filter(lambda name: name.endswith("_bytes"), phase["delta"] or {}):
                size = phase["delta"][field]
                if None in (before.get(field), after.get(field)):
                    assert size is None, field
                else:
                    assert size == after[field] - before[field], field
            if phase["phase"] == "empty_cache" and None not in (before, after):
                call = next(calls)
                freed = before["reserved_bytes"] - after["reserved_bytes"]
                assert (call["order"], call["freed_cached_bytes"]) == (phase["order"], freed)
        assert not list(calls)


@pytest.mark.parametrize("name", RUNS)
def test_the_budget_of_the_json_is_the_engine_s_sum(name: str) -> None:
    _, plan = read_record(DATA / name)
    for rank, worker in with_workers(name):
        budget, figures, kv = rank["budget"], worker.figures, rank["kv"]
        assert budget["engine_kv_cache_bytes"] == figures.get("kv_cache_bytes")
        terms = {term["name"]: term["bytes"] for term in budget["terms"]}
        if budget["equation"] == "E4":
            assert terms == {term: figures.get(figure) for term, (figure, _) in E4_TERMS.items()}
        subtracted = [size for term, size in terms.items() if E4_TERMS.get(term, ("", True))[1]]
        if None not in (budget["requested_bytes"], *subtracted):
            base, share = rank["device_total_bytes"], budget["gpu_memory_utilization"]
            if budget["equation"] == "S1":
                base = figures["least_free_before_load_bytes"]
                share = figures["mem_fraction_static"]
            assert budget["requested_bytes"] == int(base * share)
            assert (
                figures.get("requested_bytes", budget["requested_bytes"]) // 1
                == (budget["requested_bytes"])
            )
            assert budget["kv_cache_bytes"] == budget["requested_bytes"] - sum(subtracted)
            assert (
                budget["residual_bytes"]
                == budget["engine_kv_cache_bytes"] - budget["kv_cache_bytes"]
            )
        for field in ("tokens", "blocks", "block_size", "max_model_len", "bytes_per_token"):
            assert kv[field] == plan.get(field), field


@pytest.mark.parametrize("name", [*RUNS, *(f"logs/{log.name}" for log in LOGS)])
def test_the_json_holds_the_whole_report(name: str) -> None:
    for report in reports_of(name):
        data = json.loads(render_json(report))
        assert json.loads(render_json(from_json(Report, data))) == data
        assert data["findings"] == [
            {**given, **{key: getattr(finding, key) for key in ("id", "severity", "bytes", "rank")}}
            for given, finding in zip(data["findings"], report.findings, strict=True)
        ]


@pytest.mark.parametrize("name", REPORTED)
def test_json_and_csv_of_a_log_hold_what_its_lines_say(name: str) -> None:
    reports = reports_of(f"logs/{name}")
    ranks = [rank for report in reports for rank in json.loads(render_json(report))["ranks"]]
    table = list(csv.DictReader(io.StringIO("".join(report_csv(*reports)))))
    granted = [row["bytes"] for row in table if row["component"] == "engine_kv_cache_bytes"]
    for rank, size, said in zip(ranks, granted, REPORTED[name]["starts"], strict=True):
        if "kv_cache_bytes" in said:
            wanted = round(float(said["kv_cache_bytes"].removesuffix(" GiB")) * 2**30)
            assert (rank["budget"]["engine_kv_cache_bytes"], size) == (wanted, str(wanted))
        for field in {"tokens", "max_model_len", "max_concurrency"} & said.keys():
            assert rank["kv"][field] == said[field], field


@pytest.mark.parametrize("name", RUNS)
def test_csv_has_the_readings_of_the_record_and_owners_that_add_up_to_them(name: str) -> None:
    workers, _ = read_record(DATA / name)
    table = list(csv.DictReader(io.StringIO("".join(report_csv(*reports_of(name))))))
    found: dict[tuple[str, int, str], dict[str, Json]] = defaultdict(lambda: defaultdict(dict))
    for row in table:
        if row["order"]:
            at = (row["label"], int(row["order"]), row["edge"])
            size = int(row["bytes"]) if row["bytes"] else None
            assert row["component"] not in found[at][row["kind"]]
            found[at][row["kind"]][row["component"]] = size
    written = {
        (label, *at): snapshot
        for label, worker in workers.items()
        for at, snapshot in readings(worker).items()
    }
    assert found.keys() == written.keys()
    for place, snapshot in written.items():
        assert adds_up(found[place]["owner"], snapshot), place
        for reading, size in found[place]["reading"].items():
            assert size == snapshot.get(reading), (place, reading)
        sizes = {field for field, size in snapshot.items() if field.endswith("_bytes")}
        assert sizes <= found[place]["reading"].keys()


@pytest.mark.parametrize("name", RUNS)
def test_counters_of_the_trace_add_up_to_the_device_of_the_record(name: str) -> None:
    workers, _ = read_record(DATA / name)
    (report,) = reports_of(name)
    events = json.loads("".join(report_trace(report)))["traceEvents"]
    for track, (_, worker) in enumerate(sorted(workers.items()), start=1):
        mine = [event for event in events if event["pid"] == track]
        counters = [event for event in mine if event["ph"] == "C"]
        whole = {event["ts"] for event in counters if event["name"] == "unexplained"}
        sums: Counter[float] = Counter()
        for event in counters:
            if event["ts"] in whole and " / " not in event["name"]:  # a part of another counter
                sums[event["ts"]] += event["args"]["bytes"]
        wanted: Counter[int] = Counter()
        for passage in worker.phases:
            for edge in EDGES:
                snapshot = passage.get(edge, {}).get("snapshot") or {}
                if snapshot.get("device_total_bytes") is not None:
                    wanted[snapshot.get("t_ns", passage[edge]["t_ns"])] += snapshot[
                        "device_total_bytes"
                    ]
        assert [sums[ts] for ts in sorted(sums)] == [wanted[t_ns] for t_ns in sorted(wanted)]
        slices = {event["args"]["order"]: event for event in mine if event["ph"] in "XB"}
        assert [slices[order]["name"] for order in sorted(slices)] == [
            next(iter(passage.values()))["phase"] for passage in worker.phases
        ]


@pytest.mark.parametrize(("a", "b"), sorted({(a, b) for a, b, _ in DIFFS.values()}))
def test_causes_of_a_diff_add_up_to_the_engines_kv_caches(a: str, b: str) -> None:
    data = json.loads(render_result_json(diff_of(a, b)))
    served = data["served"]
    granted = {"a": served["a_granted"], "b": served["b_granted"]}
    for side, name in (("a", a), ("b", b)):
        if not name.startswith("logs/"):
            workers, _ = read_record(DATA / name)
            assert data[side]["id"] == json.loads((DATA / name / "run.json").read_text())["id"]
            label = served[f"{side}_label"]
            assert granted[side] == workers[label].figures.get("kv_cache_bytes")
    if None in (granted["a"], granted["b"]):
        assert served["difference_bytes"] is None
        return
    assert served["difference_bytes"] == granted["b"] - granted["a"]
    assert sum(cause["bytes"] for cause in served["causes"]) == served["difference_bytes"]


@pytest.mark.parametrize("case", sorted({case for case, _ in CHECKS.values()}, key=str))
def test_margins_of_a_check_are_those_of_the_record(case: tuple[str, str, str | None]) -> None:
    run, budget, _ = case
    data = json.loads(render_result_json(check_result(*case)))
    failed = [limit for limit in data["limits"] if not limit["ok"]]
    assert (data["ok"], data["failed"]) == (not failed, len(failed))
    wanted = tomlkit.parse((DATA / budget).read_text())
    keys = {limit["key"] for limit in data["limits"] if limit["table"] == "budget"}
    assert set(wanted["budget"]) - {"fail_on"} <= keys
    figures = {
        label: {
            "min_kv_cache": worker.figures.get("kv_cache_bytes"),
            "max_weights": worker.figures.get("weights_bytes"),
            "max_peak_activation": worker.figures.get("peak_activation_bytes"),
            "max_non_torch": worker.figures.get("non_torch_increase_bytes"),
        }
        for label, worker in ({} if "logs" in run else read_record(DATA / run)[0]).items()
    }
    for limit in data["limits"]:
        for reading in limit["readings"]:
            value, allowed, margin = reading["value"], reading["limit"], reading["margin"]
            known = figures.get(reading["label"], {})
            assert limit["key"] not in known or value == known[limit["key"]], limit["key"]
            if margin is not None:
                sign = 1 if limit["sense"] == "at least" else -1
                assert margin == sign * (value - allowed)
                assert reading["ok"] == (margin >= 0 or reading["within_digits"])
