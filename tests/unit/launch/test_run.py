"""The launcher with a fake engine: endings of every kind, in subprocesses of their own."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_memprof.errors import LaunchError
from vllm_memprof.launch.folder import create_run_dir, write_run_info
from vllm_memprof.launch.live import PlainView, Shown
from vllm_memprof.launch.run import EngineRun, Job, Patience, RunOutcome
from vllm_memprof.launch.watch import OWN_CHILDREN, ProcessWatch
from vllm_memprof.record.held import is_held
from vllm_memprof.record.schema import DeploymentPart, RunInfo

FAKE = Path(__file__).with_name("fake_engine.py")
QUICK = Patience(
    after_death_s=0.5,
    after_error_s=1.0,
    after_interrupt_s=1.0,
    after_head_s=0.5,
    after_peer_s=0.5,
    after_main_exit_s=0.5,
    after_term_s=0.5,
    after_kill_s=2.0,
)


class Recorder:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.bytes = b""
        self.closed = False

    def update(self, progress: Any) -> None:
        pass

    def suspend(self) -> None:
        pass

    def output(self, chunk: bytes) -> None:
        self.bytes += chunk

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


def make_job(tmp_path: Path, *options: str, mode: str = "serve", timeout_s: float = 20.0) -> Job:
    run_dir = create_run_dir(tmp_path / "run", "m")
    env = {**os.environ, "MEMPROF_RUN_DIR": str(run_dir)}
    ready = {"serve": "server", "offline": "model", "plan": "plan"}[mode]
    command = [sys.executable, str(FAKE), f"--mode-ready={ready}", *options]
    return Job(
        RunInfo(id="x", mode=mode, model="m", command=[]),
        run_dir,
        command,
        env,
        timeout_s,
        patience=QUICK,
    )


def run(job: Job, on_ready: Any = lambda _: None) -> tuple[RunOutcome, Recorder]:
    view = Recorder()
    outcome = EngineRun(job, view, on_ready).run()
    assert view.closed
    assert_nothing_left(job)
    return outcome, view


def read_info(job: Job) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((job.run_dir / "run.json").read_text())
    return data


def recorded_pids(job: Job) -> set[int]:
    return {int(path.stem.rsplit("-", 1)[1]) for path in (job.run_dir / "events").glob("*.jsonl")}


def assert_nothing_left(job: Job) -> None:
    alive = [pid for pid in recorded_pids(job) if psutil.pid_exists(pid)]
    alive = [pid for pid in alive if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not alive


def interrupt_soon(number: int = signal.SIGINT, times: int = 1, pause_s: float = 0.1) -> Any:
    def send(info: RunInfo | None = None) -> None:
        def later() -> None:
            for _ in range(times):
                time.sleep(pause_s)
                os.kill(os.getpid(), number)

        threading.Thread(target=later).start()

    return send


def interrupt_after(seconds: float, name: str = "INT") -> subprocess.Popen[bytes]:
    """A signal to this process, from another one: a thread here would be forked along with the
    engine."""
    return subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -{name} {os.getpid()}"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_ready_server_ends_on_request(tmp_path, number):
    job = make_job(tmp_path)
    outcome, _ = run(job, interrupt_soon(number))
    info = read_info(job)
    assert outcome.ready
    assert outcome.verdict.exit_code == 0
    assert (info["status"], info["exit_code"]) == ("ok", 0)
    assert signal.Signals(number).name in info["exit_reason"]
    assert info["versions"]["vllm_ascend"] == "0.23.0"
    assert (info["engine"], info["engine_version"], info["device"]) == (
        "vllm-ascend",
        "0.23.0",
        "Fake1",
    )
    assert info["seconds"] > 0
    assert len(recorded_pids(job)) == 3


def test_the_log_line_counts_as_readiness_too(tmp_path):
    outcome, _ = run(make_job(tmp_path, "--ready-by=log"), interrupt_soon())
    assert outcome.ready
    assert outcome.verdict.status == "ok"


@pytest.mark.parametrize("mode", ["offline", "plan"])
def test_a_run_that_ends_by_itself(tmp_path, mode):
    outcome, view = run(make_job(tmp_path, mode=mode))
    assert (outcome.verdict.status, outcome.verdict.exit_code, outcome.verdict.reason) == (
        "ok",
        0,
        None,
    )
    assert view.notes == []


@pytest.mark.parametrize(
    "phase", ["device_init", "hccl_init", "weight_load", "profile_run", "warm_up", "mm_profile"]
)
@pytest.mark.parametrize("extra", [[], ["--oblivious"]], ids=["engine-notices", "engine-hangs"])
def test_a_worker_killed_during_start_up(tmp_path, phase, extra):
    job = make_job(tmp_path, f"--kill-in={phase}", "--pace=0.3", *extra)
    began = time.monotonic()
    outcome, _ = run(job)
    assert time.monotonic() - began < 50  # the fake engine would go on for a minute
    info = read_info(job)
    assert info["status"] == "failed"
    assert outcome.verdict.exit_code != 0
    assert info["exit_reason"].startswith("worker TP1 (pid ")
    assert "was killed by SIGKILL" in info["exit_reason"] or "vanished" in info["exit_reason"]
    assert f"in {phase}" in info["exit_reason"]
    if phase == "mm_profile":
        assert "(inside profile_run)" in info["exit_reason"]


def test_how_a_worker_died_is_usually_known(tmp_path):
    """The zombie's status is there until its parent collects it; here the parent never does."""
    outcome, _ = run(make_job(tmp_path, "--kill-in=weight_load", "--oblivious", "--pace=0.3"))
    assert "was killed by SIGKILL in weight_load" in str(outcome.verdict.reason)


