"""The identity of a process: its ranks from the worker object and vLLM's parallel groups.

Never a rank alone: under data parallelism several workers call themselves rank 0.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from contextlib import suppress
from typing import Any

from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder

_ENGINE_NAME = re.compile(r"EngineCore_DP(\d+)")


def tell(
    recorder: Recorder, device: int | None, label: str, world_size: int | None, **known: object
) -> None:
    """Write who this process is, and keep its device and its label.

    Args:
        recorder: of this process.
        device: index of its device.
        label: of its rank.
        world_size: ranks of its replica.
        known: of rank, local_rank, dp_rank, pp_rank, tp_rank, ep_rank and model.
    """
    recorder.probe.device, recorder.label = device, label
    runtime = recorder.probe.runtime
    soc = None if runtime is None or device is None else str(runtime.get_device_name(device))
    recorder.emit(
        "identity", **_role(recorder), **known, device_index=device, label=label, soc=soc,
        world_size=world_size,
    )  # fmt: skip


def tell_role(recorder: Recorder, call: Call) -> None:
    """Write what a process without a device is, so that its death is told apart."""
    recorder.roles.add(call.hook.role)
    recorder.emit("identity", **_role(recorder))


def _role(recorder: Recorder) -> Fields:
    return {"role": recorder.role, "roles": sorted(recorder.roles)}


def tell_worker(recorder: Recorder, worker: Any) -> None:
    """Write who a worker of vLLM is, once the parallel groups exist."""
    parallel = reach(worker, "parallel_config")
    state, ranks = sys.modules.get("vllm.distributed.parallel_state"), {}
    for name in ("tp", "pp", "pcp", "ep"):
        # vLLM asserts that the group exists; a dense model has no expert group
        with suppress(Exception):
            ranks[name] = getattr(state, f"get_{name}_group")().rank_in_group
    dp, dp_known = data_parallel_rank(parallel)
    tell(
        recorder,
        reach(worker, "device.index"),
        label(
            dp if dp_known else None,
            ranks.get("pp") if _has_several(parallel, "pipeline") else None,
            ranks.get("pcp") if _has_several(parallel, "prefill_context") else None,
            ranks.get("tp"),
        ),
        reach(parallel, "world_size"),
        rank=reach(worker, "rank"),
        local_rank=reach(worker, "local_rank"),
        dp_rank=dp,
        model=reach(worker, "model_config.model"),
        **{f"{name}_rank": ranks.get(name) for name in ("pp", "tp", "ep")},
    )


def label(
    dp_rank: int | None, pp_rank: int | None, pcp_rank: int | None, tp_rank: int | None
) -> str:
    """Return ``"TP0"``, ``"PP1 TP0"``, ``"DP0 TP1"``: only TP is always named.

    In the order of vLLM's own names of workers; PCP is prefill context parallelism.
    """
    ranks = {"DP": dp_rank, "PP": pp_rank, "PCP": pcp_rank, "TP": tp_rank or 0}
    return " ".join(f"{name}{rank}" for name, rank in ranks.items() if rank is not None)


def data_parallel_rank(parallel: Any) -> tuple[int | None, bool]:
    """Return the data-parallel rank, and True if the run has several.

    vLLM resets the data-parallel size to 1 for dense models; the engine core's process name still
    carries its rank. Releases without that reset (no ``data_parallel_index`` beside the rank) name
    a single engine core ``DP0`` too.
    """
    several = _has_several(parallel, "data")
    if several or hasattr(parallel, "data_parallel_index"):
        for process in (multiprocessing.current_process(), multiprocessing.parent_process()):
            match = _ENGINE_NAME.search(reach(process, "name") or "")
            if match:
                return int(match.group(1)), True
    return reach(parallel, "data_parallel_rank"), several


def _has_several(parallel: Any, kind: str) -> bool:
    return int(reach(parallel, f"{kind}_parallel_size") or 1) > 1
