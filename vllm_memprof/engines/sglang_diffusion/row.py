"""The row of SGLang's diffusion runtime in ``ENGINES``."""

from __future__ import annotations

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.engines.sglang.options import ARGUMENTS

_RUNTIME = "sglang.multimodal_gen.runtime"
ROW = EngineRow(
    name="sglang-diffusion",
    title="SGLang's diffusion runtime",
    package="sglang",
    server=("-m", "sglang.multimodal_gen.runtime.launch_server", "--model-path"),
    driver="vllm_memprof.engines.sglang_diffusion.driver",
    hooks="vllm_memprof.engines.sglang_diffusion.hooks",
    logger="sglang.multimodal_gen.memprof",
    roles={
        (f"{_RUNTIME}.managers.worker_bootstrap", "bootstrap_scheduler_process"): "worker",
        (f"{_RUNTIME}.managers.worker_bootstrap", "bootstrap_http_server_process"): "api",
        (f"{_RUNTIME}.entrypoints.diffusion_generator", None): "api",
        (f"{_RUNTIME}.launch_server", None): "api",
    },
    forwarders=("/sglang/multimodal_gen/runtime/platforms/",),
    modes=("offline",),
    plugins="SGLANG_PLUGINS",
    group="sglang.multimodal_gen.plugins",
    known_as=(("sglang", "sglang-diffusion"),),
    # (sglang/multimodal_gen/runtime/launch_server.py::launch_server)
    ready_line=b"[server-load] workers_ready_monotonic_ns=",
    # (the same, _start_scheduler_processes)
    fatal_lines=(b"exited during initialization", b"failed to initialize:"),
    lost_lines=(),
    stack="sglang-0.5.23",
    stack_engine="sglang",
    arguments=ARGUMENTS,
    phases=("device_init", "hccl_init", "weight_load", "request"),  # it has no KV cache
    beside=("diffusers",),
    # (0.5.23: what it imports of its extra "diffusion")
    needs="diffusers==0.37.0 cache-dit==1.5.1 imageio==2.36.0 imageio-ffmpeg==0.5.1 addict==2.4.0 "
    "python-dateutil",
    without=(
        "--sleep-cycles", "--prompts", "--images", "--at-once", "--concurrency", "--max-tokens",
        "--trace-allocations",
    ),
)  # fmt: skip
