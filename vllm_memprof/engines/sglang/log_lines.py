"""SGLang's log lines that print a memory figure, on NPU and CUDA.

Where a line says GB, SGLang has divided by 2^30. Each "avail mem" is free memory of the device,
read right after empty_cache. Read in 0.5.6, 0.5.10.post1, 0.5.18 and 0.5.23; the lines of older
releases differ in what stands between the figures.
"""

from __future__ import annotations

import re

from vllm_memprof.engines.line_format import (
    CAPTURE,
    ENGINE,
    GRANT,
    INIT,
    LOAD,
    PLAN,
    READY,
    LineFormat,
    LogLines,
    row,
)
from vllm_memprof.engines.sglang.log_ranks import complete, notes
from vllm_memprof.engines.sglang.server_args import COMMAND, Lines, set_up

#: Figures that SGLang alone prints. Bytes unless the name says otherwise.
FIGURES: dict[str, str] = {
    "init_growth_bytes": "device memory taken by the set-up of torch.distributed",
    "free_before_load_bytes": "free before the weights are loaded",
    "free_after_load_bytes": "free after the weights are loaded",
    "k_pool_bytes": "keys of the KV pool, with its spare page",
    "v_pool_bytes": "values of the KV pool, with its spare page",
    "kv_pool_bytes": "KV pool that holds keys and values together (MLA), with its spare page",
    "pool_tokens": "tokens of the KV pool of this rank",
    "mm_reserved_bytes": "set aside for multimodal input before the KV cache is sized",
    "pools_budget_bytes": "what the pools of DeepSeek-V4 may take, as SGLang sizes them",
    "pools_tokens": "tokens that the pools of DeepSeek-V4 hold (tokens)",
    "free_after_pools_bytes": "free after the KV pools",
    "free_before_capture_bytes": "free before decode graphs are captured",
    "free_after_capture_bytes": "free after decode graphs are captured",
    "graph_prefill_bytes": "graphs of prefill",
    "free_ready_bytes": "free at the end of the start-up",
    "chunked_prefill_tokens": "longest chunk of a prefill (tokens)",
    "max_prefill_tokens": "most tokens of a prefill batch (tokens)",
    "max_running_requests": "most requests at a time (a count)",
    "free_at_update_bytes": "free before a weight update, the least",
    "emptied_before_bytes": "reserved before continue_generation called empty_cache, the last time",
    "emptied_after_bytes": "reserved after it",
    "emptied_bytes": "what it released",
    "static_refused": "1: SGLang refused to start: the static share holds no KV cache",
    "mem_fraction_static": "share of what was free before the model, for weights and KV cache",
    "least_static_fraction": "share above which a KV cache fits, according to SGLang",
}

SGLANG = "sglang"
_RUNNER = "sglang/srt/model_executor/model_runner.py::ModelRunner"
_POOL = "sglang/srt/mem_cache/memory_pool.py"
_GRAPHS = "(?:NPU|CUDA|npu|cuda) graph"
#: What stands between the words of one line. A colon or a bar is not among it: the prefix of the
#: next line has one, where a log's lines are joined.
_GAP = r"[\w ,.=\[\]-]"
#: As older releases have it, with a colon.
_ELAPSED = "(?: Time elapsed:)?"
_KV = r"KV Cache is allocated\. (?:dtype: [\w.]+ , )?#tokens: "

