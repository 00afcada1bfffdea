"""The row of SGLang in ``ENGINES``."""

from __future__ import annotations

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.engines.sglang.options import ARGUMENTS, DEVICES, SET_UP
from vllm_memprof.text import text

_EVERY_RANK = "leave it out: a rank waits for all others, and every rank is run"
ROW = EngineRow(
    name="sglang",
    title="SGLang",
    package="sglang",
    server=("-m", "sglang.launch_server", "--model-path"),
    driver="vllm_memprof.engines.sglang.driver",
    hooks="vllm_memprof.engines.sglang.hooks",
    equations="vllm_memprof.engines.sglang.equations",
    logger="sglang.memprof",
    roles={
        ("sglang.srt.managers.scheduler", "run_scheduler_process"): "worker",
        ("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"): "detokenizer",
        ("sglang.srt.entrypoints.engine", None): "api",
        ("sglang.launch_server", None): "api",
    },
    observing=(
        (
            r"sglang\..*",
            r"get_available_gpu_memory",
            text("sglang's reading of free memory, also for its log lines"),
        ),
    ),
    # (sglang/srt/mem_cache/memory_pool.py, 0.5.23)
    pools=dict.fromkeys(("MHATokenToKVPool", "NPUMHATokenToKVPool"), "FullAttentionSpec"),
    process_title="sglang",  # (sglang/srt/managers/scheduler.py, 0.5.23)
    forwarders=("/sglang/srt/utils/common.py", "/sglang/srt/platforms/"),
    parallel_state="sglang.srt.distributed.parallel_state",
    failed_requests="vllm_memprof.engines.sglang.steps:failed_requests",
    modes=("serve", "offline", "plan"),
    plugins="SGLANG_PLUGINS",
    group="sglang.srt.plugins",
    known_as=(("sglang", "sglang"),),
    # The socket listens earlier, before the server's own first request was answered.
    # (sglang/srt/entrypoints/http_server.py::_wait_and_warmup)
    ready_line=b"The server is fired up and ready to roll",
    # (sglang/srt/managers/scheduler.py::run_scheduler_process)
    fatal_lines=(b"Scheduler hit an exception",),
    # (sglang/srt/entrypoints/engine.py, srt/managers/tokenizer_manager.py: handlers of SIGQUIT)
    lost_lines=(b"Received sigquit from a child process", b"It usually means one child failed"),
    stack="sglang-0.5.23",
    option_files=("srt/server_args.py", "srt/arg_groups/fields/*.py"),
    stack_engine="sglang",
    arguments=ARGUMENTS,
    devices=DEVICES,
    phases=(
        *("device_init", "hccl_init", "weight_load", "kv_cache_sizing"),
        *("kv_cache_alloc", "graph_capture", "warm_up", "request"),
    ),
    profiles=False,
    log_lines="vllm_memprof.engines.sglang.log_lines",
    whole_pools=True,
    compared=text(
        "different engines: KV cache, tokens, and allocated, reserved and non-torch memory "
        "at a phase of the same name compare; of the terms of the two equations the "
        "request alone does, since SGLang runs no profile and takes its weights with all "
        "that was loaded; its KV cache that fits the device is estimated"
    ),
    set_up=SET_UP,
    without=(
        "--sleep-cycles",
        "--ranks one",
        "--ranks edges",
        "--rank",
        "memprof fit",
        "memprof share",
        "memprof calibrate",
        "--until ready",
    ),
    instead={
        "--ranks one": _EVERY_RANK,
        "--ranks edges": _EVERY_RANK,
        "--rank": _EVERY_RANK,
        "--until ready": "memprof offline --engine sglang runs requests of your own",
        "memprof share": "memprof plan sizes each of them alone",
        "memprof calibrate": "its logs print free memory at other moments: memprof explain",
        "memprof fit": "it runs no profile, so that no plan knows what stays free at the "
        "peak: memprof sweep plans some values, e.g. --over mem-fraction-static=0.7,0.8",
    },
)
