"""A third engine, in ``tests/support/toy_engine``: one folder and one line that registers it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "support" / "toy_engine"
SHARE = 0.5
#: As ``engine.py`` has them, which is not imported: this process is to have no such engine.
GIB = 1 << 30
TOTAL, CONTEXT, WEIGHTS, STEP = 64 * GIB, GIB, 8 * GIB, GIB // 2
KV_CACHE = int((TOTAL - CONTEXT) * SHARE) - WEIGHTS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would have installed of the engine and of its entry point."""
    folder = tmp_path_factory.mktemp("site")
    facts = folder / "toy_engine-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[toy_engine.plugins]\nmemprof = vllm_memprof.capture.plugin:register_toy\n"
    )
    return folder


def memprof(site: Path, *words: str, module: str = "tests.support.toy_engine") -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "NO_COLOR": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(site: Path) -> Path:
    folder = site / "run"
    given = ("--engine", "toy", "--device", "npu", "--run-dir", str(folder), "--prompt", "a b")
    memprof(site, "offline", "toy/model", *given, "--", "--toy-share", str(SHARE))
    return folder


def rank_of(report: dict[str, Any]) -> dict[str, Any]:
    (rank,) = report["ranks"]
    return rank


def test_it_is_started_and_recorded(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    assert (report["run"]["engine"], report["run"]["engine_version"]) == ("toy", "1.0")
    assert report["run"]["status"] == "ok"
    rank = rank_of(report)
    assert [phase["phase"] for phase in rank["phases"] if phase["phase"] != "empty_cache"] == [
        *("device_init", "weight_load", "kv_cache_alloc", "request")
    ]
    last = rank["phases"][-1]["after"]
    assert last["allocated_bytes"] == WEIGHTS + KV_CACHE
    assert last["allocated_run_peak_bytes"] == WEIGHTS + KV_CACHE + STEP


def test_its_equation_and_its_finding_are_in_the_report(run: Path, site: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    budget = rank_of(report)["budget"]
    assert (budget["equation"], budget["kv_cache_bytes"]) == ("TOY", KV_CACHE)
    assert [finding["id"] for finding in report["findings"]] == ["toy-share-small"]
    said = memprof(site, "report", str(run), "--full")
    assert "int(free before loading x share - (weights))" in said
    assert "free before Toy loads its weights" in said


def test_its_log_alone_is_explained(run: Path, site: Path) -> None:
    said = memprof(site, "explain", str(run / "engine.log"), "--format", "json")
    report = json.loads(said)
    assert report["run"]["engine"] == "toy"
    rank = rank_of(report)
    assert rank["budget"]["equation"] == "TOY"
    assert abs(rank["budget"]["kv_cache_bytes"] - KV_CACHE) <= GIB // 100
    assert rank["kv"]["tokens"] == KV_CACHE >> 20


def test_one_line_registers_it_and_the_package_does_not_know_it() -> None:
    lines = [line for path in FOLDER.glob("*.py") for line in path.read_text().splitlines()]
    assert [line for line in lines if "ENGINES[" in line] == [
        'ENGINES["toy"] = read_row(Path(__file__).parent)'
    ]
    package = (ROOT / "vllm_memprof").rglob("*.py")
    assert not [str(path) for path in package if "toy_engine" in path.read_text()]
