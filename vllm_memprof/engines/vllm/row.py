"""The row of vLLM, and of vllm-ascend with it, in ``ENGINES``."""

from __future__ import annotations

import re

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.engines.vllm.options import ARGUMENTS, DEVICES, PART, SET_UP
from vllm_memprof.text import text

ROW = EngineRow(
    name="vllm",
    title="vLLM",
    package="vllm",
    server=("-m", "vllm.entrypoints.cli.main", "serve"),
    driver="vllm_memprof.engines.vllm.driver",
    hooks="vllm_memprof.engines.vllm.hooks",
    equations="vllm_memprof.engines.vllm.equations",
    logger="vllm.memprof",
    roles={
        ("vllm.engine.arg_utils", None): "api",
        ("vllm.v1.engine.core", None): "engine_core",
        ("vllm.v1.worker.worker_base", None): "worker",
    },
    forwarders=(
        "/vllm_ascend/patch/platform/patch_torch_accelerator.py",
        "/vllm/utils/mem_utils.py",
        "/vllm/platforms/interface.py",
    ),
    observing=(
        (
            r"vllm\.platforms\.\w+",
            r"get_current_memory_usage",
            text("vLLM's reading of memory around the weight load"),
        ),
        (
            r"vllm\.utils(\.mem_utils)?",
            r"(measure|current_memory_usage|__enter__|__exit__)",
            text("a memory reading"),
        ),
    ),
    process_title="VLLM",  # (vllm/utils/system_utils.py::set_process_title, 0.23.0)
    parallel_state="vllm.distributed.parallel_state",
    modes=("serve", "offline", "plan"),
    plugins="VLLM_PLUGINS",
    group="vllm.general_plugins",
    known_as=(("vllm_ascend", "vllm-ascend"), ("vllm", "vllm")),
    ready_line=b"Application startup complete",
    # (vllm/v1/engine/core.py, run_engine_core)
    fatal_lines=(b"EngineCore failed to start", b"EngineCore encountered a fatal error"),
    # (vllm/v1/engine/core_client.py, monitor_engine_cores: 0.13 and 0.18; 0.23 and 0.30)
    lost_lines=(b"died unexpectedly, shutting down client", b"engine core exited unexpectedly"),
    # (vllm/entrypoints/cli/serve.py, run_headless; vllm/v1/engine/core.py, _initialize_kv_caches)
    head_line=re.compile(rb"with head node address (?:tcp://)?(\S+:\d+)"),
    # (vllm/v1/engine/exceptions.py, EngineDeadError)
    dead_core_line=b"EngineCore encountered an issue",
    core_ready_line=b"init engine (profile, create kv cache, warmup model) took",
    stack_engine="vllm-ascend",
    arguments=ARGUMENTS,
    devices=DEVICES,
    set_up=SET_UP,
    part=PART,
    cuda="vllm",
    script=True,
    option_files=(
        "engine/arg_utils.py",
        "entrypoints/openai/cli_args.py",
        "entrypoints/cli/serve.py",
    ),
    # With 0.13.0 the import of a worker opens a device, so that a fork has one context less.
    warm_since=(0, 23),
)
