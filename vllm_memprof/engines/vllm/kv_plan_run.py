"""A run that ends at the KV plan, or after the largest batches: one engine core per data-parallel
replica.

Imports vLLM where it starts an engine; runs in the driver's process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm_memprof.capture import actions, plugin
from vllm_memprof.capture.hook import StopAfterPlan
from vllm_memprof.engines.vllm.rank_choice import (
    Choice,
    RankError,
    RankFailure,
    ReplicaRanks,
    World,
    choose,
    layer_kinds,
)
from vllm_memprof.engines.vllm.wait_for_go import hold
from vllm_memprof.record.schema import READY, SERVED

#: Vocabularies are padded to a multiple of it.
_VOCABULARY_PADDING = 64


def run(
    vllm_config: Any, mode: str, rank: int | None, devices: int | None, to_the_end: bool = False
) -> int:
    """Plan the ranks that were asked for; returns the exit status.

    Args:
        vllm_config: the engine's configuration, as a server's would be.
        mode: one of ``rank_choice.MODES``.
        rank: the rank of mode ``one``.
        devices: devices of the simulated machine, None on real hardware.
        to_the_end: do not stop at the KV plan; run the largest batches and end the engine.

    Raises:
        RankError: these ranks cannot be run.
    """
    choice = choose(world_of(vllm_config), mode, rank, devices, free_host_bytes())
    if to_the_end and choice.mode == "one" and choice.world.pipeline > 1:
        # the launcher refuses ``edges``
        raise RankError("--until ready: a pipeline stage alone gets no batch from the one before: "
                        "--ranks all, or --until kv")  # fmt: skip
    if plugin.RECORDER is not None and len(choice.replicas) == 1:
        plugin.RECORDER.roles.add("engine_core")  # it will be in this process
    plugin.emit("ranks", **choice.to_event())
    try:
        if len(choice.replicas) == 1:
            return _plan_replica(vllm_config, choice, choice.replicas[0], devices, to_the_end)
        return _plan_replicas(vllm_config, choice, devices, to_the_end)
    except RankFailure as failure:
        print(f"memprof plan: {failure}", file=sys.stderr)
        return 1


def world_of(vllm_config: Any) -> World:
    """Return the sizes of a run, from the engine's configuration."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    pipeline = int(parallel.pipeline_parallel_size)
    experts = None
    if getattr(parallel, "enable_expert_parallel", False) and is_moe(vllm_config):
        experts = int(model.get_num_experts()) or None
    stages: tuple[tuple[str, ...], ...] = ()
    count = int(getattr(model.hf_text_config, "num_hidden_layers", 0))
    if pipeline > 1:
        from vllm.distributed.utils import get_pp_indices

        kinds = layer_kinds(model.hf_text_config, count)
        bounds = (get_pp_indices(count, stage, pipeline) for stage in range(pipeline))
        stages = tuple(kinds[start:end] for start, end in bounds)
    elif experts is not None and count:
        stages = (layer_kinds(model.hf_text_config, count),)
    return World(
        tensor=int(parallel.tensor_parallel_size),
        pipeline=pipeline,
        prefill_context=int(getattr(parallel, "prefill_context_parallel_size", 1) or 1),
        data=int(parallel.data_parallel_size),
        stages=stages,
        experts=experts,
        head_bytes=_head_bytes(model, int(parallel.tensor_parallel_size)),
        expert_bytes=None if experts is None else _expert_bytes(model),
    )