@pytest.mark.parametrize("lost_code", [0, 1])
def test_a_worker_killed_while_serving(tmp_path, lost_code):
    """Also when the engine itself thinks that all is well, which vLLM's server does after its
    engine died."""
    job = make_job(tmp_path, f"--lost-code={lost_code}")

    def kill_a_worker(info: RunInfo) -> None:
        assert json.loads((job.run_dir / "run.json").read_text())["engine"] == "vllm-ascend"
        for path in (job.run_dir / "events").glob("*.jsonl"):
            if "TP1" in path.read_text():
                os.kill(int(path.stem.rsplit("-", 1)[1]), signal.SIGKILL)

    outcome, _ = run(job, kill_a_worker)
    assert outcome.verdict.status == "failed"
    assert outcome.verdict.exit_code == 1
    assert "worker TP1" in str(outcome.verdict.reason)
    assert "while serving" in str(outcome.verdict.reason)


def test_a_worker_that_exits_by_itself_is_told_with_its_status(tmp_path):
    outcome, _ = run(make_job(tmp_path, "--exit-in=weight_load", "--oblivious", "--pace=0.3"))
    assert "exited with status 3 in weight_load" in str(outcome.verdict.reason)


@pytest.mark.parametrize("watched", [True, False], ids=["seen-dying", "collected-unseen"])
def test_the_main_process_killed_from_outside(tmp_path, monkeypatch, watched):
    """Also where it is collected before the thread that waits for deaths has seen how it died."""
    if not watched:
        monkeypatch.setattr(ProcessWatch, "_wait_for_deaths", lambda self: None)
    job = make_job(tmp_path)

    def kill_main(info: RunInfo) -> None:
        for path in (job.run_dir / "events").glob("*.jsonl"):
            if '"role": "api"' in path.read_text():
                os.kill(int(path.stem.rsplit("-", 1)[1]), signal.SIGKILL)

    outcome, _ = run(job, kill_main)
    assert outcome.verdict.status == "failed"
    assert outcome.verdict.exit_code == 137
    assert "API server" in str(outcome.verdict.reason)
    assert "SIGKILL" in str(outcome.verdict.reason)


def test_start_up_deadline(tmp_path):
    job = make_job(tmp_path, "--hang-in=profile_run", timeout_s=2.0)
    outcome, _ = run(job)
    assert outcome.verdict.exit_code == 1
    reason = str(outcome.verdict.reason)
    assert "not ready within 2 s (--startup-timeout)" in reason
    assert "TP1 in profile_run for " in reason
    assert "TP0 after warm_up for " in reason


def test_an_engine_that_fails_and_hangs_is_ended(tmp_path):
    outcome, _ = run(make_job(tmp_path, "--raise-in=profile_run"))
    assert outcome.verdict.exit_code == 1
    assert "TP1 failed in profile_run: AttributeError: no such operator" in str(
        outcome.verdict.reason
    )
    assert str(outcome.verdict.reason).endswith("the engine hung and was ended by memprof")


