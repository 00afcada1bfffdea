"""Actions of SGLang's rows: functions that run before or after a call of its scheduler process.

A scheduler process is scheduler and model worker in one: its role is ``worker``. The process that
started it holds the tokenizer manager and the HTTP server (``api``); a third one turns tokens into
text (``detokenizer``). A server that gets SIGTERM asks its schedulers to end; in every other case
they end by their parent's SIGKILL, and there is no phase of a shutdown.

SGLang keeps none of the figures that its equation takes. They are read where they pass: what
``_profile_available_bytes`` is called with, what it reads and what it returns. All of them are in
GiB, made of whole bytes by a division, so that the bytes come back exactly.

Read in 0.5.23; names of older releases stand in the table beside those of newer ones.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NoReturn

from vllm_memprof.capture import actions as shared
from vllm_memprof.capture import failure, identity, steps, tracing, weights
from vllm_memprof.capture.actions import begin_phase, end_phase, finish
from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.connectors import EXTRA, described
from vllm_memprof.capture.hook import Call, StopAfterPlan
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.engines.sglang.kept import kept

_GIB = 1 << 30
#: Where a process of SGLang keeps its set-up. (0.5.23)
_CONTEXT = "sglang.srt.runtime_context"
_GRAPHS = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
#: The row of the function that makes the pools of all models of a rank.
POOLS = "sgl.pools"
#: Ways in which a tokenizer process hands over multimodal input in memory of the device, for which
#: SGLang sets more aside. (kv_cache_configurator.py::mm_runtime_reservation_gb, 0.5.23)
_TRANSPORT_POOLS = ("cuda_ipc", "cuda_vmm")
#: What a page is made of, as vLLM's specs name it -> attribute of the pool.
_LAYOUT = {
    "num_kv_heads": "head_num",
    "head_size": "head_dim",
    "head_size_v": "v_head_dim",
    "dtype_bytes": "dtype.itemsize",
}
#: Batches after which every communicator of the model has been used: a prefill and some decodes.
_FIRST_BATCHES = 8


# --- roles and identity ---------------------------------------------------------------------------


def enter_scheduler(recorder: Recorder, call: Call) -> None:
    recorder.roles.update(("worker", "engine_core"))
    recorder.worker = weakref.ref(call.subject)


def leave_scheduler(recorder: Recorder, call: Call) -> None:
    """Announce the model: pools, graphs and the event loop's state are there.

    What SGLang does between its pools and this moment is the warm-up: buffers, attention backends,
    graphs. Its first batch is the phase ``request``.
    """
    finish(recorder, recorder.opened("warm_up"), call.error)
    if call.error is not None or recorder.model_ready:
        return
    recorder.model_ready = recorder.serving = True
    recorder.emit_figures("Scheduler.__init__")
    recorder.emit("ready", what="model")
    steps.start_thread(recorder)
    tracing.trace_device(recorder)
    recorder.hooks.self_check("model_ready")
    recorder.hooks.self_check("engine_ready")


def enter_launch(recorder: Recorder, call: Call) -> None:
    """Say who the process is that starts the others, so that its death is told apart."""
    identity.tell_role(recorder, call)
    steps.start_thread(recorder)


def announce_end(recorder: Recorder, call: Call) -> None:
    """Say that the engine is about to kill its processes, because it was asked to end."""
    if "api" in recorder.roles:
        recorder.emit("ready", what="end")


def leave_shutdown(recorder: Recorder, call: Call) -> None:
    end_phase(recorder, call)
    recorder.hooks.self_check("end")


def leave_event_loop(recorder: Recorder, call: Call) -> None:
    """Write what is known of the requests that were under way when the scheduler failed."""
    recorder.sampler.fail() if call.error is not None else recorder.sampler.close()
    tracing.close(recorder)


def leave_parallel_runtime(recorder: Recorder, call: Call) -> None:
    """Groups are made and the device is chosen: identity, observer of failed allocations."""
    _identify(recorder, None)


def leave_distributed(recorder: Recorder, call: Call) -> None:
    """The same, of releases in which the model runner makes the groups."""
    if not _is_draft(call.subject):
        _identify(recorder, call.subject)
        recorder.hooks.bind_instance(call.subject)


def _identify(recorder: Recorder, runner: Any) -> None:
    """Say who the process is, once.

    Args:
        recorder: of this process.
        runner: the model runner, which older releases keep the ranks in; None: the context of the
            process has them.
    """
    if recorder.label is not None:
        return
    index = _published("device", "gpu_id", runner)
    tp, pp, dp, ep, tp_size, pp_size, ep_size = (
        _published("parallel", name, runner)
        for name in (
            *("tp_rank", "pp_rank", "dp_rank", "moe_ep_rank", "tp_size", "pp_size", "moe_ep_size"),
        )
    )
    rank = kept(recorder).rank = None if tp is None else (pp or 0) * (tp_size or 1) + tp
    identity.tell(
        recorder,
        index,
        identity.label(dp, pp if (pp_size or 1) > 1 else None, None, tp),
        (tp_size or 1) * (pp_size or 1),
        rank=rank,
        local_rank=index,
        dp_rank=dp,
        pp_rank=pp,
        tp_rank=tp,
        ep_rank=ep if (ep_size or 1) > 1 else None,
    )
    failure.observe(recorder)
    recorder.hooks.self_check("device_ready")


# --- phases of a start-up -------------------------------------------------------------------------


def begin_device_init(recorder: Recorder, call: Call) -> None:
    if recorder.label is None:
        shared.begin_device_init(recorder, call)


def begin_load(recorder: Recorder, call: Call) -> None:
    """Open weight_load, or for the model that drafts, draft_load."""
    phase = "draft_load" if _is_draft(call.subject) else "weight_load"
    if not recorder.is_open(phase):
        call.token = recorder.begin(phase, call.hook.id)
        call.kept = weights.blocks_of(recorder)


def leave_load(recorder: Recorder, call: Call) -> None:
    weights.tell(recorder, call.subject, call.kept or (), _is_draft(call.subject))
    if not _is_draft(call.subject):
        recorder.hooks.bind_instance(call.subject)
        recorder.hooks.bind_model(call.subject)


def begin_sizing(recorder: Recorder, call: Call) -> None:
    begin_phase(recorder, call)
    args = reach(call.subject, "server_args")
    recorder.figures |= {
        "least_free_before_load_bytes": _bytes(call.argument("pre_model_load_memory")),
        "mem_fraction_static": _published("schedule", "mem_fraction_static", args),
    }


def keep_available(recorder: Recorder, call: Call) -> None:
    """Keep what the engine reads as free while it sizes the KV cache, the least of all ranks."""
    recorder.figures["least_free_after_load_bytes"] = _bytes(call.result)


def keep_reservation(recorder: Recorder, call: Call) -> None:
    recorder.figures["mm_reserved_bytes"] = _bytes(call.result) or None
    kept(recorder).mm_pools = call.kwargs.get("mm_feature_transport") in _TRANSPORT_POOLS


def keep_embedding_limit(recorder: Recorder, call: Call) -> None:
    """Keep how much the cache of multimodal embeddings may come to hold, where that is all that the
    reservation is for; every model has that cache."""
    reserved = recorder.figures.get("mm_reserved_bytes") is not None
    if reserved and not kept(recorder).mm_pools:
        recorder.figures["mm_cache_limit_bytes"] = call.argument("max_size", 0)


def leave_sizing(recorder: Recorder, call: Call) -> None:
    end_phase(recorder, call)
    if call.error is None:
        recorder.figures["profiled_bytes"] = call.result
    recorder.emit_figures("_profile_available_bytes")


def keep_cell(recorder: Recorder, call: Call) -> None:
    """Keep the bytes of a page of the KV cache, of all layers of this rank; of pools that differ
    in what a token takes (DeepSeek-V4, sliding windows), the tokens alone."""
    cell, page = reach(call.subject, "_cell_size"), call.argument("page_size", 2)
    tokens = reach(call.result, "max_total_num_tokens")
    if tokens is None or not page:
        return
    if isinstance(cell, int):
        recorder.figures["page_bytes"] = page * cell
    else:  # a mean has a fraction
        cell = None
        recorder.figures["half_page_bytes"] = 0  # the pools may take all
    kept(recorder).sized = page, cell, tokens


def leave_configure(recorder: Recorder, call: Call) -> None:
    """Write the plan of the KV cache, as the configurator has made it, and open the warm-up.

    A run that is to end here ends with the pools of the draft model, which follow; in a release
    that makes them elsewhere, without them.
    """
    if _is_draft(call.subject):
        return
    _write_plan(recorder, call)
    if recorder.stop_after != "kv_plan":
        if not recorder.is_open("warm_up"):
            recorder.begin("warm_up", call.hook.id)
    elif not recorder.hooks.is_bound(POOLS):
        _stop(recorder)


def leave_pools(recorder: Recorder, call: Call) -> None:
    """Stop the scheduler of a plan: every pool of its rank is there."""
    if recorder.stop_after == "kv_plan":
        _stop(recorder)


def _stop(recorder: Recorder) -> NoReturn:
    recorder.hooks.self_check("model_ready")
    recorder.hooks.self_check("engine_ready")
    raise StopAfterPlan


def _write_plan(recorder: Recorder, call: Call) -> None:
    """Write the figures, and the keys of a ``kv_plan`` event that SGLang has.

    The ranks of a start agree on the least free memory, so that each has the same number of tokens.
    """
    figures, configurator = recorder.figures, call.subject
    tokens = reach(call.result, "max_total_num_tokens")
    page, cell, most = kept(recorder).sized or (None, None, 0)
    if tokens is None or page is None:
        recorder.emit_figures("configure")
        return
    profiled = figures.get("profiled_bytes")
    limit = _published("schedule", "max_total_tokens", reach(configurator, "server_args"))
    limited = limit is not None and tokens < most
    if limited:
        figures["limited_tokens"] = tokens
    planned = None if cell is None else tokens * cell
    # what pools that differ take is not known with a limit; without, it may be what was profiled
    figures["kv_cache_bytes"] = planned if cell or limited else profiled
    recorder.emit_figures("configure")
    pool = reach(call.result, "token_to_kv_pool")
    layers, dtype = reach(pool, "layer_num"), reach(pool, "dtype")
    length = reach(configurator, "model_config.context_len")
    ranks = 1
    for name in ("tp_size", "pp_size"):
        ranks *= _published("parallel", name, configurator) or 1
    layout = {name: reach(pool, path) for name, path in _LAYOUT.items()}
    group = {
        "type": type(pool).__name__,
        "layers": layers,
        "block_size": page,
        "page_size_bytes": page * cell // layers if layers and cell else None,
        "bytes_per_token": cell,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "layout": {name: value for name, value in layout.items() if value is not None},
    }
    recorder.emit(
        "kv_plan",
        blocks=tokens // page,
        block_size=page,
        tokens=tokens,
        max_model_len=length,
        max_concurrency=tokens // page / -(-length // page) if length else None,
        available_bytes=[profiled] * ranks,
        planned_bytes=[planned] * ranks,
        bytes_per_token=cell,
        groups=[group],
        num_gpu_blocks_override=tokens // page if limited else None,
        group_count=1,
        tokens_rule="blocks",
        context_parallel=1,
        kv_transfer=False,
        connectors=_connectors(reach(configurator, "server_args")),
        shared_backing=False,
        padding_bytes=page * (cell or 0),
        max_num_seqs=reach(call.result, "max_running_requests"),
    )


def _connectors(server_args: object) -> list[Fields]:
    """Return the rows of ``capture.connectors.described`` of what SGLang has in their place."""
    given = {
        name: _published(part, name, server_args)
        for part, names in NAMES["sglang_connectors"].items()
        for name in names
    }
    mode = given.pop("disaggregation_mode")
    named = {
        "HiCache": given.pop("enable_hierarchical_cache"),
        "disaggregation": mode not in (None, "null"),
    }
    return [
        row
        for name, there in named.items()
        if there
        for row in described({"kv_connector": name, "kv_role": mode, EXTRA: given})
    ]


def begin_graph_capture(recorder: Recorder, call: Call) -> None:
    """Open the phase where graphs are to be captured; the function is called without them, too."""
    runner = call.kwargs.get("model_runner", call.subject)
    if not _is_draft(runner) and _captures():
        begin_phase(recorder, call)


def leave_graph_capture(recorder: Recorder, call: Call) -> None:
    """Keep what the engine has measured of its capture, and how many graphs it made."""
    if call.token is not None and call.error is None:
        size = _bytes(reach(call.result, "memory_usage_gb"))
        sizes = reach(call.result, "runner.capture_bs")
        recorder.figures["graph_bytes"] = size
        call.token.detail |= {"graph_bytes": size, "graphs": None if sizes is None else len(sizes)}
    end_phase(recorder, call)


def _captures() -> bool:
    """Return whether graphs of decode are captured, by the engine's own question."""
    module = sys.modules.get(_GRAPHS)
    try:
        return not module.check_cuda_graph_backend(  # type: ignore[union-attr]
            module.Phase.DECODE,  # type: ignore[union-attr]
            module.Backend.DISABLED,  # type: ignore[union-attr]
        )
    except Exception:  # a release that asks otherwise
        return True


