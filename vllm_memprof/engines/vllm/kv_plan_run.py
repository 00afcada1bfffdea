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
from functools import partial
from typing import Any

from vllm_memprof.capture import actions, plugin
from vllm_memprof.capture.hook import StopAfterPlan
from vllm_memprof.engines.driver import OptionError, Options
from vllm_memprof.engines.vllm.forks import Fork
from vllm_memprof.engines.vllm.rank_choice import (
    Choice,
    RankFailure,
    World,
    choose,
    layer_kinds,
)
from vllm_memprof.engines.vllm.wait_for_go import hold
from vllm_memprof.record.host import MEMORY, read_limits
from vllm_memprof.record.schema import READY, SERVED

#: Vocabularies are padded to a multiple of it.
_VOCABULARY_PADDING = 64
#: Of a model's configuration, where vLLM has no function for it. (0.11; 0.13.0,
#: ``ModelConfig.get_num_experts``)
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def run(vllm_config: Any, options: Options) -> int:
    """Plan the ranks that were asked for; returns the exit status.

    Args:
        vllm_config: the engine's configuration, as a server's would be.
        options: which ranks, on how many devices of a simulated machine; and whether the run goes
            on, through the largest batches.

    Raises:
        OptionError: these ranks cannot be run.
    """
    cores = len(os.sched_getaffinity(0))
    choice = choose(world_of(vllm_config), options, free_host_bytes(), cores)
    if options.until == "ready" and choice.mode == "one" and choice.world.pipeline > 1:
        # the launcher refuses ``edges``
        raise OptionError("--until ready: a pipeline stage alone gets no batch from the one before:"
                          " --ranks all, or --until kv")  # fmt: skip
    plugin.emit("ranks", **choice.to_event())
    try:
        if len(choice.replicas) > 1:
            return _plan_replicas(vllm_config, choice, options)
        if plugin.RECORDER is not None:
            plugin.RECORDER.roles.add("engine_core")  # it will be in this process
        return _plan_replica(vllm_config, choice, next(iter(choice.replicas)), options)
    except RankFailure as failure:
        print(f"memprof plan: {failure}", file=sys.stderr)
        return 1


def world_of(vllm_config: Any) -> World:
    """Return the sizes of a run, from the engine's configuration."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    text = model.hf_text_config
    tensor, pipeline = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    names = "vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size"
    sizes = (getattr(text, name, None) or 0 for name in names)  # Hunyuan has one for each layer
    vocabulary, hidden, count, expert = (
        max(size) if isinstance(size, list) else int(size) for size in sizes
    )
    item = getattr(getattr(model, "dtype", None), "itemsize", 0)
    experts = None
    if getattr(parallel, "enable_expert_parallel", False):
        experts = count_experts(model) or None
    stages: tuple[tuple[str, ...], ...] = ()
    if pipeline > 1:
        from vllm.distributed.utils import get_pp_indices

        kinds = layer_kinds(text, count)
        bounds = (get_pp_indices(count, stage, pipeline) for stage in range(pipeline))
        stages = tuple(kinds[start:end] for start, end in bounds)
    elif experts is not None and count:
        stages = (layer_kinds(text, count),)
    # (vllm 0.23.0, vocab_parallel_embedding.py::pad_vocab_size)
    padded = -(-vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    quantized = experts is None or getattr(model, "quantization", None)
    return World(
        tensor=tensor,
        pipeline=pipeline,
        prefill_context=int(getattr(parallel, "prefill_context_parallel_size", 1) or 1),
        data=int(parallel.data_parallel_size),
        stages=stages,
        experts=experts,
        head_bytes=-(-padded // tensor) * hidden * item or None,
        expert_bytes=None if quantized else 3 * hidden * expert * item or None,  # gate, up, down
    )


def count_experts(model: Any) -> int:
    """Return the experts of a model; where it has some, data-parallel replicas work in step."""
    if hasattr(model, "get_num_experts"):
        return int(model.get_num_experts())
    return max(getattr(model.hf_text_config, name, None) or 0 for name in _EXPERTS)


def free_host_bytes() -> int | None:
    """Return the host memory in bytes that this container's processes may take; None: unknown.

    The smallest that a limit leaves, file cache that can be dropped counted as free.
    """
    limits = (each.free_bytes for each in read_limits() if each.kind == MEMORY)
    return min(limits, default=None)


def _plan_replica(vllm_config: Any, choice: Choice, replica: int, options: Options) -> int:
    """One engine core in this process."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor, UniProcExecutor

    from vllm_memprof.engines.vllm import full_step, one_rank_executor

    executor = Executor.get_class(vllm_config)
    if choice.mode != "all":
        devices = options.devices

        def on_crowd(device: int) -> None:
            if devices:
                plugin.emit("ranks", **choice.with_fuller_devices(device, devices).to_event())

        executor = one_rank_executor.make_executor(choice.replicas[replica], devices, on_crowd)
    elif executor is UniProcExecutor:
        executor = one_rank_executor.PlanExecutor
    if choice.world.data > 1:
        become_replica(vllm_config, choice.world, replica, options.devices)
    try:
        core = EngineCore(vllm_config, executor, log_stats=False)
    except StopAfterPlan:
        return 0
    if options.until != "ready":
        core.shutdown()
        print(
            "memprof plan: the engine came up without a KV plan hook; is MEMPROF_RUN_DIR set?",
            file=sys.stderr,
        )
        return 1
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


def become_replica(vllm_config: Any, world: World, index: int, devices: int | None) -> None:
    """Set what ``EngineCoreProc.run_engine_core`` sets for a data-parallel rank. (vllm 0.23.0)

    The group over which its cores agree when to step is left out: it lives on the host and is not
    used before the first request. A machine holds all replicas where its devices are not known, one
    where a replica takes more than a machine.
    """
    of_a_machine = world.data if devices is None else max(1, devices // world.replica_size)
    parallel = vllm_config.parallel_config
    multiprocessing.current_process().name = f"EngineCore_DP{index}"
    parallel.data_parallel_rank_local = index % of_a_machine
    if hasattr(parallel, "data_parallel_index"):
        parallel.data_parallel_index = index
    if count_experts(vllm_config.model_config) or not hasattr(parallel, "data_parallel_index"):
        parallel.data_parallel_rank = index
    else:
        parallel.data_parallel_size = parallel.data_parallel_size_local = 1
        parallel.data_parallel_rank = 0


def _plan_replicas(vllm_config: Any, choice: Choice, options: Options) -> int:
    """Start one process per replica: together where all ranks are run, else one after the other."""
    from vllm.v1.engine import utils

    def plan(replica: int) -> int:
        try:
            return _plan_replica(vllm_config, choice, replica, options)
        except Exception:
            traceback.print_exc()
            return 1

    # As vLLM's launcher shares the devices out. (vllm/v1/engine/utils.py)
    own_devices = getattr(utils, "set_device_control_env_var", None)
    forks = {}
    for replica in choice.replicas:
        devices_of: Any = contextlib.nullcontext()
        if choice.mode == "all" and own_devices:
            devices_of = own_devices(vllm_config, replica)
        with devices_of:
            forks[replica] = Fork(partial(plan, replica), f"EngineCore_DP{replica}")
        if choice.mode != "all":
            forks[replica].process.join()
    for replica, fork in forks.items():
        if fork.answer() != 0:
            raise RankFailure(f"EngineCore_DP{replica} failed; its error is in engine.log")
    return 0
