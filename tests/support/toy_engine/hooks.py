"""The rows of the toy engine, and what they read of it."""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture import identity
from vllm_memprof.capture.actions import begin_device_init, end_phase
from vllm_memprof.capture.hook import Call, Hook
from vllm_memprof.capture.hooks import rows
from vllm_memprof.capture.recorder import Recorder


def leave_device_init(recorder: Recorder, call: Call) -> None:
    recorder.label = identity.label(None, None, None, None)
    recorder.emit("identity", role="worker", roles=["worker"], rank=0, device_index=0,
                  label=recorder.label, soc="ToyNPU", world_size=1)  # fmt: skip
    end_phase(recorder, call)
    recorder.hooks.self_check("device_ready")


def leave_kv_cache(recorder: Recorder, call: Call) -> None:
    from tests.support.toy_engine.engine import TOKEN, WEIGHTS

    toy = call.subject
    end_phase(recorder, call)
    recorder.figures |= {
        "toy_free_bytes": toy.free_before,
        "toy_share": toy.share,
        "weights_bytes": WEIGHTS,
        "kv_cache_bytes": toy.tokens * TOKEN,
    }
    recorder.emit_figures("allocate_kv_cache")
    recorder.emit(
        "kv_plan", tokens=toy.tokens, bytes_per_token=TOKEN, planned_bytes=[toy.tokens * TOKEN]
    )
    recorder.serving = recorder.model_ready = True
    recorder.emit("ready", what="model")
    recorder.hooks.self_check("model_ready")
    recorder.hooks.self_check("engine_ready")


def _phase(phase: str, function: str, **fields: Any) -> Hook:
    fields = {"engine": "toy", "versions": ">=0", **fields}
    target = f"tests.support.toy_engine.engine:Toy.{function}"
    return rows.phase(f"toy.{phase}", phase, target, **fields)


HOOKS = (
    _phase("device_init", "init_device", enter=begin_device_init, leave=leave_device_init),
    _phase("weight_load", "load_weights", least_calls=1),
    _phase("kv_cache_alloc", "allocate_kv_cache", leave=leave_kv_cache),
    _phase("request", "answer", due="end"),
)