# fmt: off
FORMATS: tuple[LineFormat, ...] = (
    row(INIT, "Init torch distributed ends",
        rf"Init torch distributed ends\.{_GAP}{{0,40}}?\bmem usage={{init_growth_bytes GB}}",
        engine=SGLANG, cite=f"{_RUNNER}.init_torch_distributed (to 0.5.18)"),
    row(INIT, "Memory baseline taken", r"Memory baseline taken\. mem usage={init_growth_bytes GB}",
        engine=SGLANG, cite="sglang/srt/model_executor (0.5.23)"),
    # --- weights
    row(LOAD, "Load weight begin", r"Load weight begin\. avail mem={free_before_load_bytes GB}",
        equation="S1", engine=SGLANG, cite=f"{_RUNNER}.load_model"),
    row(LOAD, "Load weight end",
        rf"Load weight end\.{_GAP}{{0,200}}?\bavail mem={{free_after_load_bytes GB}}",
        equation="S1", engine=SGLANG, cite=f"{_RUNNER}.load_model"),
    row(LOAD, "Load weight end",
        rf"Load weight end\.{_GAP}{{0,240}}?\bmem usage={{weights_bytes GB}}",
        equation="S1", engine=SGLANG, cite=f"{_RUNNER}.load_model: growth of used device memory"),
    # --- KV cache
    row(GRANT, "KV Cache is allocated", _KV + "{pool_tokens} ,",
        equation="S1", engine=SGLANG, cite=f"{_POOL}::MHATokenToKVPool"),
    row(GRANT, "KV Cache is allocated", _KV + r"\d+ , K size: {k_pool_bytes GB}",
        equation="S1", engine=SGLANG),
    row(GRANT, "KV Cache is allocated",
        _KV + r"\d+ , K size: [\d.]+ GB , V size: {v_pool_bytes GB}", equation="S1", engine=SGLANG),
    row(GRANT, "KV Cache is allocated", _KV + r"\d+ , KV size: {kv_pool_bytes GB}",
        equation="S1", engine=SGLANG, cite=f"{_POOL}::MLATokenToKVPool"),
    row(GRANT, "of the KV budget for", r"Reserving {mm_reserved_bytes GB} of the KV budget for",
        engine=SGLANG, cite="sglang/srt/mem_cache/kv_cache_configurator.py"
        "::mm_runtime_reservation_gb (0.5.23)"),
    row(GRANT, "4 memory calculation",
        rf"DS[Vv]4 memory calculation:{_GAP}{{0,300}}?\b(?:raw_)?available_bytes="
        r"{pools_budget_bytes GB}",
        engine=SGLANG, cite="sglang/srt/model_executor/pool_configurator.py"
        "::DSV4PoolConfigurator.calculate_pool_sizes"),
    row(GRANT, "4 pool sizes", r"DS[Vv]4 pool sizes: full={pools_tokens} , swa=",
        engine=SGLANG, cite="pool_configurator.py::DSV4PoolConfigurator._to_config"),
    row(GRANT, "Loaded weights leave no GPU memory",
        r"Loaded weights leave no GPU memory", engine=SGLANG, sets=("static_refused",),
        cite="sglang/srt/mem_cache/kv_cache_configurator.py"
        "::KVCacheConfigurator._profile_available_bytes (0.5.23)"),
    row(GRANT, "under --mem-fraction-static",
        r"under --mem-fraction-static={mem_fraction_static}\. Raise", engine=SGLANG),
    row(GRANT, "Raise --mem-fraction-static above",
        r"Raise --mem-fraction-static above {least_static_fraction} \(", engine=SGLANG),
    row(GRANT, "Please try to increase --mem-fraction-static",
        r"Not enough memory\. Please try to increase --mem-fraction-static", engine=SGLANG,
        sets=("static_refused",), cite="sglang/srt/model_executor/pool_configurator.py"
        "::MemoryPoolConfig; model_runner.py in older releases"),
    row(PLAN, "Memory pool end", r"Memory pool end\. avail mem={free_after_pools_bytes GB}",
        engine=SGLANG, cite=f"{_RUNNER}.init_memory_pool"),
    # --- graphs
    row(CAPTURE, "raph begin",
        rf"Capture (?:target (?:decode|verify) )?{_GRAPHS} begin\.{_GAP}{{0,1500}}?\bavail"
        r" mem={free_before_capture_bytes GB}", engine=SGLANG,
        cite=f"{_RUNNER}.init_cuda_graphs; cuda_graph_setup.py (0.5.18, 0.5.23)"),
    row(CAPTURE, "raph end",
        rf"Capture (?:target (?:decode|verify) )?{_GRAPHS} end\.{_ELAPSED}{_GAP}{{0,1500}}?\bmem"
        r" usage={graph_bytes GB}", engine=SGLANG),
    row(CAPTURE, "raph end",
        rf"Capture (?:target (?:decode|verify) )?{_GRAPHS} end\.{_ELAPSED}{_GAP}{{0,1500}}?\bavail"
        r" mem={free_after_capture_bytes GB}", engine=SGLANG),
    row(CAPTURE, "raph end",
        rf"Capture (?:target prefill|piecewise) {_GRAPHS} end\.{_ELAPSED}{_GAP}{{0,1500}}?\bmem"
        r" usage={graph_prefill_bytes GB}", engine=SGLANG),
    # --- ready: a number is trusted where something follows it, because lines get cut
    row(PLAN, "max_total_num_tokens=", r"\bmax_total_num_tokens={tokens} , chunked_prefill_size",
        scope=ENGINE, engine=SGLANG, cite="sglang/srt/managers/scheduler.py::Scheduler"),
    row(PLAN, "context_len=",
        r"max_running_requests=\d+ , context_len={max_model_len} , available_gpu_mem",
        scope=ENGINE, engine=SGLANG),
    row(READY, "chunked_prefill_size=",
        r"max_total_num_tokens=\d+ , chunked_prefill_size={chunked_prefill_tokens} ,",
        engine=SGLANG),
    row(READY, "max_prefill_tokens=",
        r", max_prefill_tokens={max_prefill_tokens} , max_running_requests", engine=SGLANG),
    row(READY, "max_running_requests=",
        r", max_running_requests={max_running_requests} , context_len", engine=SGLANG),
    row(READY, "available_gpu_mem=",
        r", context_len=\d+ , available_gpu_mem={free_ready_bytes GB}", engine=SGLANG),
    # --- while it serves
    row(None, "Update engine weights online from disk",
        r"Update engine weights online from disk begin\. avail mem={free_at_update_bytes GB}",
        engine=SGLANG, cite="sglang/srt/model_executor::WeightUpdater.update_weights_from_disk"),
    # where a terminal wraps before the ">" of the arrow, that reads as the mark of a quotation
    row(None, "_cache() called",
        r"empty_cache\(\) called: reserved {emptied_before_bytes MB.1} -(?:>)?"
        r" {emptied_after_bytes MB.1} \(freed {emptied_bytes MB.1}\)", engine=SGLANG,
        cite="sglang/srt/managers/scheduler.py::Scheduler.continue_generation"),
)
# fmt: on
_LATEST = frozenset({"emptied_before_bytes", "emptied_after_bytes", "emptied_bytes"})
_LEAST = frozenset({"free_at_update_bytes"})
_ONCE_PER_MODEL = frozenset({"free_before_load_bytes", "free_after_load_bytes", "weights_bytes"})
LOG = LogLines(
    engine=SGLANG,
    formats=FORMATS,
    figures=FIGURES,
    needles=(
        b"avail mem",
        b"KV Cache is",
        b"KV budget",
        b"4 pool sizes",
        b"total_num_tokens",
        b"mem usage",
        b"_cache() called",
        b"server_args=",
    ),
    ready="The server is fired up and ready to roll",
    speaks=re.compile(
        r"sglang[/.](?:srt|launch)|\bsglang\b(?!\s*(?:==|:|\d|-))|Scheduler hit an exception"
        r"|mem[-_]fraction[-_]static|sgl_kernel/"
    ),
    broken=("Scheduler hit an exception", "Received sigquit from a child process"),
    phase_of={
        "load_model": "weight_load",
        "_profile_available_bytes": "kv_cache_plan",
        "profile_max_num_token": "kv_cache_plan",
        "init_memory_pool": "kv_cache_alloc",
        "_init_pools": "kv_cache_alloc",
        "_create_buffers": "kv_cache_alloc",
        "init_cuda_graphs": "graph_capture",
        "init_device_graphs": "graph_capture",
        "capture_decode_graph": "graph_capture",
        "forward_batch_generation": "request",
        "update_weights_from_disk": "weight_update",
        "update_weights_from_tensor": "weight_update",
        "update_weights_from_distributed": "weight_update",
    },
    latest=_LATEST,
    least=_LEAST,
    once_per_model=_ONCE_PER_MODEL,
    free_around_load=("free_before_load_bytes", "free_after_load_bytes"),
    contradiction_is_unknown=frozenset(FIGURES) - _LATEST - _LEAST - _ONCE_PER_MODEL,
    looked_for='"Load weight end", "KV Cache is allocated", "Memory pool end", '
    "max_total_num_tokens",
    refused={"static_refused": "the static share holds no KV cache"},
    # "[2026-11-21 23:58:59 DP0 TP0 EP0]"
    ranks=re.compile(r"[ \]](?P<ranks>(?:(?:DP|PP|TP|EP|ATTN_CP|MOE_DP)\d+ ?)+)\] "),
    pool_tokens="pool_tokens",
    command=COMMAND,
    argument_lines=Lines,
    set_up=set_up,
    complete=complete,
    notes=notes,
)