def _head_bytes(model: Any, tensor: int) -> int | None:
    """Return the size of an LM head or a token embedding on one tensor rank; None: not known.

    (vllm 0.23.0, ``vocab_parallel_embedding.py::pad_vocab_size``)
    """
    text, dtype = model.hf_text_config, getattr(model, "dtype", None)
    vocabulary, hidden = (getattr(text, name, None) for name in ("vocab_size", "hidden_size"))
    if not vocabulary or not hidden or dtype is None:
        return None
    padded = -(-vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    return int(-(-padded // tensor) * hidden * dtype.itemsize)


def _expert_bytes(model: Any) -> int | None:
    """Return the size of one expert in one layer; None: not known, as where it is quantised."""
    text, dtype = model.hf_text_config, getattr(model, "dtype", None)
    hidden, wide = (getattr(text, name, None) for name in ("hidden_size", "moe_intermediate_size"))
    if not hidden or not wide or dtype is None or getattr(model, "quantization", None):
        return None
    return int(3 * hidden * wide * dtype.itemsize)  # gate, up and down


def is_moe(vllm_config: Any) -> bool:
    """Return True if the model has experts: its data-parallel replicas then work in step."""
    model = vllm_config.model_config
    known = getattr(model, "is_moe", None)
    return bool(model.get_num_experts() > 0 if known is None else known)


def free_host_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the host memory in bytes that this container's processes may take; None: unknown.

    The smaller of the kernel's MemAvailable and what the cgroup's limit leaves, file cache that can
    be dropped counted as free.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found.append(_numbers(proc / "meminfo")["MemAvailable:"] << 10)
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())  # "max": no limit
        used = (
            int((cgroup / "memory.current").read_text())
            - _numbers(cgroup / "memory.stat")["inactive_file"]
        )
        found.append(limit - used)
    return min(found, default=None)


def _numbers(path: Path) -> dict[str, int]:
    return {
        words[0]: int(words[1])
        for words in map(str.split, path.read_text().splitlines())
        if len(words) > 1
    }


def _plan_replica(
    vllm_config: Any, choice: Choice, replica: ReplicaRanks, devices: int | None, to_the_end: bool
) -> int:
    """One engine core in this process."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from vllm_memprof.engines.vllm import full_step, one_rank_executor

    data_parallel = choice.world.data > 1
    executor = Executor.get_class(vllm_config)
    if choice.mode != "all":

        def on_crowd(device: int) -> None:
            if devices:
                plugin.emit("ranks", **choice.with_fuller_devices(device, devices).to_event())

        executor = one_rank_executor.make_executor(replica, devices, on_crowd)
    elif executor is UniProcExecutor:
        executor = one_rank_executor.PlanExecutor
    if data_parallel:
        _become_replica(vllm_config, replica.index, _replicas_of_a_machine(choice.world, devices))
    try:
        core = EngineCore(vllm_config, executor, log_stats=False)
    except StopAfterPlan:
        return 0
    if to_the_end:
        # groups without peers cannot be taken down
        ended = core if choice.mode == "all" else core.model_executor
        try:
            if plugin.RECORDER is not None:
                actions.model_is_ready(plugin.RECORDER, core.scheduler)
            hold(READY)
            plugin.emit("full_step", **full_step.drive(core, vllm_config))
            hold(SERVED)
        finally:
            ended.shutdown()
        return 0
    core.shutdown()
    print(
        "memprof plan: the engine came up without a KV plan hook; is MEMPROF_RUN_DIR set?",
        file=sys.stderr,
    )
    return 1


def _replicas_of_a_machine(world: World, devices: int | None) -> int:
    """Return how many data-parallel replicas a machine holds: all of them where its devices are not
    known, one where a replica takes more than a machine."""
    return world.data if devices is None else max(1, devices // world.replica_size)


def _become_replica(vllm_config: Any, index: int, of_a_machine: int) -> None:
    """Set what ``EngineCoreProc.run_engine_core`` sets for a data-parallel rank. (vllm 0.23.0)

    The group over which its cores agree when to step is left out: it lives on the host and is not
    used before the first request.
    """
    parallel = vllm_config.parallel_config
    multiprocessing.current_process().name = f"EngineCore_DP{index}"
    parallel.data_parallel_rank_local = index % of_a_machine
    if hasattr(parallel, "data_parallel_index"):
        parallel.data_parallel_index = index
    if is_moe(vllm_config) or not hasattr(parallel, "data_parallel_index"):
        parallel.data_parallel_rank = index
    else:
        parallel.data_parallel_size = parallel.data_parallel_size_local = 1
        parallel.data_parallel_rank = 0


def _plan_replicas(vllm_config: Any, choice: Choice, devices: int | None, to_the_end: bool) -> int:
    """Start one process per replica: together where all ranks are run, else one after the other."""
    from vllm.v1.engine import utils

    # As vLLM's launcher shares the devices out. (vllm/v1/engine/utils.py)
    own_devices = getattr(utils, "set_device_control_env_var", None)
    context = multiprocessing.get_context("fork")
    children = []
    for replica in choice.replicas:
        child = context.Process(
            target=_replica_process,
            args=(vllm_config, choice, replica, devices, to_the_end),
            name=f"EngineCore_DP{replica.index}",
        )
        devices_of: Any = contextlib.nullcontext()
        if choice.mode == "all" and own_devices is not None:
            devices_of = own_devices(vllm_config, replica.index)
        with devices_of:
            child.start()
        children.append(child)
        if choice.mode != "all":
            child.join()
    for child in children:
        child.join()
    failed = [child for child in children if child.exitcode]
    if failed:
        raise RankFailure(
            f"{failed[0].name} ended with status {failed[0].exitcode}; its error is in engine.log"
        )
    return 0


def _replica_process(
    vllm_config: Any, choice: Choice, replica: ReplicaRanks, devices: int | None, to_the_end: bool
) -> None:
    try:
        status = _plan_replica(vllm_config, choice, replica, devices, to_the_end)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
