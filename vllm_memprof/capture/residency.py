"""Sleep, wake-up and weight updates: phases after the start-up, and memory counted but not mapped.

In sleep mode weights and KV cache live in a pool of the caching allocator whose physical memory the
engine unmaps and maps itself. ``reserved`` and ``allocated`` count the pool all the time, the
device does not; read as usual, non-torch memory of a sleeping worker would be tens of GiB below
zero. So the pool's own list is asked for what it has unmapped (sizes only: no device call), and the
probe takes that off.

A weight update is one phase from ``start_weight_update`` to ``finish_weight_update``, over several
calls of the worker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm_memprof.capture.actions import begin_phase, finish
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder


def enter_pool_sleep(recorder: Recorder, call: Call) -> None:
    """Set the unmapped bytes early: the engine unmaps first and empties the cache then."""
    recorder.probe.set_unmapped(_unmapped_by_sleep(call.subject))


def leave_pool_sleep(recorder: Recorder, call: Call) -> None:
    if call.error is not None:
        recorder.probe.set_unmapped(None)  # how far it came is not known


def leave_pool_wake_up(recorder: Recorder, call: Call) -> None:
    awake, tags = recorder.notes.awake_tags, call.argument("tags")
    if call.error is not None:
        recorder.probe.set_unmapped(None)
    elif tags is None:
        awake.clear()
        recorder.probe.set_unmapped(0)
    else:
        awake.update(tags)
        recorder.probe.set_unmapped(_unmapped_by_sleep(call.subject, awake))


def enter_sleep(recorder: Recorder, call: Call) -> None:
    recorder.notes.awake_tags.clear()
    _begin(recorder, call, {"level": call.argument("level", 1)})


def enter_wake_up(recorder: Recorder, call: Call) -> None:
    tags = call.argument("tags")
    _begin(recorder, call, {"tags": None if tags is None else list(tags)})


def enter_update(recorder: Recorder, call: Call) -> None:
    """Open an update that this call is a part or the whole of; a first load is no update.

    Loading the model for the first time is not an update.
    """
    if not recorder.is_open("weight_load"):
        _begin(recorder, call, {"by": _hooked_name(call)})


def enter_update_start(recorder: Recorder, call: Call) -> None:
    _end_update(recorder, None)  # one that the engine gave up
    _begin(recorder, call, {"by": _hooked_name(call)})
    recorder.notes.weight_update = call.token


def leave_update_start(recorder: Recorder, call: Call) -> None:
    if call.error is not None:
        _end_update(recorder, call.error)


def leave_update_finish(recorder: Recorder, call: Call) -> None:
    _end_update(recorder, call.error)


def _hooked_name(call: Call) -> str:
    """The name that was hooked; the function behind it may have none of its own."""
    return call.hook.targets[0].rpartition(".")[2]


def _begin(recorder: Recorder, call: Call, detail: dict[str, object]) -> None:
    if recorder.probe.is_ready():
        begin_phase(recorder, call, detail)


def _end_update(recorder: Recorder, error: BaseException | None) -> None:
    opened, recorder.notes.weight_update = recorder.notes.weight_update, None
    if opened is not None:
        finish(recorder, opened, error)


def _unmapped_by_sleep(pool: Any, awake: Collection[str] = ()) -> int | None:
    """Bytes of the pool that a sleep unmaps and a wake-up of these tags has not mapped again.

    vllm_ascend/device_allocator/camem.py::CaMemAllocator, 0.23.0, and
    vllm/device_allocator/cumem.py: ``handle[1]`` is the aligned size; the persistent tag stays
    mapped.
    """
    try:
        kept = {getattr(pool, "sleep_persistent_tag", None), *awake}
        return sum(
            int(data.handle[1]) for data in pool.pointer_to_data.values() if data.tag not in kept
        )
    except (AttributeError, TypeError, IndexError):
        return None
