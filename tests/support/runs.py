"""The runs and logs of tests/data that every format is tried on, and one made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.accounting.builders import DATA, gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.outcomes import CheckResult, check_report
from vllm_memprof.compare.diff import Diff, diff_reports
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.loader import load_run

#: Every run folder: a new one is tried without being named here.
RUNS = sorted(path.parent.name for path in DATA.glob("*/run.json"))
LOGS = sorted(path for path in (DATA / "logs").iterdir() if path.suffix in (".log", ".md"))


def report_of(name: str, **info: Any) -> Report:
    """The report of a folder of tests/data, with fields of its run.json replaced."""
    return build_report(recorded(name, **info))


def reports_of(name: str) -> list[Report]:
    """Return the reports of a folder or file of tests/data; ``logs/FILE#2`` is the second start."""
    path, _, start = name.partition("#")
    runs = [load_run(DATA / path)] if (DATA / path).is_dir() else read_log(str(DATA / path))
    return [build_report(run) for run in (runs[int(start) - 1 : int(start)] if start else runs)]


def diff_of(a: str, b: str) -> Diff:
    return diff_reports(reports_of(a)[0], reports_of(b)[0])


def check_result(run: str, budget: str, baseline: str | None = None) -> CheckResult:
    """Check a run under a budget file of tests/data, of a log its first start."""
    limits = parse_budget((DATA / budget).read_text(), budget)
    return check_report(
        reports_of(run)[0], limits, None if baseline is None else reports_of(baseline)[0]
    )


def oom_report() -> Report:
    """Out of memory while the weights were loaded, as the hooks record it."""
    full = replace(
        snapshot(
            device_total_bytes=gib(60),
            device_free_bytes=gib(1),
            allocated_bytes=gib(55),
            reserved_bytes=gib(58),
        ),
        t_ns=3 * 10**9,
    )
    empty = replace(
        full, t_ns=10**9, device_free_bytes=gib(59), allocated_bytes=0, reserved_bytes=0
    )
    detail = {"requested_bytes": gib(2), "device_total_bytes": gib(60), "device": "0"}
    phases = [
        span("weight_load", empty, None, end_t_ns=None),
        span(
            "oom",
            None,
            full,
            order=1,
            parent=0,
            depth=1,
            start_t_ns=None,
            end_t_ns=full.t_ns,
            detail=detail,
        ),
    ]
    return build_report(
        run_of(process(phases, {"device_total_bytes": gib(60)}), status="oom", exit_code=1)
    )
