"""vLLM without a server; see ``engines.driver``.

The engine's arguments go through vLLM's own parser, so that any of them works and a wrong one gets
vLLM's own message. ``plan`` is configured as ``vllm serve`` would be (the same defaults for batch
sizes), with the engine core in this process, and ends when the KV plan is known; ``offline`` is
``vllm.LLM``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from vllm_memprof.capture import plugin
from vllm_memprof.engines.driver import Options, run_driver
from vllm_memprof.engines.prompts import Request, load_requests, run_all, tokens_said
from vllm_memprof.engines.vllm.shortcuts import (
    all_replaced,
    importing_what_it_uses,
    of_a_worker,
    of_an_inspection,
    without_inductor,
)
from vllm_memprof.record.schema import ENV_STOP_AFTER

#: How long the engine may take to end itself. vLLM's default kills it at once, and with it the
#: shutdown phase.
_SHUTDOWN_TIMEOUT_S = 30
#: What a plan imports after its arguments are parsed, whatever the model is. With 0.23 it opens no
#: device; with 0.13.0 it does, so that no plan of it is a fork (``EngineRow.warm_since``).
_MODULES = (
    "vllm_memprof.engines.vllm.kv_plan_run",
    "vllm.v1.engine.core",
    "vllm_memprof.engines.vllm.one_rank_executor",
    "vllm_ascend.worker.worker",
)
#: What every plan imports later, where a release has it: a fifth of a second of a small plan.
_LATER_MODULES = (
    "vllm_memprof.capture.observer",
    "vllm_ascend.ops.qwen2_decoder",
    "vllm_ascend.ops.rel_pos_attention",
    "sympy.tensor.tensor",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; returns the exit status."""
    return run_driver({"plan": run_plan, "offline": run_offline}, argv)


@importing_what_it_uses()
def import_ahead() -> None:
    """Import what every plan imports, in a plan's order; no device is opened, nothing recorded.

    It is the way of ``main`` up to the engine's own parser, plug-ins of the engine included, and
    the modules of the engine core and the worker, which read no configuration when imported.
    """
    _parse_engine_args("plan", "model", [], server=True)
    for name in _MODULES:
        importlib.import_module(name)
    for name in _LATER_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # it reads the path of every module once, when it is first asked about code of no known file
    inspect.getmodule(compile("", "no module's file", "exec"))


def import_when_idle() -> None:
    """Import what plans with graphs need and the first plan did not wait for."""
    from torch._inductor.compile_fx import compile_fx  # noqa: F401


def main_in_fork(argv: Sequence[str]) -> int:
    """Run one mode in a fork of a process that has called ``import_ahead``; returns the status.

    The fork ends with ``os._exit``, so what a process does at its end is done here.
    """
    plugin.register_in_fork()
    status = main(argv)
    if not _is_alone():
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return status


@importing_what_it_uses()
def run_plan(options: Options, engine_args: list[str]) -> int:
    """Bring the engine up to its KV plan and stop; or on, through its largest batches.

    The engine core runs in this process: the workers, and with them every figure, are the same as
    behind a server, but no front end, tokenizer or second engine process has to start.
    """
    if options.until == "kv":
        os.environ[ENV_STOP_AFTER] = "kv_plan"
    with _without_collecting():
        args = _parse_engine_args("plan", options.model, engine_args, server=True)
        if options.devices is not None and getattr(args, "swap_space", None):
            # vLLM up to 0.13 compares 4 GiB for each tensor rank, or --swap-space, with the memory
            # of the machine it runs on (CacheConfig.verify_with_parallel_config), and makes no
            # other use of it: a simulated machine is taken to have it
            args.swap_space = 0

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from vllm_memprof.engines.vllm import kv_plan_run

        with all_replaced(of_an_inspection()):
            vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
                UsageContext.OPENAI_API_SERVER
            )
    eager = vllm_config.model_config.enforce_eager
    with all_replaced(of_a_worker()), without_inductor(eager):
        return kv_plan_run.run(vllm_config, options)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Skip the garbage collector while the engine is imported: two seconds of ten."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_offline(options: Options, engine_args: list[str]) -> int:
    """Serve prompts in this process, one after the other or several at once, and end the engine."""
    requests = load_requests(options)
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
        run_all(lambda batch: generate(llm, batch, sampling), requests, options)
        for number in range(1, options.sleep_cycles + 1):
            started = time.perf_counter()
            llm.sleep(level=1)
            llm.wake_up()
            seconds = time.perf_counter() - started
            generate(llm, requests[:1], sampling)
            print(f"sleep cycle {number}/{options.sleep_cycles}: {seconds:.2f} s", flush=True)
    finally:
        core = llm.llm_engine.engine_core  # a release without a timeout waits for some seconds
        timed = "timeout" in inspect.signature(core.shutdown).parameters
        core.shutdown(**({"timeout": _SHUTDOWN_TIMEOUT_S} if timed else {}))
    return 0


def _parse_engine_args(
    mode: str, model: str, engine_args: list[str], server: bool
) -> argparse.Namespace:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser

    def parse(add: Any, **fields: Any) -> argparse.Namespace:
        parser = add(FlexibleArgumentParser(prog=f"memprof {mode}"))
        vars(parser).update(fields)
        args: argparse.Namespace = parser.parse_args(["--model", model, *engine_args])
        return args

    _renew_thread_pool_in_children()
    if not server:
        return parse(EngineArgs.add_cli_args)
    try:  # with the server's own arguments too only if there are any: they import the server
        return parse(AsyncEngineArgs.add_cli_args, error=_refuse)
    except LookupError:
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ModuleNotFoundError:  # before 0.30
            from vllm.entrypoints.openai.cli_args import make_arg_parser

        return parse(make_arg_parser)


def _refuse(message: str) -> NoReturn:
    raise LookupError(message)


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


def generate(llm: Any, requests: Sequence[Request], sampling: Any) -> list[str]:
    """Run requests together, chats first; returns what is said of each."""
    rows = [request.row() for request in requests]
    chats = [row["messages"] for row in rows if "messages" in row]
    prompts = [row["prompt"] for row in rows if "messages" not in row]
    outputs = [] if not chats else list(llm.chat(chats, sampling, use_tqdm=False))
    if prompts:
        outputs += llm.generate(prompts, sampling, use_tqdm=False)
    return [
        tokens_said(len(output.prompt_token_ids or ()), len(output.outputs[0].token_ids))
        for output in outputs
    ]


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
