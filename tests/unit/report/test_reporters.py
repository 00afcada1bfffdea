"""The same report through every reporter: equal numbers, safe text, any width, any terminal."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding

from tests.support.many_ranks import write_many_ranks
from tests.support.page import Page
from tests.support.render import render_json, table
from tests.support.runs import LOGS, RUNS, oom_report, report_of
from tests.unit.accounting.builders import device_memory as device_edges
from tests.unit.accounting.builders import gib, process, recorded, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.errors import MemprofError
from vllm_memprof.files import write_atomically
from vllm_memprof.frames.csv import report_csv
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.schema import PlannedRanks
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.documents.report import verdict
from vllm_memprof.report.files import write_reports
from vllm_memprof.report.grid import Prose
from vllm_memprof.report.html import render_html
from vllm_memprof.report.language import LANGUAGES
from vllm_memprof.report.markdown import escape, render_markdown
from vllm_memprof.report.table import render_table
from vllm_memprof.report.trace import report_trace
from vllm_memprof.text import fold

WIDTHS = (80, 120, 200)


def texts(report: Report) -> dict[str, str]:
    return {
        **{f"table {width}": table(report, width) for width in WIDTHS},
        "markdown": render_markdown(report),
    }


@pytest.mark.parametrize("name", RUNS)
def test_all_reporters_give_the_same_figures(name: str) -> None:
    assert_same_figures(report_of(name))


def test_all_reporters_give_the_same_figures_of_a_run_out_of_memory() -> None:
    assert_same_figures(oom_report())


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_all_reporters_give_the_same_figures_of_a_log(log: Path) -> None:
    for run in read_log(str(log)):
        report = build_report(run)
        assert_same_figures(report)
        for width in (60, *WIDTHS):
            assert all(cell_len(line) <= width for line in table(report, width).splitlines())


def assert_same_figures(report: Report) -> None:
    data = json.loads(render_json(report))
    page = Page(render_html(report)).text
    same_in_csv_and_trace(report, data)
    for where, text in {**texts(report), "html": page}.items():
        flat = " ".join(text.split())
        for rank in data["ranks"]:
            budget, kv = rank["budget"], rank["kv"]
            wanted = [
                budget["requested_bytes"],
                budget["kv_cache_bytes"],
                budget["engine_kv_cache_bytes"],
            ]
            wanted += [budget["fits_request_bytes"], budget["fits_request_tokens"]]
            wanted += [kv["tokens"], kv["blocks"], kv["bytes_per_token"]]
            wanted += [row["bytes"] for row in budget.get("corrections", [])]
            wanted += [term["bytes"] for term in budget["terms"]]
            wanted += [
                item["bytes"] for item in budget["not_subtracted"] if budget["fits_request_bytes"]
            ]
            for figure in wanted:
                assert figure is None or f"{figure:,}" in flat, (where, rank["label"], figure)
        for finding in data["findings"]:
            assert finding["id"] in flat.replace("\\", ""), where


def same_in_csv_and_trace(report: Report, data: dict[str, Any]) -> None:
    """Formats without thousands separators: figures by rank and name, those of the equation and of the device."""
    rows = list(csv.DictReader(io.StringIO("".join(report_csv(report)))))
    counters = set()
    if report.run.source != "log":
        events = json.loads("".join(report_trace(report)))["traceEvents"]
        counters = {(e["pid"], e["name"], e["args"]["bytes"]) for e in events if e["ph"] == "C"}
    for track, rank in enumerate(data["ranks"], start=1):
        found = {
            (row["kind"], row["component"], row["bytes"])
            for row in rows
            if row["label"] == rank["label"]
        }
        budget = rank["budget"]
        wanted = [("budget", name, budget[name]) for name in ("requested_bytes", "kv_cache_bytes")]
        wanted += [
            ("budget", name, budget[name])
            for name in ("engine_kv_cache_bytes", "fits_request_bytes")
        ]
        wanted += [("term", term["name"], term["bytes"]) for term in budget["terms"]]
        wanted += [
            ("not_subtracted", item["name"], item["bytes"]) for item in budget["not_subtracted"]
        ]
        owners = [
            (row["component"], row["bytes"])
            for memory in device_edges(rank)
            for row in memory["owners"]
        ]
        wanted += [("owner", *owner) for owner in owners]
        for kind, name, size in wanted:
            assert (kind, name, "" if size is None else str(size)) in found, (rank["label"], name)
        for name, size in owners if counters else ():
            assert size is None or (track, name, size) in counters, (rank["label"], name)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [60, *WIDTHS])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    for line in table(report_of(name), width).splitlines():
        assert cell_len(line) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_characters_keep_the_width_and_stay_whole(width: int) -> None:
    model = "/模型/通义千问-视觉语言-大模型/" + "超长的名字" * 12
    text = table(report_of("graph_tp2", model=model), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert model in "".join(line.removeprefix("model").strip() for line in text.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_are_never_cut(width: int) -> None:
    """A narrow terminal may fold a word, but a number in two lines is a wrong number."""
    text = table(report_of("skewed_tp2"), width)
    for figure in (
        "9.75 → 17.69",
        "13.30 → 13.30",
        "47,571,465,216",
        "641,536",
        "FullAttentionSpec",
    ):
        assert figure.replace(" → ", "→") in text.replace(" → ", "→")
    assert "…" not in text


def test_eager_graph_memory_is_not_measured_never_zero() -> None:
    for text in texts(report_of("eager_tp2")).values():
        row = next(line for line in text.splitlines() if "graph" in line and "capture" in line)
        assert "NOT MEASURED" in row
        assert "0.00" not in row
        assert "eager mode" in text


def test_unknown_is_a_dash_never_zero() -> None:
    taken = snapshot(allocated_bytes=gib(2))
    text = table(
        build_report(run_of(process([span("weight_load", taken, None, end_t_ns=None)]))), 120
    )
    row = next(line for line in text.splitlines() if "weight_load" in line)
    assert row.split() == ["weight_load", "open", "-", "-", "2.00", "→", "-", "-", "-"]


def test_the_phase_in_which_a_rank_died_is_said() -> None:
    for text in texts(report_of("killed_tp2")).values():
        flat = " ".join(text.replace("\\", "").split())
        assert "worker TP1 (pid 4101) was killed by SIGKILL in weight_load" in flat
        assert "weight_load was not finished" in flat


def test_a_run_under_way_is_not_called_dead() -> None:
    text = table(report_of("killed_tp2", status="running", exit_reason=None), 200)
    assert "weight_load was under way" in text


def test_the_verdict_comes_first_and_last() -> None:
    first, *_, last = table(report_of("skewed_tp2"), 200).split("\n\n")
    wanted = (
        "KV cache 44.05 GiB, 641,536 tokens on TP1, the least of 2 ranks; equation E4 (vllm-ascend 0.18+) "
        "reproduces it exactly"
    )
    assert " ".join(last.split()).startswith(wanted)
    assert f"verdict {wanted}" in " ".join(first.split())


def test_verdicts() -> None:
    assert verdict(report_of("graph_tp2")).startswith(
        "KV cache 44.30 GiB, 645,120 tokens on every rank; equation E4"
    )
    reason = "worker TP1 (pid 4101) was killed by SIGKILL in weight_load"
    assert verdict(report_of("killed_tp2")) == f"no KV cache was sized: {reason}"
    assert verdict(report_of("killed_tp2", exit_reason=None)) == "no KV cache was sized"
    run = recorded("graph_tp2")
    for change, text in (
        ({"weights_bytes": 1}, "does not reproduce it on TP0-TP1"),
        ({"weights_bytes": None}, "on every rank; equation not recomputed"),
        ({"kv_cache_memory_bytes_arg": 5}, "fixed by --kv-cache-memory-bytes"),
    ):
        changed = [
            replace(p, figures={**p.figures, **change} if p.figures else {}) for p in run.processes
        ]
        assert text in verdict(build_report(replace(run, processes=changed)))


def test_a_verdict_names_ranks_that_nobody_knows() -> None:
    run = recorded("graph_tp2")
    ranks = PlannedRanks("one", "-", 8, run=[0], alike={0: [1]}, not_run=[2, 3, 4, 5, 6, 7])
    without = [
        process
        for process in run.processes
        if process.identity is None or process.identity.label != "TP1"
    ]
    one = verdict(
        build_report(replace(run, info=replace(run.info, ranks=ranks), processes=without))
    )
    said = "6 of 8 ranks differ and were not run"
    assert one.startswith(
        f"KV cache 44.30 GiB, 645,120 tokens on TP0; {said}; equation E4 (vllm-ascend 0.18+)"
    )
    two = verdict(build_report(replace(run, info=replace(run.info, ranks=ranks))))
    assert two.startswith(f"KV cache 44.30 GiB, 645,120 tokens on TP0-TP1; {said}; equation E4")
    known = verdict(
        build_report(replace(run, info=replace(run.info, ranks=replace(ranks, not_run=[]))))
    )
    assert "not run" not in known


def test_an_exception_is_told_once_where_it_began() -> None:
    level = snapshot(reserved_bytes=gib(2))
    spans = [
        span("warm_up", level, level, 0, error="RuntimeError: no"),
        span("graph_capture", level, level, 1, parent=0, depth=1, error="RuntimeError: no"),
    ]
    ranks = [process(spans, rank=i, pid=i, label=f"TP{i}") for i in range(2)]
    notes = [
        line.strip()
        for line in table(build_report(run_of(*ranks)), 120).splitlines()
        if "raised" in line
    ]
    assert notes == ["TP0-TP1: graph_capture raised RuntimeError: no"]


def test_a_run_without_a_budget_has_none_that_fits_the_request() -> None:
    figures = {
        "device_total_bytes": gib(60),
        "gpu_memory_utilization": 0.9,
        "weights_bytes": gib(8),
    }
    text = table(build_report(run_of(process([], figures))), 120)
    assert "not recomputed, unknown: peak_activation, non_torch" in text
    assert "fits the request" not in text


def test_modelled_figures_are_marked_on_a_simulated_device_only() -> None:
    simulated, real = (
        table(report_of("graph_tp2"), 120),
        table(report_of("graph_tp2", simulated=False), 120),
    )
    assert "simulated: profile ascend910b" in simulated
    assert "Non-torch (m)" in simulated
    assert "(m)" not in real
    assert "simulated" not in real.replace("sim:910b", "")
    assert "modelled" not in real


def test_phases_come_in_the_order_in_which_they_occurred() -> None:
    _, _, text = table(report_of("graph_tp2"), 80).partition("\nPhases, ")
    names = [
        "device_init",
        "hccl_init",
        "weight_load",
        "profile_run",
        "mm_profile",
        "kv_cache_alloc",
        "warm_up",
    ]
    places = [text.index(name) for name in names]
    assert places == sorted(places)
    assert "\n   graph_capture" in text  # nested in warm_up


def test_a_row_of_its_own_where_a_rank_differs() -> None:
    lines = table(report_of("skewed_tp2"), 120).splitlines()
    assert any(re.search(r"weight_load\s+TP0-TP1", line) for line in lines)
    assert any(re.search(r"profile_run\s+TP0 .* 0\.36 → 0\.91", line) for line in lines)
    assert any(re.search(r"profile_run\s+TP1 .* 0\.36 → 1\.16", line) for line in lines)


def test_many_passages_become_one_row() -> None:
    level = [snapshot(reserved_bytes=gib(2 + i / 10), allocated_bytes=gib(1)) for i in range(31)]
    spans = [span("request", level[i], level[i + 1], i) for i in range(30)]
    text = table(build_report(run_of(process(spans))), 80)
    row, growth = [line for line in text.splitlines() if "request" in line]
    assert "request x30" in row
    assert "2.00 → 5.00" in row
    assert growth.split() == ["request", "x30", "+3,072.0"]
    assert "30.00" in row  # seconds of all of them


def test_many_passages_with_phases_inside() -> None:
    level = snapshot(reserved_bytes=gib(2))
    spans = []
    for i in range(2000):
        spans.append(span("request", level, level, 2 * i))
        spans.append(span("empty_cache", level, level, 2 * i + 1, parent=2 * i, depth=1))
    spans.append(span("request", level, None, 4000, end_t_ns=None))
    text = table(build_report(run_of(process(spans))), 80)
    rows = [line.split()[:3] for line in text.splitlines() if "→ 2.00" in line or "→ -" in line]
    assert rows == [
        ["request", "x2000", "2000.00"],
        ["empty_cache", "x2000", "2000.00"],
        ["request", "open", "2.00"],
    ]


def test_a_small_model_gets_more_digits() -> None:
    taken = snapshot(reserved_bytes=22 << 20, reserved_peak_bytes=22 << 20, allocated_bytes=3 << 20)
    text = table(build_report(run_of(process([span("weight_load", taken, taken)]))), 120)
    assert "0.0215 → 0.0215" in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(environment: dict[str, str]) -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True, _environ=environment).print(
        render_table(report_of("graph_tp2"))
    )
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


def test_without_a_terminal_there_are_no_escapes() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, _environ={}).print(render_table(report_of("skewed_tp2")))
    assert "\x1b" not in stream.getvalue()


def test_an_ascii_terminal_can_print_it() -> None:
    text = table(report_of("graph_tp2"), 80, "ascii")
    assert "9.75 > 17.69" in text
    assert "ok engine - recomputed: equal" in text


HOSTILE = "<img src=x onerror=alert(1)>|`a` *b* _c_ [d](http://e) @someone #12 \\ $x$\n\n# title"


def test_markdown_is_safe_from_names() -> None:
    report = report_of(
        "graph_tp2", model=HOSTILE, command=["memprof", HOSTILE], exit_reason=HOSTILE
    )
    text = render_markdown(report)
    outside = re.sub(r"`+ .*? `+\n", "", text)  # the command's code span
    assert "<img" not in outside
    assert "\n# title" not in text
    assert "@someone" not in outside
    assert "[d](" not in outside.replace("\\[d\\](", "")
    assert text.startswith("# memprof: &lt;img")


def test_markdown_tables_have_even_rows() -> None:
    for name in RUNS:
        tables = re.findall(r"(?:^\|.*\n)+", render_markdown(report_of(name)), flags=re.M)
        assert len(tables) >= 2
        for found in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in found.splitlines()}) == 1


def test_escape_keeps_the_text() -> None:
    assert escape("a|b") == "a\\|b"
    assert escape("a & b < c") == "a &amp; b &lt; c"
    assert escape("模型_1") == "模型\\_1"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("@someone and a@b.c", "&#64;&#8203;someone and a&#64;&#8203;b.c"),
        ("#123, #x", "&#35;&#8203;123, &#35;x"),
        ("GH-12", "GH-&#8203;12"),
        ("see https://a.b/c or www.a.b", "see https:&#47;/a.b/c or www&#46;a.b"),
        ("two\nlines\n\n## three", "two lines &#35;&#35; three"),
        ("`code` ~~no~~ $x$", "\\`code\\` \\~\\~no\\~\\~ \\$x\\$"),
    ],
)
def test_nothing_becomes_a_link_a_mention_or_a_heading(text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_markdown_begins_with_one_line_that_says_it_all() -> None:
    report = report_of("skewed_tp2")
    title, blank, summary, *_ = render_markdown(report).splitlines()
    assert (title, blank) == ("# memprof: Qwen/Qwen3-VL-8B-Instruct", "")
    assert summary.startswith(
        "**Qwen/Qwen3-VL-8B-Instruct**, vllm-ascend 0.23.0, Ascend910B2, 60.96 GiB"
    )
    assert summary.endswith(f": **{escape(verdict(report))}**")


def test_long_tables_of_markdown_are_folded_and_stay_markdown() -> None:
    for name in RUNS:
        lines = render_markdown(report_of(name)).splitlines()
        opens = [i for i, line in enumerate(lines) if line.startswith("<details>")]
        closes = [i for i, line in enumerate(lines) if line == "</details>"]
        assert len(opens) == len(closes)
        for begin, end in zip(opens, closes, strict=True):
            rows = [line for line in lines[begin:end] if line.startswith("| ")][2:]
            assert lines[begin] == f"<details><summary>{len(rows)} rows</summary>"
            assert (lines[begin + 1], lines[end - 1]) == ("", "")  # else GitHub shows the source
            assert len(rows) > 16
    assert any("<details>" in render_markdown(report_of(name)) for name in RUNS)


def test_markdown_fits_into_a_comment_whatever_a_run_says() -> None:
    report = report_of("skewed_tp2")
    one = report.findings[0]
    loud = replace(
        report,
        run=replace(
            report.run,
            model="模" * 9000,
            command=["x" * 9000],
            notes=["n" * 3000] * 500,
            exit_reason="e" * 9000,
        ),
        findings=[
            replace(one, title=f"{i} {'t' * 90}", evidence="e" * 9000, bytes=i) for i in range(500)
        ],
        ranks=[
            replace(rank, errors=[f"{rank.label} {i} {'e' * 500}" for i in range(500)])
            for rank in report.ranks
        ],
    )
    text = render_markdown(loud)
    assert len(text.encode()) < 60_000
    assert "497 more in report.json" in text
    assert "Too long for a comment, see report.json: Phases, GiB" in text
    assert "## KV cache equation" in text  # what fits is there


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([], ""),
        (["TP0"], "TP0"),
        (["TP0", "TP1"], "TP0-TP1"),
        (["TP0", "TP1", "TP2", "TP5"], "TP0-TP2, TP5"),
        (["DP0 TP0", "DP0 TP1", "DP1 TP0"], "DP0 TP0-TP1, DP1 TP0"),
        (["engine", "TP0"], "engine, TP0"),
    ],
)
def test_ranks_fold(labels: list[str], text: str) -> None:
    assert fold(labels) == text


def test_files_are_whole_private_and_replaced(tmp_path: Path) -> None:
    report = report_of("graph_tp2")
    (tmp_path / "report.json").write_text("old")
    write_reports(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "report.json").read_text()) == to_json(report)
    assert (tmp_path / "report.md").read_text() == render_markdown(
        FirstScreen((report,), tmp_path.name)
    )


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="cannot write"):
        write_atomically(tmp_path / "absent" / "report.json", "{}")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(MemprofError, match="No space left"):
        write_atomically(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"


def test_ranks_by_the_hundred(tmp_path: Path) -> None:
    """Ranks that agree print like one."""
    run = recorded("graph_tp2")
    worker = run.processes[0]
    ranks = [
        replace(
            worker, identity=replace(worker.identity, rank=i, pid=i, label=f"TP{i}"), kv_plan=None
        )
        for i in range(128)
    ]
    text = table(build_report(replace(run, processes=ranks)), 120)
    assert "before → after, TP0-TP127" in text
    of_two = table(build_report(replace(run, processes=ranks[:2])), 120)
    assert len(text.splitlines()) <= len(of_two.splitlines()) + 2  # a longer label may wrap


#: Runs a command in a process of its own and prints the most memory it had.
PEAK = """
import sys
from vllm_memprof.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 ranks that differ by some MiB outside torch; TP300 has 2 GiB more."""
    return write_many_ranks(tmp_path_factory.mktemp("many") / "run", ranks=512, outlier=300)


@pytest.mark.parametrize(
    ("format_name", "size"),
    [
        ("table", 65_000),
        pytest.param("json", 120_000_000, marks=pytest.mark.full),
        pytest.param("markdown", 65_000, marks=pytest.mark.full),
        pytest.param("csv", 150_000_000, marks=pytest.mark.full),
        pytest.param("trace", 70_000_000, marks=pytest.mark.full),
    ],
)
def test_512_ranks_in_every_format(
    format_name: str, size: int, many_ranks: Path, tmp_path: Path
) -> None:
    """Folded where a person reads it, whole where a program does; never more than 500 MB of memory."""
    target = tmp_path / "report"
    command = [
        sys.executable,
        "-c",
        PEAK,
        "report",
        str(many_ranks),
        "--full",
        "--format",
        format_name,
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) < 500_000_000
    assert target.stat().st_size < size
    text = target.read_text(encoding="utf-8")
    if format_name in ("table", "markdown"):
        assert "report.json has every rank" in " ".join(text.split())
        assert any(
            "TP300" in line and "2.35" in line for line in text.splitlines()
        )  # outliers are kept
    else:
        assert all(re.search(rf"\bTP{i}\b", text) for i in (0, 1, 300, 511))
        assert len(set(re.findall(r"\bTP\d+\b", text))) == 512


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("width", [80, 120])
def test_options_and_figures_of_a_narrow_table_are_not_broken(width: int, lang: str) -> None:
    wide, narrow = (table(report_of("recorded_oom"), each, lang=lang) for each in (500, width))
    for pattern in (r"--[a-z-]+", r"\w+=expandable_segments:True", r"\d{1,3}(?:,\d{3})+"):
        assert set(re.findall(pattern, wide)) == set(re.findall(pattern, narrow))


def test_lines_in_chinese_end_behind_an_ideograph_and_not_within_an_option() -> None:
    console = Console(width=30, file=io.StringIO())
    console.print(
        Padding(
            Prose("从 KV cache 中扣除的显存多于图实际占用的：--gpu-memory-utilization 0.9554。"), 0
        )
    )
    assert [*map(str.rstrip, console.file.getvalue().splitlines())] == [  # type: ignore[attr-defined]
        "从 KV cache 中扣除的显存多于图",
        "实际占用的：",
        "--gpu-memory-utilization",
        "0.9554。",
    ]


def test_markdown_has_options_as_code_and_no_option_that_is_not_enough_in_bold() -> None:
    drawn = render_markdown(FirstScreen((report_of("recorded_oom"),)))
    assert "| `--gpu-memory-utilization" in drawn
    assert "&nbsp;&nbsp;`-" not in drawn
    assert "**`" not in drawn
    said = escape("set --a-b 0.5, *A_BC_D=x:True* or --names N.")
    assert said == r"set `--a-b 0.5`, \*`A_BC_D=x:True`\* or `--names N`."
