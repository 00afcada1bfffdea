"""What the launcher knows of each engine: a row of data, and no code.

How its server is started, by which name its plug-ins are allowed, and what it prints when it is
ready, when it fails, and when it lost a process of its own. A third engine is a row here, a folder
in ``engines`` with its driver, and a module of hook rows in ``capture/hooks``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_memprof.errors import UsageError


@dataclass(frozen=True)
class EngineRow:
    """One engine, as the launcher starts and follows it."""

    name: str  # of --engine
    title: str
    package: str  # that has to be importable, and whose version counts
    server: tuple[str, ...]  # arguments of the interpreter; the model follows
    driver: str  # module that runs it without a server; known here by name alone
    modes: tuple[str, ...]  # serve | offline | plan
    plugins: str  # variable: an allow-list of plug-ins by name
    group: str  # of our entry point
    #: Name of a run's engine by the package that tells it: the first that is installed counts.
    known_as: tuple[tuple[str, str], ...]
    #: Its line at readiness, for an engine in which our own event is missing.
    ready_line: bytes
    #: What it logs when it has failed and is about to end.
    fatal_lines: tuple[bytes, ...]
    #: What it logs when a process of its own ended and nobody had asked.
    lost_lines: tuple[bytes, ...]
    #: A host of a deployment that has no API server prints no ``ready_line``: what it prints of its
    #: head, HOST:PORT in the group, and what each of its engine cores prints when it is ready.
    head_line: re.Pattern[bytes] | None = None
    core_ready_line: bytes | None = None
    #: What its API server logs when an engine core said that it fails, on whatever host.
    dead_core_line: bytes | None = None
    #: Stack of a simulated device where none is named; None: the default of ``sim``.
    stack: str | None = None
    stack_engine: str = ""  # ``engine`` of the stacks that it runs on
    #: Packages that it needs besides, which no stack of a simulated device has.
    needs: str | None = None
    #: Options of memprof that it has no counterpart for.
    without: tuple[str, ...] = ()
    #: One of those -> what to do, where that is not to leave it out.
    instead: Mapping[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)  # unless the user set them
    #: Its server is a script that pip installs, for which Python does not look for modules in the
    #: current folder, as it does for ``python -m``.
    script: bool = False
    #: First release whose plans can be forked after the engine's import; see ``launch.warm``. None:
    #: no release.
    warm_since: tuple[int, int] | None = None


VLLM = EngineRow(
    name="vllm",
    title="vLLM",
    package="vllm",
    server=("-m", "vllm.entrypoints.cli.main", "serve"),
    driver="vllm_memprof.engines.vllm.driver",
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
    script=True,
    # With 0.13.0 the import of a worker opens a device, so that a fork has one context less.
    warm_since=(0, 23),
)
_EVERY_RANK = "leave it out: a rank waits for all others, and every rank is run"
SGLANG = EngineRow(
    name="sglang",
    title="SGLang",
    package="sglang",
    server=("-m", "sglang.launch_server", "--model-path"),
    driver="vllm_memprof.engines.sglang.driver",
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
    stack_engine="sglang",
    without=(
        "--sleep-cycles",
        "--ranks one",
        "--ranks edges",
        "--rank",
        "--fit",
        "--share",
        "--until ready",
    ),
    instead={
        "--ranks one": _EVERY_RANK,
        "--ranks edges": _EVERY_RANK,
        "--rank": _EVERY_RANK,
        "--until ready": "memprof offline --engine sglang runs requests of your own",
        "--fit": "it runs no profile, so that no plan knows what stays free at the peak: memprof "
        "sweep plans some values, e.g. --over mem-fraction-static=0.7,0.8",
    },
)
SGLANG_DIFFUSION = EngineRow(
    name="sglang-diffusion",
    title="SGLang's diffusion runtime",
    package="sglang",
    server=("-m", "sglang.multimodal_gen.runtime.launch_server", "--model-path"),
    driver="vllm_memprof.engines.sglang_diffusion.driver",
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
    # (0.5.23: what it imports of its extra "diffusion")
    needs="diffusers==0.37.0 cache-dit==1.5.1 imageio==2.36.0 imageio-ffmpeg==0.5.1 addict==2.4.0 "
    "python-dateutil",
    without=(
        "--sleep-cycles", "--prompts", "--images", "--at-once", "--concurrency", "--max-tokens",
        "--trace-allocations",
    ),
)  # fmt: skip
ENGINES = {row.name: row for row in (VLLM, SGLANG, SGLANG_DIFFUSION)}


def refuse(row: EngineRow, option: str) -> None:
    """Refuse an option that an engine has no counterpart for.

    Raises:
        UsageError: it has none.
    """
    if option in row.without:
        hint = row.instead.get(option, "leave it out")
        raise UsageError(f"{option} has no counterpart in {row.title}", hint=hint)


def engine_row(name: str) -> EngineRow:
    """Return the row of an engine.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in ENGINES:
        raise UsageError(f"--engine {name!r} is not known", hint=f"one of {', '.join(ENGINES)}")
    return ENGINES[name]
