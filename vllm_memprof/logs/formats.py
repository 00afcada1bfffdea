"""The table of engine log lines that print a memory figure: those of vLLM and vllm-ascend.

``engines.line_format`` says how a row is written; the rows of other engines stand in
their own folders (``log_lines`` of their row). ``FORMATS`` has all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.line_format import (
    ASCEND,
    CAPTURE,
    CUDA,
    ENGINE,
    GRANT,
    INIT,
    LOAD,
    OOM,
    PLAN,
    PROFILE,
    READY,
    LineFormat,
    LogLines,
    row,
)

#: What engines print that have lines of their own.
OF_ENGINES: tuple[LogLines, ...] = tuple(
    import_module(row.log_lines).LOG for row in ENGINES.values() if row.log_lines is not None
)
#: Figures that only a log gives, besides ``record.schema.FIGURES``. Bytes unless the name says
#: otherwise.
LOG_FIGURES: dict[str, str] = {
    "consumed_bytes": "free at the start less free after profiling (E6); CPU: all but the KV cache",
    "printed_peak_activation_bytes": "peak activation of E6; in some releases + graph estimate",
    "graph_estimate_bytes": "graph memory estimated before the KV cache was sized (E5, E6)",
    "graph_estimate_charged": "1: the engine subtracts its graph estimate, as it says; 0: not",
    "graph_difference_bytes": "|graph - estimate| as printed",
    "non_kv_cache_bytes": "sum that the equation subtracts, as memory_profiling prints it",
    "profile_before_reserved_bytes": "reserved before the profile run",
    "profile_end_reserved_bytes": "reserved after the profile run, before its last empty_cache",
    "profile_end_allocated_peak_bytes": "allocated peak, before the last empty_cache",
    "profile_end_non_torch_bytes": "non-torch after the profile run, before its last empty_cache",
    "profile_after_reserved_bytes": "reserved after the profile run and its last empty_cache",
    "mm_profile_reserved_bytes": "reserved after the multi-modal part of the profile run",
    "mm_profile_allocated_peak_bytes": "allocated peak after the multi-modal part",
    "mm_profile_non_torch_bytes": "non-torch after the multi-modal part of the profile run",
    "distributed_before_reserved_bytes": "reserved before HCCL was initialised",
    "distributed_before_allocated_peak_bytes": "allocated peak before HCCL was initialised",
    "distributed_after_reserved_bytes": "reserved after HCCL was initialised",
    "distributed_after_allocated_peak_bytes": "allocated peak after HCCL was initialised",
    "distributed_after_non_torch_bytes": "non-torch after HCCL was initialised",
    "used_less_allocated_bytes": "device used less allocated, after profiling: non-torch (E2, E0a)",
    "draft_weights_bytes": "weights of a draft model, where a line of its own prints them (V0)",
    "profile_after_free_within_requested_bytes": "free after profiling, of the requested memory",
    "corrected_peak_activation_bytes": "peak activation as the log's author corrected it",
    "claimed_request_base_bytes": "base of the request, according to the log's author",
    "suggested_requested_bytes": "--kv-cache-memory that the engine suggests to fit the request",
    "suggested_requested_printed_bytes": "the same, rounded",
    "suggested_limit_bytes": "--kv-cache-memory that the engine suggests for the whole device",
    "suggested_limit_printed_bytes": "the same, rounded",
    "equivalent_utilization": "ratio that gives the same KV cache without a graph estimate",
    "suggested_utilization": "utilization that keeps the previous KV cache (a ratio)",
    "mm_ipc_bytes": "reserved for multi-modal decoding in the front end",
    "kv_cache_reduced_bytes": "KV cache after that reservation",
    "kv_cache_minimum_bytes": "KV cache that one request of max_model_len needs",
    "estimated_max_model_len": "longest request that fits, according to the engine (tokens)",
    "halved": "1: the budget was halved for operator workspace (310P)",
    "startup_refused": "1: the engine refused to start: less is free than it requests",
    "no_cache_blocks": "1: the engine refused to start: no KV block fits",
    "kv_cache_minimum_tokens": "max_model_len that the KV cache has to hold (tokens)",
    "kv_cache_stored_tokens": "tokens that the KV cache holds, less than that",
    "warm_up_reserved_bytes": "reserved after warm-up",
    "warm_up_allocated_bytes": "allocated after warm-up",
    "serving_reserved_bytes": "reserved while serving, the most seen",
    "serving_allocated_bytes": "allocated while serving, the most seen",
    "sleep_freed_bytes": "freed by sleep mode",
    "sleep_in_use_bytes": "still in use while asleep",
    "sleep_communicator_bytes": "HCCL and attention workspace that sleep mode released",
    "encoder_budget_tokens": "budget of the encoder cache (tokens)",
    "encoder_profile_items": "multi-modal items that the profile run used (a count)",
    "npu_smi_total_bytes": "npu-smi: size of the card",
    "npu_smi_before_bytes": "npu-smi: used on the card before the start",
    "npu_smi_after_bytes": "npu-smi: used on the card after the start",
    "npu_smi_process_bytes": "npu-smi: used by one process",
    "oom_requested_bytes": "size of the failed allocation",
    "oom_device_total_bytes": "total capacity at the OOM",
    "oom_allocated_bytes": "allocated at the OOM",
    "oom_allocated_peak_bytes": "allocated peak at the OOM",
    "oom_active_bytes": "active at the OOM",
    "oom_free_bytes": "free on the device at the OOM",
    "oom_reserved_bytes": "reserved at the OOM",
    "oom_unallocated_bytes": "reserved but unallocated at the OOM",
    "oom_process_bytes": "held by the process at the OOM, non-torch included",
    "oom_graph_pools_bytes": "allocated in private pools (graphs) at the OOM",
    "oom_non_torch_bytes": "non-torch at the OOM",
    "oom_npu_workspace": "1: the operator workspace allocator failed, not the caching allocator",
    "oom_outside_torch": "1: the runtime failed for a library outside torch (HCCL, ATB)",
    **{name: meaning for log in OF_ENGINES for name, meaning in log.figures.items()},
}


def _measured(anchor: str, moment: str, stage: int) -> list[LineFormat]:
    """Return the three debug lines of vllm-ascend at one point of the profile run."""
    rows = []
    for printed, figure in (
        ("torch_memory", "reserved"),
        ("torch_peak", "allocated_peak"),
        ("non_torch_memory", "non_torch"),
    ):
        name = f"{moment}_{figure}_bytes"
        name = "initial_non_torch_bytes" if name == "distributed_before_non_torch_bytes" else name
        pattern = rf"(?<!\S){printed} {anchor} is {{{name} G}}"
        rows.append(row(stage, printed, pattern, engine=ASCEND))
    return rows


def _of_either(
    stage: int, anchor: str, pattern: str | None = None, **given: Any
) -> list[LineFormat]:
    """Return a line about graphs as vLLM and as vllm-ascend print it: the word before tells."""
    return [
        row(stage, anchor, f"{word} {pattern or anchor}", engine=engine, **given)
        for word, engine in (("CUDA", CUDA), ("ACL", ASCEND))
    ]


_ASCEND_GRANT = "vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory"
_ASCEND_READY = "vllm_ascend/worker/worker.py::NPUWorker.compile_or_warm_up_model"
_CUDA_GRANT = "vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory"
_CUDA_READY = "vllm/v1/worker/gpu_worker.py::Worker.compile_or_warm_up_model"
_PROFILING = "vllm/utils/mem_utils.py::MemoryProfilingResult.__repr__"
_V0 = "vllm/worker/worker.py::Worker.determine_num_available_blocks (0.6.5 to 0.9)"
_V0_FIRST = "vllm/worker/worker.py::Worker.determine_num_available_blocks (0.6.4)"
_UTIL = "--gpu-memory-utilization"

#: In this order; a number that one row has read is not read again by a later one.
# fmt: off
FORMATS: tuple[LineFormat, ...] = (
    # --- start-up, before anything is loaded
    row(INIT, "Free memory on device",
        r"Free memory on device (?P<device>[a-z]+:\d+)? \({initial_free_bytes/GiB} /"
        r" {device_total_bytes GiB}\) on startup is less than", sets=("startup_refused",),
        cite="vllm/v1/worker/utils.py::request_memory; vllm_ascend"
        " worker.py::NPUWorker.init_device"),
    row(INIT, "than desired GPU memory",
        r"utilization \({gpu_memory_utilization} , {requested_bytes GiB}\)"),
    row(INIT, "worker init memory snapshot",
        r"free_memory={initial_free_bytes GiB} , total_memory={device_total_bytes GiB}",
        cite="vllm/utils/mem_utils.py::MemorySnapshot.__repr__ (0.18 to 0.32)"),
    row(INIT, "worker init memory snapshot", r"[, ]non_torch_memory={initial_non_torch_bytes GiB}"),
    row(INIT, "worker requested memory", r"worker requested memory: {requested_bytes GiB}",
        cite="vllm/v1/worker/gpu_worker.py::Worker.init_device (0.18 to 0.32)"),
    # --- weights: the value is GiB also where the line says GB
    row(LOAD, "oading model weights took", r"oading model weights took {weights_bytes GB.4}",
        cite="vllm_ascend/worker/model_runner_v1.py::NPUModelRunner.load_model; vllm V0, and"
        " V1 to 0.7"),
    row(LOAD, "odel loading took", r"odel loading took {weights_bytes G} (?:memory )?and",
        engine=CUDA,
        cite="vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.load_model (0.8 to 0.33)"),
    row(PROFILE, "ncoder cache will be initialized",
        r"with a budget of {encoder_budget_tokens} tokens, and profiled with"
        r" {encoder_profile_items} \D",
        cite="vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.profile_run (0.9 to 0.33)"),
    # --- V0: one line in 0.6.4; later in one sentence, or one value a line
    row(PROFILE, "emory profiling results", r"total_gpu_memory={device_total_bytes GiB}",
        equation="E0a", cite=_V0_FIRST),
    row(PROFILE, "emory profiling results",
        r"peak_torch_memory={profile_after_allocated_peak_bytes GiB}", equation="E0a"),
    row(PROFILE, "emory profiling results", r"non_torch_memory={used_less_allocated_bytes GiB}",
        equation="E0a"),
    row(GRANT, "emory profiling results", r"kv_cache_size={kv_cache_bytes GiB}", equation="E0a"),
    row(GRANT, "emory profiling results",
        r"gpu_memory_utilization={gpu_memory_utilization!}", equation="E0a"),
    row(PROFILE, "total_gpu_memory",
        r"total_gpu_memory \({device_total_bytes GiB}\) x gpu_memory_utilization"
        r" \({gpu_memory_utilization}\)", equation="E0", cite=_V0),
    row(PROFILE, "total_gpu_memory", r"gpu_memory_utilization \([0-9.]+\) = {requested_bytes GiB}",
        equation="E0", cite=_V0),
    row(PROFILE, "total_gpu_memory", r"total_gpu_memory {device_total_bytes GiB}", equation="E0",
        cite=_V0),
    row(PROFILE, "vLLM instance can use", r"vLLM instance can use {requested_bytes GiB}",
        equation="E0", cite=_V0),
    row(PROFILE, "model weights take", r"model weights take {weights_bytes GiB}", equation="E0",
        cite=_V0),
    row(PROFILE, "non_torch_memory", r"non_torch_memory (?:takes )?{non_torch_increase_bytes GiB}",
        equation="E0", cite=_V0),
    row(PROFILE, "activation peak memory",
        r"activation peak memory (?:takes )?{peak_activation_bytes GiB}", equation="E0", cite=_V0),
    row(GRANT, "reserved for KV Cache is", r"memory reserved for KV Cache is {kv_cache_bytes GiB}",
        equation="E0", cite=_V0),
    row(GRANT, "available_kv_cache_memory", r"available_kv_cache_memory {kv_cache_bytes GiB}",
        equation="E0"),
    # --- profiling
    row(PROFILE, "eal profiling", r"results of real profiling", opens="real", engine=ASCEND),
    row(PROFILE, "peak_memory",
        r"(?<!\S)peak_memory after profiling is {profile_after_allocated_peak_bytes G}",
        equation="E2", opens="real"),
    row(PROFILE, "non_torch_memory",
        r"(?<!\S)non_torch_memory after profiling is {used_less_allocated_bytes G}", equation="E2",
        when="real"),
    *_measured("before init HCCL", "distributed_before", INIT),
    *_measured("after init HCCL", "distributed_after", INIT),
    *_measured("before profiling", "profile_before", PROFILE),
    *_measured("after profiling multi-modal", "mm_profile", PROFILE),
    *_measured(r"after profiling, before empty_cache\(\)", "profile_end", PROFILE),
    *_measured(r"after profiling, after empty_cache\(\)", "profile_after", PROFILE),
    *_measured("after profiling", "profile_after", PROFILE),
    row(PROFILE, "peak_activation_memory new",
        r"memory new is {corrected_peak_activation_bytes G}"),
    row(None, "nitial free memory:",
        "nitial free memory: {claimed_request_base_bytes GiB} [*x\u00d7] 0?\\.\\d"),
    row(PROFILE, "nitial free memory:", r"nitial free memory: {initial_free_bytes GiB}",
        cite=f"{_CUDA_GRANT} (DEBUG)"),
    row(PROFILE, "equested memory:",
        r"Requested memory: {gpu_memory_utilization} \(util\), {requested_bytes GiB}",
        cite=f"{_CUDA_GRANT} (DEBUG)"),
    row(PROFILE, "ree memory after profiling",
        r"memory after profiling: {profile_after_free_bytes GiB} \(total\)",
        cite=f"{_CUDA_GRANT} (DEBUG)"),
    row(PROFILE, "within requested",
        r"{profile_after_free_within_requested_bytes GiB} \(within requested\)"),
    row(PROFILE, "otal non KV cache memory", r"otal non KV cache memory: {non_kv_cache_bytes GiB}",
        cite=_PROFILING),
    row(PROFILE, "torch peak memory increase",
        r"torch peak memory increase: {peak_activation_bytes GiB}", cite=_PROFILING),
    row(PROFILE, "forward increase memory",
        r"non-torch forward increase memory: {non_torch_increase_bytes GiB}",
        cite=f"{_PROFILING} (to 0.26)"),
    row(PROFILE, "total consumed (from",
        r"total consumed \(from mem_get_info\): {consumed_bytes GiB}",
        cite=f"{_PROFILING} (from 0.27; vllm-ascend prints it too, and does not use it)"),
    row(PROFILE, "weights memory:", r"weights memory: {weights_bytes GiB}", cite=_PROFILING),
    row(PROFILE, "CUDA graph memory:",
        r"Estimated CUDA graph memory: {graph_estimate_bytes GiB} total",
        cite="vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.profile_cudagraph_memory"
        " (0.18 to 0.33); vllm-ascend 0.21 and 0.22 call it"),
    # --- what the equation grants
    row(GRANT, "vailable memory:", r"Available memory: {kv_cache_bytes} , total memory:",
        equation="E2", cite="vllm_ascend/worker/worker_v1.py (0.9 to 0.11), worker.py (0.12 to"
        " 0.14)::determine_available_memory"),
    row(GRANT, "total memory:",
        r"memory: (?P<kv>\d+) , total memory: {device_total_bytes!}(?! [KMGT]i?B?\b)",
        equation="E2"),
    row(GRANT, "vailable memory:",
        r"Available memory: {kv_cache_bytes GiB} , (?:total|requested) memory:", equation="E2"),
    row(GRANT, "total memory:", r"GiB , total memory: {device_total_bytes GiB}", equation="E2"),
    row(GRANT, "requested memory:", r"GiB , requested memory: {requested_bytes GiB}",
        equation="E2"),
    row(GRANT, "halved for workspace",
        r"Available KV cache memory: {kv_cache_bytes GiB} \(halved for workspace\)", equation="E4p",
        sets=("halved",),
        cite="vllm_ascend/_310p/worker_310p.py::NPUWorker310.determine_available_memory (0.23"
        " to main)"),
    row(GRANT, "vailable KV cache memory:", r"Available KV cache memory: {kv_cache_bytes GiB}",
        cite=f"{_ASCEND_GRANT} (0.15 to main); {_CUDA_GRANT} (0.9 to 0.33)"),
    row(GRANT, "nitial free memory", r"nitial free memory {initial_free_bytes GiB} , reserved"
        r" {kv_cache_memory_bytes_arg GiB} (?:memory )?for KV",
        cite=f"{_ASCEND_GRANT} (0.23 to main); {_CUDA_GRANT} (0.11 to 0.33)"),
    # Before the available memory: what it is made of. (vllm-ascend, from 0.26)
    row(GRANT, "persisted startup plan",
        r"persisted startup plan [^:]{0,60}: kv_cache_memory_bytes={startup_plan_bytes} \(",
        cite="vllm/v1/worker/startup_plan.py::maybe_apply_startup_plan (0.27 to 0.30)"),
    row(GRANT, "multi-group budget",
        r"multi-group budget by [\d.]+ \({kv_largest_group_page_bytes} bytes/block over"
        r" {kv_all_page_bytes} total page bytes\)", engine=ASCEND,
        cite="vllm_ascend/worker/worker.py::NPUWorker._scale_kv_cache_memory_for_multi_group (from"
        " 0.28)"),
    row(GRANT, "KV cache reuse maps",
        r"scale logical KV budget by (?=\d+\.\d{3}\.){kv_layer_reuse}\.", engine=ASCEND,
        cite=f"{_ASCEND_GRANT} (from 0.26)"),
    row(GRANT, "Sparse KV offload is enabled",
        r"enlarge total available memory to {kv_planner_bytes GiB}", engine=ASCEND,
        cite="vllm_ascend/worker/worker.py::NPUWorker.update_available_memory_for_sparse_kv_offload"
        " (0.26)"),
    row(GRANT, "Sparse KV offload memory plan", r"planner={kv_planner_bytes GiB}", engine=ASCEND,
        cite="vllm_ascend/worker/worker.py::NPUWorker._apply_kv_offload_decode_memory_constraints"
        " (from 0.27)"),
    row(GRANT, "for KV cache on node",
        r"Auto set \({kv_cache_bytes/GiB} / {device_total_bytes/GiB}\) GiB for KV cache",
        equation="CPU",
        cite="vllm/v1/worker/cpu_worker.py::CPUWorker.determine_available_memory (0.23 to 0.32)"),
    row(GRANT, "for KV cache on node",
        r"with {requested_bytes GiB} requested memory for the worker", engine=CUDA),
    row(GRANT, "memory was consumed by", r"{consumed_bytes GiB} memory was consumed by non-kv",
        equation="CPU"),
    *_of_either(GRANT, "graph memory profiling is enabled", sets=("graph_estimate_charged",),
        cite=f"{_CUDA_GRANT} (0.18 to 0.33); {_ASCEND_GRANT} (0.21, 0.22)"),
    row(GRANT, "equivalent to --gpu",
        rf"current {_UTIL}={{gpu_memory_utilization}} is equivalent to"
        rf" {_UTIL}={{equivalent_utilization}} without"),
    *_of_either(GRANT, "graph memory profiling is disabled", clears=("graph_estimate_charged",),
        cite=f"{_CUDA_GRANT} (0.20 to 0.33); {_ASCEND_GRANT} (0.21, 0.22)"),
    row(GRANT, "re-enabling it", rf"increasing {_UTIL} from {{gpu_memory_utilization}} to"
        rf" (?=\d\.\d{{4}}\.){{suggested_utilization}}\."),
    row(GRANT, "graph memory profiling will be enabled", r"profiling will be enabled by default",
        engine=CUDA, clears=("graph_estimate_charged",), cite=f"{_CUDA_GRANT} (0.18, 0.19)"),
    row(GRANT, "same effective KV cache",
        rf"increase {_UTIL} from {{gpu_memory_utilization}} to {{suggested_utilization}} to"
        rf" maintain", engine=CUDA),
    row(GRANT, "same effective KV cache",
        rf"increase {_UTIL} to (?=\d\.\d{{4}}\.){{suggested_utilization}}\."),
    row(GRANT, "Reserving", r"Reserving {mm_ipc_bytes GiB} of GPU memory for frontend", engine=CUDA,
        cite="vllm/multimodal/gpu_ipc_memory.py::reserve_mm_ipc_gpu_memory (0.25 to 0.33)"),
    row(GRANT, "cache memory reduced to",
        r"KV cache memory reduced to {kv_cache_reduced_bytes GiB}", engine=CUDA),
    # --- the KV plan
    row(PLAN, "KV cache is needed", r"{kv_cache_minimum_bytes GiB} KV cache is needed",
        cite="vllm/v1/core/kv_cache_utils.py::check_enough_kv_cache_memory"),
    row(PLAN, "available KV cache memory (", r"available KV cache memory \({kv_cache_bytes GiB}\)"),
    row(PLAN, "estimated maximum model length",
        r"maximum model length is {estimated_max_model_len} \."),
    row(PLAN, "No available memory for the cache", r"for the cache blocks",
        sets=("no_cache_blocks",),
        cite="vllm/v1/core/kv_cache_utils.py::check_enough_kv_cache_memory; vllm/worker/worker.py"
        "::raise_if_cache_size_invalid (V0)"),
    row(PLAN, "that can be stored in KV cache",
        r"max(?:imum)? seq(?:uence)? len(?:gth)? \({kv_cache_minimum_tokens}\) is larger than the"
        r" maximum number of tokens that can be stored in KV cache \({kv_cache_stored_tokens}\)",
        cite="vllm/worker/worker.py::raise_if_cache_size_invalid (V0, and V1 to 0.7)"),
    row(PLAN, "KV cache size", r"KV cache size: {tokens} tokens", scope=ENGINE,
        cite="vllm/v1/core/kv_cache_utils.py (0.8 to 0.33)"),
    row(PLAN, "aximum concurrency for",
        r"aximum concurrency for {max_model_len} tokens per request: {max_concurrency.2} x\b",
        scope=ENGINE, cite="vllm/v1/core/kv_cache_utils.py; vllm/executor/executor_base.py (V0)"),
    row(PLAN, " blocks:", r"# (?:GPU|CUDA|NPU|gpu|cuda|npu) blocks: {blocks} , # CPU", scope=ENGINE,
        cite="vllm/executor/executor_base.py (V0)"),
    # the number behind it ends the line: where that was cut, nothing would tell
    row(PLAN, "Overriding num_gpu_blocks",
        r"num_gpu_blocks={fitting_blocks} with num_gpu_blocks_override=", scope=ENGINE,
        cite="vllm/v1/core/kv_cache_utils.py::may_override_num_blocks (to 0.19),"
        " get_kv_cache_configs (0.20 to 0.32)"),
    # --- graphs, ready
    row(CAPTURE, "Graph capturing finished",
        r"Graph capturing finished in \d+ secs?, took {graph_bytes GiB}",
        cite="vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.capture_model"),
    *_of_either(CAPTURE, "graph pool memory", r"graph pool memory: {graph_bytes GiB} \(actual\)",
        cite=f"{_CUDA_READY} (0.18 to 0.33); {_ASCEND_READY} (0.21, 0.22)"),
    row(CAPTURE, "graph pool memory", r"{graph_estimate_bytes GiB} \(estimated\)"),
    row(CAPTURE, "graph pool memory", r"difference: {graph_difference_bytes GiB} \("),
    row(READY, "Free memory on device",
        r"Free memory on device (?P<device>[a-z]+:\d+)? \({initial_free_bytes/GiB} /"
        r" {device_total_bytes GiB}\) on startup \.",
        cite=f"{_ASCEND_READY} (0.20 to main); {_CUDA_READY} (0.11 to 0.33)"),
    row(READY, "memory utilization is",
        r"memory utilization is \({gpu_memory_utilization} , {requested_bytes GiB}\)"),
    row(READY, "Actual usage", r"Actual usage: {weights_bytes GiB} for weights", equation="E4"),
    row(READY, "Actual usage", r"Actual usage is {weights_bytes GiB} for weight\b", equation="E5"),
    row(READY, "for consumed memory", r"Actual usage is {consumed_bytes GiB} for consumed memory",
        equation="E6"),
    row(READY, "for consumed memory",
        r"consumed memory [^,]{0,40} , {printed_peak_activation_bytes GiB} for peak activation",
        equation="E6"),
    row(READY, "for peak activation",
        r"for weights? , {peak_activation_bytes GiB} for peak activation"),
    row(READY, "for non-torch memory", r"{non_torch_increase_bytes GiB} for non-torch memory"),
    row(READY, "raph memory", r"{graph_bytes GiB} for (?:CUDAGraph|NPU graph) memory"),
    row(READY, "--kv-cache-memory=", r"with `--kv-cache-memory={suggested_requested_bytes}`"),
    row(READY, "to fit into requested memory",
        r"\({suggested_requested_printed_bytes GiB}\) to fit into requested"),
    row(READY, "--kv-cache-memory=", r", or `--kv-cache-memory={suggested_limit_bytes}`"),
    row(READY, "to fully utilize", r"\({suggested_limit_printed_bytes GiB}\) to fully utilize"),
    row(READY, "urrent kv cache memory in use",
        r"urrent kv cache memory in use is {kv_cache_bytes GiB}", engine=CUDA),
    row(READY, "urrent KV cache memory:", r"Current KV cache memory: {kv_cache_bytes GiB}",
        equation="E4"),
    row(READY, "After warmup", r"torch reserved memory {warm_up_reserved_bytes GiB}",
        equation="E4"),
    row(READY, "After warmup", r"torch allocated memory {warm_up_allocated_bytes GiB}",
        equation="E4"),
    row(None, "torch reserved memory:",
        r"reserved memory: {serving_reserved_bytes GiB}, torch allocated memory:"
        r" {serving_allocated_bytes GiB}", engine=ASCEND,
        cite="vllm_ascend/worker/worker.py::NPUWorker.log_memory_stats (0.23, main)"),
    row(None, "Sleep mode", r"Sleep mode (?:\(level=\S+\) )?freed {sleep_freed_bytes GiB} memory,"
        r" {sleep_in_use_bytes GiB} memory is still in use",
        cite="GPUWorker.sleep; NPUWorker.sleep"),
    row(None, "attention workspace memory",
        r"attention workspace memory: {sleep_communicator_bytes GiB.3}", engine=ASCEND,
        cite="vllm_ascend/device_allocator/sleep_mem_optimized.py::SleepWakeupManager.sleep"
        " (0.23 to main)"),
    # --- out of memory
    row(OOM, "NPUWorkspaceAllocator tried",
        r"tried to allocate {oom_requested_bytes ?} \(NPU (?P<device>\d+);"
        r" {oom_device_total_bytes ?} total capacity; {oom_free_bytes ?} free\)", engine=ASCEND,
        sets=("oom_npu_workspace",), cite="torch_npu NPUWorkspaceAllocator.cpp"),
    row(OOM, "ried to allocate",
        r"Tried to allocate {oom_requested_bytes ?} \([NG]PU (?P<device>\d+);"
        r" {oom_device_total_bytes ?} total capacity; {oom_allocated_bytes ?} already allocated;",
        cite="torch_npu NPUCachingAllocator.cpp; torch CUDACachingAllocator.cpp (to 2.0)"),
    row(OOM, "current active", r"already allocated; {oom_active_bytes ?} current active;",
        engine=ASCEND),
    row(OOM, "free;", r"(?:active|allocated); {oom_free_bytes ?} free;"),
    row(OOM, "reserved in total", r"free; {oom_reserved_bytes ?} reserved in total"),
    row(OOM, "ried to allocate",
        r"Tried to allocate {oom_requested_bytes ?}\. GPU (?P<device>\d+) has a total capaci?ty"
        r" of {oom_device_total_bytes ?} of which {oom_free_bytes ?} is free", engine=CUDA,
        cite="torch CUDACachingAllocator.cpp (2.1 and later)"),
    row(OOM, "this process has", r"this process has {oom_process_bytes ?} memory in use",
        engine=CUDA),
    row(OOM, "is allocated by PyTorch",
        r"allocated memory {oom_allocated_bytes ?} is allocated by PyTorch", engine=CUDA),
    row(OOM, "allocated in private pools",
        r"with {oom_graph_pools_bytes ?} allocated in private pools", engine=CUDA),
    row(OOM, "by PyTorch but unallocated",
        r"and {oom_unallocated_bytes ?} is reserved by PyTorch but un", engine=CUDA),
    # the runtime, for what asks it without torch: communicators, operator libraries
    row(OOM, "Failed to allocate resource[DeviceMemory]",
        r"DeviceMemory\] with info \[size:{oom_requested_bytes}\]", engine=ASCEND,
        sets=("oom_outside_torch",), cite="CANN runtime, error EL0004 (8.2)"),
    row(OOM, "total_memory:", r"^ total_memory: {oom_device_total_bytes G}"),
    row(OOM, "torch_memory:", r"^ torch_memory: {oom_reserved_bytes G}"),
    row(OOM, "torch_memory_peak:", r"^ torch_memory_peak: {oom_allocated_peak_bytes G}"),
    row(OOM, "non_torch_memory:", r"^ non_torch_memory: {oom_non_torch_bytes G}"),
    # --- npu-smi, as a person notes it down: used / size, in MiB; "before the service was started",
    # "after the service was started", "held"
    row(INIT, "\u670d\u52a1\u542f\u52a8\u524d",
        "\u52a8\u524d : {npu_smi_before_bytes/MiB.0} / {npu_smi_total_bytes/MiB.0}(?!\\w)",
        engine=ASCEND),
    row(None, "\u670d\u52a1\u542f\u52a8\u540e",
        "\u52a8\u540e : {npu_smi_after_bytes/MiB.0} / {npu_smi_total_bytes/MiB.0}(?!\\w)",
        engine=ASCEND),
    row(None, "\u8fdb\u7a0b\u5360\u7528", "\u5360\u7528 : {npu_smi_process_bytes/MiB.0} \\)",
        engine=ASCEND),
    *(line for log in OF_ENGINES for line in log.formats),
)
# fmt: on
