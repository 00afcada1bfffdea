"""Sleep, wake-up and weight updates: phases that come after the start-up, and memory that is counted but not there.

In sleep mode weights and KV cache live in a pool of the caching allocator whose physical memory the engine unmaps and
maps itself. ``reserved`` and ``allocated`` count the pool all the time, the device does not; read as usual, non-torch
memory of a sleeping worker would be tens of GiB below zero. So the pool's own list is asked for what it has unmapped
(sizes only: no device call), and the probe takes that off.

A weight update is one phase from ``start_weight_update`` to ``finish_weight_update``, over several calls of the worker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm_memprof.capture import emptycache
from vllm_memprof.capture.session import OpenPhase

if TYPE_CHECKING:
    from vllm_memprof.capture.actions import Call
    from vllm_memprof.capture.core import Capture
    from vllm_memprof.capture.session import Session

_UPDATE = "weight_update"


def enter_pool_sleep(capture: Capture, call: Call) -> None:
    """The engine unmaps first and empties the cache then: at that moment the figure has to be there."""
    capture.session.probe.set_unmapped(_unmapped_by_sleep(call.subject))


def leave_pool_sleep(capture: Capture, call: Call) -> None:
    if call.error is not None:
        capture.session.probe.set_unmapped(None)  # nobody knows how far it came


def leave_pool_wake_up(capture: Capture, call: Call) -> None:
    probe = capture.session.probe
    given = {"tags": call.args[1] if len(call.args) > 1 else None} | call.kwargs
    if call.error is not None:
        probe.set_unmapped(None)
        return
    awake: set[str] = capture.session.notes.setdefault("awake_tags", set())
    if given["tags"] is None:
        awake.clear()
        probe.set_unmapped(0)
    else:
        awake.update(given["tags"])
        probe.set_unmapped(_unmapped_by_sleep(call.subject, awake))


def enter_sleep(capture: Capture, call: Call) -> None:
    capture.session.notes.pop("awake_tags", None)
    level = call.kwargs.get("level", call.args[1] if len(call.args) > 1 else 1)
    _begin(capture.session, call, "sleep", {"level": level})


def enter_wake_up(capture: Capture, call: Call) -> None:
    tags = call.kwargs.get("tags", call.args[1] if len(call.args) > 1 else None)
    _begin(capture.session, call, "wake_up", {"tags": None if tags is None else list(tags)})


def leave_phase(capture: Capture, call: Call) -> None:
    if isinstance(call.token, OpenPhase):
        capture.session.end(call.token, call.error)
        if call.error is None:
            emptycache.call_after(capture, call.token.phase)


def enter_update(capture: Capture, call: Call) -> None:
    """A part of an update that may also be the whole of it. Loading the model for the first time is not an update."""
    if not capture.session.is_open("weight_load"):
        _begin(capture.session, call, _UPDATE, {"by": _method(call)})


def enter_update_start(capture: Capture, call: Call) -> None:
    _end_update(capture, None)  # one that the engine gave up
    _begin(capture.session, call, _UPDATE, {"by": _method(call)})
    capture.session.notes[_UPDATE] = call.token


def leave_update_start(capture: Capture, call: Call) -> None:
    if call.error is not None:
        _end_update(capture, call.error)


def leave_update_finish(capture: Capture, call: Call) -> None:
    _end_update(capture, call.error)


def _method(call: Call) -> str:
    """The name that was hooked; the function behind it may have none of its own."""
    return call.hook.targets[0].rpartition(".")[2]


def _begin(session: Session, call: Call, phase: str, detail: dict[str, Any]) -> None:
    if session.probe.is_ready() and not session.is_open(phase):
        call.token = session.begin(phase, call.hook.id, detail)


def _end_update(capture: Capture, error: BaseException | None) -> None:
    opened = capture.session.notes.pop(_UPDATE, None)
    if isinstance(opened, OpenPhase):
        capture.session.end(opened, error)
        if error is None:
            emptycache.call_after(capture, _UPDATE)


def _unmapped_by_sleep(pool: Any, awake: Collection[str] = ()) -> int | None:
    """Bytes of the pool that a sleep unmaps and a wake-up of these tags has not mapped again.

    vllm_ascend/device_allocator/camem.py::CaMemAllocator, 0.23.0, and vllm/device_allocator/cumem.py: ``handle[1]`` is
    the aligned size; the persistent tag stays mapped.
    """
    try:
        kept = {getattr(pool, "sleep_persistent_tag", None), *awake}
        return sum(
            int(data.handle[1]) for data in pool.pointer_to_data.values() if data.tag not in kept
        )
    except (AttributeError, TypeError, IndexError):
        return None
