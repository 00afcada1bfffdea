"""The engine as a child: its command line, its environment, and the process itself.

The builders are pure functions. ``EngineProcess`` starts the engine in a session of its own, so
that a Ctrl-C in memprof's terminal reaches it once, through memprof, and copies what it prints to
``engine.log``, where secrets are replaced.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_memprof.engines import VLLM, engine_row
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError
from vllm_memprof.launch import warm
from vllm_memprof.launch.engine_log import LogFilter
from vllm_memprof.launch.folder import FILE_MODE
from vllm_memprof.launch.request import LaunchRequest
from vllm_memprof.record.schema import (
    ENV_EMPTY_CACHE_AT,
    ENV_RUN_DIR,
    ENV_SAMPLE,
    ENV_STOP_AFTER,
    ENV_TRACE_ALLOCATIONS,
    TRAVELS,
)

PLUGIN_NAME = "memprof"
ENV_PLUGINS = VLLM.plugins
#: vLLM >= 0.18 copies the variables that this one names to Ray workers. (vllm/ray/ray_env.py) A
#: release before gets the names from the plug-in. (capture/ray_nodes.py)
ENV_RAY_NAMES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

_TAIL_BYTES = 256 * 1024
_ERROR_LINES = 60
_READ_BYTES = 1 << 16
#: A line of the engine's log that may tell why it ended.
#: pydantic names the error on one line and says what is wrong on the next: "  Value error, …"; or
#: the argument on the next, and what is wrong on the one after it: "  Input should be …".
_ERROR_LINE = re.compile(
    rb"\b\w*(?:Error|Exception)\b: |out of memory|^[\w.-]+(?: \w+)?: error: |\bValue error, "
    rb"|^(?:\([^)]*\))?\s*Input should be ",
    re.IGNORECASE,
)
#: What a collective says when a rank is gone. (gloo/transport/tcp/pair.cc, of torch 2.5 and 2.10)
LOST_PEER = (b"Connection reset by peer", b"Connection closed by peer", b"Broken pipe")
#: A traceback follows the line that says that the engine failed.
_TRACEBACK_NS = 1_000_000_000
#: vLLM's warning of a low limit of open files, which quotes an error that it may cause.
_ADVICE = b"Found ulimit of"
_OF_AN_ARGUMENT = re.compile(rb"^(?:\([^)]*\))?\s*(?=Input should be )")
_PROCESS = re.compile(rb"^\([^)]*\)\s*")
#: What the simulated device answered without computing, where it decides about memory.
#: (sim/native/error.cpp, note_answer)
ANSWER_LINE = re.compile(
    rb"\[memprof (simulated device\] .* is not computed; answered: .*) \(pid \d+\)"
)
#: Fields of a request that a driver gets as they are. (``engines.driver.Options``)
_OF_A_DRIVER = (
    *("prompts", "at_once", "max_tokens", "repeat", "concurrency", "on_error"),
    *("sleep_cycles", "until"),
)
_PR_SET_PDEATHSIG = 1
#: Seconds that an engine has to end by itself after its launcher was killed. vLLM's API server
#: waits for the clients of requests that nobody answers any more.
_ENDS_WITHIN_S = 30
#: Waits for a line, which says that the engine has ended, or for the end of the pipe: the launcher
#: was killed.
_GUARD = 'read -r ended || { sleep "$2"; kill -s KILL -- "-$1"; }'


def build_command(
    python: Path,
    request: LaunchRequest,
    model_path: str,
    model_args: list[str],
    devices: int | None = None,
    version: str | None = None,
) -> list[str]:
    """Return the engine's command line.

    Args:
        python: interpreter of the engine.
        request: what the user asked for.
        model_path: what the engine gets as the model.
        model_args: what a model preset adds; stands before the user's arguments, so that the user's
            win.
        devices: devices of the simulated machine, for a plan; None: it runs on hardware, or is
            none.
        version: of the interpreter; None: not known.
    """
    engine_args = [*model_args, *request.engine_args]
    row = engine_row(request.engine)
    # a module of the user's folder must not stand before one of the engine's
    found = re.match(r"(\d+)\.(\d+)", version or "")
    knows = found is not None and (int(found[1]), int(found[2])) >= (3, 11)  # the option -P
    safe = knows and (row.script or request.mode != "serve")
    start = [str(python), *(["-P"] if safe else [])]
    if request.mode == "serve":
        return [*start, *row.server, model_path, *engine_args]
    paths = {"prompts_file": request.prompts_file, "images_dir": request.images_dir}
    options = {
        "model": model_path,
        **{name: getattr(request, name) for name in _OF_A_DRIVER},
        **{name: None if path is None else str(path.absolute()) for name, path in paths.items()},
    }
    if devices is not None:  # on hardware all ranks run: each waits for the others
        options |= {"devices": devices, "ranks": request.ranks or "auto", "rank": request.rank}
    known = {name: value for name, value in options.items() if value is not None}
    return [*start, "-m", row.driver, request.mode, json.dumps(known), *engine_args]


def build_env(
    base: Mapping[str, str],
    run_dir: Path,
    mode: str,
    extra: Mapping[str, str],
    row: EngineRow = VLLM,
    until: str | None = None,
) -> dict[str, str]:
    """Return the engine's environment: the caller's, what the device and the model need, and what
    switches capture on.

    Args:
        base: the caller's environment.
        run_dir: the run folder, absolute.
        mode: serve, offline or plan.
        extra: additions of the simulated device and of the model preset.
        row: of the engine.
        until: where a plan stops: "kv" or "ready".
    """
    env = dict(base)
    for name in (ENV_STOP_AFTER, ENV_EMPTY_CACHE_AT, ENV_SAMPLE, ENV_TRACE_ALLOCATIONS):
        env.pop(name, None)  # a run decides these itself
    env |= {**extra, ENV_RUN_DIR: str(run_dir)}
    if mode == "plan" and until != "ready":
        env[ENV_STOP_AFTER] = "kv_plan"
    if row.plugins in env:  # an allow-list: without our name the engine would not load us
        env[row.plugins] = _append(env[row.plugins], PLUGIN_NAME)
    for name in TRAVELS:
        env[ENV_RAY_NAMES] = _append(env.get(ENV_RAY_NAMES, ""), name)
    env.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold the engine's lines back otherwise
    return env


def _append(comma_list: str, name: str) -> str:
    names = [entry for entry in comma_list.split(",") if entry.strip()]
    known = name in (entry.strip() for entry in names)
    return ",".join(names if known else [*names, name])


class LogPump:
    """Copies the engine's output to ``engine.log``, secrets replaced, and to an echo as it is;
    keeps the end and error lines, secrets replaced.

    Args:
        fd: read end of the pipe; owned from here on.
        log_path: ``engine.log``; made with mode 0600, appended to.
        echo: gets every chunk, e.g. to show it on the terminal; called from the pump's thread.
        keep_secrets: ``engine.log`` gets every byte as it is.
        row: of the engine.
    """

    def __init__(
        self,
        fd: int,
        log_path: Path,
        echo: Callable[[bytes], None] | None,
        keep_secrets: bool = False,
        row: EngineRow = VLLM,
    ) -> None:
        self._fd = fd
        self._row = row
        self._keep_secrets = keep_secrets
        self._filter = LogFilter()
        self._log_fd = os.open(
            log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE
        )
        self._echo = echo
        self._tail = bytearray()
        self._partial = b""
        self._line_before = b""
        self._error_lines: collections.deque[str] = collections.deque(maxlen=_ERROR_LINES)
        self.last_line = ""
        self.application_ready = False
        self.head: str | None = None  # HOST:PORT; this host has no API server
        self.cores_ready = 0  # engine cores that said so
        self.dead_core_t_ns: int | None = None  # an engine core said that it fails, of any host
        #: When a rank ended its connection with one of this host, which had not failed before.
        self.lost_peer_t_ns: int | None = None
        self.fatal_line: str | None = None
        self._fatal_t_ns = 0
        self.lost_core = False  # the API server says that its engine core ended
        self.last_output_s = time.monotonic()
        self.log_error: str | None = None  # why engine.log is incomplete
        self.device_answers: list[str] = []  # of the simulated device, each of them once
        self._thread = threading.Thread(target=self._run, name="memprof-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the output: every process that holds the pipe has ended."""
        self._thread.join(timeout_s)

    def tail(self, lines: int) -> list[str]:
        return bytes(self._tail).decode(errors="replace").splitlines()[-lines:]

    def error_lines(self) -> list[str]:
        """Lines that look like an error's message, oldest first, at most the last 60."""
        return list(self._error_lines)

    def _run(self) -> None:
        while True:
            try:
                chunk = os.read(self._fd, _READ_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                break
            self.last_output_s = time.monotonic()
            self._take(chunk, self._filter.feed(chunk))
            if self._echo is not None:
                with contextlib.suppress(Exception):  # a closed terminal must not stop the log
                    self._echo(chunk)
        self._take(b"", self._filter.close())
        os.close(self._fd)
        os.close(self._log_fd)

    def _take(self, raw: bytes, redacted: bytes) -> None:
        """Write to engine.log; a full disk ends the log, never the engine: the pipe is read on."""
        view = memoryview(raw if self._keep_secrets else redacted)
        try:
            while view and self.log_error is None:
                view = view[os.write(self._log_fd, view) :]
        except OSError as error:
            self.log_error = f"engine.log is incomplete: {error.strerror}"
        self._scan(redacted)

    def _scan(self, chunk: bytes) -> None:
        self._tail += chunk
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._partial = self._partial[-4096:]
        row = self._row
        for line in lines:
            now_ns = time.monotonic_ns()
            said = {name: found for name, form in row.lines.items() if (found := form.search(line))}
            self.application_ready |= "ready" in said
            if "head" in said:
                self.head = said["head"][1].decode(errors="replace")
            self.cores_ready += "core_ready" in said
            if self.fatal_line is None and "fatal" in said:
                self.fatal_line = line.decode(errors="replace").strip()
                self._fatal_t_ns = now_ns
            if self.dead_core_t_ns is None and "dead_core" in said:
                self.dead_core_t_ns = now_ns
            if (
                self.lost_peer_t_ns is None
                and any(words in line for words in LOST_PEER)
                and (self.fatal_line is None or now_ns - self._fatal_t_ns < _TRACEBACK_NS)
            ):
                self.lost_peer_t_ns = now_ns
            self.lost_core |= "lost" in said
            if line.strip():
                self.last_line = line.decode(errors="replace").rstrip()
            if _ERROR_LINE.search(line) and _ADVICE not in line:
                if _OF_AN_ARGUMENT.search(line):
                    argument = _PROCESS.sub(b"", self._line_before)
                    line = argument + b": " + _OF_AN_ARGUMENT.sub(b"", line)
                self._error_lines.append(line.decode(errors="replace").strip()[:500])
            self._line_before = line.strip()
            if found := ANSWER_LINE.search(line):
                answer = found.group(1).decode(errors="replace").replace("]", ":", 1)
                if answer not in self.device_answers:
                    self.device_answers.append(answer)


class EngineProcess:
    """The engine's main process, in a session and process group of its own.

    Args:
        command: from ``build_command``.
        env: from ``build_env``.
        log_path: ``engine.log``.
        echo, keep_secrets, row: see ``LogPump``.
        interrupted: where it may be a fork of a warm process: asked while waiting for that.

    Raises:
        LaunchError: the program cannot be executed.
    """

    _process: subprocess.Popen[bytes] | warm.WarmChild
    _guard: subprocess.Popen[bytes] | None = None

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        log_path: Path,
        echo: Callable[[bytes], None] | None = None,
        keep_secrets: bool = False,
        row: EngineRow = VLLM,
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        read_fd, write_fd = os.pipe()
        self.pump = LogPump(read_fd, log_path, echo, keep_secrets, row)
        try:
            forked = None
            if interrupted is not None:
                forked = warm.start(command, env, write_fd, interrupted)
            self._process = forked or subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(write_fd)
        if forked is None:  # a warm process ends its forks itself
            self._guard = _guard_group(self._process.pid)
        self.pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code as ``subprocess`` counts it (negative: the signal), None while it runs."""
        code = self._process.poll()
        if code is not None and self._guard is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._guard.communicate(b"ended\n", timeout=5)
            self._guard = None
        return code

    def stop_warm(self) -> None:
        """Where this is a fork of a warm process: ask that one to end as well."""
        if isinstance(self._process, warm.WarmChild):
            warm.stop(self._process.name)

    def send_signal(self, number: int) -> None:
        """Signal the main process alone: it knows how to end its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Signal every process of the group, unless its main process has been collected."""
        if self.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _guard_group(group: int) -> subprocess.Popen[bytes] | None:
    """Start a shell that ends the engine's process group after this process was killed.

    Returns:
        None where there is no shell: then SIGTERM is all that the engine gets.
    """
    command = ["/bin/sh", "-c", _GUARD, "memprof-guard", str(group), str(_ENDS_WITHIN_S)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


def end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls before it starts, to get SIGTERM when its parent is killed.

    The kernel goes by the parent's thread: the one that starts the child has to live as long as the
    child.

    Returns:
        For ``preexec_fn``; None where the system has no such signal.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_death_signal
