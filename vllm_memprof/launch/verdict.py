"""The verdict on a run: what was seen enters, status, exit code and one sentence leave. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from vllm_memprof.launch.progress import EngineProgress, Lost, ProcessProgress
from vllm_memprof.launch.signals import signal_name
from vllm_memprof.launch.watch import Death
from vllm_memprof.record.failures import is_out_of_memory
from vllm_memprof.units import one_line

#: Exit status when the engine itself has none to give: it was ended by memprof, or said 0 after
#: losing a worker.
EXIT_FAILED = 1

#: Deaths noticed within this time of each other have no order.
_AT_ONCE_NS = 300_000_000
#: A process that dies this long after a worker began to shut down did not cause the shutdown;
#: sooner, it may have: workers notice the death of their parent at once, and the launcher may be
#: late in noticing it.
_SHUTDOWN_NS = 2_000_000_000

#: Characters of an error's text in a reason.
_MOST = 400
#: Messages that only pass on that something else failed.
_GENERIC = re.compile(
    r"Engine core initialization failed|Engine core proc|EngineDeadError|EngineCore encountered|"
    r"died unexpectedly|Executor failed|cancelled|CancelledError|BrokenPipe|"
    r"Connection(Reset|Refused)"
)
_LOG_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m|\([^)]*\)|[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d|\[[^\]]*\]:?|\s)+"
)


@dataclass
class EngineEnd:
    """Everything the launcher noticed about an engine that has ended."""

    mode: str
    engine_code: int | None  # of the main process; negative: the signal; None: not collected
    ready: bool = False
    ready_t_ns: int | None = None
    interrupted_by: int | None = None  # signal that the user sent first
    failed_before: bool = False  # the engine had failed when the user ended it
    hung: bool = False  # it failed, and did not end by itself
    lost_core: bool = False  # the API server says that its engine core ended unasked
    timed_out_s: float | None = None  # the start-up deadline, when it passed
    deaths: list[Death] = field(default_factory=list)  # before any ending was asked for
    lost: list[Lost] = field(default_factory=list)  # the same of workers on Ray nodes
    forced: bool = False  # memprof had to signal the processes itself
    forced_main: bool = False  # the main process among them
    error_lines: list[str] = field(default_factory=list)  # of engine.log, oldest first
    host_oom_kills: int = 0  # processes that the kernel killed for host memory during the run
    headless: bool = False  # no API server here
    head_ended: str | None = None  # head of the deployment; its end was the cause of this one's
    lost_peer_t_ns: int | None = None  # when a rank of another host closed its connection
    other_host_t_ns: int | None = None  # when an engine core of another host said that it fails
    stuck: str | None = None  # where each rank was at the deadline


@dataclass(frozen=True)
class RunVerdict:
    status: str  # ok | failed | oom
    exit_code: int  # of memprof
    reason: str | None = None  # one sentence


def judge(seen: EngineEnd, progress: EngineProgress) -> RunVerdict:
    """Return the status, exit code and reason of a run: the first cause, not what followed."""
    code = seen.engine_code
    own_code = EXIT_FAILED if code is None else code if code >= 0 else 128 - code
    if seen.forced_main and seen.interrupted_by is None:
        own_code = EXIT_FAILED  # the signal that the engine died of was memprof's
    if seen.interrupted_by is not None and not seen.failed_before:
        return _judge_interrupted(seen, progress, own_code)
    if seen.timed_out_s is not None:
        deadline = f"not ready within {seen.timed_out_s:g} s (--startup-timeout)"
        return RunVerdict(
            "failed", EXIT_FAILED, f"{deadline}: {seen.stuck or 'no process reported'}"
        )
    if seen.head_ended is not None:
        return _judge_without_head(seen, progress, own_code)
    culprit = find_culprit(seen.deaths, progress)
    if culprit is None and seen.mode == "serve" and seen.ready:  # nobody asked this server to end
        culprit = find_culprit(seen.deaths, progress, orderly_too=True, late_too=seen.lost_core)
    for t_ns, what in (
        (seen.other_host_t_ns, "an engine core on another host failed"),
        (seen.lost_peer_t_ns, "a rank on another host closed its connection"),
    ):
        if t_ns is not None and (culprit is None or culprit.t_ns > t_ns):
            reason = f"{what}: the run of that host says why"
            return RunVerdict("failed", own_code or EXIT_FAILED, reason)
    lost = find_lost(seen, progress)
    gone = seen.mode == "serve" and not (culprit is None and lost is None)
    broken = seen.hung or seen.failed_before or gone
    # its main process ends with 0 after an engine core's end
    broken |= seen.headless and seen.ready
    if seen.engine_code == 0 and not broken:
        return RunVerdict("ok", 0)
    if lost is None:
        reason, oom = _first_cause(seen, progress, culprit)
    else:
        reason, oom = describe_lost(lost, progress, seen.ready, seen.mode), False
    status = "oom" if oom else "failed"
    if seen.hung or seen.interrupted_by is not None:
        by = "memprof" if seen.interrupted_by is None else signal_name(seen.interrupted_by)
        return RunVerdict(status, EXIT_FAILED, f"{reason}; the engine hung and was ended by {by}")
    return RunVerdict(status, own_code or EXIT_FAILED, reason)


def find_culprit(
    deaths: list[Death],
    progress: EngineProgress,
    orderly_too: bool = False,
    late_too: bool = False,
) -> Death | None:
    """Return the death that caused the others: the first disorderly one of an engine process.

    Args:
        deaths: as they were noticed.
        progress: of the processes.
        orderly_too: deaths in good order count, too.
        late_too: so does that of an engine core long after its workers began to shut down.
    """
    return next(iter(_suspects(deaths, progress, orderly_too, late_too)), None)


def _suspects(
    deaths: list[Death],
    progress: EngineProgress,
    orderly_too: bool = False,
    late_too: bool = False,
) -> list[Death]:
    """Return the disorderly deaths of engine processes noticed at once, the likeliest cause first.

    The engine core's death well after its workers began to shut down is none: vLLM kills it when it
    takes too long; unless the API server says that it lost its core (``late_too``).
    """
    suspects: list[tuple[Death, ProcessProgress]] = []
    ends_t_ns = progress.ready_t_ns.get("end")  # the engine kills its own processes from here on
    for death in deaths:
        if ends_t_ns is not None and death.t_ns > ends_t_ns:
            continue
        process = progress.by_pid(death.pid)
        if process is None or not process.matters or process.shutting_down:
            continue
        began = progress.shutdown_t_ns
        late = began is not None and death.t_ns - began > _SHUTDOWN_NS
        if late and not process.is_worker and not late_too:
            continue
        if orderly_too or not death.looks_orderly:
            suspects.append((death, process))
    at_once = [pair for pair in suspects if pair[0].t_ns - suspects[0][0].t_ns < _AT_ONCE_NS]
    # Of several noticed at once: one whose death is known to be violent, else the one that fell
    # silent first.
    at_once.sort(key=lambda pair: (not pair[0].known, pair[1].last_t_ns or 0))
    return [death for death, _ in at_once]


def describe_death(death: Death, progress: EngineProgress, ready: bool, mode: str) -> str:
    """``worker TP1 (pid 123) was killed by SIGKILL in weight_load``."""
    process = progress.by_pid(death.pid)
    if process is None:
        return f"process {death.pid} {death.describe()}"
    who = f"worker {process.name}" if process.is_worker and process.label else process.name
    return f"{who} (pid {death.pid}) {death.describe()} {where(process, ready, mode)}"


def find_lost(seen: EngineEnd, progress: EngineProgress) -> Lost | None:
    """Return the loss on a Ray node that caused the end: a node's before that of one worker, whose
    own error says more."""
    nodes = [lost for lost in seen.lost if lost.rank is None]
    own = [] if progress.first_error or progress.oom_message else seen.lost
    return next(iter(nodes or own), None)


def describe_lost(lost: Lost, progress: EngineProgress, ready: bool, mode: str) -> str:
    """``worker TP1 on node-b (pid 123) was lost with its node while serving``."""
    workers = [
        process
        for process in progress.workers
        if process.node == lost.node and lost.rank in (None, process.rank)
    ]
    how = "was lost with its node" if lost.rank is None else "was lost"
    parts = [
        f"worker {process.name} on {process.host} (pid {process.pid}) {how} "
        f"{where(process, ready, mode)}"
        for process in workers
    ]
    if not parts:
        who = "its worker" if lost.rank is None else f"the worker of rank {lost.rank}"
        parts = [f"the Ray node {lost.node[:12]} was lost before {who} reported"]
    why = "" if lost.rank is None else f": {one_line(lost.reason, _MOST)}"
    return "; ".join(parts) + why


def where(process: ProcessProgress, ready: bool, mode: str) -> str:
    """Return the phase under way, else ``while serving``, else the phase that had finished."""
    if process.open:
        return process.where() or ""
    if ready:
        doing = {"serve": "while serving", "offline": "while generating"}
        return doing.get(mode, "after the plan")
    return process.where() or "before its first phase"


def describe_stuck(progress: EngineProgress, now_ns: int) -> str:
    """Return the place of each rank and its seconds there: ``TP0 in weight_load for 31 s, TP1 after
    hccl_init for 31 s``."""
    parts = []
    for process in progress.workers or [p for p in progress.processes if p.matters]:
        since = process.open[-1].start_t_ns if process.open else process.last_t_ns
        if None not in (progress.host, process.host) and progress.host != process.host:
            since = None  # of another clock
        duration = "" if since is None else f" for {max(0, now_ns - since) / 1e9:.0f} s"
        parts.append(f"{process.name} {process.where() or 'before its first phase'}{duration}")
    return ", ".join(parts)


def _where_each(seen: EngineEnd, progress: EngineProgress) -> str:
    return ", ".join(
        f"{process.name} {where(process, seen.ready, seen.mode)}" for process in progress.workers
    )


def _judge_interrupted(seen: EngineEnd, progress: EngineProgress, own_code: int) -> RunVerdict:
    assert seen.interrupted_by is not None
    name = signal_name(seen.interrupted_by)
    killed = ", and did not end until memprof ended its processes" if seen.forced else ""
    if seen.mode == "serve" and seen.ready:
        return RunVerdict("ok", own_code, f"ended by {name}{killed}")
    at = _where_each(seen, progress)
    reason = f"interrupted by {name}{': ' + at if at else ''}{killed}"
    return RunVerdict("failed", 128 + seen.interrupted_by, reason)


def _judge_without_head(seen: EngineEnd, progress: EngineProgress, own_code: int) -> RunVerdict:
    killed = "; the engine did not end until memprof ended its processes" if seen.forced else ""
    if seen.ready:  # its main process may have ended well though memprof had to signal it
        code = 0 if seen.engine_code == 0 else own_code
        return RunVerdict("ok", code, f"the head {seen.head_ended} has ended{killed}")
    at = _where_each(seen, progress)
    reason = f"the head {seen.head_ended} ended before this host was ready"
    return RunVerdict(
        "failed", own_code or EXIT_FAILED, f"{reason}{': ' + at if at else ''}{killed}"
    )


def _first_cause(
    seen: EngineEnd, progress: EngineProgress, culprit: Death | None
) -> tuple[str, bool]:
    """Return the reason, and True if it is device memory that ran out."""
    error = progress.first_error
    line = find_error_line(seen.error_lines)
    oom = progress.oom_message is not None or any(map(_says_oom, seen.error_lines))
    if culprit is not None and (error is None or culprit.t_ns <= error[0]):
        ready = seen.ready and (seen.ready_t_ns is None or seen.ready_t_ns <= culprit.t_ns)
        reason = describe_death(culprit, progress, ready, seen.mode)
        if not culprit.known:  # nor then which of several was first
            reason += "".join(
                f"; {describe_death(other, progress, ready, seen.mode)} at the same time"
                for other in _suspects(seen.deaths, progress)
                if other is not culprit and not other.known
            )
        if culprit.signal == signal.SIGKILL and seen.host_oom_kills:
            reason += "; the kernel killed a process for lack of host memory meanwhile (see dmesg)"
        if culprit.signal is None and line and not _GENERIC.search(line):
            reason += f": {one_line(line, _MOST)}"
        return reason, oom and culprit.signal is None
    if error is not None:
        _, name, phase, message = error
        oom = _says_oom(message) or progress.oom_message is not None
        what = "ran out of device memory" if oom else "failed"
        return f"{name} {what} in {phase}: {one_line(message, _MOST)}", oom
    if seen.hung or seen.failed_before:
        what = "the engine failed"
    elif seen.engine_code is not None and seen.engine_code < 0:
        what = f"the engine was killed by {signal_name(-seen.engine_code)}"
    else:
        what = f"the engine exited with status {seen.engine_code}"
    last = _where_each(seen, progress)
    at = f" ({last})" if last else "" if seen.ready else " before any worker reported"
    tail = progress.oom_message or line
    return what + at + (f": {one_line(tail, _MOST)}" if tail else ""), oom


def _says_oom(text: str) -> bool:
    return "OutOfMemoryError" in text or is_out_of_memory("", text)


def find_error_line(lines: list[str]) -> str | None:
    """Return the last line that names an error of its own, without the logger's prefix."""
    telling = [line for line in lines if not _GENERIC.search(line)]
    chosen = (telling or lines)[-1:]
    return _LOG_PREFIX.sub("", chosen[0]) if chosen else None
