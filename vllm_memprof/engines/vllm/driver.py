"""The engine without a server: ``python -m vllm_memprof.engines.vllm.driver {offline|plan} ...``.

Runs under the engine's interpreter. The engine's arguments go through vLLM's own parser, so that
any of them works and a wrong one gets vLLM's own message. ``plan`` is configured as ``vllm serve``
would be (the same defaults for batch sizes), with the engine core in this process, and ends when
the KV plan is known; ``offline`` is ``vllm.LLM``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_memprof.capture import plugin
from vllm_memprof.engines.offline import add_arguments, driver_parser, run_all, run_driver
from vllm_memprof.engines.vllm.model_inspection import in_a_fork
from vllm_memprof.engines.vllm.prompts import Request, load_requests
from vllm_memprof.engines.vllm.rank_choice import MODES
from vllm_memprof.record.schema import ENV_STOP_AFTER

#: How long the engine may take to end itself. vLLM's default kills it at once, and with it the
#: shutdown phase.
_SHUTDOWN_TIMEOUT_S = 30
_PR_SET_TIMERSLACK = 29
#: What a plan imports after its arguments are parsed, whatever the model is. With 0.23 it opens no
#: device; with 0.13.0 it does, so that no plan of it is a fork (``EngineRow.warm_since``).
_MODULES = (
    "vllm_memprof.engines.vllm.kv_plan_run",
    "vllm.v1.engine.core",
    "vllm_memprof.engines.vllm.one_rank_executor",
    "vllm_ascend.worker.worker",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; returns the exit status."""
    return run_driver(_parser(), {"plan": run_plan, "offline": run_offline}, argv)


def import_engine() -> None:
    """Import what every plan imports, in a plan's order; no device is opened, nothing recorded.

    It is the way of ``main`` up to the engine's own parser, plug-ins of the engine included, and
    the modules of the engine core and the worker, which read no configuration when imported.
    """
    _parse_engine_args("plan", "model", [], server=True)
    for name in _MODULES:
        importlib.import_module(name)


def main_in_fork(argv: Sequence[str]) -> int:
    """Run one mode in a fork of a process that has called ``import_engine``; returns the status.

    The fork ends with ``os._exit``, so what a process does at its end is done here.
    """
    plugin.register_in_fork("api")
    status = main(argv)
    if not _is_alone():
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return status


def run_plan(options: argparse.Namespace, engine_args: list[str]) -> int:
    """Bring the engine up to its KV plan and stop; or on, through its largest batches.

    The engine core runs in this process: the workers, and with them every figure, are the same as
    behind a server, but no front end, tokenizer or second engine process has to start.
    """
    if options.devices is not None:
        _let_threads_doze()
    if options.until == "kv":
        os.environ[ENV_STOP_AFTER] = "kv_plan"
    with _without_collecting():
        args = _parse_engine_args("plan", options.model, engine_args, server=True)
        if options.devices is not None:
            _leave_out_swap_space(args)

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from vllm_memprof.engines.vllm import kv_plan_run

        with in_a_fork():
            vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
                UsageContext.OPENAI_API_SERVER
            )
    return kv_plan_run.run(
        vllm_config, options.ranks, options.rank, options.devices, options.until == "ready"
    )


