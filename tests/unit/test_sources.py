"""What a person names becomes a report: a run folder with the log of its engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.accounting.builders import DATA
from vllm_memprof.accounting.owners.peak_owners import divided_device
from vllm_memprof.report.documents.first_screen import FirstScreen, opening_of
from vllm_memprof.sources import build_run

LOG = DATA / "logs" / "recorded_tp2_0.23.0.log"


def checked(run_dir: Path) -> dict[str, bool | None]:
    kv = build_run(run_dir).ranks[0].kv
    return {check.name: check.ok for check in kv.checks if "printed" in check.name}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A recorded run, with the log of another start with the same command."""
    shutil.copytree(DATA / "recorded_tp2", tmp_path / "run")
    return tmp_path / "run"


def test_the_plan_of_a_run_is_compared_with_its_engine_log(run_dir: Path) -> None:
    shutil.copy(LOG, run_dir / "engine.log")
    assert checked(run_dir) == {
        "tokens as the engine printed them": True,
        "max concurrency as the engine printed it, in hundredths": True,
        "max_model_len as the engine printed it": True,
    }


def test_a_log_that_prints_other_tokens_is_told(run_dir: Path) -> None:
    text = LOG.read_text()
    assert "642,560 tokens" in text
    (run_dir / "engine.log").write_text(text.replace("642,560 tokens", "642,688 tokens"))
    assert checked(run_dir)["tokens as the engine printed them"] is False


@pytest.mark.parametrize("content", [None, b"", b"no line about memory\n", b"\x1f\x8b broken"])
def test_a_log_that_is_not_there_or_says_nothing(run_dir: Path, content: bytes | None) -> None:
    if content is not None:
        (run_dir / "engine.log").write_bytes(content)
    assert checked(run_dir) == {"tokens and concurrency as the engine printed them": None}


def test_a_run_that_failed_is_answered_with_what_its_log_says(tmp_path: Path) -> None:
    shutil.copytree(DATA / "recorded_killed_tp2", tmp_path / "run")
    assert build_run(tmp_path / "run").failure is None
    (tmp_path / "run" / "engine.log").write_text("OSError: [Errno 98] address already in use\n")
    failure = build_run(tmp_path / "run").failure
    assert failure is not None
    assert (failure.kind, failure.is_memory) == ("not-memory-at-all", False)


def test_what_a_run_prints_after_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    shutil.copytree(DATA / "recorded_killed_tp2", tmp_path / "run")
    (tmp_path / "run" / "engine.log").write_text("Fatal Python error: init_import_site\n")
    assert build_run(tmp_path / "run").failure is not None
    file = tmp_path / "run" / "run.json"
    info = json.loads(file.read_text()) | {"exit_reason": "interrupted by SIGINT"}
    file.write_text(json.dumps(info))
    report = build_run(tmp_path / "run")
    assert report.failure is None
    first = opening_of(FirstScreen([report]), 100).answer[0]
    assert first.name == "STOPPED"
    assert "interrupted by SIGINT" in first.value


def test_what_hooks_did_not_see_is_taken_from_the_log(tmp_path: Path) -> None:
    """A run without a worker, and one whose workers recorded nothing: never less than explain."""
    shutil.copytree(DATA / "recorded_killed_tp2", tmp_path / "run")
    refused = (
        "(Worker_TP{} pid=1) ERROR [worker.py:1] ValueError: Free memory on device (60.00/60.96 "
        "GiB) on startup is less than desired GPU memory utilization (0.995, 60.66 GiB). Decrease "
        "GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    (tmp_path / "run" / "engine.log").write_text(refused.format(0) + refused.format(1))
    for events in (tmp_path / "run" / "events").iterdir():
        rows = [
            row
            for row in events.read_text().splitlines()
            if '"process"' in row or '"identity"' in row
        ]
        events.write_text("".join(row + "\n" for row in rows))
    report = build_run(tmp_path / "run")
    assert report.failure is not None
    assert report.failure.kind == "neighbour"
    assert "startup-refused" in {found.id for found in report.findings}
    for events in (tmp_path / "run" / "events").iterdir():
        events.unlink()
    report = build_run(tmp_path / "run")
    assert "startup-refused" in {found.id for found in report.findings}


def test_a_worker_of_the_log_alone_is_on_the_host_of_the_run(tmp_path: Path) -> None:
    """Of a start that the engine refused, the core recorded itself, and no worker did."""
    shutil.copytree(DATA / "recorded_killed_tp2", tmp_path / "run")
    (tmp_path / "run" / "engine.log").write_text(
        "(EngineCore pid=1) INFO 01-01 [core.py:1] Initializing a V1 LLM engine (v0.23.0) with "
        "config: model='some/model', tensor_parallel_size=1, \n"
        "(EngineCore pid=1) INFO 01-01 [platform.py:1] platform plugin ascend is activated\n"
        "(EngineCore pid=1) ERROR [worker.py:1] ValueError: Free memory on device (60.61/60.96 "
        "GiB) on startup is less than desired GPU memory utilization (0.995, 60.66 GiB). Decrease "
        "GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    core, worker = sorted((tmp_path / "run" / "events").iterdir())
    core.write_text(core.read_text().split("\n")[0].replace('"worker"', '"engine_core"') + "\n")
    worker.unlink()
    report = build_run(tmp_path / "run")
    assert report.deployment is None
    (rank,) = report.ranks
    divided = divided_device(rank)
    assert divided is not None
    assert sum(row.bytes for row in divided.owners) == rank.device_total_bytes


def test_a_run_that_ended_well_has_no_failure(run_dir: Path) -> None:
    (run_dir / "engine.log").write_text("OSError: [Errno 98] address already in use\n")
    assert build_run(run_dir).failure is None
