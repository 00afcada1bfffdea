"""The golden files: documents of the recorded runs as text, at fixed widths, without colour.

One run and one failure are kept whole, of each other kind of run the first screen; the rows of
tables are tested in ``tests/unit/report``. The figures of JSON, csv and trace are
tested against the record in ``test_figures.py``. ``make golden``, or ``python -m
tests.golden.update``, rewrites the files; the difference is for a person to read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.host_runs import write_hosts
from tests.support.render import check_table, diff_table, outline, printed, table
from tests.support.runs import check_result, diff_of, reports_of
from vllm_memprof.accounting import Report
from vllm_memprof.accounting.deployment.report import build_deployment
from vllm_memprof.check.ci import render_check_github, render_check_junit
from vllm_memprof.check.document import check_document
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.compare.document import diff_document
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table

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


def screen(width: int, encoding: str = "utf-8", lang: str = "en") -> Callable[[FirstScreen], str]:
    return lambda found: printed(render_table(found, lang=lang), width, encoding)


def wide_diff(width: int) -> Callable[[Diff], str]:
    return lambda diff: diff_table(diff, width)


def wide_check(width: int) -> Callable[[CheckResult], str]:
    return lambda result: check_table(result, width)


#: File -> run, reporter.
REPORTS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "graph_tp2.120.txt": ("graph_tp2", wide(120)),
    "graph_tp2.80.txt": ("graph_tp2", wide(80)),
    "graph_tp2.full.md": ("graph_tp2", render_markdown),
    "graph_tp2.zh.120.txt": ("graph_tp2", wide(120, lang="zh")),
    "graph_tp2.page.txt": ("graph_tp2", outline),
    "recorded_oom.120.txt": ("recorded_oom", wide(120)),
    "ascend_19.page.txt": (ASCEND_19, outline),
}
#: File -> run or log, width or format and language of its first screen.
SCREENS: dict[str, tuple[str, Callable[[FirstScreen], str]]] = {
    "recorded_023_tp2.screen.100.txt": ("recorded_023_tp2", screen(100)),
    "recorded_023_tp2.screen.80.txt": ("recorded_023_tp2", screen(80)),
    "recorded_023_tp2.screen.120.txt": ("recorded_023_tp2", screen(120)),
    "recorded_023_tp2.screen.ascii.80.txt": ("recorded_023_tp2", screen(80, encoding="ascii")),
    "recorded_023_tp2.screen.zh.100.txt": ("recorded_023_tp2", screen(100, lang="zh")),
    "recorded_023_tp2.screen.md": ("recorded_023_tp2", render_markdown),
    "recorded_oom.screen.100.txt": ("recorded_oom", screen(100)),
    "recorded_oom.screen.zh.100.txt": ("recorded_oom", screen(100, lang="zh")),
    "recorded_oom_image.screen.100.txt": ("recorded_oom_image", screen(100)),
    "recorded_killed_tp2.screen.100.txt": ("recorded_killed_tp2", screen(100)),
    "recorded_sglang_tp2.screen.100.txt": ("recorded_sglang_tp2", screen(100)),
    "skewed_tp2.screen.100.txt": ("skewed_tp2", screen(100)),
    "plan_tp2.screen.100.txt": ("plan_tp2", screen(100)),
    "negative_kv.screen.100.txt": ("logs/vllm-project__vllm-ascend-9372.log", screen(100)),
    "ascend_19.screen.100.txt": (ASCEND_19, screen(100)),
    "short_log.screen.100.txt": ("logs/baidu__vLLM-Kunlun-330.log", screen(100)),
    "two_methods.screen.100.txt": (TWO_METHODS, screen(100)),
    "memory_snapshot.screen.100.txt": ("memory_files/engine_0.23.0.pickle.gz", screen(100)),
    "memory_snapshot.screen.zh.80.txt": ("memory_files/snapshot.pickle", screen(80, lang="zh")),
    "memory_record.screen.80.txt": ("memory_files/memory_record.csv", screen(80)),
    "module_mem.screen.md": ("memory_files/npu_module_mem_20240101.csv", render_markdown),
    "operator_memory.screen.100.txt": ("memory_files/operator_memory.csv", screen(100)),
    "memscope.screen.100.txt": ("memory_files/memscope_dump_20240101000000.csv", screen(100)),
}
#: File -> reporter, of a deployment on two hosts whose clocks are three seconds apart.
DEPLOYMENTS: dict[str, Callable[[Report], str]] = {
    "two_hosts.120.txt": wide(120),
    "two_hosts.screen.100.txt": lambda report: screen(100)(FirstScreen((report,), "runs")),
    "two_hosts.page.txt": outline,
}
#: File -> run A, run B, reporter.
DIFFS: dict[str, tuple[str, str, Callable[[Diff], str]]] = {
    "diff_engines.120.txt": ("recorded_tiny_tp2", "recorded_sglang_tp2", wide_diff(120)),
    "diff_013_023.80.txt": ("recorded_013_tp2", "recorded_023_tp2", wide_diff(80)),
    "diff_two_methods.100.txt": (f"{TWO_METHODS}#2", f"{TWO_METHODS}#3", wide_diff(100)),
    "diff_skewed.80.txt": ("skewed_tp2", "graph_tp2", wide_diff(80)),
    "diff_killed.80.txt": ("killed_tp2", "plan_tp2", wide_diff(80)),
    "diff_models.md": (
        "recorded_tp1",
        "recorded_tp2",
        lambda diff: render_markdown(partial(diff_document, diff)),
    ),
}
#: File -> run, budget file and baseline; reporter.
CHECKS: dict[str, tuple[tuple[str, str, str | None], Callable[[CheckResult], str]]] = {
    "check_passed.80.txt": (("graph_tp2", "budgets/passed.toml", None), wide_check(80)),
    "check_failed.80.txt": (FAILED, wide_check(80)),
    "check_failed.md": (
        FAILED,
        lambda result: render_markdown(partial(check_document, result)),
    ),
    "check_failed.github.txt": (FAILED, lambda result: render_check_github(result, GUARD)),
    "check_failed.junit.xml": (FAILED, render_check_junit),
    "check_log.80.txt": ((LOG, "budgets/log.toml", None), wide_check(80)),
    "check_killed.80.txt": (("recorded_killed_tp2", "budgets/passed.toml", None), wide_check(80)),
}
GOLDEN = {*REPORTS, *SCREENS, *DEPLOYMENTS, *DIFFS, *CHECKS}


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
    if name in SCREENS:
        run, draw_screen = SCREENS[name]
        return draw_screen(FirstScreen(tuple(reports_of(run)), run))
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
