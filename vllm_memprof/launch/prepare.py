"""From what the user asked for to what is started: interpreter, model, device, run folder.

Starts nothing yet.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from vllm_memprof.engines import ENGINES, VLLM, engine_row
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch import warm
from vllm_memprof.launch.deployment import find_part
from vllm_memprof.launch.engine import build_command, build_env
from vllm_memprof.launch.folder import create_run_dir
from vllm_memprof.launch.interpreter import find_python, probe_interpreter, require_engine
from vllm_memprof.launch.request import DeviceChoice, LaunchRequest
from vllm_memprof.launch.run import Job
from vllm_memprof.options import Option, read_options
from vllm_memprof.record.schema import (
    ENV_EMPTY_CACHE_AT,
    ENV_RUN_ID,
    ENV_SAMPLE,
    ENV_TRACE_ALLOCATIONS,
    RunInfo,
)
from vllm_memprof.redact import redact_command, select_env

#: Files that exist where a kind of device does.
DEVICE_FILES = {
    "npu": ("/dev/davinci_manager", "/dev/davinci0"),
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"),
}


@dataclass(frozen=True)
class _Target:
    """Interpreter, model and device of an engine that is to be started."""

    python: Path
    model_path: str
    model_args: list[str] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None  # name for the record until the engine reports its own
    profile: str | None = None
    devices: int | None = None  # of the simulated machine
    state: Path | None = None  # accounting of its devices, of this run alone
    notes: tuple[str, ...] = ()  # on what stands in for the build's or the model's own


def prepare_job(request: LaunchRequest, environ: Mapping[str, str] | None = None) -> Job:
    """Look everything up, make the run folder, and return what to start.

    Args:
        request: what the user asked for.
        environ: the caller's environment; default: this process's.

    Raises:
        UsageError, LaunchError, SetupError: with what to try next.
    """
    environ = os.environ if environ is None else environ
    row = engine_row(request.engine)
    if request.device.simulated:
        target = _simulated_target(request, row)
    else:
        require_device(request.device, request.stack)
        target = _Target(find_python(request.python, row), request.model)
    env_extra = dict(target.env)
    if request.empty_cache_at:
        env_extra[ENV_EMPTY_CACHE_AT] = ",".join(request.empty_cache_at)
    if request.sample is not None:
        env_extra[ENV_SAMPLE] = request.sample
    if request.trace_allocations is not None:
        env_extra[ENV_TRACE_ALLOCATIONS] = str(request.trace_allocations)
    facts = probe_interpreter(target.python, {**environ, **env_extra})
    require_engine(facts, row)
    run_dir = create_run_dir(request.run_dir, request.model)
    devices = target.devices if request.mode == "plan" else None
    command = build_command(
        target.python, request, target.model_path, target.model_args, devices, facts.python
    )
    env = build_env(environ, run_dir, request.mode, env_extra, row, request.until)
    own_args = request.engine_args if row is VLLM else []  # of another engine they are not read
    run_id = uuid.uuid4().hex
    info = RunInfo(
        id=run_id,
        mode=request.mode,
        model=request.model,
        command=redact_command(request.typed),
        engine_command=redact_command(command),
        env=select_env(env),
        versions={name: version for name, version in facts.versions.items() if version is not None},
        device=target.device,
        simulated=request.device.simulated,
        device_profile=target.profile,
        part=None if request.mode != "serve" else find_part(own_args, request.deployment),
        empty_cache_at=request.empty_cache_at,
        sample=request.sample,
        until=request.until if request.mode == "plan" else None,
        notes=list(target.notes),
    )
    timeout_s = find_shutdown_timeout(request.engine_args)
    return Job(
        info,
        run_dir,
        command,
        {**env, ENV_RUN_ID: run_id},
        request.startup_timeout_s,
        shutdown_timeout_s=timeout_s,
        keep_secrets=request.keep_secrets,
        device_state=target.state,
        engine=row,
        warm=warm.is_wanted(environ) and _can_fork(request, row, facts.versions.get(row.package)),
    )


def _can_fork(request: LaunchRequest, row: EngineRow, version: str | None) -> bool:
    """Return whether an engine may be a fork of a warm process.

    Only for what was seen to have the same figures: plans on a simulated device.
    """
    if row.warm_since is None or not request.device.simulated or request.mode != "plan":
        return False
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) >= row.warm_since


def _simulated_target(request: LaunchRequest, row: EngineRow) -> _Target:
    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import ENV_STATE, own_state_file, prepare_runtime

    assert request.device.profile is not None
    runtime = prepare_runtime(request.device.profile, request.stack or row.stack)
    if runtime.stack.engine != row.stack_engine:
        other = next(row for row in ENGINES.values() if row.stack_engine == runtime.stack.engine)
        raise UsageError(
            f"the stack {runtime.stack.name} has {runtime.stack.engine}, not {row.title}",
            hint=f"`memprof sim list` shows the stacks; --engine {other.name} runs {other.title}",
        )
    model = resolve_model(request.model, list(request.engine_args))
    env = {**runtime.env, **model.env}
    state = None if request.share_device else own_state_file()
    if state is not None:
        env[ENV_STATE] = str(state)
    return _Target(
        runtime.python if request.python is None else find_python(request.python, row),
        model.path,
        model.extra_args,
        env,
        runtime.profile.name,
        runtime.profile.name,
        runtime.profile.device.device_count,
        state,
        (*runtime.notes, *model.stand_ins),
    )


def require_device(
    device: DeviceChoice,
    stack: str | None = None,
    files: Mapping[str, tuple[str, ...]] = DEVICE_FILES,
) -> None:
    """Refuse a real device that is not there, before the engine's slow start.

    Raises:
        UsageError: a stack is named, which only simulated devices have.
        LaunchError: none of the files that belong to this kind of device exists.
    """
    if stack is not None:
        hint = "add --device sim:910b, or leave --stack out"
        raise UsageError("--stack names a simulated stack", hint=hint)
    wanted = files.get(device.kind, ())
    if wanted and not any(os.path.exists(path) for path in wanted):
        raise LaunchError(
            f"--device {device.kind}: this machine has none of {', '.join(wanted)}",
            hint="--device sim:910b runs on a simulated Ascend device; "
            "`memprof doctor` shows what is there",
        )


def find_shutdown_timeout(engine_args: list[str]) -> float:
    """Return the seconds that the user gave vLLM for a graceful shutdown (``--shutdown-timeout``);
    0 when not given."""
    given = read_options(engine_args, [Option("shutdown-timeout", float)])
    return max(0.0, cast(float, given.get("shutdown_timeout", 0.0)))