# --- after the start-up ---------------------------------------------------------------------------


def begin_online(recorder: Recorder, call: Call) -> None:
    """Open a phase of a serving scheduler, with what the request for it says."""
    request = call.args[1] if len(call.args) > 1 else next(iter(call.kwargs.values()), None)
    detail: dict[str, object] = {"by": call.function}
    if call.hook.phase == "weight_update":
        detail["kind"] = call.hook.id.rpartition(".")[2]  # disk, tensor, distributed, ipc
    for name in ("mode", "torch_empty_cache", "flush_cache", "empty_cache", "tags"):
        value = call.kwargs.get(name, getattr(request, name, None))
        if value is not None:
            detail[name] = value if isinstance(value, (bool, str)) else [*map(str, value)]
    if recorder.probe.is_ready():
        begin_phase(recorder, call, detail)


def leave_online(recorder: Recorder, call: Call) -> None:
    """End the phase; what the call says of its success is kept with it."""
    if call.token is not None:
        success = call.result if isinstance(call.result, bool) else None
        success = getattr(call.result, "success", success)
        if isinstance(success, bool):
            call.token.detail["success"] = success
    end_phase(recorder, call)


def enter_first_steps(recorder: Recorder, call: Call) -> None:
    """Open the phase of the first batch: communicators and operator workspace come with it."""
    if recorder.serving and not kept(recorder).first_batches:
        begin_phase(recorder, call)


def leave_first_steps(recorder: Recorder, call: Call) -> None:
    """End that phase; take off what is wanted until every communicator has been used."""
    if not recorder.serving:
        return  # a batch of the start-up's own
    end_phase(recorder, call)
    kept(recorder).first_batches += 1
    if kept(recorder).first_batches >= _FIRST_BATCHES:
        recorder.hooks.release("first_steps")


# --- shared ---------------------------------------------------------------------------------------


def _is_draft(subject: Any) -> bool:
    return bool(reach(subject, "is_draft_worker"))


def _published(part: str, name: str, older: object) -> Any:
    """Return a value of the set-up that the process has published; None where it is not known.

    Args:
        part: of the set-up.
        name: of the value.
        older: what has it in a release that publishes nothing, or until that is done.
    """
    try:
        return getattr(getattr(sys.modules.get(_CONTEXT), f"get_{part}")(), name)
    except Exception:  # a context refuses what it lacks in its own way
        return getattr(older, name, None)


def _bytes(gib: float | None) -> int | None:
    """Return the whole bytes that a number of GiB was made of."""
    return None if gib is None else round(gib * _GIB)
