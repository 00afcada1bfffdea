"""One run from start to end: starts the engine, watches it, ends it, and writes ``run.json`` before
and after.

Runs in the launcher's main thread (signal handlers). The clock is CLOCK_MONOTONIC, the same as in
the events; the time of day is asked for dates alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from vllm_memprof.engines import VLLM
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError
from vllm_memprof.launch.checkpoint import find_checkpoint
from vllm_memprof.launch.deployment import has_others
from vllm_memprof.launch.engine import EngineProcess
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.folder import write_run_info
from vllm_memprof.launch.head_node import HeadNode
from vllm_memprof.launch.host import HostWatch
from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress, RankBudget
from vllm_memprof.launch.shared_memory import SharedMemory, left_behind
from vllm_memprof.launch.signals import catch_signals, signal_name
from vllm_memprof.launch.verdict import (
    EngineEnd,
    RunVerdict,
    describe_death,
    describe_lost,
    describe_stuck,
    find_lost,
    find_suspects,
    judge,
)
from vllm_memprof.launch.watch import ProcessWatch, adopt_orphans
from vllm_memprof.record import oom_files
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.held import hold
from vllm_memprof.record.host import HostRecord, host_name, numbers
from vllm_memprof.record.schema import (
    ENGINE_LOG,
    RUN_FILE,
    DeploymentPart,
    FullStep,
    PlannedRanks,
    RunInfo,
)
from vllm_memprof.record.tail import EventTail

_TAIL_LINES = 15  # of the engine's output, which are shown after a failure
_TICK_S = 0.1
_TICK_SERVING_S = 0.5  # hours of it; signals are handled at once all the same
_WALK_S = 1.0  # between two walks of the process tree; it costs a read of all of /proc
_WALK_READY_S = 5.0
_LOOK_S = 2.0  # between two looks at the connections with the head


@dataclass(frozen=True)
class Patience:
    """Seconds of each stage of an ending.

    The sum of the stages after a death stays well under 30.
    """

    after_death_s: float = 8.0  # for the engine to notice that it lost a process
    after_error_s: float = 20.0  # of silence after the engine said that it failed: it may hang
    after_vanishing_s: float = 15.0  # the same when it may have been the orderly end of a run
    before_note_s: float = 1.5  # an engine that ends well meanwhile needs no alarm
    before_note_at_end_s: float = 6.0  # when workers had begun to shut down: vLLM gives them 4 s
    after_interrupt_s: float = 30.0  # plus vLLM's own --shutdown-timeout
    in_start_s: float = 1.5  # each, of SIGTERM before it is ready: there is nothing to finish
    after_head_s: float = 5.0  # without a connection with the head: it has ended
    after_peer_s: float = 10.0  # for the head to end, after the engine lost one of its peers
    after_main_exit_s: float = 5.0  # for children of a main process that has ended
    after_term_s: float = 6.0
    after_kill_s: float = 5.0  # the kernel frees device memory before a process is gone


#: Called when the server is ready; returns what accounting says of its ranks, for the views.
OnReady = Callable[[RunInfo], Iterable[RankBudget] | None]


@dataclass
class Job:
    """Everything that is decided before the engine starts."""

    info: RunInfo  # secrets redacted
    run_dir: Path
    command: list[str]
    env: Mapping[str, str]
    startup_timeout_s: float
    shutdown_timeout_s: float = 0.0  # what the engine was told to take for a graceful shutdown
    patience: Patience = field(default_factory=Patience)
    keep_secrets: bool = False  # engine.log holds what the engine printed, secrets and all
    device_state: Path | None = None  # accounting of simulated devices; removed when all have ended
    engine: EngineRow = VLLM
    warm: bool = False  # the engine may be a fork of a process that has imported it


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    info: RunInfo
    verdict: RunVerdict
    ready: bool
    log_tail: list[str]
    left_behind: list[int]  # pids that could not be ended: processes that hang in the kernel


class EngineRun:
    """One run: the loop over events, processes and signals, and what is known so far.

    Args:
        job: what to start.
        view: what shows the progress.
        on_ready: called once when the server is ready, with ``run.json`` up to date and the
            terminal its own; it may take a second.
    """

    _engine: EngineProcess
    _watch: ProcessWatch
    _host: HostWatch
    _shared: SharedMemory
    _deadline_s: float  # of the start-up

    def __init__(
        self,
        job: Job,
        view: View,
        on_ready: OnReady = lambda _: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._view, self._on_ready, self._on_start = job, view, on_ready, on_start
        self._info = job.info
        self._progress = EngineProgress(host_name())
        self._tail = EventTail(job.run_dir)
        log = job.run_dir / ENGINE_LOG
        self._pump = LogPump(log, view.output, job.keep_secrets, job.engine)
        self._progress.requests, self._progress.output = self._pump.requests, self._pump.tail
        self._seen = EngineEnd(job.info.mode, self._progress)
        #: Why the engine is to end; None: it is not. Then what is said, and signals of growing
        #: force, each after a time of patience since the one before.
        self._cause: str | None = None
        self._steps: list[tuple[float, int | str]] = []
        self._since_s = 0.0
        self._signals: list[int] = []
        self._wake = threading.Event()
        self._next_walk_s = self._next_look_s = 0.0
        self._last_event_s = time.monotonic()
        self._head: HeadNode | None = None  # of a host without an API server
        self._started_s = time.time()  # since the epoch, as files are dated

    def run(self) -> RunOutcome:
        """Run the engine to its end.

        Raises:
            LaunchError: the engine could not be started at all; ``run.json`` says so.
        """
        job, info, seen, progress = self._job, self._info, self._seen, self._progress
        info.start_t_ns, info.started, info.host = time.monotonic_ns(), utc_text(), progress.host
        oom_kills = _host_oom_kills()
        adopt_orphans()
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold(job.run_dir))
            write_run_info(job.run_dir, info)
            if left := left_behind(remove=True):
                self._view.note(f"memprof: removed shared memory of killed runs: {len(left)} files")
            stack.enter_context(catch_signals(self._note_signal))
            try:
                interrupted = (lambda: bool(self._signals)) if job.warm else None
                self._engine = EngineProcess(job.command, job.env, self._pump, interrupted)
                self._engine.tell(self._wake.set)
                self._watch = ProcessWatch(self._engine.pid)
                self._host = HostWatch(
                    info.host_memory or HostRecord(), progress.seen, bool(info.sample)
                )
                self._shared = SharedMemory(job.device_state)
                stack.callback(self._close)
                self._on_start()
                unended = self._supervise()
            except Exception as error:
                own = f"memprof itself failed: {type(error).__name__}: "
                reason = f"{'' if isinstance(error, LaunchError) else own}{error}"
                self._finish(RunVerdict("failed", 1, reason))
                raise
        pump, part = self._pump, info.part
        pump.join(2.0)
        self._note_readiness()  # it may have died in the moment in which it became ready
        if seen.interrupted_by is None:
            seen.lost = list(progress.lost)
        seen.engine_code = self._engine.poll()
        seen.error_lines = list(pump.error_lines)
        seen.lost_core = "lost" in pump.said
        seen.headless = self._head is not None
        if self._head is not None and self._head_has_ended(self._head):
            seen.head_ended = self._head.host
        elsewhere = part is not None and not part.headless and "fatal" not in pump.said
        if elsewhere and "dead_core" in pump.said:  # no engine core of this host
            seen.other_host_t_ns = pump.said["dead_core"][0][0]
        if part is not None and has_others(part) and progress.first_error is None:
            seen.lost_peer_t_ns = pump.lost_peer_t_ns  # else it was a rank of this host
        seen.host_oom_kills = _host_oom_kills() - oom_kills
        verdict = judge(seen)
        if unended:
            verdict = replace(verdict, exit_code=verdict.exit_code or 1)
            info.notes.append(f"processes that could not be ended: {unended}")
        info.notes += [*filter(None, [pump.log_error]), *pump.device_answers]
        self._finish(verdict)
        return RunOutcome(info, verdict, seen.ready, list(pump.tail)[-_TAIL_LINES:], unended)

    def _note_signal(self, number: int) -> None:
        self._signals.append(number)
        self._wake.set()

    def _supervise(self) -> list[int]:
        """Wait until all processes of the engine are gone; return those that could not be ended."""
        engine, seen, watch = self._engine, self._seen, self._watch
        self._deadline_s = time.monotonic() + self._job.startup_timeout_s
        while True:
            self._fold_events()
            if self._note_readiness() and self._cause is None:
                self._adopt_facts()
                self._host.read(watch.living())
                self._write_info()
                if seen.mode == "serve":
                    self._view.update(self._progress)
                    self._view.suspend()
                    self._progress.serve(self._on_ready(self._info) or ())
            walks = time.monotonic() >= self._next_walk_s or engine.poll() is not None
            if walks:
                watch.walk()
                self._host.look(watch.living())
                pause_s = _WALK_READY_S if seen.ready else _WALK_S
                self._next_walk_s = time.monotonic() + pause_s
            self._shared.look(watch.living, walks)
            self._handle_signals()
            self._note_losses()
            self._look_at_head()
            if engine.poll() is not None and not set(watch.living()) - {engine.pid}:
                self._note_losses()  # some may have died since
                return []
            if self._cause is None and (ending := self._find_cause()):
                self._end(*ending)
            waited_s = time.monotonic() - self._since_s
            if self._steps and waited_s >= self._steps[0][0]:
                self._take_step(f"{self._cause}: ")
            elif self._cause and not self._steps and waited_s > self._job.patience.after_kill_s:
                return watch.living()
            self._view.update(self._progress)
            serving = seen.ready and seen.mode == "serve" and self._cause is None
            self._wake.wait(_TICK_SERVING_S if serving else _TICK_S)
            self._wake.clear()

    def _find_cause(self) -> tuple[str, float, float | None] | None:
        """Return why the engine is to end, the seconds that it has to end by itself, and those
        until the user is told; None: it is not."""
        seen, progress, pump = self._seen, self._progress, self._pump
        head, patience, now_s = self._head, self._job.patience, time.monotonic()
        lost, suspects = find_lost(seen), find_suspects(seen, seen.deaths)
        if lost is not None:
            return describe_lost(seen, lost), patience.after_death_s, patience.before_note_s
        if suspects:
            unclear = seen.ready and seen.mode != "serve" and not suspects[0][0].killed
            at_end = unclear and progress.shutdown_t_ns is not None
            return (
                describe_death(seen, suspects[0]),
                patience.after_vanishing_s if unclear else patience.after_death_s,
                patience.before_note_at_end_s if at_end else patience.before_note_s,
            )
        if self._engine.poll() is not None:
            return "the engine ended and left processes behind", patience.after_main_exit_s, None
        failed = "fatal" in pump.said or (not seen.ready and progress.first_error)
        silent_s = now_s - max(self._last_event_s, pump.last_output_s)
        if failed and silent_s >= patience.after_error_s:  # vLLM may wait for its own for ever
            seen.hung = True
            return f"the engine failed and did nothing for {patience.after_error_s:g} s", 0.0, None
        if not seen.ready and now_s > self._deadline_s:
            seen.timed_out_s = self._job.startup_timeout_s
            seen.stuck = describe_stuck(progress, time.monotonic_ns()) or seen.stuck
            if head is not None and not head.ends:
                seen.stuck = f"no connection with the head {head.host}; {seen.stuck}"
            return f"not ready within {seen.timed_out_s:g} s", 0.0, None
        # without an API server an engine would wait for its head for ever; one that failed closes
        # its connections itself
        gone_s = 0.0 if head is None or head.lost_s is None else now_s - head.lost_s
        if head is None or "fatal" in pump.said or gone_s < patience.after_head_s:
            return None
        seen.head_ended = head.host
        self._view.note(
            f"memprof: no connection with the head {head.host} for {patience.after_head_s:g} s: "
            "it has ended; SIGINT sent to the engine"
        )
        self._engine.send_signal(signal.SIGINT)
        return "the engine did not end", patience.after_interrupt_s, None

    def _fold_events(self) -> None:
        for file, event in self._tail.poll():
            self._progress.fold(file, event)
            self._last_event_s = time.monotonic()
            process = self._progress.by_file[file]
            here = process.host in (None, self._info.host)  # others have launchers of their own
            if event.get("kind") == "process" and process.pid is not None and here:
                self._watch.track(process.pid, process.wall)

    def _handle_signals(self) -> None:
        seen, progress, pump = self._seen, self._progress, self._pump
        while self._signals:
            number = self._signals.pop(0)
            if self._cause is not None:
                self._steps = [each for each in self._steps if not isinstance(each[1], str)]
                self._take_step()
                continue
            seen.interrupted_by, seen.interrupted_t_ns = number, time.monotonic_ns()
            failed = progress.first_error is not None or "fatal" in pump.said
            seen.failed_before = failed or bool(progress.lost)
            forwarded = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
            self._engine.send_signal(forwarded)
            self._view.note(
                f"memprof: {signal_name(forwarded)} sent to the engine; again to hasten"
            )
            patience = self._job.patience
            self._end(
                "the engine did not end", patience.after_interrupt_s + self._job.shutdown_timeout_s
            )
            if forwarded == signal.SIGTERM and not seen.ready:
                self._steps = [(patience.in_start_s, step) for _, step in self._steps]

    def _note_losses(self) -> None:
        """Take over what died; what is after the user's signal belongs to it."""
        seen = self._seen
        for death in self._watch.refresh():
            if death.pid == self._engine.pid and death.code is None:
                # it was collected here, by ``poll``, before the watch could read how it died
                death = replace(death, code=self._engine.poll())
            own = death.pid == self._engine.pid and not death.killed
            if not own and (self._cause is None or seen.interrupted_by is None):
                seen.deaths.append(death)
        if seen.interrupted_by is None:
            seen.lost = list(self._progress.lost)

    def _look_at_head(self) -> None:
        """Look whether a host without an API server is connected with its head."""
        said, info = self._pump.said.get("head"), self._info
        if not said or self._cause is not None or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_S
        if self._head is None:
            address = said[-1][1]
            self._head = HeadNode(address)
            part = info.part or DeploymentPart(address, "arguments")
            info.part = replace(part, headless=True)  # the log knows better than the arguments
        self._head.look(self._watch.living())

    def _head_has_ended(self, head: HeadNode) -> bool:
        """Return whether an engine ended by itself because its head had ended."""
        seen, progress, lost_t_ns = self._seen, self._progress, self._pump.lost_peer_t_ns
        asked = seen.head_ended or seen.interrupted_by is not None or seen.timed_out_s is not None
        failed = progress.first_error is not None or progress.oom_message is not None
        if asked or failed or lost_t_ns is None:
            return False
        before = [death for death in seen.deaths if death.t_ns < lost_t_ns]
        if find_suspects(seen, before):
            return False  # it was a process of this host
        return head.has_ended(self._job.patience.after_peer_s)

    def _note_readiness(self) -> bool:
        """Return True once: when the engine said that it is ready, by an event or in its log."""
        t_ns, part = self._progress.ready_at(self._info), self._info.part
        line, wanted = "ready", 1
        if part is not None and part.headless:
            line, wanted = "core_ready", part.dp_local or 1
        by_log = len(self._pump.said.get(line, ())) >= wanted
        if self._seen.ready or (t_ns is None and not by_log):
            return False
        self._seen.ready = True
        self._seen.ready_t_ns = time.monotonic_ns() if t_ns is None else t_ns
        return True

    def _write_info(self) -> None:
        """Write ``run.json``; a full disk changes nothing about the run."""
        try:
            write_run_info(self._job.run_dir, self._info)
        except OSError as error:
            self._view.note(
                f"memprof: cannot write {RUN_FILE} in {self._job.run_dir}: {error.strerror}"
            )

    def _end(self, cause: str, patience_s: float, note_after_s: float | None = None) -> None:
        """Begin to end the engine: first it has time to end by itself.

        Args:
            cause: for the user.
            patience_s: that time.
            note_after_s: the user is told the cause so much later, unless it has ended by then.
        """
        self._cause, self._since_s = cause, time.monotonic()
        later_s = self._job.patience.after_term_s
        self._steps = [(patience_s, signal.SIGTERM), (later_s, signal.SIGKILL)]
        if note_after_s is not None:
            note = f"memprof: {cause}; the engine has {patience_s:g} s to end"
            rest_s = max(0.0, patience_s - note_after_s)
            self._steps[:1] = [(note_after_s, note), (rest_s, signal.SIGTERM)]

    def _take_step(self, why: str = "") -> None:
        """Take the next step of the ending, if one is left."""
        if not self._steps:
            return
        (_, step), *self._steps = self._steps
        self._since_s = time.monotonic()
        if isinstance(step, str):
            self._view.note(step)
            return
        self._watch.walk()
        self._seen.forced = True
        self._seen.forced_main |= self._engine.poll() is None
        self._watch.signal(self._watch.living(), step)
        self._view.note(f"memprof: {why}sent {signal_name(step)} to all its processes")

    def _close(self) -> None:
        """End every process of the engine that is left, none after an orderly end; then the
        display."""
        limit_s = time.monotonic() + self._job.patience.after_kill_s
        while time.monotonic() < limit_s:
            self._watch.walk()
            if not (self._watch.living() or self._engine.poll() is None) and self._shared.close():
                break
            self._watch.signal(self._watch.living(), signal.SIGKILL)
            time.sleep(0.02)
        if self._seen.interrupted_by is not None:
            self._engine.stop_warm()
        self._fold_events()
        self._watch.close()
        self._view.update(self._progress)
        self._view.close()

    def _adopt_facts(self) -> None:
        """Take over what only the engine's processes know: versions, the device."""
        info, progress = self._info, self._progress
        info.versions = dict(sorted({**info.versions, **progress.versions}.items()))
        versions = {name.replace("-", "_"): version for name, version in info.versions.items()}
        for package, engine in self._job.engine.known_as:
            if info.engine is None and package in versions:
                info.engine, info.engine_version = engine, versions[package]
        said, step = progress.ranks, progress.full_step
        info.ranks = None if said is None else from_json(PlannedRanks, said)
        info.full_step = None if step is None else from_json(FullStep, step)
        if progress.soc and not info.simulated:
            info.device = progress.soc
        info.checkpoint = info.checkpoint or find_checkpoint(info.model)

    def _finish(self, verdict: RunVerdict) -> None:
        self._adopt_facts()
        info = self._info
        assert info.start_t_ns is not None
        info.ended = utc_text()
        info.seconds = round((time.monotonic_ns() - info.start_t_ns) / 1e9, 3)
        info.status, info.exit_code = verdict.status, verdict.exit_code
        info.exit_reason = verdict.reason
        if not self._progress.by_file:
            info.notes.append("no engine process wrote events: it ended before the hooks loaded")
        info.notes += [
            f"torch_npu wrote {name} at an OOM: a copy is in {oom_files.OOM_DIR}/"
            for name in oom_files.keep(self._job.env, self._started_s, self._job.run_dir)
        ]
        self._write_info()


def utc_text(seconds: float | None = None) -> str:
    """Return a time since the epoch, or now, as ISO 8601."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _host_oom_kills() -> int:
    """Return how many processes the kernel killed for lack of host memory since boot. (vmstat)"""
    return numbers(Path("/proc/vmstat")).get("oom_kill", 0)
