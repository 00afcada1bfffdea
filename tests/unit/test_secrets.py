"""A marked secret is sent through every entrance and looked for in every file and on every stream."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_memprof as mp
from tests.support.secrets import ALL, BY_NAME, KEY, MARK, marked
from tests.unit.launch.test_run import make_job
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.cli import main
from vllm_memprof.cli.run import _say_how_it_ended
from vllm_memprof.errors import MemprofError, RunRecordError
from vllm_memprof.launch.folder import write_run_info
from vllm_memprof.launch.live import PlainView, Shown
from vllm_memprof.launch.run import EngineRun
from vllm_memprof.plans.model import Knob, Plan, PlanRow, folder_name
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.store import output_of, row_of, write_row
from vllm_memprof.plans.sweep import SweepJob, default_folder, run_sweep
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.schema import RunInfo
from vllm_memprof.report.files import write_reports
from vllm_memprof.sources import build_run

START = """\
(APIServer pid=100) INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.23.0
{config}
(EngineCore_DP0 pid=200) INFO 01-01 00:00:01 [core.py:1] Initializing a V1 LLM engine (v0.23.0) \
with config: model='https://user:{key}@hub/m', max_seq_len=32768, tensor_parallel_size=1,
(Worker_TP0 pid=301) INFO 01-01 00:01:00 [model_runner_v1.py:1] Loading model weights took 9.1948 GB
(Worker_TP0 pid=301) INFO 01-01 00:01:10 [worker.py:1] Available KV cache memory: 44.30 GiB
(EngineCore_DP0 pid=200) INFO 01-01 00:01:11 [kv_cache_utils.py:1] GPU KV cache size: 645,120 tokens
## api_key='{key}'
(Worker_TP0 pid=301) INFO 01-01 00:01:10 [worker.py:1] Available KV cache memory: 40.00 GiB
PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,api_key:{key}
"""
FORMATS = ("table", "markdown", "html", "json", "csv")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine-of-mine.log"
    path.write_text(START.format(config="\n\n".join(ALL), key=KEY))
    return path


def memprof(*args: str) -> str:
    """Run a command in this process; return everything that it printed."""
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            main(list(args))
        except SystemExit:
            pass
    return out.getvalue() + error.getvalue()


def files_with_the_mark(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if marked(path.name) or (path.is_file() and marked(path.read_bytes().decode("latin-1")))
    ]


@pytest.mark.parametrize(
    ("format_name", "lang"),
    [*((name, "en") for name in FORMATS), *((name, "zh") for name in FORMATS[:3])],
)
def test_explain(log, tmp_path, format_name, lang):
    printed = memprof("explain", str(log), "--format", format_name, "--lang", lang)
    assert "44.3" in printed or "475" in printed  # the figures are there, in GiB or in bytes
    assert not marked(printed)
    out = tmp_path / "out"
    memprof("explain", str(log), "--format", format_name, "--lang", lang, "-o", str(out))
    assert out.stat().st_size > 100
    assert not marked(out.read_text())


@pytest.mark.parametrize("line", BY_NAME)
def test_explain_keeps_no_command_or_set_up_with_its_secret(tmp_path, line):
    path = tmp_path / "a.log"
    path.write_text(START.replace("{key}", KEY).format(config=line))
    printed = memprof("explain", str(path), "--format", "json")
    assert not marked(printed)
    first = json.loads(printed)[0]["ranks"][0]
    assert first["budget"]["engine_kv_cache_bytes"] is not None


def test_explain_reads_stdin_and_gzip(log, tmp_path):
    packed = tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert not marked(memprof("explain", str(packed)))
    done = subprocess.run(
        [sys.executable, "-m", "vllm_memprof", "explain", "-", "--format", "json"],
        input=log.read_bytes(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert b"44.3" in done.stdout or b"KV" in done.stdout or b"kv_cache_bytes" in done.stdout
    assert not marked((done.stdout + done.stderr).decode())


def test_explain_far_inside_a_long_log(tmp_path):
    """Beyond the first megabytes, only lines around figures are read."""
    path = tmp_path / "long.log"
    filling = "INFO 01-01 00:00:00 [loggers.py:1] Avg prompt throughput: 1.0 tokens/s\n" * 80_000
    path.write_text(filling + START.format(config="\n\n".join(ALL), key=KEY))
    printed = memprof("explain", str(path), "--format", "json")
    assert "engine_kv_cache_bytes" in printed
    assert not marked(printed)


def test_a_log_as_input_of_report_diff_check_and_load(log, tmp_path):
    budget = tmp_path / "b.toml"
    budget.write_text('[budget]\nmin_kv_cache = "60GiB"\n')
    first, second = f"{log}#1", f"{log}#2"
    for args in (
        ["diff", first, second],
        ["diff", first, second, "--format", "json"],
        ["diff", first, second, "--format", "html", "-o", str(tmp_path / "diff.html")],
        ["check", first, "--budget", str(budget)],
        ["check", first, "--budget", str(budget), "--format", "json"],
        ["check", first, "--budget", str(budget), "--format", "junit"],
        ["report", str(log)],
    ):
        assert not marked(memprof(*args)), args
    log_moved = log.rename(tmp_path.parent / f"{tmp_path.name}.log")
    assert files_with_the_mark(tmp_path) == []
    loaded = mp.load(f"{log_moved}")
    text = loaded.to_html() + loaded._repr_html_() + repr(loaded)
    text += "".join(
        getattr(loaded, name).to_csv() for name in ("phases", "budget", "kv", "findings")
    )
    assert "44.3" in text
    assert not marked(text + repr(loaded.reports))


def test_a_report_and_a_run_of_another_release(log, tmp_path):
    """They may hold secrets in clear; what is made from them does not."""
    report = json.loads(memprof("explain", str(log), "--format", "json"))[0]
    report["run"]["command"] = ["vllm", "serve", "m", "--api-key", KEY]
    report["run"]["exit_reason"] = f"ValueError: api_key='{KEY}'"
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert not marked(memprof("diff", str(path), str(path), "--format", "json"))
    assert not marked(repr(mp.load(path).reports))  # type: ignore[union-attr]

    job = make_job(tmp_path, "--fail=3", mode="offline")
    write_run_info(job.run_dir, job.info)
    data = json.loads((job.run_dir / "run.json").read_text())
    data |= {"command": ["--hf-token", KEY], "exit_reason": f"HF_TOKEN={KEY}", "status": "failed"}
    (job.run_dir / "run.json").write_text(json.dumps(data))
    assert not marked(repr(load_run(job.run_dir)))


def test_error_messages():
    for text in ALL:
        error = RunRecordError(f"cannot read: {text}", hint=text)
        assert not marked(f"{error} {error!r} {error.message} {error.hint}")
    assert isinstance(error, MemprofError)


def test_events_of_an_engine_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", "--api-key", KEY, f"-cc=hf_{MARK}abc"])
    recorder = Recorder(tmp_path)
    for text in ALL:
        recorder.error("hook", ValueError(text))
        recorder.emit("unread", what="figure", reason=text)
    recorder.emit("figures", source="x", values={"bytes_per_token": 5, "kv_cache_bytes": 7})
    assert files_with_the_mark(tmp_path) == []
    [path] = (tmp_path / "events").glob("*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(events) == 2 * len(ALL) + 2
    assert events[-1]["values"] == {"bytes_per_token": 5, "kv_cache_bytes": 7}


@pytest.mark.parametrize("keep_secrets", [False, True])
def test_a_run_from_its_start_to_its_report(tmp_path, keep_secrets, capfd):
    """Every line that the engine prints, its events, its error, memprof's own lines about it."""
    printed = "\n\n".join(ALL)
    job = make_job(tmp_path, "--fail=3", mode="offline")
    job.keep_secrets = keep_secrets
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys, os\n"
        "data = open(sys.argv[1], 'rb').read()\n"
        "for at in range(0, len(data), 7): os.write(1, data[at:at + 7])\n"
        "sys.exit(3)\n"
    )
    (tmp_path / "in").write_text(f"{printed}\nValueError: bad api_key='{KEY}'\ntoken={KEY}")
    job.command[:] = [sys.executable, str(script), str(tmp_path / "in")]
    echoed = io.BytesIO()
    view = PlainView(Shown("title", 0, output=True), echoed)
    outcome = EngineRun(job, view).run()
    write_reports(build_run(job.run_dir), job.run_dir)
    _say_how_it_ended(outcome, job, SimpleNamespace(mode="offline", quiet=True))  # type: ignore[arg-type]
    capturing = capfd.readouterr()
    assert "last lines of engine.log" in capturing.err
    assert not marked(capturing.err + capturing.out)
    assert "ValueError: bad api_key='***'" in (outcome.info.exit_reason or "")
    assert files_with_the_mark(job.run_dir) == (["engine.log"] if keep_secrets else [])
    log = (job.run_dir / "engine.log").read_text()
    assert "--port 8000" in log
    if keep_secrets:
        assert log == (tmp_path / "in").read_text()
    # the engine's own stream, on the terminal of its owner, is not memprof's to change
    assert (tmp_path / "in").read_bytes() in echoed.getvalue()


