"""The verdict on a run: what was seen enters, status, exit code and one sentence leave. Pure."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass, field

from vllm_memprof.launch.progress import EngineProgress, Lost, ProcessProgress
from vllm_memprof.launch.signals import signal_name
from vllm_memprof.launch.watch import Death
from vllm_memprof.record.failures import is_out_of_memory
from vllm_memprof.units import format_gib, one_line

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

#: A death that may have caused the others, and whose it was.
Suspect = tuple[Death, ProcessProgress]


@dataclass
class EngineEnd:
    """Everything the launcher noticed about an engine that has ended."""

    mode: str
    progress: EngineProgress
    engine_code: int | None = None  # of the main process; negative: the signal; None: not collected
    ready: bool = False
    ready_t_ns: int | None = None
    interrupted_by: int | None = None  # signal that the user sent first
    interrupted_t_ns: int | None = None
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
    stuck: str = "no process reported"  # where each rank was at the deadline


@dataclass(frozen=True)
class RunVerdict:
    status: str  # ok | failed | oom | terminated
    exit_code: int  # of memprof
    reason: str | None = None  # one sentence


def judge(seen: EngineEnd) -> RunVerdict:
    """Return the status, exit code and reason of a run: the first cause, not what followed."""
    code = seen.engine_code
    own_code = EXIT_FAILED if code is None else code if code >= 0 else 128 - code
    if seen.forced_main and seen.interrupted_by is None:
        own_code = EXIT_FAILED  # the signal that the engine died of was memprof's
    each = _where_each(seen)
    at = f": {each}" if each else ""
    killed = "; the engine did not end until memprof ended its processes" if seen.forced else ""
    if seen.interrupted_by is not None and not seen.failed_before:
        name = signal_name(seen.interrupted_by)
        if seen.mode == "serve" and seen.ready:
            return RunVerdict("ok", own_code, f"ended by {name}{killed}")
        reason = f"interrupted by {name}{at}{killed}"
        return RunVerdict("terminated", 128 + seen.interrupted_by, reason)
    if seen.timed_out_s is not None:
        deadline = f"not ready within {seen.timed_out_s:g} s (--startup-timeout)"
        return RunVerdict("failed", EXIT_FAILED, f"{deadline}: {seen.stuck}")
    if seen.head_ended is not None and seen.ready:
        # its main process may have ended well though memprof had to signal it
        reason = f"the head {seen.head_ended} has ended{killed}"
        return RunVerdict("ok", 0 if code == 0 else own_code, reason)
    if seen.head_ended is not None:
        reason = f"the head {seen.head_ended} ended before this host was ready{at}{killed}"
        return RunVerdict("failed", own_code or EXIT_FAILED, reason)
    suspects = find_suspects(seen, seen.deaths)
    line = find_error_line(seen.error_lines) or "died unexpectedly"
    if not suspects and (seen.mode == "serve" if seen.ready else _GENERIC.search(line)):
        # nobody asked it to end, nor does it say why
        suspects = find_suspects(seen, seen.deaths, True, seen.lost_core or not seen.ready)
    for t_ns, what in (
        (seen.other_host_t_ns, "an engine core on another host failed"),
        (seen.lost_peer_t_ns, "a rank on another host closed its connection"),
    ):
        if t_ns is not None and all(death.t_ns > t_ns for death, _ in suspects[:1]):
            reason = f"{what}: the run of that host says why"
            return RunVerdict("failed", own_code or EXIT_FAILED, reason)
    lost = find_lost(seen)
    gone = seen.mode == "serve" and bool(suspects or lost)
    # of a headless host the main process ends with 0 after an engine core's end
    broken = seen.hung or seen.failed_before or gone or (seen.headless and seen.ready)
    if code == 0 and not broken:
        return RunVerdict("ok", 0)
    if lost is None:
        reason, oom = _first_cause(seen, suspects)
    else:
        reason, oom = describe_lost(seen, lost), False
    if seen.hung or seen.interrupted_by is not None:
        by = "memprof" if seen.interrupted_by is None else signal_name(seen.interrupted_by)
        reason, own_code = f"{reason}; the engine hung and was ended by {by}", EXIT_FAILED
    return RunVerdict("oom" if oom else "failed", own_code or EXIT_FAILED, reason)


def find_suspects(
    seen: EngineEnd, deaths: list[Death], orderly_too: bool = False, late_too: bool = False
) -> list[Suspect]:
    """Return the deaths that may have caused the others, the likeliest first: the first disorderly
    ones of engine processes, noticed at once.

    The engine core's death well after its workers began to shut down is none: vLLM kills it when it
    takes too long.

    Args:
        seen: what else is known.
        deaths: as they were noticed.
        orderly_too: deaths in good order count, too.
        late_too: so does that of an engine core which its API server says that it lost.
    """
    suspects, progress = list[Suspect](), seen.progress
    ends = progress.ready_t_ns.get("end", ())  # the engine kills its own processes from here on
    began = progress.shutdown_t_ns
    for death in deaths:
        process = progress.by_pid(death.pid)
        if process is None or process.shutting_down:
            continue
        late = began is not None and death.t_ns - began > _SHUTDOWN_NS
        late = late and not process.is_worker and not late_too
        ended = any(death.t_ns > t_ns for t_ns in ends)
        if not (late or ended) and (orderly_too or not death.looks_orderly):
            suspects.append((death, process))
    at_once = [pair for pair in suspects if pair[0].t_ns - suspects[0][0].t_ns < _AT_ONCE_NS]
    # Of several noticed at once: one whose death is known to be violent, else the one that fell
    # silent first.
    return sorted(at_once, key=lambda pair: (pair[0].code is None, pair[1].last_t_ns))


def describe_death(seen: EngineEnd, suspect: Suspect) -> str:
    """``worker TP1 (pid 123) was killed by SIGKILL in weight_load``."""
    death, process = suspect
    who = f"worker {process.name}" if process.is_worker and process.label else process.name
    return f"{who} (pid {death.pid}) {death.describe()} {where(seen, process, death.t_ns)}"


def find_lost(seen: EngineEnd) -> Lost | None:
    """Return the loss on a Ray node that caused the end: a node's before that of one worker, whose
    own error says more."""
    nodes = [lost for lost in seen.lost if lost.rank is None]
    said = seen.progress.first_error or seen.progress.oom_message
    own = [] if said else seen.lost
    return next(iter(nodes or own), None)


def describe_lost(seen: EngineEnd, lost: Lost) -> str:
    """``worker TP1 on node-b (pid 123) was lost with its node while serving``."""
    node = lost.rank is None
    parts = [
        f"worker {process.name} on {process.host} (pid {process.pid}) was lost"
        f"{' with its node' if node else ''} {where(seen, process)}"
        for process in seen.progress.workers
        if process.node == lost.node and lost.rank in (None, process.rank)
    ]
    who = "its worker" if node else f"the worker of rank {lost.rank}"
    unknown = f"the Ray node {lost.node[:12]} was lost before {who} reported"
    return ("; ".join(parts) or unknown) + ("" if node else f": {one_line(lost.reason, _MOST)}")


def where(seen: EngineEnd, process: ProcessProgress, t_ns: int | None = None) -> str:
    """Return the phase under way, else ``while serving``, else the phase that had finished.

    Args:
        seen: what else is known.
        process: the process.
        t_ns: a moment, CLOCK_MONOTONIC, at which the engine may not have been ready yet.
    """
    early = t_ns is not None and seen.ready_t_ns is not None and seen.ready_t_ns > t_ns
    if seen.ready and not early and not process.open:
        doing = {"serve": "while serving", "offline": "while generating"}
        return doing.get(seen.mode, "after the plan")
    t_ns = t_ns or sys.maxsize
    places = {each.where(t_ns) or "" for each in seen.progress.workers if not process.is_worker}
    if any(places):
        return f"with workers {' and '.join(sorted(filter(None, places)))}"
    return process.where(t_ns) or "before its first phase"


def describe_stuck(progress: EngineProgress, now_ns: int) -> str:
    """Return the place of each rank and its seconds there: ``TP0 in weight_load for 31 s, TP1 after
    hccl_init for 31 s``."""
    parts = []
    for process in progress.workers or [p for p in progress.processes if p.matters]:
        since = process.open[-1].start_t_ns if process.open else process.last_t_ns
        place = f"{process.name} {process.where() or 'before its first phase'}"
        if since is not None and (None in (progress.host, process.host)
                                  or progress.host == process.host):  # fmt: skip
            place += f" for {max(0, now_ns - since) / 1e9:.0f} s"  # else it is of another clock
        parts.append(place)
    return ", ".join(parts)


def _where_each(seen: EngineEnd) -> str:
    at = seen.interrupted_t_ns
    return ", ".join(f"{each.name} {where(seen, each, at)}" for each in seen.progress.workers)


def _first_cause(seen: EngineEnd, suspects: list[Suspect]) -> tuple[str, bool]:
    """Return the reason, and True if it is device memory that ran out."""
    error, out = seen.progress.first_error, seen.progress.oom_message
    line = find_error_line(seen.error_lines)
    oom = out is not None or any(map(_says_oom, seen.error_lines))
    if suspects and (error is None or suspects[0][0].t_ns <= error[0]):
        culprit = suspects[0][0]
        reason = describe_death(seen, suspects[0])
        for other in suspects[1:]:
            # nor is it known then which of several was first
            if culprit.code is None and other[0].code is None:
                reason += f"; {describe_death(seen, other)} at the same time"
        if read := seen.progress.seen.get(culprit.pid):
            reason += f", with {format_gib(read.bytes)} GiB of host memory"
        # of one whose death was seen it is known that others ended after it
        soon_ns = _AT_ONCE_NS if culprit.code is None else 0
        after = [
            f"{process.name} (pid {death.pid})"
            for death in seen.deaths
            if death.t_ns - culprit.t_ns > soon_ns and (process := seen.progress.by_pid(death.pid))
        ]
        if after:
            reason += f"; after it ended {', '.join(after)}"
        if culprit.code == -signal.SIGKILL and seen.host_oom_kills:
            reason += "; the kernel killed a process for lack of host memory meanwhile (see dmesg)"
        if not culprit.killed and line and not _GENERIC.search(line):
            reason += f": {one_line(line, _MOST)}"
        return reason, oom and not culprit.killed
    if error is not None:
        _, name, phase, message = error
        oom = _says_oom(message) or out is not None
        what = "ran out of device memory" if oom else "failed"
        return f"{name} {what} in {phase}: {one_line(message, _MOST)}", oom
    what = f"exited with status {seen.engine_code}"
    if seen.hung or seen.failed_before:
        what = "failed"
    elif seen.engine_code is not None and seen.engine_code < 0:
        what = f"was killed by {signal_name(-seen.engine_code)}"
    each = _where_each(seen)
    at = f" ({each})" if each else "" if seen.ready else " before any worker reported"
    tail = out or line
    return f"the engine {what}{at}" + (f": {one_line(tail, _MOST)}" if tail else ""), oom


def _says_oom(text: str) -> bool:
    return "OutOfMemoryError" in text or is_out_of_memory("", text)


def find_error_line(lines: list[str]) -> str | None:
    """Return the last line that names an error of its own, without the logger's prefix."""
    telling = [line for line in lines if not _GENERIC.search(line)]
    chosen = (telling or lines)[-1:]
    return _LOG_PREFIX.sub("", chosen[0]) if chosen else None