def test_the_first_failure_is_the_reason_also_when_the_user_loses_patience(tmp_path):
    job = make_job(tmp_path, "--raise-in=weight_load")
    job.patience = replace(QUICK, after_error_s=60.0)
    with interrupt_after(1.5):
        outcome, _ = run(job)
    assert "TP1 failed in weight_load" in str(outcome.verdict.reason)
    assert str(outcome.verdict.reason).endswith("ended by SIGINT")


@pytest.mark.parametrize(
    "options", [["--stubborn"], ["--stubborn", "--detach"], ["--leave-workers", "--stubborn"]]
)
def test_stubborn_processes_are_killed(tmp_path, options):
    job = make_job(tmp_path, *options)
    outcome, view = run(job, interrupt_soon())
    assert outcome.left_behind == []
    assert any("SIGKILL" in note for note in view.notes)
    assert outcome.verdict.status == "ok"  # it had served, and the user wanted it to end


def test_workers_left_behind_by_an_engine_that_ended_well(tmp_path):
    outcome, _ = run(
        make_job(tmp_path, "--leave-workers", "--detach", "--oblivious"), interrupt_soon()
    )
    assert outcome.verdict.exit_code == 0


def test_a_second_interrupt_hastens(tmp_path):
    job = make_job(tmp_path, "--stubborn")
    job.patience = Patience(after_interrupt_s=60, after_term_s=60, after_kill_s=2)
    began = time.monotonic()
    run(job, interrupt_soon(times=3, pause_s=0.3))
    assert time.monotonic() - began < 50  # the fake engine would go on for a minute


def test_an_interrupt_during_start_up_terminates_the_run(tmp_path):
    job = make_job(tmp_path, "--hang-in=weight_load")
    with interrupt_after(1.5):
        outcome, _ = run(job)
    assert outcome.verdict.exit_code == 130
    assert outcome.verdict.status == read_info(job)["status"] == "terminated"
    assert "interrupted by SIGINT" in str(outcome.verdict.reason)
    assert "TP1 in weight_load" in str(outcome.verdict.reason)


def test_sigterm_during_start_up_ends_it_within_five_seconds(tmp_path):
    job = make_job(tmp_path, "--hang-in=weight_load", "--stubborn")
    job.patience = Patience()
    began_s = time.monotonic()
    with interrupt_after(1.5, "TERM"):
        outcome, _ = run(job)
    assert time.monotonic() - began_s < 1.5 + 5
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("terminated", 143)
    assert outcome.left_behind == []


def test_the_engines_own_status_and_message(tmp_path):
    outcome, _ = run(make_job(tmp_path, "--fail=7"))
    assert outcome.verdict.exit_code == 7
    assert "No available memory for the cache blocks" in str(outcome.verdict.reason)
    assert any("No available memory" in line for line in outcome.log_tail)


def test_out_of_memory_is_a_status_of_its_own(tmp_path):
    outcome, _ = run(make_job(tmp_path, "--oom-in=profile_run"))
    assert outcome.verdict.status == "oom"
    assert outcome.verdict.exit_code == 1
    assert "TP1 ran out of device memory in profile_run" in str(outcome.verdict.reason)


def test_engine_log_holds_every_byte(tmp_path):
    job = make_job(tmp_path, "--noise=20000", "--fail=1")
    _, view = run(job)
    log = (job.run_dir / "engine.log").read_bytes()
    assert b"\xff\xfe raw bytes \x1b[31mred\x1b[0m\n" in log
    assert log.count(b"line ") == 20000
    assert view.bytes == log