def test_run_json(tmp_path):
    info = RunInfo(id="x", mode="serve", model=f"https://u:{KEY}@hub/m", command=["--api-key", KEY])
    info.notes += [f"HF_TOKEN={KEY}"]
    info.env["VLLM_X"] = f"https://u:{KEY}@h"
    info.exit_reason = f"Error: token='{KEY}'"
    write_run_info(tmp_path, info)
    assert files_with_the_mark(tmp_path) == []


def test_plans_searches_and_sweeps(tmp_path):
    arguments = ["--api-key", KEY, f"--hf-token={KEY}", "--max-model-len", "8"]
    plan = Plan("m", arguments, own={"device": "sim"})
    knobs = [Knob("hf-token", [KEY, f"other{MARK}"]), Knob("max-num-seqs", ["8"])]
    folder = tmp_path / "sweep"
    job = SweepJob(plan, knobs, ["memprof"])
    assert [each.engine_args[3] for each in job.plans] != []
    assert any(KEY in each for plan in job.plans for each in plan.engine_args)  # the engine's
    folders = [default_folder(plan, knobs), *(folder_name(1, each) for each in job.plans)]
    assert not marked(" ".join(map(str, folders)))

    def pool(tasks, progress):
        for task in tasks:
            task.run_dir.mkdir(parents=True)
            output = output_of(task.run_dir)
            output.write_text(f"memprof: failed: api_key='{KEY}'\n")
            row = row_of(task.plan, task.run_dir, 1)
            output.unlink()
            yield task, row

    runner = PlanRunner(folder, pool=pool)
    sweep = run_sweep(job, runner)
    assert len(sweep.rows) == 2
    assert "api_key='***'" in (sweep.rows[0].reason or "")
    assert not marked(repr(sweep))
    assert files_with_the_mark(folder) == []
    again = run_sweep(SweepJob(plan, knobs, ["memprof"]), runner)
    assert len(again.rows) == 2
    write_row(tmp_path / "row", None, PlanRow({"x": "1"}, "failed", f"HF_TOKEN={KEY}"))
    assert files_with_the_mark(tmp_path / "row") == []


