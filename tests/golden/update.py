"""The golden files: every reporter's output on the recorded runs, at fixed widths, without colour.

``make golden``, or ``python -m tests.golden.update``, rewrites them; the difference is for a person to read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

from tests.unit.report.page import Page
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.check import CheckResult, check_report
from vllm_memprof.compare.diff import Diff, diff_reports
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.loader import load_run
from vllm_memprof.report import render_json, render_markdown, render_table
from vllm_memprof.report.check import render_check_json, render_check_markdown, render_check_table
from vllm_memprof.report.check_github import render_check_github
from vllm_memprof.report.check_junit import render_check_junit
from vllm_memprof.report.csv_rows import render_csv
from vllm_memprof.report.diff import render_diff_json, render_diff_markdown, render_diff_table
from vllm_memprof.report.html import render_html
from vllm_memprof.report.trace import render_trace

HERE = Path(__file__).parent
DATA = HERE.parent / "data"


def table(report: Report, width: int, encoding: str = "utf-8", lang: str = "en") -> str:
    """The terminal's tables as a file gets them; trailing blanks are of no interest."""
    return printed(render_table(report, lang=lang), width, encoding)


def diff_table(diff: Diff, width: int, encoding: str = "utf-8") -> str:
    return printed(render_diff_table(diff), width, encoding)


def check_table(result: CheckResult, width: int, encoding: str = "utf-8") -> str:
    return printed(render_check_table(result), width, encoding)


def printed(what: RenderableType, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, no_color=True, legacy_windows=False, _environ={})
    console.print(what)
    stream.flush()
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode(encoding).splitlines())


def outline(report: Report) -> str:
    """The page without its figures: headings, and tables with their columns."""
    return Page(render_html(report)).outline()


#: file name -> (run, reporter)
GOLDEN: dict[str, tuple[str, Callable[[Report], str]]] = {
    "graph_tp2.80.txt": ("graph_tp2", lambda report: table(report, 80)),
    "graph_tp2.120.txt": ("graph_tp2", lambda report: table(report, 120)),
    "graph_tp2.200.txt": ("graph_tp2", lambda report: table(report, 200)),
    "graph_tp2.ascii.80.txt": ("graph_tp2", lambda report: table(report, 80, "ascii")),
    "graph_tp2.md": ("graph_tp2", render_markdown),
    "graph_tp2.json": ("graph_tp2", render_json),
    "recorded_tp2.80.txt": ("recorded_tp2", lambda report: table(report, 80)),
    "recorded_tp2.120.txt": ("recorded_tp2", lambda report: table(report, 120)),
    "recorded_tp2.md": ("recorded_tp2", render_markdown),
    "recorded_tp1.80.txt": ("recorded_tp1", lambda report: table(report, 80)),
    "eager_tp2.80.txt": ("eager_tp2", lambda report: table(report, 80)),
    "recorded_killed_tp2.zh.80.txt": (
        "recorded_killed_tp2",
        lambda report: table(report, 80, lang="zh"),
    ),
    "recorded_023_tp2.zh.120.txt": (
        "recorded_023_tp2",
        lambda report: table(report, 120, lang="zh"),
    ),
    "two_methods.zh.md": (
        "logs/two_methods_910b_tp2.md",
        lambda report: render_markdown(report, "zh"),
    ),
    "skewed_tp2.80.txt": ("skewed_tp2", lambda report: table(report, 80)),
    "skewed_tp2.120.txt": ("skewed_tp2", lambda report: table(report, 120)),
    "skewed_tp2.md": ("skewed_tp2", render_markdown),
    "two_methods.100.txt": ("logs/two_methods_910b_tp2.md", lambda report: table(report, 100)),
    "two_methods.md": ("logs/two_methods_910b_tp2.md", render_markdown),
    "wtdcode_34.100.txt": ("logs/wtdcode__vllm-backport-34.log", lambda report: table(report, 100)),
    "recorded_log.100.txt": ("logs/recorded_tp2_0.23.0.log", lambda report: table(report, 100)),
    "ascend_19.json": ("logs/vllm-project__vllm-ascend-19.log", render_json),
    "killed_tp2.80.txt": ("killed_tp2", lambda report: table(report, 80)),
    "killed_tp2.md": ("killed_tp2", render_markdown),
    "killed_tp2.json": ("killed_tp2", render_json),
    "recorded_023_tp2.page.txt": ("recorded_023_tp2", outline),
    "skewed_tp2.page.txt": ("skewed_tp2", outline),
    "ascend_19.page.txt": ("logs/vllm-project__vllm-ascend-19.log", outline),
    "killed_tp2.csv": ("killed_tp2", render_csv),
    "killed_tp2.trace.json": ("killed_tp2", render_trace),
    "ascend_19.csv": ("logs/vllm-project__vllm-ascend-19.log", render_csv),
    "plan_tp2.80.txt": ("plan_tp2", lambda report: table(report, 80)),
}

#: Ending of a golden file -> reporter: every format that there is.
FORMATS: dict[str, Callable[[Report], str]] = {
    "80.txt": lambda report: table(report, 80),
    "120.txt": lambda report: table(report, 120),
    "md": render_markdown,
    "json": render_json,
    "csv": render_csv,
    "trace.json": render_trace,
    "page.txt": outline,
}
#: Recorded runs of each kind that are kept in every format: clean, out of memory, killed, and known from its log alone.
IN_EVERY_FORMAT = {
    "recorded_tiny_tp2": "recorded_tiny_tp2",
    "recorded_oom": "recorded_oom",
    "recorded_killed_tp2": "recorded_killed_tp2",
    "recorded_log": "logs/recorded_tp2_0.23.0.log",
}
GOLDEN |= {
    f"{name}.{ending}": (run, reporter)
    for name, run in IN_EVERY_FORMAT.items()
    for ending, reporter in FORMATS.items()
    if not (
        run.startswith("logs/") and reporter is render_trace
    )  # a log tells of no moments in time
}


