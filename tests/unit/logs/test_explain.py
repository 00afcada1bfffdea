"""``memprof explain``: what it prints, how it ends, what it says about files that are no logs."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from vllm_memprof import cli
from vllm_memprof.errors import RunRecordError

DATA = Path(__file__).parents[2] / "data" / "logs"
LINE = "INFO Available KV cache memory: 43.40 GiB\n"


@pytest.fixture
def explain(capsys):
    """Runs the command; (exit status, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["explain", *map(str, args)])
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, captured.err

    return run


def test_table(explain):
    status, out, _ = explain(DATA / "wtdcode__vllm-backport-34.log")
    assert status == 0
    assert "KV cache 1.95 GiB" in out
    assert "PP1_TP3" in out


def test_one_start_is_one_report(explain):
    status, out, _ = explain("--format", "json", DATA / "vllm-project__vllm-27706.log")
    report = json.loads(out)
    assert status == 0
    assert report["schema"] == "memprof.report/3"
    assert report["run"]["source"] == "log"
    assert report["ranks"][0]["kv"]["tokens"] == 94784
    assert report["ranks"][0]["pid"] is None
    assert report["ranks"][0]["budget"]["engine_kv_cache_bytes"] == round(10.12 * 2**30)


def test_several_starts_are_an_array(explain):
    status, out, _ = explain("--format=json", DATA / "two_methods_910b_tp2.md")
    reports = json.loads(out)
    assert status == 0
    assert [report["run"]["status"] for report in reports] == ["ok", "ok", "ok", "oom", "ok"]
    assert reports[3]["ranks"][0]["oom"]["reserved_bytes"] == round(59.38 * 2**30)
    assert reports[3]["ranks"][0]["oom"]["requested_bytes"] is None


@pytest.mark.parametrize("format_name", ["table", "markdown", "json"])
@pytest.mark.parametrize(
    "name", sorted(path.name for path in DATA.iterdir() if path.suffix in (".log", ".md"))
)
def test_every_log_in_every_format(explain, name, format_name):
    status, out, _ = explain("--format", format_name, DATA / name)
    assert status == 0
    assert out.strip()


@pytest.mark.parametrize("format_name", ["table", "markdown"])
def test_several_starts_begin_with_a_table(explain, format_name):
    _, out, _ = explain("--full", "--format", format_name, DATA / "two_methods_910b_tp2.md")
    lines = out.replace("\\", "").splitlines()
    assert lines[0].lstrip("# ") == "5 engine starts"
    rows = [plain(line).replace("|", " ").split() for line in lines[4:9]]
    assert [row[0].strip("*") for row in rows] == ["#1", "#2", "#3", "#4", "#5"]
    assert rows[1][1:] == ["0.9", "54.86", "-", "-", "40.35", "-", "E2", "equation", "equal"]
    _, one, _ = explain("--format", format_name, DATA / "vllm-project__vllm-27706.log")
    assert "engine starts" not in one


@pytest.mark.parametrize("lang", ["en", pytest.param("zh", marks=pytest.mark.full)])
def test_markdown_of_many_starts_fits_into_a_comment(explain, tmp_path, lang):
    log = tmp_path / "many.log"
    log.write_text((DATA / "recorded_tp2_0.23.0.log").read_text() * 70)
    _, out, _ = explain(log, "--full", "--format", "markdown", "--lang", lang)
    assert len(out.encode()) < 60_000
    listed = [line for line in out.splitlines() if re.match(r"\| #\d+ \|", plain(line))]
    assert len(listed) == 60
    first_out, last_out = (
        int(number) for number in re.search(r"#(\d+)-many.log#(\d+)", plain(out)).groups()
    )
    assert (out.count("\n# memprof: "), last_out) == (first_out - 1, 70)
    said = {"en": "left out below: {} of 70 starts", "zh": "略去 70 次启动中的 {} 次"}[lang]
    assert said.format(71 - first_out) in out
    assert {"en": "10 more engine starts", "zh": "另有 10 次引擎启动"}[lang] in out
    status, one, _ = explain(f"{log}#70", "--full", "--format", "markdown", "--lang", lang)
    assert status == 0
    assert "many.log#70" not in plain(one)  # one start needs no list
    assert one.count("# memprof: ") == 1


def test_of_many_starts_the_last_ones_are_listed(explain, tmp_path):
    log = tmp_path / "many.log"
    log.write_text((DATA / "recorded_tp2_0.23.0.log").read_text() * 70)
    _, out, _ = explain(log)
    assert out.startswith("70 engine starts\n")
    assert re.findall(r"^#(\d+) ", out, flags=re.M) == [str(number) for number in range(63, 71)]
    assert len(out.splitlines()) <= 45


def plain(text: str) -> str:
    return text.replace("&#35;", "#").replace("&#8203;", "")


def test_one_start_of_a_log_by_its_number(explain, tmp_path):
    log = DATA / "two_methods_910b_tp2.md"
    every = json.loads(explain("--format", "json", log)[1])
    one = json.loads(explain("--format", "json", f"{log}#4")[1])
    assert one == every[3]
    for number in (0, 6):
        status, _, err = explain(f"{log}#{number}")
        assert (status, f"has no run {number}: it holds 5 runs" in err) == (3, True)
    named = tmp_path / "a.log#2"  # a file of that very name comes first
    named.write_text(LINE)
    assert "43.40" in explain(named)[1]


