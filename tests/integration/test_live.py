"""One server under load: metrics, attach, a full disk, and what the report says of it afterwards."""

from __future__ import annotations

import resource
import signal
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import (
    FORK,
    MEMPROF,
    assert_nothing_left,
    engine_pids,
    finish,
    read_events,
    start_memprof,
    wait_for_server,
    wait_until,
)
from tests.support.load import Load
from tests.support.ports import free_port

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

KEY = "Mk7QzSEEDx9key"
PROMPT = "Mk7QzSEEDx9prompt"
FOLDER = 'Mk7QzSEEDx9 folder {x="1"}'


def scrape(port: int) -> tuple[str, dict[tuple[str, ...], float]]:
    """Return the text, and value by name and label values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return text, found


def limit_files(pid: int, size: int | None) -> None:
    """No file of the process may grow beyond a size: the kernel answers as on a full disk."""
    process = psutil.Process(pid)
    _, hard = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def losses(run_dir: Path) -> set[int]:
    """When losses of events began, as event files say."""
    return {event["since_t_ns"] for event in read_events(run_dir) if event["kind"] == "lost"}


def attach(run_dir: Path) -> str:
    done = subprocess.run(
        [*MEMPROF, "attach", str(run_dir), "--once"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_under_load_is_watched_and_goes_on_when_the_disk_is_full(
    sim_stack, tmp_path, cleanup_processes, monkeypatch
):
    from vllm_memprof.sim.presets import resolve_model

    monkeypatch.setenv(*FORK)
    folder = tmp_path / FOLDER
    folder.symlink_to(resolve_model("memprof/tiny", []).path)
    port, metrics_port = free_port(), free_port()
    run_dir = tmp_path / "run"
    process = start_memprof(
        ["serve", str(folder), "--served-model-name", "tiny", "--device", "sim:910b",
         "--enforce-eager", "--load-format", "dummy", "--max-model-len", "4096",
         "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY,
         "--sample", "1", "--metrics-port", str(metrics_port)],
        run_dir,
    )  # fmt: skip
    cleanup_processes.append(process)

    wait_for_server(process, run_dir, 200)
    load = Load(port, "tiny", clients=4, prompt=PROMPT, max_tokens=40, key=KEY).start()

    def busy():
        text, found = scrape(metrics_port)
        at_work = found.get(("memprof_requests_running",), 0) > 0
        return (text, found) if at_work and found["memprof_kv_blocks_used",] > 0 else None

    text, found = wait_until(busy, 60, "a sample of requests that run")
    assert "Mk7QzSEEDx9" not in text
    assert found["memprof_simulated",] == 1
    assert found["memprof_requests_running",] <= 4
    owners = [value for name, value in found.items() if name[0] == "memprof_owner_bytes"]
    assert sum(owners) == found["memprof_device_total_bytes", "TP0"]
    shown = attach(run_dir)
    assert " running, " in shown
    assert "not measured" not in shown
    assert KEY not in shown

    (core,) = {
        int(event["file"].removesuffix(".jsonl").rsplit("-", 1)[1])
        for event in read_events(run_dir)
        if event["kind"] == "kv_plan"
    }
    (own,) = (run_dir / "events").glob(f"*-{core}.jsonl")
    answered = len(load.answers.tokens)
    limit_files(core, own.stat().st_size)  # events and samples alike
    wait_until(lambda: '"kind":"lost"' in own.read_text(), 30, "the first line says so")
    assert "nothing is recorded of TP0: File too large" in attach(run_dir)
    wait_until(lambda: len(load.answers.tokens) > answered + 4, 60, "requests are answered")
    limit_files(core, None)
    wait_until(
        lambda: scrape(metrics_port)[1]["memprof_events_lost_total",] > 0, 30, "it says how many"
    )
    limit_files(core, own.stat().st_size)
    wait_until(lambda: len(losses(run_dir)) == 2, 30, "the disk is full again")
    answers = load.stop()
    assert answers.failures == []
    assert set(answers.tokens) == {40}

    pids = engine_pids(run_dir)
    process.send_signal(signal.SIGINT)
    run = finish(process, run_dir, 60)
    assert_nothing_left(pids)
    assert run.returncode == 0, run.output[-3000:]
    assert run.info["status"] == "ok"
    assert run.report["run"]["truncated"] is True
    found = [each for each in run.report["findings"] if each["id"] == "events-lost"]
    assert len(found) == 2
    first, last = (str(each["evidence"]) for each in found)
    assert "events not written: File too large" in first
    assert "to the end of its record: File too large" in last
    assert "memprof: metrics on http://127.0.0.1:" in run.output
    assert " GiB (m) | no step has been sampled yet" in run.output  # a plain line
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes()
        assert PROMPT.encode() not in path.read_bytes(), path.name
    assert attach(run_dir).endswith(f"all of it: memprof report {run_dir}\n")
