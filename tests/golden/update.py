"""The golden files: documents of the recorded runs as text, at fixed widths, without colour.

One report is kept at every width; each other case once. The figures of JSON, csv and trace are
tested against the record in ``test_figures.py``. ``make golden``, or ``python -m
tests.golden.update``, rewrites the files; the difference is for a person to read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.host_runs import write_hosts
from tests.support.render import check_table, diff_table, outline, table
from tests.support.runs import check_result, diff_of, reports_of
from vllm_memprof.accounting import Report
from vllm_memprof.accounting.deployment import build_deployment
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.report import render_markdown
from vllm_memprof.report.check_github import render_check_github
from vllm_memprof.report.check_junit import render_check_junit

HERE = Path(__file__).parent
#: Suffix of the files of this folder that are not golden files.
KEPT = ".py"

LOG = "logs/recorded_tp2_0.23.0.log"
TWO_METHODS = "logs/two_methods_910b_tp2.md"
ASCEND_19 = "logs/vllm-project__vllm-ascend-19.log"
GUARD = "budgets/guard.toml"
FAILED = ("skewed_tp2", GUARD, "eager_tp2")


def wide(width: int, **how: str) -> Callable[[Report], str]:
    return lambda report: table(report, width, **how)


def wide_diff(width: int) -> Callable[[Diff], str]:
    return lambda diff: diff_table(diff, width)


def wide_check(width: int) -> Callable[[CheckResult], str]:
    return lambda result: check_table(result, width)


#: File -> run, reporter.
REPORTS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "graph_tp2.80.txt": ("graph_tp2", wide(80)),
    "graph_tp2.120.txt": ("graph_tp2", wide(120)),
    "graph_tp2.200.txt": ("graph_tp2", wide(200)),
    "graph_tp2.ascii.80.txt": ("graph_tp2", wide(80, encoding="ascii")),
    "graph_tp2.md": ("graph_tp2", render_markdown),
    "recorded_tp2.80.txt": ("recorded_tp2", wide(80)),
    "recorded_tp1.80.txt": ("recorded_tp1", wide(80)),
    "recorded_tiny_tp2.80.txt": ("recorded_tiny_tp2", wide(80)),
    "recorded_sglang_tp2.120.txt": ("recorded_sglang_tp2", wide(120)),
    "recorded_oom.80.txt": ("recorded_oom", wide(80)),
    "recorded_oom_image.80.txt": ("recorded_oom_image", wide(80)),
    "recorded_killed_tp2.80.txt": ("recorded_killed_tp2", wide(80)),
    "eager_tp2.80.txt": ("eager_tp2", wide(80)),
    "skewed_tp2.80.txt": ("skewed_tp2", wide(80)),
    "killed_tp2.80.txt": ("killed_tp2", wide(80)),
    "plan_tp2.80.txt": ("plan_tp2", wide(80)),
    "recorded_log.100.txt": (LOG, wide(100)),
    "two_methods.100.txt": (TWO_METHODS, wide(100)),
    "wtdcode_34.100.txt": ("logs/wtdcode__vllm-backport-34.log", wide(100)),
    "recorded_023_tp2.zh.120.txt": ("recorded_023_tp2", wide(120, lang="zh")),
    "two_methods.zh.md": (TWO_METHODS, lambda report: render_markdown(report, "zh")),
    "recorded_023_tp2.page.txt": ("recorded_023_tp2", outline),
    "recorded_oom.page.txt": ("recorded_oom", outline),
    "ascend_19.page.txt": (ASCEND_19, outline),
}
#: File -> reporter, of a deployment on two hosts whose clocks are three seconds apart.
DEPLOYMENTS: dict[str, Callable[[Report], str]] = {
    "two_hosts.80.txt": wide(80),
    "two_hosts.120.txt": wide(120),
    "two_hosts.md": render_markdown,
    "two_hosts.zh.120.txt": wide(120, lang="zh"),
    "two_hosts.page.txt": outline,
}
#: File -> run A, run B, reporter.
DIFFS: dict[str, tuple[str, str, Callable[[Diff], str]]] = {
    "diff_engines.120.txt": ("recorded_tiny_tp2", "recorded_sglang_tp2", wide_diff(120)),
    "diff_013_023.80.txt": ("recorded_013_tp2", "recorded_023_tp2", wide_diff(80)),
    "diff_two_methods.100.txt": (f"{TWO_METHODS}#2", f"{TWO_METHODS}#3", wide_diff(100)),
    "diff_skewed.80.txt": ("skewed_tp2", "graph_tp2", wide_diff(80)),
    "diff_killed.80.txt": ("killed_tp2", "plan_tp2", wide_diff(80)),
    "diff_models.md": ("recorded_tp1", "recorded_tp2", render_markdown),
}
#: File -> run, budget file and baseline; reporter.
CHECKS: dict[str, tuple[tuple[str, str, str | None], Callable[[CheckResult], str]]] = {
    "check_passed.80.txt": (("graph_tp2", "budgets/passed.toml", None), wide_check(80)),
    "check_failed.80.txt": (FAILED, wide_check(80)),
    "check_failed.md": (FAILED, render_markdown),
    "check_failed.github.txt": (FAILED, lambda result: render_check_github(result, GUARD)),
    "check_failed.junit.xml": (FAILED, render_check_junit),
    "check_log.80.txt": ((LOG, "budgets/log.toml", None), wide_check(80)),
    "check_killed.80.txt": (("recorded_killed_tp2", "budgets/passed.toml", None), wide_check(80)),
}
GOLDEN = {*REPORTS, *DEPLOYMENTS, *DIFFS, *CHECKS}


def output(name: str) -> str:
    """Return what a golden file has to hold."""
    if name in DIFFS:
        a, b, draw_diff = DIFFS[name]
        return draw_diff(diff_of(a, b))
    if name in CHECKS:
        case, draw_check = CHECKS[name]
        return draw_check(check_result(*case))
    if name in DEPLOYMENTS:
        with TemporaryDirectory() as folder:
            parts = load_parts(write_hosts(Path(folder), ahead_s=3.0))
        return DEPLOYMENTS[name](build_deployment(parts))
    run, draw = REPORTS[name]
    return "\n".join(draw(report) for report in reports_of(run))


def present() -> set[str]:
    """Return the names of the files that are there."""
    return {path.name for path in HERE.iterdir() if path.is_file() and path.suffix != KEPT}


def main() -> None:
    for name in present() - GOLDEN:
        (HERE / name).unlink()
    for name in GOLDEN:
        (HERE / name).write_text(output(name), encoding="utf-8")


if __name__ == "__main__":
    main()
