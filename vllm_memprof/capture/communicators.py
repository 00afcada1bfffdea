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

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import OpenPhase, Recorder
from vllm_memprof.engines import ENGINES

_MIB = 1 << 20
_BUFFERS = 2
_DEFAULT_MIB = {"HCCL_BUFFSIZE": 200, "P2P_HCCL_BUFFSIZE": 20}
#: Operations between two ranks: torch_npu gives them communicators of their own, beside the
#: group's.
_P2P = ("send", "recv", "recv_anysource", "batch_isend_irecv")
#: Modules in which engines keep their groups by name.
_PARALLEL_STATE = [row.parallel_state for row in ENGINES.values() if row.parallel_state]
#: Backends that never touch a device. torch_npu's is "custom" or "hccl", CUDA's is "nccl".
_HOST_BACKENDS = ("gloo", "mpi")


def enter(recorder: Recorder, call: Call) -> None:
    if recorder.late:
        recorder.settle()
    seen = recorder.notes.groups_seen
    group = call.subject
    operation = call.function.lstrip("_")
    p2p = operation in _P2P
    if (id(group), p2p) in seen or not on_device(group, call.args[1:]):
        return
    seen.add((id(group), p2p))
    if recorder.probe.is_ready() and not recorder.is_open("communicator"):
        names, ranks = describe(group)
        detail: dict[str, object] = {
            "group": names[0],
            "names": names,
            "ranks": ranks,
            "op": operation,
            "p2p": p2p,
            **buffers(group, p2p, recorder.probe.backend_name),
        }
        call.token = recorder.begin("communicator", call.hook.id, detail)


def leave(recorder: Recorder, call: Call) -> None:
    if isinstance(call.token, OpenPhase) and call.error is None:
        recorder.end_queued(call.token)
    elif isinstance(call.token, OpenPhase):
        recorder.end(call.token, call.error)


def on_device(group: Any, arguments: tuple[Any, ...]) -> bool:
    """Return True if this collective runs on the device.

    The first tensor decides, without one (a barrier) the group's backend.
    """
    for argument in arguments:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if (kind := reach(argument, "device.type")) is not None:
            return bool(kind != "cpu")
    return str(group.name()) not in _HOST_BACKENDS


def describe(group: Any) -> tuple[list[str], list[int] | None]:
    """Return the engine's names for a group (several may share a communicator), and its ranks."""
    names: list[str] = []
    ranks: list[int] | None = None
    for module in _PARALLEL_STATE:
        for reference in list(getattr(sys.modules.get(module), "_groups", {}).values()):
            coordinator = reference()
            if coordinator is not None and getattr(coordinator, "device_group", None) is group:
                names.append(str(coordinator.unique_name))
                ranks = [int(rank) for rank in coordinator.ranks]
    if ranks is None:
        with contextlib.suppress(Exception):  # a backend object is not a registered group
            known = sys.modules["torch"].distributed.get_process_group_ranks(group)
            ranks = [int(rank) for rank in known]
    own = getattr(group, "group_desc", "") or getattr(group, "group_name", "") or "unnamed"
    return names or [str(own)], ranks


def buffers(group: Any, p2p: bool, backend: str | None) -> dict[str, int | str | None]:
    """Read the configured size of a communicator's buffers, and where it is configured.

    Returns:
        ``buffer_bytes`` (of all buffers together) and ``buffer_source`` (hccl_config, the name of
        the environment variable, or "default"); None each where the backend is not HCCL.
    """
    if backend != "npu":
        return {"buffer_bytes": None, "buffer_source": None}
    variable = "P2P_HCCL_BUFFSIZE" if p2p else "HCCL_BUFFSIZE"
    configured = None
    if not p2p:  # the options that the group was made with; asking makes nothing
        with contextlib.suppress(Exception):  # another backend, or a release without it
            options = group._get_backend(sys.modules["torch"].device("npu")).options
            configured = dict(options.hccl_config).get("hccl_buffer_size")
    given = os.environ.get(variable, "")
    if isinstance(configured, int) and configured > 0:
        mib, source = configured, "hccl_config"
    elif given.isdigit() and int(given) > 0:
        mib, source = int(given), variable
    else:
        mib, source = _DEFAULT_MIB[variable], "default"
    return {"buffer_bytes": _BUFFERS * mib * _MIB, "buffer_source": source}
