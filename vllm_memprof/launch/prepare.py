"""From what the user asked for to what is started: interpreter, model, device, run folder.

Starts nothing yet.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from vllm_memprof.engines import ENGINES, VLLM, engine_row
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.engines.host_asks import host_asks
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch import warm
from vllm_memprof.launch.deployment import find_part
from vllm_memprof.launch.engine import at_least, build_command, build_env
from vllm_memprof.launch.folder import create_run_dir
from vllm_memprof.launch.interpreter import find_python, probe_interpreter, require_engine
from vllm_memprof.launch.misspelt import refuse_misspelt
from vllm_memprof.launch.request import DeviceChoice, LaunchRequest
from vllm_memprof.launch.run import Job
from vllm_memprof.options import read_option
from vllm_memprof.record.host import HostRecord, read_limits
from vllm_memprof.record.schema import (
    ENV_EMPTY_CACHE_AT,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_SAMPLE,
    ENV_TRACE_ALLOCATIONS,
    RunInfo,
)
from vllm_memprof.redact import redact_command, select_env
from vllm_memprof.units import known_items

#: Files that exist where a kind of device does.
DEVICE_FILES = {
    "npu": ("/dev/davinci_manager", "/dev/davinci0"),
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"),
}


def prepare_job(
    request: LaunchRequest,
    environ: Mapping[str, str] = os.environ,
    check: Callable[[RunInfo], None] | None = None,
) -> Job:
    """Look everything up, make the run folder, and return what to start.

    Args:
        request: what the user asked for.
        environ: the caller's environment.
        check: is given what is known of the run, and may refuse it before there is a folder.

    Raises:
        UsageError, LaunchError, SetupError: with what to try next.
    """
    row, profile = engine_row(request.engine), request.device.profile
    asked = {
        ENV_EMPTY_CACHE_AT: ",".join(request.empty_cache_at),
        ENV_SAMPLE: request.sample,
        ENV_TRACE_ALLOCATIONS: request.trace_allocations,
    }
    extra = {name: str(value) for name, value in asked.items() if value}
    model_path, model_args, device, devices, state = request.model, list[str](), None, None, None
    notes: list[str] = []  # on what stands in for the build's or the model's own
    python = None
    if profile is None:
        require_device(request.device, request.stack)
    else:
        from vllm_memprof.sim.presets import fit_args, resolve_model
        from vllm_memprof.sim.runtime import ENV_STATE, own_state_file, prepare_runtime

        runtime = prepare_runtime(profile, request.stack or row.stack)
        if runtime.stack.engine != row.stack_engine:
            stack = runtime.stack
            other = next(row for row in ENGINES.values() if row.stack_engine == stack.engine)
            raise UsageError(
                f"the stack {stack.name} has {stack.engine}, not {row.title}",
                f"`memprof sim list` shows the stacks; --engine {other.name} runs {other.title}",
            )
        model = resolve_model(request.model, list(request.engine_args), row.quantization)
        model_path, model_args = model.path, model.extra_args
        engine_args, drafts = fit_args(request.engine_args, model)
        request = replace(request, engine_args=engine_args)
        extra |= {**runtime.env, **model.env}
        if not request.share_device:
            state = own_state_file()
            extra[ENV_STATE] = str(state)
        python = None if request.python else runtime.python
        device, notes = runtime.profile.name, [*runtime.notes, *model.stand_ins, *drafts]
        devices = runtime.profile.device.device_count if request.mode == "plan" else None
    python = python or find_python(request.python, row)
    facts = probe_interpreter(python, {**environ, **extra})
    require_engine(facts, row)
    refuse_misspelt(request.engine_args, facts, row)
    command = build_command(python, request, model_path, model_args, devices, facts.python)
    env = build_env(environ, Path(), request.mode, extra, row, request.until)
    own_args = request.engine_args if row is VLLM else []  # of another engine they are not read
    limits = read_limits()
    asks = host_asks(row, request.engine_args, Path(model_path), limits, environ)
    info = RunInfo(
        id=uuid.uuid4().hex,
        mode=request.mode,
        model=request.model,
        command=redact_command(request.typed),
        engine_command=redact_command(command),
        env=select_env(env),
        versions=known_items(facts.versions),
        device=device,
        simulated=profile is not None,
        device_profile=device,
        part=None if request.mode != "serve" else find_part(own_args, request.deployment),
        empty_cache_at=request.empty_cache_at,
        sample=request.sample,
        until=request.until if request.mode == "plan" else None,
        notes=notes,
        host_memory=HostRecord(limits, asks),
    )
    if check is not None:
        check(info)
    run_dir = create_run_dir(request.run_dir, request.model)
    env[ENV_RUN_DIR] = str(run_dir)
    info.env = select_env(env)
    return Job(
        info,
        run_dir,
        command,
        {**env, ENV_RUN_ID: info.id},
        request.startup_timeout,
        shutdown_timeout_s=find_shutdown_timeout(request.engine_args),
        keep_secrets=request.keep_secrets,
        device_state=state,
        engine=row,
        warm=warm.is_wanted(environ) and can_fork(request, row, facts.versions.get(row.package)),
    )


def can_fork(request: LaunchRequest, row: EngineRow, version: str | None) -> bool:
    """Return whether an engine may be a fork of a warm process.

    Only for what was seen to have the same figures: plans on a simulated device.
    """
    seen = request.device.simulated and request.mode == "plan"
    return seen and row.warm_since is not None and at_least(version, row.warm_since)


def require_device(device: DeviceChoice, stack: str | None = None) -> None:
    """Refuse a real device that is not there, before the engine's slow start.

    Raises:
        UsageError: a stack is named, which only simulated devices have.
        LaunchError: none of the files that belong to this kind of device exists.
    """
    if stack is not None:
        hint = "add --device sim:910b, or leave --stack out"
        raise UsageError("--stack names a simulated stack", hint)
    wanted = DEVICE_FILES.get(device.kind, ())
    if wanted and not any(map(os.path.exists, wanted)):
        raise LaunchError(
            f"--device {device.kind}: this machine has none of {', '.join(wanted)}",
            "--device sim:910b runs on a simulated Ascend device; "
            "`memprof doctor` shows what is there",
        )


def find_shutdown_timeout(engine_args: list[str]) -> float:
    """Return the seconds that the user gave vLLM for a graceful shutdown (``--shutdown-timeout``);
    0 when not given."""
    return max(0.0, read_option(engine_args, "shutdown-timeout", float) or 0.0)
