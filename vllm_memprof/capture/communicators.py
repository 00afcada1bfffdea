"""First collectives: a communicator takes its device buffers when its group first communicates, not when it is made.

The methods of torch's ``ProcessGroup`` are hooked, not the functions of ``torch.distributed``: whatever name a caller
imported arrives there, and the compiler's rewriting of those functions is not disturbed. A group that has been seen
costs a set look-up, and the hooks are taken off when the model is warm, so that serving never meets them.

Collectives are queued: a group's buffers may appear only after its call has returned (see Session.end_queued).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm_memprof.capture.session import OpenPhase

if TYPE_CHECKING:
    from vllm_memprof.capture.actions import Call
    from vllm_memprof.capture.core import Capture


#: Backends that never touch a device. torch_npu's is "custom" or "hccl", CUDA's is "nccl".
_HOST_BACKENDS = ("gloo", "mpi")


def enter(capture: Capture, call: Call) -> None:
    session = capture.session
    if session.late:
        session.settle()
    seen: set[int] = session.notes.setdefault("groups_seen", set())
    group = call.subject
    if id(group) in seen or not on_device(group, call.args[1:]):
        return
    seen.add(id(group))
    if session.probe.is_ready() and not session.is_open("communicator"):
        names, ranks = describe(group)
        detail = {"group": names[0] if names else None, "names": names, "ranks": ranks, "op": _operation(call)}
        call.token = session.begin("communicator", call.hook.id, detail)


def leave(capture: Capture, call: Call) -> None:
    if not isinstance(call.token, OpenPhase):
        return
    if call.error is None:
        capture.session.end_queued(call.token)
    else:
        capture.session.end(call.token, call.error)


def on_device(group: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether this collective runs on the device: by its first tensor, else (a barrier) by the group's backend."""
    for argument in arguments:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        device = getattr(argument, "device", None)
        if device is not None and hasattr(device, "type"):
            return bool(device.type != "cpu")
    return str(group.name()) not in _HOST_BACKENDS


def describe(group: Any) -> tuple[list[str], list[int] | None]:
    """vLLM's names for a group (several may share one communicator) and its global ranks."""
    names: list[str] = []
    ranks: list[int] | None = None
    state = sys.modules.get("vllm.distributed.parallel_state")
    for reference in list(getattr(state, "_groups", {}).values()):
        coordinator = reference()
        if coordinator is not None and getattr(coordinator, "device_group", None) is group:
            names.append(str(coordinator.unique_name))
            ranks = [int(rank) for rank in coordinator.ranks]
    if ranks is None:
        ranks = _ranks_by_torch(group)
    if not names:
        names = [str(getattr(group, "group_desc", "") or getattr(group, "group_name", "") or "unnamed")]
    return names, ranks


def _ranks_by_torch(group: Any) -> list[int] | None:
    try:
        return [int(rank) for rank in sys.modules["torch"].distributed.get_process_group_ranks(group)]
    except Exception:  # a backend object is not a registered group
        return None


def _operation(call: Call) -> str:
    return call.function.lstrip("_")