def test_into_a_file(explain, tmp_path):
    status, out, _ = explain(
        DATA / "two_methods_910b_tp2.md", "--format", "markdown", "-o", tmp_path / "r.md"
    )
    assert (status, out) == (0, "")
    assert "44.30" in (tmp_path / "r.md").read_text()


def test_standard_input(explain, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(LINE.encode(), mtime=0)))
    )
    status, out, _ = explain("-")
    assert status == 0
    assert "KV cache 43.40 GiB" in out
    assert "memprof explain LOG --full" in out


def test_several_logs(explain, tmp_path):
    (tmp_path / "a.log").write_text(LINE)
    (tmp_path / "b.log").write_text("nothing here\n")
    status, out, err = explain(tmp_path / "a.log", tmp_path / "b.log")
    assert status == 0
    assert "KV cache 43.40 GiB" in out
    assert "no line about memory in b.log" in err


FAILED = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`\n"


def test_a_failure_without_a_figure_is_an_answer(explain, tmp_path):
    (tmp_path / "x.log").write_text(f"(EngineCore pid=1) ERROR HF_TOKEN=hf_1234567890abcd {FAILED}")
    status, out, _ = explain(tmp_path / "x.log")
    assert status == 0
    _, first, second = out.splitlines()[:3]
    assert first.startswith("FAILED ")
    assert "(likely)" in first
    assert second.startswith("line 1 ")
    assert "1234567890abcd" not in out
    assert "--gpu-memory-utilization" in out
    assert "profile-too-small" not in out  # a kind is for programs
    status, out, _ = explain("--format", "json", tmp_path / "x.log")
    failure = json.loads(out)["failure"]
    assert (failure["kind"], failure["is_memory"]) == ("profile-too-small", True)
    _, out, _ = explain("--format", "markdown", tmp_path / "x.log")
    assert out.splitlines()[3].startswith("- **FAILED**: ")


def test_a_failure_far_down_a_log_is_found(explain, tmp_path):
    access = 'INFO: 1.2.3.4:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    with (tmp_path / "x.log").open("w") as out:
        out.write(f"{LINE}\nINFO: Application startup complete.\n")
        out.writelines([access] * 100_000)
        out.write(f"{FAILED}ERROR EngineDeadError: EngineCore encountered an issue.\n")
    _, out, _ = explain("--format", "json", tmp_path / "x.log")
    report = json.loads(out)
    assert report["failure"]["kind"] == "profile-too-small"
    assert report["failure"]["evidence"][0]["line"] > 100_000
    assert report["run"]["status"] == "failed"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        os.urandom(100_000),
        b"\0" * 50_000,
        b"\x89PNG\r\n\x1a\n" * 99,
        gzip.compress(b"x", mtime=0),
    ],
)
def test_a_file_without_memory_lines(explain, tmp_path, content):
    (tmp_path / "x.log").write_bytes(content)
    status, out, err = explain(tmp_path / "x.log")
    assert (status, out) == (3, "")
    assert "no line about memory in x.log" in err
    assert ("looked for" in err) == ("Available KV cache memory" in err) == bool(content)
    assert ("it is empty" in err) == (not content)


def test_a_line_that_may_tell_of_a_failure_is_shown_where_nothing_is_known(explain, tmp_path):
    told = "[Checker] 'device ip' is not set correctly \x1b[31mtoken=hf_1234567890abcd"
    (tmp_path / "x.log").write_text(f"in the log of the second node:\n{told}\nregards\n")
    status, out, err = explain(tmp_path / "x.log")
    assert (status, out) == (3, "")
    assert "no failure that memprof knows; line 2 may tell of one: [Checker] 'device ip'" in err
    assert "looked for" not in err
    assert "1234567890abcd" not in err
    assert "\x1b" not in err


def test_no_log_of_several_has_memory_lines(explain, tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("nothing here\n")
    status, out, err = explain(tmp_path / "a.log", tmp_path / "b.log")
    assert (status, out) == (3, "")
    assert err.count("looked for") == 1
    assert "any of 2 logs" in err


def test_a_terminal_is_told_how_to_end_the_paste(explain, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(LINE.encode()))
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)
    status, out, err = explain("-")
    assert (status, "KV cache 43.40 GiB" in out) == (0, True)
    assert "Ctrl-D" in err


def test_damaged_gzip(explain, tmp_path):
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 500)
    status, _, err = explain(tmp_path / "x.gz")
    assert status == 3
    assert "damaged gzip" in err


def test_a_folder(explain, tmp_path):
    status, _, err = explain(tmp_path)
    assert status == 3
    assert "is a folder" in err
    assert f"memprof report {tmp_path}" in err


def test_no_file(explain, tmp_path):
    status, _, err = explain(tmp_path / "none.log")
    assert status == 3
    assert "there is no file" in err


def test_no_permission(explain, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    from vllm_memprof.logs.to_record import read_log

    with pytest.raises(RunRecordError, match="no permission to read"):
        read_log("x.log")


def test_an_unknown_format(explain):
    status, _, err = explain("--format", "xml", DATA / "vllm-project__vllm-27706.log")
    assert status == 2
    assert "xml" in err


def test_one_very_long_line(explain, tmp_path):
    with (tmp_path / "x.log").open("wb") as out:
        for _ in range(200):
            out.write(b"\x1b[0mx" * 100_000)
    status, _, err = explain(tmp_path / "x.log")
    assert status == 3
    assert "no line about memory" in err