def test_files_are_private(tmp_path):
    job = make_job(tmp_path, "--fail=1")
    run(job)
    assert stat.S_IMODE(job.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((job.run_dir / "events").stat().st_mode) == 0o700
    for name in ("run.json", "engine.log"):
        assert stat.S_IMODE((job.run_dir / name).stat().st_mode) == 0o600


def test_a_program_that_cannot_start(tmp_path):
    job = make_job(tmp_path)
    job.command = [str(tmp_path / "no-such-program")]
    with pytest.raises(LaunchError, match="no-such-program"):
        EngineRun(job, Recorder()).run()
    assert read_info(job)["status"] == "failed"


def test_an_engine_without_hooks_says_so(tmp_path):
    job = make_job(tmp_path)
    job.command = [sys.executable, "-c", "print('hello')"]
    outcome, _ = run(job)
    assert "no engine process wrote events" in " ".join(outcome.info.notes)


def test_answers_of_the_simulated_device_are_notes(tmp_path):
    """Each once, whatever the process; other lines of the device are none."""
    line = (
        "[memprof simulated device] aclnnEqual of tensors of {} bytes is not computed; answered: "
    )
    lines = [line.format(size) + f"different (pid {pid})" for size, pid in ((4, 1), (4, 2), (8, 1))]
    job = make_job(tmp_path)
    script = f"print({'; '.join(lines)!r}.replace('; [', chr(10) + 'x [')); print('[memprof] x')"
    job.command = [sys.executable, "-c", script]
    outcome, _ = run(job)
    notes = [note for note in outcome.info.notes if note.startswith("simulated device:")]
    assert notes == [
        f"simulated device: aclnnEqual of tensors of {size} bytes is not computed; "
        "answered: different"
        for size in (4, 8)
    ]


def test_plain_lines_tell_each_finished_phase(tmp_path, capfdbinary):
    job = make_job(tmp_path, mode="offline")
    EngineRun(job, PlainView(Shown("title", time.monotonic_ns()))).run()
    text = capfdbinary.readouterr().err.decode()
    assert text.startswith("title\n")
    assert "TP0 weight_load 6.00 GiB reserved, peak 6.00, non-torch 1.00 (0.0 s)" in text
    assert text.count("warm_up") == 2
    assert "fake engine starts" not in text


def test_nothing_outlives_a_memprof_that_is_killed(tmp_path):
    """SIGKILL of the launcher itself: the engine's main process gets SIGTERM from the kernel."""
    run_dir = create_run_dir(tmp_path / "run", "m")
    code = (
        "import sys; from tests.unit.launch.test_run import *\n"
        "EngineRun(Job(RunInfo(id='x', mode='serve', model='m', command=[]), Path(sys.argv[1]), "
        "[sys.executable, str(FAKE)], {**os.environ, 'MEMPROF_RUN_DIR': sys.argv[1]}, 20.0), "
        "Recorder()).run()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(run_dir)])
    limit = time.monotonic() + 20
    while len(list(run_dir.glob("events/*.ready"))) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    pids = {int(path.stem.rsplit("-", 1)[1]) for path in (run_dir / "events").glob("*.jsonl")}
    assert len(pids) == 3
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.05)


#: An engine that its clients keep from ending, and a memprof that launched it.
STAYS = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
LAUNCHER = """
import os, sys, time
from pathlib import Path
from vllm_memprof.launch import engine, engine_log
engine._ENDS_WITHIN_S = 0.5
pump = engine_log.LogPump(Path(sys.argv[2]))
stays = engine.EngineProcess([sys.executable, "-c", sys.argv[1]], os.environ, pump)
while b"up" not in Path(sys.argv[2]).read_bytes():
    time.sleep(0.05)
print(stays.pid, flush=True)
time.sleep(60)
"""


def test_an_engine_that_stays_when_its_memprof_is_killed_is_ended(tmp_path):
    command = [sys.executable, "-c", LAUNCHER, STAYS, str(tmp_path / "engine.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    limit = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_accounting_of_its_own_devices_goes_with_a_run(tmp_path: Path) -> None:
    job = replace(make_job(tmp_path, mode="plan"), device_state=tmp_path / "devices")
    (tmp_path / "devices").touch()
    run(job)
    assert not (tmp_path / "devices").exists()


def test_a_full_disk_ends_neither_the_engine_nor_the_launcher(tmp_path, monkeypatch):
    """run.json cannot be written again after the start: the run goes on, its status is its own."""
    job = make_job(tmp_path)
    writes = []

    def refuse_later(run_dir: Path, info: RunInfo) -> None:
        writes.append(info.status)
        if len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_run_info(run_dir, info)

    monkeypatch.setattr("vllm_memprof.launch.run.write_run_info", refuse_later)
    outcome, view = run(job, interrupt_soon())
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("ok", 0)
    assert len(writes) == 3  # at the start, at readiness, at the end
    said = [note for note in view.notes if "cannot write run.json" in note]
    assert len(said) == 2
    assert "No space left on device" in said[0]
    assert read_info(job)["status"] == "running"  # what was written before


def test_the_folder_is_held_while_the_run_is_recorded(tmp_path):
    job = make_job(tmp_path)
    held = []

    def look(info: RunInfo) -> None:
        held.append(is_held(job.run_dir, info.host))
        interrupt_soon()()

    run(job, look)
    assert held == [True]
    assert is_held(job.run_dir, socket.gethostname()) is False


class Listener:
    """The head of a deployment: accepts connections on loopback until it is closed.

    A process of its own, as a host is: connections between own processes do not count.
    """

    _CODE = """
import socket
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
held = []
while True:
    held.append(sock.accept())
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._CODE], stdout=subprocess.PIPE, text=True
        )
        OWN_CHILDREN.add(self._process.pid)
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        OWN_CHILDREN.discard(self._process.pid)


@pytest.fixture
def head():
    listener = Listener()
    yield listener
    listener.close()


def headless_job(tmp_path: Path, *options: str, timeout_s: float = 20.0) -> Job:
    job = make_job(tmp_path, *options, timeout_s=timeout_s)
    job.info.part = DeploymentPart("d", "arguments", headless=True, dp_size=2, dp_local=1)
    return job


def test_a_headless_host_is_ready_with_its_engine_core_and_ends_by_a_signal(tmp_path, head):
    job = headless_job(tmp_path, f"--head={head.address}")
    outcome, _ = run(job, interrupt_soon())
    assert outcome.ready
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("ok", 0)
    assert outcome.verdict.reason == "ended by SIGINT"


def test_a_headless_host_ends_with_its_head(tmp_path, head, monkeypatch):
    monkeypatch.setattr("vllm_memprof.launch.run._LOOK_S", 0.1)
    job = headless_job(tmp_path, f"--head={head.address}", "--pace=0.1")
    closes = lambda _: threading.Timer(1.0, head.close).start()  # noqa: E731
    outcome, view = run(job, closes)
    assert outcome.ready
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("ok", 0)
    assert outcome.verdict.reason == "the head 127.0.0.1 has ended"
    assert any("no connection with the head 127.0.0.1 for 0.5 s" in note for note in view.notes)


def test_an_engine_that_fails_since_its_head_ended_has_not_failed(tmp_path, head):
    """As in the middle of a step, whose collective fails."""
    job = headless_job(tmp_path, f"--head={head.address}", "--lose-peer", "--pace=0.1")
    outcome, _ = run(job, lambda _: threading.Timer(2.5, head.close).start())
    assert outcome.ready
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("ok", 1)  # the engine's own
    assert outcome.verdict.reason == "the head 127.0.0.1 has ended"


def test_a_head_that_ends_while_a_host_starts(tmp_path, head, monkeypatch):
    monkeypatch.setattr("vllm_memprof.launch.run._LOOK_S", 0.1)
    job = headless_job(tmp_path, f"--head={head.address}", "--hang-in=weight_load")
    threading.Timer(1.5, head.close).start()
    outcome, _ = run(job)
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("failed", 1)
    reason = outcome.verdict.reason
    assert reason.startswith("the head 127.0.0.1 ended before this host was ready: ")
    assert "TP1 in weight_load" in reason


def test_a_headless_host_whose_head_does_not_start(tmp_path):
    job = headless_job(tmp_path, "--head=127.0.0.1:9", "--hang-in=weight_load", timeout_s=2.0)
    outcome, _ = run(job)
    assert outcome.verdict.exit_code == 1
    reason = outcome.verdict.reason
    assert reason.startswith("not ready within 2 s (--startup-timeout): no connection with the")
    assert "TP1 in weight_load" in reason


def test_a_worker_killed_on_a_headless_host_is_its_own_failure(tmp_path, head):
    job = headless_job(tmp_path, f"--head={head.address}", "--kill-in=serving", "--lost-code=0")
    outcome, _ = run(job)
    assert (outcome.verdict.status, outcome.verdict.exit_code) == ("failed", 1)
    assert outcome.verdict.reason.startswith("worker TP1 (pid ")


def test_a_headless_host_whose_arguments_say_nothing_is_known_by_its_log(tmp_path, head):
    """As where the arguments are in a file."""
    job = make_job(tmp_path, f"--head={head.address}")
    outcome, _ = run(job, interrupt_soon())
    assert outcome.ready
    part = read_info(job)["part"]
    assert (part["headless"], part["deployment"]) == (True, head.address)
