"""The engine as a child: its command line, its environment, and the process itself.

The builders are pure functions. ``EngineProcess`` starts the engine in a session of its own, so
that a Ctrl-C in memprof's terminal reaches it once, through memprof, and copies what it prints to
``engine.log``, where secrets are replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_memprof.engines import VLLM, engine_row
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError
from vllm_memprof.launch import warm
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.request import LaunchRequest
from vllm_memprof.record.schema import (
    ENV_EMPTY_CACHE_AT,
    ENV_RUN_DIR,
    ENV_SAMPLE,
    ENV_STOP_AFTER,
    ENV_TRACE_ALLOCATIONS,
    TRAVELS,
)
from vllm_memprof.units import known_items

PLUGIN_NAME = "memprof"
#: vLLM >= 0.18 copies the variables that this one names to Ray workers. (vllm/ray/ray_env.py) A
#: release before gets the names from the plug-in. (capture/ray_nodes.py)
ENV_RAY_NAMES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

#: Fields of a request that a driver gets as they are. (``engines.driver.Options``)
_OF_A_DRIVER = (
    *("prompts", "at_once", "max_tokens", "repeat", "concurrency", "on_error"),
    *("sleep_cycles", "until"),
)
_PR_SET_PDEATHSIG = 1
#: Seconds that an engine has to end by itself after its launcher was killed. vLLM's API server
#: waits for the clients of requests that nobody answers any more.
_ENDS_WITHIN_S = 30
#: Ends the engine's process group after this process was killed: waits for a line, which says that
#: the engine has ended, or for the end of the pipe.
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
    safe = at_least(version, (3, 11)) and (row.script or request.mode != "serve")
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
    known = known_items(options)
    return [*start, "-m", row.driver, request.mode, json.dumps(known), *engine_args]


def at_least(version: str | None, least: tuple[int, int]) -> bool:
    """Return whether a version, as it is printed, is known and not older than another one."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) >= least


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


class EngineProcess:
    """The engine's main process, in a session and process group of its own.

    Args:
        command: from ``build_command``.
        env: from ``build_env``.
        pump: of its output; started here.
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
        pump: LogPump,
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        try:
            forked = None
            if interrupted is not None:
                forked = warm.start(command, env, pump.fd, interrupted)
            self._process = forked or subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=pump.fd,
                stderr=pump.fd,
                start_new_session=True,
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            pump.start()
        if forked is None:  # a warm process ends its forks itself
            guard = ["/bin/sh", "-c", _GUARD, "memprof-guard", str(self.pid), str(_ENDS_WITHIN_S)]
            with contextlib.suppress(OSError):  # without a shell SIGTERM is all that it gets
                self._guard = subprocess.Popen(
                    guard,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

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

    def tell(self, at_end: Callable[[], None]) -> None:
        """Where this is a fork of a warm process: call it at the end, in a thread."""
        if isinstance(self._process, warm.WarmChild):
            self._process.tell(at_end)

    def stop_warm(self) -> None:
        """Where this is a fork of a warm process: ask that one to end as well."""
        if isinstance(self._process, warm.WarmChild):
            warm.stop(self._process.name)

    def send_signal(self, number: int) -> None:
        """Signal the main process alone: it knows how to end its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def end_with_parent() -> Callable[[], None]:
    """Return what a child calls before it starts, to get SIGTERM when its parent is killed.

    The kernel goes by the parent's thread: the one that starts the child has to live as long as the
    child.

    Returns:
        For ``preexec_fn``.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_death_signal
