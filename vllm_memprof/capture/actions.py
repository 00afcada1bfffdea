"""Actions of a start-up: functions that a hook row names, run before or after the engine's call.

Actions read; the only things they change are the recorder and the event file. An action that raises
is recorded once and its row is out of the way from then on. Two exceptions are meant to leave:
StopAfterPlan and StrictFailure.
"""

from __future__ import annotations

import sys
import weakref

from vllm_memprof.capture import (
    empty_cache,
    failure,
    figures,
    identity,
    kv_plan,
    steps,
    tracing,
    weights,
)
from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.connectors import storages_of
from vllm_memprof.capture.hook import Call, StopAfterPlan
from vllm_memprof.capture.items import of_kwargs
from vllm_memprof.capture.recorder import OpenPhase, Recorder
from vllm_memprof.units import minus

# --- phases ---------------------------------------------------------------------------------------


def begin_phase(
    recorder: Recorder,
    call: Call,
    detail: Fields | None = None,
    device: bool = True,
) -> None:
    """Open the row's phase, unless an override's call already has; see ``Recorder.begin``."""
    phase = call.hook.phase
    assert phase is not None
    if not recorder.is_open(phase):
        call.token = recorder.begin(phase, call.hook.id, detail, device=device)


def end_phase(recorder: Recorder, call: Call) -> None:
    """Close the phase that this call opened."""
    finish(recorder, call.token, call.error)


def finish(recorder: Recorder, opened: OpenPhase | None, error: BaseException | None) -> None:
    """Close a phase, if there is one; if the user named it, empty the cache after its success."""
    if opened is not None:
        recorder.end(opened, error)
        if error is None:
            empty_cache.call_after(recorder, opened.phase)


def begin_kv_connector(recorder: Recorder, call: Call) -> None:
    """Open the phase where a connector is configured; the function is called without one too."""
    if reach(call.argument("vllm_config", 0), "kv_transfer_config") is not None:
        begin_phase(recorder, call)


def begin_draft_load(recorder: Recorder, call: Call) -> None:
    """Open the phase, and keep the names of the layers that are there without the drafter."""
    begin_phase(recorder, call)
    call.kept = _layers(call.subject)


def leave_draft_load(recorder: Recorder, call: Call) -> None:
    """Name the layers that the drafter has added: those of them with a KV cache are its own."""
    after = _layers(call.subject)
    if call.token is not None and None not in (call.kept, after):
        call.token.detail["layers"] = sorted(after - call.kept)
    end_phase(recorder, call)


def _layers(proposer: object) -> frozenset[str] | None:
    """Return the names of the layers that models have registered so far; None without the list.

    (vllm/config/compilation.py::CompilationConfig.static_forward_context, 0.11.0 to 0.30.0)
    """
    layers = reach(proposer, "vllm_config.compilation_config.static_forward_context")
    return frozenset(layers) if isinstance(layers, dict) else None


def begin_device_init(recorder: Recorder, call: Call) -> None:
    """Open the phase without a reading: the worker has not chosen its device yet."""
    begin_phase(recorder, call, device=False)


def begin_load_model(recorder: Recorder, call: Call) -> None:
    """Open the phase, and keep where memory was in use before it."""
    begin_phase(recorder, call)
    call.kept = weights.blocks_of(recorder)


def leave_load_model(recorder: Recorder, call: Call) -> None:
    runner = reach(call.subject, "model_runner")
    recorder.hooks.bind_instance(runner)
    figures.read_worker(recorder, call.subject)
    recorder.emit_figures("load_model")
    weights.tell(recorder, call.subject, call.kept or ())
    recorder.hooks.bind_model(runner)


def leave_profile_run(recorder: Recorder, call: Call) -> None:
    finish(recorder, recorder.opened("mm_profile"), call.error)
    if call.token is not None and recorder.hooks.is_bound("s.mm_merge"):
        call.token.detail["mm_merge_ran"] = recorder.merged_in_profile
    end_phase(recorder, call)
    if call.error is None and call.token is not None:
        figures.read_profile(recorder, call.subject, call.result)
        recorder.emit_figures("determine_available_memory")
    recorder.hooks.release("profiled")


def keep_profile_result(recorder: Recorder, call: Call) -> None:
    recorder.profile_result = call.subject


def leave_mm_batch(recorder: Recorder, call: Call) -> None:
    """Keep what profiling assumes of multimodal items."""
    opened, runner = recorder.opened("mm_profile"), call.subject
    modality, items = call.argument("modality"), call.argument("max_items_per_batch", 2)
    known = isinstance(modality, str) and isinstance(items, int)
    if opened is None or not known:
        return
    budget = reach(runner, "mm_budget")
    tokens = reach(budget, "mm_max_toks_per_item") or reach(budget, "max_tokens_by_modality")
    sizes = of_kwargs(call.result, reach(runner, "model_config.hf_config"))
    size, frames = sizes[0] if sizes else (None, None)
    opened.detail |= {
        "mm_modality": modality,
        "mm_items": items,
        "mm_tokens_per_item": (tokens or {}).get(modality),
        "mm_size": size,
        "mm_frames": frames,
    }


