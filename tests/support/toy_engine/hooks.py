"""What is read of the toy engine after its calls."""

from __future__ import annotations

from vllm_memprof.capture import identity
from vllm_memprof.capture.actions import end_phase
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder


def leave_device_init(recorder: Recorder, call: Call) -> None:
    identity.tell(recorder, 0, identity.label(None, None, None, None), 1, rank=0)
    end_phase(recorder, call)
    recorder.hooks.self_check("device_ready")


def leave_kv_cache(recorder: Recorder, call: Call) -> None:
    toy, token, weights = call.subject, 1 << 20, 8 << 30
    end_phase(recorder, call)
    recorder.figures |= {
        "toy_free_bytes": toy.free_before,
        "toy_share": toy.share,
        "weights_bytes": weights,
        "kv_cache_bytes": toy.tokens * token,
    }
    recorder.emit_figures("allocate")
    recorder.emit("kv_plan", tokens=toy.tokens, bytes_per_token=token,
                  planned_bytes=[toy.tokens * token])  # fmt: skip
    recorder.serving = recorder.model_ready = True
    recorder.emit("ready", what="model")
    recorder.hooks.self_check("model_ready")
    recorder.hooks.self_check("engine_ready")
