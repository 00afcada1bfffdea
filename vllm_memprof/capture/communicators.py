"""First collectives: a communicator takes its device buffers when its group first communicates.

The methods of torch's ``ProcessGroup`` are hooked, not the functions of ``torch.distributed``:
whatever name a caller imported arrives there, and the compiler's rewriting of those functions is
not disturbed. A group that has been seen costs a set look-up, and the hooks are taken off when the
model is warm, so that serving never meets them.

Collectives are queued: a group's buffers may appear only after its call has returned (see
Recorder.end_queued).

The size of the buffers is fixed when the communicator is made, by the first of these that is
given: ``hccl_config`` of the group's options (vllm-ascend sets one for most of its groups), the
environment, HCCL's default. Each communicator holds two buffers of that size, to send and to
receive. (CANN 9.0: HCCL_BUFFSIZE; torch_npu 2.10: ``ProcessGroupHCCL.cpp`` and
``OptionsManager::GetHcclBufferSize``, ``GetP2PBufferSize``)
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.engines import ENGINES

_BUFFERS = 2 << 20  # two, in MiB


def enter(recorder: Recorder, call: Call) -> None:
    recorder.settle()
    seen, group, operation = recorder.groups_seen, call.subject, call.function.lstrip("_")
    p2p = operation in NAMES["point_to_point"]
    key = id(group), p2p
    if key in seen or not _on_device(group, call.args[1:]):
        return
    seen.add(key)
    if recorder.probe.is_ready() and not recorder.is_open("communicator"):
        detail = {**_describe(group), "op": operation, "p2p": p2p}
        if recorder.probe.backend == "npu":
            detail |= buffers(group, p2p)
        call.token = recorder.begin("communicator", call.hook.id, detail)


def leave(recorder: Recorder, call: Call) -> None:
    if call.token is not None:
        succeeded = call.error is None
        recorder.end_queued(call.token) if succeeded else recorder.end(call.token, call.error)


def _on_device(group: Any, arguments: tuple[Any, ...]) -> bool:
    """Return True if this collective runs on the device.

    The first tensor decides, without one (a barrier) the group's backend.
    """
    for argument in arguments:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if (kind := reach(argument, "device.type")) is not None:
            return bool(kind != "cpu")
    # backends that never touch a device; torch_npu's is "custom" or "hccl", CUDA's is "nccl"
    return str(group.name()) not in ("gloo", "mpi")


def _describe(group: Any) -> Fields:
    """Return the engine's names for a group (several may share a communicator), and its ranks."""
    names: list[str] = []
    ranks: Any = None
    for row in ENGINES.values():
        kept_by_name = reach(sys.modules.get(row.parallel_state or ""), "_groups") or {}
        for reference in list(kept_by_name.values()):
            coordinator = reference()
            if reach(coordinator, "device_group") is group:
                names.append(str(coordinator.unique_name))
                ranks = coordinator.ranks
    if ranks is None:
        with contextlib.suppress(Exception):  # a backend object is not a registered group
            ranks = sys.modules["torch"].distributed.get_process_group_ranks(group)
    if not names:
        names = [str(reach(group, "group_desc") or reach(group, "group_name") or "unnamed")]
    ranks = None if ranks is None else list(ranks)
    return {"group": names[0], "names": names, "ranks": ranks}


def buffers(group: Any, p2p: bool) -> Fields:
    """Read the configured size of a communicator's buffers of HCCL, and where it is configured.

    Returns:
        ``buffer_bytes`` (of all buffers together) and ``buffer_source``: hccl_config, the name of
        the environment variable, or "default".
    """
    variable, default = ("P2P_HCCL_BUFFSIZE", 20) if p2p else ("HCCL_BUFFSIZE", 200)
    sizes: Fields = {}
    if not p2p:  # the options that the group was made with; asking makes nothing
        with contextlib.suppress(Exception):  # another backend, or a release without it
            options = group._get_backend(sys.modules["torch"].device("npu")).options
            sizes["hccl_config"] = dict(options.hccl_config).get("hccl_buffer_size")
    sizes |= {variable: os.environ.get(variable), "default": default}
    for source, size in sizes.items():
        if str(size).isdigit() and int(size) > 0:
            return {"buffer_bytes": _BUFFERS * int(size), "buffer_source": source}
    return {}