def test_the_typed_command(tmp_path, monkeypatch):
    """``memprof serve`` records what was typed, the engine's command and its environment."""
    from vllm_memprof.launch import prepare
    from vllm_memprof.launch.request import DeviceChoice, LaunchRequest

    monkeypatch.setattr(prepare, "find_python", lambda python, row: Path(sys.executable))
    monkeypatch.setattr(
        prepare,
        "probe_interpreter",
        lambda *_: SimpleNamespace(versions={"vllm": "0.23.0"}, python="3.11.7", folders={}),
    )
    monkeypatch.setattr(prepare, "require_engine", lambda facts, row: None)
    args = ["--api-key", KEY, f"second{MARK}", "--port", "80"]
    request = LaunchRequest(
        "serve", "m", args, DeviceChoice("cpu"), run_dir=tmp_path / "run",
        typed=["memprof", "serve", "--keep-secrets", "m", *args], keep_secrets=True,
    )  # fmt: skip
    environ = {**os.environ, "VLLM_API_KEY": KEY, "HF_TOKEN": KEY, "VLLM_X": f"http://u:{KEY}@h"}
    job = prepare.prepare_job(request, environ)
    assert job.keep_secrets
    assert KEY in job.command  # the engine gets what was typed
    assert job.env["VLLM_API_KEY"] == KEY
    write_run_info(job.run_dir, job.info)
    assert files_with_the_mark(job.run_dir) == []
    assert job.info.command == [
        "memprof", "serve", "--keep-secrets", "m", "--api-key", "***", "***", "--port", "80",
    ]  # fmt: skip
