"""What the engine core's process does for workers on Ray nodes. Actions of hook rows.

Before the engine connects to Ray: this package, as far as a worker needs it, becomes part of the
job's runtime environment, and variables that belong to this host are kept from travelling. Before
the workers are made: the collector is. When the executor ends: which workers are gone. Ray and the
engine are looked up, never imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_memprof.capture import ray_package
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.ray_collector import NODE_LOST, Collector
from vllm_memprof.capture.ray_worker import COLLECTOR
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.schema import ENV_RAY_SHIP, ENV_RUN_ID, TRAVELS
from vllm_memprof.redact import redact_text

_PREFIX = "MEMPROF_"
#: Ray's own variable: the job that runs this process has a runtime environment already, and a
#: second one with the same field is refused.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_MESSAGE_LENGTH = 300
_CONNECT_S = 2.0
_ANSWER_S = 2.0
#: Seconds that workers have for their last lines, when the engine ends.
_FINISH_S = 3.0


def enter_executor(recorder: Recorder, call: Call) -> None:
    """Prepare the job that the engine is about to open."""
    keep_at_home()
    ray: Any = sys.modules.get("ray")
    if ray is None or os.environ.get(ENV_RAY_SHIP) == "0":
        return
    if ray.is_initialized() or _SUBMITTED in os.environ:
        text = "this Ray job was opened before the engine: memprof records where it is installed"
        recorder.emit("error", where="ray", message=text)
        return
    config = call.subject.parallel_config
    given, staged = config.ray_runtime_env or {}, ray_package.stage()
    call.token = (config, config.ray_runtime_env, staged)
    modules = [*(given.get("py_modules") or []), *ray_package.modules_of(staged)]
    config.ray_runtime_env = {**given, "py_modules": modules}


def leave_executor(recorder: Recorder, call: Call) -> None:
    """Take back what ``enter_executor`` changed; the job keeps its runtime environment."""
    if isinstance(call.token, tuple):
        config, given, staged = call.token
        config.ray_runtime_env = given
        shutil.rmtree(staged, ignore_errors=True)


def enter_workers(recorder: Recorder, call: Call) -> None:
    """Start the collector on this node; workers find it by its name. Nothing is waited for."""
    config = call.subject.parallel_config
    asked = config.ray_runtime_env
    if asked and any(ray_package.is_staged(module) for module in asked.get("py_modules") or []):
        # of the job alone: Ray takes folders of this host for a job, not for an actor
        others = [each for each in asked["py_modules"] if not ray_package.is_staged(each)]
        kept = {name: value for name, value in asked.items() if name != "py_modules"}
        config.ray_runtime_env = {**kept, **({"py_modules": others} if others else {})} or None
    ray: Any = sys.modules["ray"]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = COLLECTOR.format(run_id=os.environ.get(ENV_RUN_ID, ""))
    options = {"name": name, "num_cpus": 0, "scheduling_strategy": here, "get_if_exists": True}
    actor = ray.remote(Collector).options(**options).remote(str(Path(recorder.run_dir).absolute()))
    recorder.notes.collector = actor  # it lives as long as somebody holds it


def enter_shutdown(recorder: Recorder, call: Call) -> None:
    """Say which workers are gone, before the executor ends the others; let these send the rest."""
    executor, collector = call.subject, recorder.notes.collector
    if getattr(executor, "shutting_down", False) or collector is None:
        return
    ray: Any = sys.modules["ray"]
    if not getattr(executor, "is_failed", False):
        if ray.is_initialized():
            _let_senders_finish(ray, collector)
        return
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    answers: dict[str, bool] = {}
    for handle in getattr(executor, "ray_worker_handles", []):
        node, run = handle.node_id, handle.run_ref
        if run is None or not ray.wait([run], timeout=0)[0]:
            continue
        if node not in answers:
            answers[node] = node_answers(nodes.get(node))
            if not answers[node]:
                recorder.emit("ray_lost", node=node, rank=None, reason=NODE_LOST)
        if answers[node]:
            recorder.emit("ray_lost", node=node, rank=handle.rank, reason=_why(ray, run))


def _let_senders_finish(ray: Any, collector: Any) -> None:
    """Wait for last lines: the executor is about to kill its workers."""
    ray.get(collector.end.remote(), timeout=_ANSWER_S)
    until_s = time.monotonic() + _FINISH_S
    while ray.get(collector.unfinished.remote(), timeout=_ANSWER_S) and time.monotonic() < until_s:
        time.sleep(0.05)


def node_answers(node: Mapping[str, Any] | None) -> bool:
    """Return whether a node of ``ray.nodes()`` takes connections; Ray itself needs many seconds to
    see that one does not."""
    with contextlib.suppress(OSError):
        if node is not None and node["Alive"]:
            address = (node["NodeManagerAddress"], node["NodeManagerPort"])
            socket.create_connection(address, _CONNECT_S).close()
            return True
    return False


def keep_at_home() -> None:
    """Keep the variables of this host and of its simulated device from travelling with Ray.

    vLLM has a set of names that it does not copy; from 0.13 on, in ``vllm.ray.ray_env``. What a run
    is asked for travels: vLLM 0.23 copies every variable, or those with a prefix that the launcher
    named; a release before that copies by name, and is given the names.
    """
    left_out = getattr(sys.modules.get("vllm.ray.ray_env"), "RAY_NON_CARRY_OVER_ENV_VARS", None)
    if isinstance(left_out, set):
        left_out |= {name for name in os.environ if is_of_host(name)}
    for module in ("vllm.v1.executor.ray_executor", "vllm.v1.executor.ray_distributed_executor"):
        executor = getattr(sys.modules.get(module), "RayDistributedExecutor", None)
        names = getattr(executor, "ADDITIONAL_ENV_VARS", None)
        if isinstance(names, set):
            names |= set(TRAVELS)


def is_of_host(name: str) -> bool:
    """Return whether a variable of memprof's belongs to its host."""
    return name.startswith(_PREFIX) and name not in TRAVELS


def _why(ray: Any, reference: Any) -> str:
    try:
        ray.get(reference, timeout=0)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return redact_text(text)[:_MESSAGE_LENGTH]
    return "its work ended"
