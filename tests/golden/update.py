"""The golden files: every reporter's output on the recorded runs, at fixed widths, without colour.

``make golden``, or ``python -m tests.golden.update``, rewrites them; the difference is for a person to read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from vllm_memprof.ledger import Report, build_report
from vllm_memprof.logs.record import read_log
from vllm_memprof.record.loader import load_run
from vllm_memprof.report import render_json, render_markdown, render_table

HERE = Path(__file__).parent
DATA = HERE.parent / "data"


def table(report: Report, width: int, encoding: str = "utf-8") -> str:
    """The terminal's tables as a file gets them; trailing blanks are of no interest."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=width, no_color=True, legacy_windows=False, _environ={})
    console.print(render_table(report))
    stream.flush()
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode(encoding).splitlines())


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
    "recorded_killed_tp2.80.txt": ("recorded_killed_tp2", lambda report: table(report, 80)),
    "eager_tp2.80.txt": ("eager_tp2", lambda report: table(report, 80)),
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
    "plan_tp2.80.txt": ("plan_tp2", lambda report: table(report, 80)),
}


#: Files of this folder that are not golden files.
KEPT = (".py",)


def output(name: str) -> str:
    """What a golden file has to hold now."""
    run, reporter = GOLDEN[name]
    path = DATA / run
    runs = [load_run(path)] if path.is_dir() else read_log(str(path))  # a log may hold several starts
    return "\n".join(reporter(build_report(each)) for each in runs)


def main() -> None:
    for path in HERE.iterdir():
        if path.is_file() and path.suffix not in KEPT and path.name not in GOLDEN:
            path.unlink()
    for name in GOLDEN:
        (HERE / name).write_text(output(name), encoding="utf-8")


if __name__ == "__main__":
    main()