_LOG = "logs/two_methods_910b_tp2.md"
#: file name -> (run A, run B, reporter); of a log, the start that counts
DIFFS: dict[str, tuple[str, str, Callable[[Diff], str]]] = {
    "diff_013_023.80.txt": (
        "recorded_013_tp2",
        "recorded_023_tp2",
        lambda diff: diff_table(diff, 80),
    ),
    "diff_013_023.120.txt": (
        "recorded_013_tp2",
        "recorded_023_tp2",
        lambda diff: diff_table(diff, 120),
    ),
    "diff_013_023.200.txt": (
        "recorded_013_tp2",
        "recorded_023_tp2",
        lambda diff: diff_table(diff, 200),
    ),
    "diff_013_023.ascii.80.txt": (
        "recorded_013_tp2",
        "recorded_023_tp2",
        lambda diff: diff_table(diff, 80, "ascii"),
    ),
    "diff_013_023.md": ("recorded_013_tp2", "recorded_023_tp2", render_diff_markdown),
    "diff_013_023.json": ("recorded_013_tp2", "recorded_023_tp2", render_diff_json),
    "diff_two_methods.100.txt": (f"{_LOG}#2", f"{_LOG}#3", lambda diff: diff_table(diff, 100)),
    "diff_skewed.80.txt": ("skewed_tp2", "graph_tp2", lambda diff: diff_table(diff, 80)),
    "diff_killed.80.txt": ("killed_tp2", "plan_tp2", lambda diff: diff_table(diff, 80)),
    "diff_models.md": ("recorded_tp1", "recorded_tp2", render_diff_markdown),
}


_GUARD = "budgets/guard.toml"
#: file name -> (run, budget file, baseline or None, reporter)
CHECKS: dict[str, tuple[str, str, str | None, Callable[[CheckResult], str]]] = {
    "check_passed.80.txt": (
        "graph_tp2",
        "budgets/passed.toml",
        None,
        lambda result: check_table(result, 80),
    ),
    "check_passed.120.txt": (
        "graph_tp2",
        "budgets/passed.toml",
        None,
        lambda result: check_table(result, 120),
    ),
    "check_failed.80.txt": (
        "skewed_tp2",
        _GUARD,
        "eager_tp2",
        lambda result: check_table(result, 80),
    ),
    "check_failed.120.txt": (
        "skewed_tp2",
        _GUARD,
        "eager_tp2",
        lambda result: check_table(result, 120),
    ),
    "check_failed.ascii.80.txt": (
        "skewed_tp2",
        _GUARD,
        "eager_tp2",
        lambda result: check_table(result, 80, "ascii"),
    ),
    "check_failed.md": ("skewed_tp2", _GUARD, "eager_tp2", render_check_markdown),
    "check_failed.json": ("skewed_tp2", _GUARD, "eager_tp2", render_check_json),
    "check_failed.github.txt": (
        "skewed_tp2",
        _GUARD,
        "eager_tp2",
        lambda result: render_check_github(result, _GUARD),
    ),
    "check_failed.junit.xml": ("skewed_tp2", _GUARD, "eager_tp2", render_check_junit),
    "check_log.80.txt": (
        "logs/recorded_tp2_0.23.0.log",
        "budgets/log.toml",
        None,
        lambda r: check_table(r, 80),
    ),
    "check_killed.80.txt": (
        "recorded_killed_tp2",
        "budgets/passed.toml",
        None,
        lambda result: check_table(result, 80),
    ),
}


#: Files of this folder that are not golden files.
KEPT = (".py",)


def output(name: str) -> str:
    """What a golden file has to hold now."""
    if name in DIFFS:
        a, b, draw = DIFFS[name]
        return draw(diff_reports(*(_reports(run)[0] for run in (a, b))))
    if name in CHECKS:
        checked, budget, baseline, print_check = CHECKS[name]
        return print_check(check_result(checked, budget, baseline))
    run, reporter = GOLDEN[name]
    return "\n".join(reporter(report) for report in _reports(run))


def check_result(run: str, budget: str, baseline: str | None = None) -> CheckResult:
    """A run of tests/data under a budget file of it."""
    limits = parse_budget((DATA / budget).read_text(), budget)
    return check_report(
        _reports(run)[0], limits, None if baseline is None else _reports(baseline)[0]
    )


def _reports(run: str) -> list[Report]:
    """Of a folder of tests/data, or of a log, which may hold several starts."""
    name, _, start = run.partition("#")
    path = DATA / name
    runs = [load_run(path)] if path.is_dir() else read_log(str(path))
    return [build_report(each) for each in (runs[int(start) - 1 : int(start)] if start else runs)]


def main() -> None:
    for path in HERE.iterdir():
        if (
            path.is_file()
            and path.suffix not in KEPT
            and path.name not in {*GOLDEN, *DIFFS, *CHECKS}
        ):
            path.unlink()
    for name in (*GOLDEN, *DIFFS, *CHECKS):
        (HERE / name).write_text(output(name), encoding="utf-8")


if __name__ == "__main__":
    main()