def _let_threads_doze() -> None:
    """Let sleeps of this thread, and of what it starts, end up to a millisecond late.

    A thread of torch_npu looks every two microseconds, or as seldom as the kernel lets it, whether
    operators are done (``release_thread``): 17,000 times a second, a tenth of a plan's processor
    time. Simulated operators are done at once.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, 1_000_000, 0, 0, 0)


def _leave_out_swap_space(args: argparse.Namespace) -> None:
    """Take a simulated machine to have the host memory that the engine would swap to.

    vLLM up to 0.13 compares 4 GiB for each tensor rank, or ``--swap-space``, with the memory of the
    machine it runs on (``CacheConfig.verify_with_parallel_config``), and makes no other use of it.
    """
    if getattr(args, "swap_space", 0):
        print(f"memprof plan: --swap-space {args.swap_space:g} is not compared with this machine")
        args.swap_space = 0


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Skip the garbage collector while the engine is imported: two seconds of ten."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_offline(options: argparse.Namespace, engine_args: list[str]) -> int:
    """Serve prompts in this process, one after the other or several at once, and end the engine."""
    skip = options.on_error == "skip"
    requests = load_requests(options.prompts, options.prompt, options.images, skip=skip)
    sleep_mode = ["--enable-sleep-mode"] if options.sleep_cycles else []
    with _without_collecting():
        args = _parse_engine_args(
            "offline", options.model, [*sleep_mode, *engine_args], server=False
        )

        from vllm.engine.arg_utils import EngineArgs

        from vllm import LLM, SamplingParams

    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    try:
        _run_all(llm, requests, sampling, options, skip)
        for number in range(1, options.sleep_cycles + 1):
            started = time.perf_counter()
            llm.sleep(level=1)
            llm.wake_up()
            seconds = time.perf_counter() - started
            _generate(llm, requests[:1], sampling)
            print(f"sleep cycle {number}/{options.sleep_cycles}: {seconds:.2f} s", flush=True)
    finally:
        core = llm.llm_engine.engine_core  # a release without a timeout waits for some seconds
        timed = "timeout" in inspect.signature(core.shutdown).parameters
        core.shutdown(**({"timeout": _SHUTDOWN_TIMEOUT_S} if timed else {}))
    return 0


def _run_all(
    llm: Any,
    requests: Sequence[Request],
    sampling: Any,
    options: argparse.Namespace,
    skip: bool,
) -> None:
    """Run the requests, some together, and say of each how it went."""

    def generate(batch: Sequence[Request]) -> list[tuple[int, int]]:
        return [
            (len(output.prompt_token_ids or ()), len(output.outputs[0].token_ids))
            for output in _generate(llm, batch, sampling)
        ]

    run_all(generate, requests, options, skip)


def _parser() -> argparse.ArgumentParser:
    parser, modes = driver_parser(
        "vllm_memprof.engines.vllm.driver", "vLLM's",
        plan="stop when the KV plan is known", offline="generate for some prompts",
    )  # fmt: skip
    plan, offline = modes["plan"], modes["offline"]
    plan.add_argument(
        "--until", choices=("kv", "ready"), default="kv", help="where to stop (default kv)"
    )
    plan.add_argument(
        "--ranks", choices=MODES, default="all", help="which ranks to run (default all)"
    )
    plan.add_argument("--rank", type=int, help="the rank of --ranks one (default 0)")
    plan.add_argument(
        "--devices", type=int, help="devices of the simulated machine; without it every rank is run"
    )
    add_arguments(offline)
    offline.add_argument(
        "--sleep-cycles", type=int, default=0, help="sleep and wake up so often after the prompts"
    )
    return parser


def _parse_engine_args(
    mode: str, model: str, engine_args: list[str], server: bool
) -> argparse.Namespace:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog=f"memprof {mode}")
    if server:  # so that the arguments of a vllm serve command can be planned unchanged
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ModuleNotFoundError:  # before 0.30
            from vllm.entrypoints.openai.cli_args import make_arg_parser

        parser = make_arg_parser(parser)
    else:
        parser = EngineArgs.add_cli_args(parser)
    args: argparse.Namespace = parser.parse_args(["--model", model, *engine_args])
    _renew_thread_pool_in_children()
    return args


def _renew_thread_pool_in_children() -> None:
    """Let forked engine processes start with a thread pool of their own.

    ``LLM`` forks its processes by default. They inherit torch's pool without its threads; torch
    renews it at the first use, without a lock, and in torch 2.10 two threads that do so at once end
    the process ("Invalid thread pool"). Renewing it before there is a second thread leaves nothing
    to race for. Asking for the number of threads that is already set changes nothing else.
    (caffe2/utils/threadpool/pthreadpool-cpp.cc)
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def _generate(llm: Any, requests: Sequence[Request], sampling: Any) -> list[Any]:
    """Return the outputs of requests; those that are chats run first."""
    rows = [request.row() for request in requests]
    chats = [row["messages"] for row in rows if "messages" in row]
    prompts = [row["prompt"] for row in rows if "messages" not in row]
    outputs = [] if not chats else list(llm.chat(chats, sampling, use_tqdm=False))
    if prompts:
        outputs += llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def _is_alone() -> bool:
    """Return whether no peer waits for this process; taking a model down takes seconds."""
    return "vllm_memprof.engines.vllm.absent_peers" in sys.modules


if __name__ == "__main__":
    status = main()
    if _is_alone():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
