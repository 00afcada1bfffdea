"""A run of SGLang that ends when the pools of every rank are there.

The main process and the schedulers start as they do for a server: the same set-up, the same checks,
a process for each rank. Left out are the tokenizer and the detokenizer, which hold no memory of a
device, and all that follows the pools. A scheduler is stopped by capture (``StopAfterPlan``); it
waits for the others, which may still need it, until SGLang ends them all.

Imports SGLang where it starts an engine: the schedulers, which SGLang spawns, import this module as
well. Read in 0.5.23.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from typing import Any, NoReturn

from vllm_memprof.capture import plugin
from vllm_memprof.capture.hook import StopAfterPlan
from vllm_memprof.engines.driver import OptionError
from vllm_memprof.record.schema import PlannedRanks

#: What a scheduler tells the process that started it, without what a plan does not come to.
_PLANNED = {"status": "ready", "max_total_num_tokens": None, "max_req_input_len": None}


def run(server_args: Any, devices: int | None) -> int:
    """Plan all ranks; returns the exit status.

    The schedulers are ended by SGLang's own handler at exit.

    Args:
        server_args: of SGLang, as its server would have them.
        devices: of the simulated machine, None on real hardware.

    Raises:
        OptionError: some ranks have no device, or the KV cache is sized later.
    """
    from sglang.srt.entrypoints.engine import Engine

    class PlanEngine(Engine):  # type: ignore[misc]
        """An engine that stops once its schedulers have their pools."""

        @classmethod
        def _launch_scheduler_processes(
            cls, server_args: Any, port_args: Any, run_scheduler_process_func: Any, **more: Any
        ) -> NoReturn:
            """Start the schedulers, and wait until each has its pools or one of them fails."""
            check_sizing(server_args)
            ranks = ranks_of_start(devices)
            started, _ = super()._launch_scheduler_processes(
                server_args, port_args, run_scheduler_until_planned, **more
            )
            started.wait_for_ready()
            if ranks is not None:
                plugin.emit("ranks", **ranks)
            plugin.emit("ready", what="plan")
            raise StopAfterPlan

    try:
        PlanEngine(server_args=server_args)
    except StopAfterPlan:
        return 0
    print("memprof plan: this release of SGLang starts its ranks elsewhere", file=sys.stderr)
    return 1


def run_scheduler_until_planned(*args: Any, **kwargs: Any) -> None:
    """Run one scheduler; when it has its pools, say so and wait to be ended.

    Takes what ``run_scheduler_process`` takes.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    pipe_writer = kwargs["pipe_writer"] if "pipe_writer" in kwargs else args[6]
    try:
        run_scheduler_process(*args, **kwargs)
    except StopAfterPlan:
        pipe_writer.send(_PLANNED)
        while True:
            signal.pause()


def check_sizing(server_args: Any) -> None:
    """Refuse a set-up of which the pools are resized after the graphs were captured (CUDA).

    Raises:
        OptionError: it is one.
    """
    from sglang.srt.arg_groups import overrides

    planned = getattr(overrides, "post_capture_kv_sizing_planned", None)
    if planned is not None and planned(server_args):
        raise OptionError(
            "this set-up sizes the KV cache again after its graphs, and a plan ends before them: "
            "memprof offline --engine sglang reports it, and with "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0 it is sized once"
        )


def ranks_of_start(devices: int | None) -> dict[str, object] | None:
    """Return the keys of a ``ranks`` event; None where the sizes are not known.

    Raises:
        OptionError: some ranks have no device on a simulated machine.
    """
    try:
        from sglang.srt import runtime_context

        parallel = runtime_context.get_parallel()
        # attention data parallelism lies inside the tensor ranks
        size = int(parallel.dp_size) * int(parallel.tp_size) * int(parallel.pp_size)
        nodes = int(parallel.nnodes)
    except Exception:  # a release that keeps them elsewhere
        return None
    if devices is not None and nodes > 1:
        raise OptionError(f"--nnodes {nodes}: the simulated device is one machine; leave it out")
    if devices is not None and size > devices:
        raise OptionError(
            f"{size} ranks, and this machine has {devices} devices: a plan of SGLang runs every "
            "rank; a profile of a machine with more devices has room for them"
        )
    if nodes > 1:
        return None
    everyone = list(range(size))
    why = "SGLang's ranks wait for each other"
    return asdict(PlannedRanks("all", why, size, everyone, {}, []))