def stop_mm_profile(recorder: Recorder, call: Call) -> None:
    """End mm_profile when the dummy run at full size starts, the text part; keep its tokens."""
    tokens = call.argument("num_tokens")
    if recorder.is_open("profile_run") and isinstance(tokens, int):
        largest = max(tokens, recorder.figures["profiled_tokens"] or 0)
        recorder.figures["profiled_tokens"] = largest
    if tokens == reach(call.subject, "max_num_tokens"):
        finish(recorder, recorder.opened("mm_profile"), None)


def leave_kv_alloc(recorder: Recorder, call: Call) -> None:
    """Keep what the storages of the caches take."""
    caches = reach(call.subject, "model_runner.kv_caches")
    found = {at: tensor.untyped_storage().nbytes() for _, at, tensor in storages_of(caches)}
    recorder.figures["kv_storage_bytes"] = sum(found.values()) or None
    recorder.emit_figures("initialize_from_config")


def begin_graph_capture(recorder: Recorder, call: Call) -> None:
    begin_phase(recorder, call)
    call.kept = _captured_graphs()


def leave_graph_capture(recorder: Recorder, call: Call) -> None:
    before, after = call.kept, _captured_graphs()
    graph_bytes = call.result if isinstance(call.result, int) else recorder.captured_bytes
    if call.error is None:
        recorder.figures["graph_bytes"] = graph_bytes
    if call.token is not None:
        call.token.detail |= {"graph_bytes": graph_bytes, "graphs": minus(after, before)}
    recorder.captured_bytes = None
    end_phase(recorder, call)


def _captured_graphs() -> int | None:
    """Return the graphs captured so far, by vLLM's compilation/counter.py; None without it."""
    module = sys.modules.get("vllm.compilation.counter")
    count = reach(module, "compilation_counter.num_cudagraph_captured")
    return count if isinstance(count, int) else None


def keep_captured_bytes(recorder: Recorder, call: Call) -> None:
    """Keep what the inherited method measured; an override that calls it may drop the result."""
    if isinstance(call.result, int):
        recorder.captured_bytes = call.result


def keep_weights(recorder: Recorder, call: Call) -> None:
    """Keep the bytes that the engine measured around the loading of its model."""
    weights = reach(call.subject, "consumed_memory")
    if isinstance(weights, int):
        recorder.figures["weights_bytes"] = weights


def leave_warm_up(recorder: Recorder, call: Call) -> None:
    figures.read_worker(recorder, call.subject)
    recorder.emit_figures("compile_or_warm_up_model")
    recorder.serving = True
    steps.start_thread(recorder)
    tracing.trace_device(recorder)
    recorder.hooks.release("first_steps")  # every communicator of the model has been used
    recorder.hooks.self_check("model_ready")


def leave_shutdown(recorder: Recorder, call: Call) -> None:
    recorder.sampler.close()
    tracing.close(recorder)
    end_phase(recorder, call)
    recorder.hooks.self_check("end")


def fold_peak(recorder: Recorder, call: Call) -> None:
    recorder.sampler.fold_peak()


# --- roles, readiness, the KV plan ----------------------------------------------------------------


def leave_device_ready(recorder: Recorder, call: Call) -> None:
    """Classes are final and ranks are known: identity, second binding pass, first self-check."""
    worker = reach(call.subject, "worker")
    if worker is None:
        return
    recorder.worker = weakref.ref(worker)
    identity.tell_worker(recorder, worker)
    figures.read_worker(recorder, worker)
    recorder.emit_figures("init_device")
    recorder.hooks.bind_instance(worker)
    recorder.hooks.bind_instance(reach(worker, "model_runner"))
    failure.observe(recorder)
    recorder.hooks.self_check("device_ready")


def leave_kv_plan(recorder: Recorder, call: Call) -> None:
    config, available = call.argument("vllm_config", 0), call.argument("available_memory", 2)
    recorder.emit("kv_plan", **kv_plan.describe(config, available, call.result))
    if recorder.stop_after == "kv_plan":
        recorder.emit("ready", what="plan")
        raise StopAfterPlan


def leave_kv_caches(recorder: Recorder, call: Call) -> None:
    """Shut the executor down after a planned stop: no object holds the engine core any more."""
    if isinstance(call.error, StopAfterPlan):
        call.subject.model_executor.shutdown()


def announce_model(recorder: Recorder, call: Call) -> None:
    model_is_ready(recorder, reach(call.subject, "scheduler"))


def model_is_ready(recorder: Recorder, scheduler: object) -> None:
    """Say once that the engine core of this process takes requests from now on."""
    if recorder.model_ready:
        return
    recorder.model_ready = True
    recorder.emit("ready", what="model")
    recorder.hooks.bind_instance(scheduler)
    steps.start_thread(recorder)
    tracing.trace_host(recorder)
    recorder.hooks.self_check("engine_ready")


def end_core(recorder: Recorder, call: Call) -> None:
    """Write what the engine core has traced, before it ends."""
    tracing.close(recorder)


def announce_server(recorder: Recorder, call: Call) -> None:
    recorder.roles.add("api")
    recorder.emit("ready", what="server")
    recorder.hooks.self_check("end")
