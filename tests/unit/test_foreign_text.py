"""Text of strangers: nothing in it reaches a terminal, leaves a cell, or is a formula or markup."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.unit.accounting.builders import DATA
from tests.unit.test_strangers import memprof
from vllm_memprof.errors import RunRecordError
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.tail import EventTail
from vllm_memprof.text import csv_cell, plain, text

#: Colours, the title of the window, a link, the clipboard, C1 forms of these, bidi overrides.
ESCAPES = (
    "\x1b[31m", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1b]52;c;eA==\x07",
    "\x9b31m", "\x9d0;title\x9c", "\x90q\x9c", "\x1bc", "\x1b(0", "\x07", "\x08", "\r", "\x7f",
    "\u202e", "\u2066", "\u2069", "\u200f", "\u061c", "\u2028", "\x00",
)  # fmt: skip
PAYLOAD = "=a|b</td><script>alert(1)</script>`x`**y**\n| z |" + "".join(ESCAPES) + "end"
#: What is left of a terminal's language.
LEFT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FORMATS = ("table", "markdown", "html", "json", "csv", "trace")
#: Keys that say what a line is.
KEPT = ("schema", "kind", "phase", "edge", "role", "status", "mode", "state", "need", "until", "what",
        "engine", "engine_version", "started", "ended", "source", "part", "hook", "ranks",
        "sample", "full_step")  # fmt: skip


def spoilt(data, key=""):
    """Return data with the payload in each text that is a name."""
    if isinstance(data, dict):
        return {
            name: value if name in KEPT else spoilt(value, name) for name, value in data.items()
        }
    if isinstance(data, list):
        return [spoilt(value, key) for value in data]
    return data + PAYLOAD if isinstance(data, str) else data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("spoilt") / "run"
    shutil.copytree(DATA / "graph_tp2", run)
    info = json.loads((run / "run.json").read_text())
    info |= {"exit_reason": "x", "notes": ["a note"], "device": "Ascend"}
    (run / "run.json").write_text(json.dumps(spoilt(info), ensure_ascii=False))
    for path in (run / "events").glob("*.jsonl"):
        lines = [json.dumps(spoilt(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines))
    return run


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("full", [False, True])
def test_no_format_obeys_a_record(run_dir, format_name, full):
    code, printed = memprof(
        "report", run_dir, "--format", format_name, *(["--full"] if full else [])
    )
    assert code == 0
    assert len(printed) > 500
    assert LEFT.findall(printed) == []
    if format_name == "html":
        assert "<script>alert" not in printed
        assert "</td><script" not in printed
    if format_name == "markdown":
        tables = re.findall(r"(?:^\|.*\n)+", printed, re.MULTILINE)
        assert tables
        for table in tables:
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(counts) == 1, table
        assert "<script>" not in re.sub(r"`+[^`]*`+", "", printed)
    if format_name == "csv":
        rows = list(csv.reader(io.StringIO(printed)))
        assert len({len(row) for row in rows}) == 1
        cells = {cell for row in rows for cell in row}
        numbers = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
        assert not [
            each for each in cells if each[:1] in "=+-@" and each and not numbers.fullmatch(each)
        ]


def test_a_report_of_another_release_and_a_comparison(run_dir, tmp_path):
    report = spoilt(json.loads((memprof("report", run_dir, "--format", "json"))[1]))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report, ensure_ascii=False))
    for format_name in ("table", "markdown", "html", "json"):
        _, printed = memprof("diff", path, run_dir, "--format", format_name)
        assert LEFT.findall(printed) == []
        assert "<script>alert" not in printed or format_name in ("table", "json", "markdown")


@pytest.mark.parametrize("format_name", FORMATS[:5])
def test_no_format_obeys_a_log(tmp_path, format_name):
    path = tmp_path / f"a{ESCAPES[0]}\u202e.log"
    path.write_text(
        f"vllm serve m{PAYLOAD} --max-model-len 8\n"
        f"(Worker pid=7) ERROR 01-01 00:00:00 [a.py:1] RuntimeError: {PAYLOAD}\n"
        "(Worker pid=7) INFO 01-01 00:00:00 [a.py:1] Available KV cache memory: 44.30 GiB\n"
        f"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB {PAYLOAD}\n"
    )
    _, printed = memprof("explain", path, "--format", format_name)
    assert LEFT.findall(printed) == []


def test_messages_and_the_live_view(run_dir):
    error = RunRecordError(f"cannot read {PAYLOAD}", hint=PAYLOAD)
    assert LEFT.findall(f"{error}{error.hint}") == []
    assert LEFT.findall(repr([event for _, event in EventTail(run_dir).poll()])) == []
    assert LEFT.findall(str(text("of {name}", name=PAYLOAD))) == []


@pytest.mark.parametrize("escape", ESCAPES)
def test_each_sequence_goes_whole(escape):
    assert plain(f"a{escape}b") == "ab"
    assert plain("K size:\x1b 16.09") == "K size: 16.09"  # no sequence takes a digit of a figure
    assert plain("a\tb\nc é 汉字 → 😀") == "a\tb\nc é 汉字 → 😀"


@pytest.mark.parametrize(
    ("value", "cell"),
    [("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("@a", "'@a"), ("\t=a", "'\t=a"),
     ("-1", "-1"), ("+1.5e3", "+1.5e3"), ("a=b", "a=b"), (-1, -1), (None, None), ("", "")],
)  # fmt: skip
def test_cells_are_no_formulas(value, cell):
    assert csv_cell(value) == cell


# --- figures that cannot be


@pytest.fixture
def record(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(DATA / "graph_tp2", run)
    return run


def changed(run: Path, change) -> tuple[str, int]:
    """Change the first snapshot of the first worker; return the name of its file, and the line."""
    for path in sorted((run / "events").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            event = json.loads(line)
            if event.get("snapshot") and event["snapshot"].get("reserved_bytes"):
                change(event["snapshot"])
                lines[number - 1] = json.dumps(event)
                path.write_text("\n".join([*lines, ""]))
                return path.name, number
    raise AssertionError("no snapshot")


IMPOSSIBLE = {
    "allocated above reserved": {"allocated_bytes": 9 << 40, "reserved_bytes": 8 << 40},
    "free above total": {"device_free_bytes": 9 << 40, "device_total_bytes": 8 << 40},
    "negative": {"reserved_bytes": -1},
    "negative free": {"device_free_bytes": -(5 << 30)},
    "beyond 2^53": {"device_total_bytes": 1 << 53},
    "beyond what fits 64 bits": {"allocated_bytes": 1 << 70},
    "infinite": {"host_rss_bytes": 1e300},
    "above its peak": {"allocated_bytes": 5, "reserved_bytes": 6, "allocated_peak_bytes": 4},
    "a module": {"components": {"HCCL": {"bytes": -5, "peak_bytes": 1}}},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_figure_that_cannot_be_is_named(record, name):
    file, line = changed(record, lambda snapshot: snapshot.update(IMPOSSIBLE[name]))
    run = load_run(record)
    assert run.truncated
    (note,) = run.notes
    assert note.startswith("damaged record of TP")
    assert f"{file}, line {line}: " in note
    code, printed = memprof("report", record)
    assert code == 0
    assert "DAMAGED" in printed
    assert file in printed.replace("\n", "")


def test_nan_is_a_line_that_is_dropped(record):
    changed(record, lambda snapshot: snapshot.update(reserved_bytes=float("nan")))
    assert "incomplete line(s) dropped" in load_run(record).notes[0]


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in DATA.glob("*/run.json")))
def test_no_record_of_the_tests_has_one(folder):
    assert not [note for note in load_run(DATA / folder).notes if "damaged" in note]


def of_a_phase(report):
    phases = report["ranks"][1]["phases"]
    return next(phase for phase in phases if (phase["after"] or {}).get("reserved_bytes"))


#: What is changed in a report.json -> what its refusal says.
IMPOSSIBLE_IN_A_REPORT = {
    "allocated above reserved": (
        lambda report: of_a_phase(report)["after"].update(allocated_bytes=9 << 40),
        "allocated_bytes 9,895,604,649,984 is above reserved_bytes"),
    "free above total": (
        lambda report: of_a_phase(report)["before"].update(device_free_bytes=9 << 40),
        "is above device_total_bytes"),
    "negative": (
        lambda report: of_a_phase(report)["after"].update(reserved_bytes=-1), "reserved_bytes is -1"),
    "a size of the budget": (
        lambda report: report["ranks"][1]["budget"].update(engine_kv_cache_bytes=1 << 60),
        "engine_kv_cache_bytes is"),
    "a term": (
        lambda report: report["ranks"][1]["budget"]["terms"][0].update(bytes=1 << 60),
        "terms 0, bytes is"),
    "a difference": (
        lambda report: of_a_phase(report)["delta"].update(reserved_bytes=-1 << 60),
        "reserved_bytes is"),
    "tokens": (lambda report: report["ranks"][1]["kv"].update(tokens=-5), "tokens is -5"),
    "infinite": (
        lambda report: of_a_phase(report).update(seconds=float("inf")),
        "Infinity, which is not a figure"),
    "not a number": (
        lambda report: report["ranks"][1]["kv"].update(tokens=float("nan")),
        "NaN, which is not a figure"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE_IN_A_REPORT)
@pytest.mark.parametrize("command", ["diff", "check"])
def test_a_figure_that_cannot_be_is_refused_in_a_report_json(tmp_path, command, name):
    change, said = IMPOSSIBLE_IN_A_REPORT[name]
    run = DATA / "graph_tp2"
    report = json.loads(memprof("report", run, "--format", "json")[1])
    change(report)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    options = [run] if command == "diff" else ["--min-kv-cache", "1GiB"]
    code, printed = memprof(command, path, *options)
    assert code == 3
    assert said in " ".join(printed.split())
    assert "report.json" in printed
    if "not a figure" not in said:
        assert "ranks 1, " in printed


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in DATA.glob("*/run.json")))
def test_every_report_json_of_the_tests_is_read(folder, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(memprof("report", DATA / folder, "--format", "json")[1])
    assert memprof("diff", path, path)[0] == 0
