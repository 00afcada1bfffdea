"""``memprof report``, ``diff`` and ``check`` over the run folders of a deployment."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vllm_memprof as mp
from tests.support.host_runs import SOURCE, part, write_hosts
from tests.support.page import Page
from vllm_memprof.api import RunFrames
from vllm_memprof.cli import app, main


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    write_hosts(folder, ahead_s=3.0)
    return folder


def printed(*words: object) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_folders_a_folder_of_them_and_a_glob_are_one_report(hosts: Path) -> None:
    one_by_one = printed("report", "--full", hosts / "node-a", hosts / "node-b")
    assert "hosts" in one_by_one
    assert one_by_one == printed("report", "--full", hosts)
    assert one_by_one == printed("report", "--full", hosts / "node-*")
    assert re.search(r"(\+2\.9|\+3\.0)\d+ ± \d", one_by_one)


def test_one_folder_is_as_before(tmp_path: Path) -> None:
    for format_name in ("table", "json", "csv", "trace", "markdown"):
        text = printed("report", SOURCE, "--format", format_name)
        assert "deployment" not in text.replace('"deployment": null', "")


def test_a_folder_that_holds_one_run_is_that_run_or_lacks_the_others(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "alone" / "run")
    assert printed("report", "--full", tmp_path / "alone") == printed("report", "--full", SOURCE)
    first, _ = write_hosts(tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "node-b")
    assert "no run folder of node rank 1 of 2" in printed("report", "--full", tmp_path / "half")
    assert "no run folder" not in printed("report", "--full", first)


def test_a_folder_given_twice_is_named(hosts: Path) -> None:
    told = printed("report", "--full", hosts / "node-a", hosts / "node-b", hosts / "node-b")
    assert "given twice, read once" in told


def test_the_rest_is_reported_and_nothing_readable_is_status_3(
    hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not read: nowhere" in printed("report", "--full", hosts / "node-a", "nowhere")
    assert main(["report", "nowhere", "nor-here"]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_several_deployments_are_a_mistake_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hosts(tmp_path, second={"part": part(deployment="other")})
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "10.0.0.5:29500, other" in said
    assert "--deployment NAME" in said
    assert "TP1" in printed("report", "--full", tmp_path, "--deployment", "other")


def test_csv_has_the_host_and_one_clock(hosts: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(printed("report", hosts, "--format", "csv"))))
    assert {row["host"] for row in rows} == {"node-a", "node-b"}
    ends = {
        row["host"]: float(row["seconds"])
        for row in rows
        if row["phase"] == "hccl_init" and row["edge"] == "after" and row["seconds"]
    }
    assert abs(ends["node-a"] - ends["node-b"]) < 0.1


def test_the_trace_has_a_process_per_rank_grouped_by_host(hosts: Path) -> None:
    trace = json.loads(printed("report", hosts, "--format", "trace"))
    names = [
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    ]
    assert [name.partition(" (")[0] for name in names] == ["node-a: TP0", "node-b: TP1"]
    begins = [event["ts"] for event in trace["traceEvents"] if event.get("name") == "weight_load"]
    assert len(begins) == 2
    assert abs(begins[0] - begins[1]) < 5e6
    assert min(event["ts"] for event in trace["traceEvents"]) >= 0


def test_the_page_has_the_tables_in_both_languages(hosts: Path, tmp_path: Path) -> None:
    for lang, wanted in (
        ("en", "Available KV cache memory by engine core"),
        ("zh", "各 EngineCore"),
    ):
        target = tmp_path / f"{lang}.html"
        printed("report", hosts, "--format", "html", "--lang", lang, "-o", target)
        page = Page(target.read_text(encoding="utf-8"))
        assert wanted in page.text
        assert "node-b" in page.text


def test_diff_and_check_take_a_folder_or_a_glob(hosts: Path, tmp_path: Path) -> None:
    assert "the same KV cache" in printed("diff", hosts, hosts / "*")
    assert "B - A" in printed("diff", SOURCE, hosts)
    budget = tmp_path / "budget.toml"
    budget.write_text('[budget]\nmin_kv_cache = "1GiB"\n')
    assert "within budget" in printed("check", hosts, "--budget", budget)


def test_the_python_api_has_a_column_of_hosts(hosts: Path) -> None:
    frames = mp.load(hosts)
    assert isinstance(frames, RunFrames)
    assert sorted(frames.phases["host"].unique()) == ["node-a", "node-b"]
    assert list(frames.kv["host"]) == ["node-a", "node-b"]
