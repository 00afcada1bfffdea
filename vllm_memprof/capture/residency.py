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

from contextlib import suppress

from vllm_memprof.capture.actions import begin_phase, finish
from vllm_memprof.capture.attributes import Fields
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder


def leave_pool_wake_up(recorder: Recorder, call: Call) -> None:
    tags, awake = call.argument("tags"), recorder.awake_tags or ()
    recorder.awake_tags = None if tags is None else {*awake, *tags}
    note_unmapped(recorder, call)


def note_unmapped(recorder: Recorder, call: Call) -> None:
    """Set what a sleep unmaps of the pool and a wake-up has not mapped again; unknown if it failed.

    Before a sleep as well: the engine unmaps first and empties the cache then.
    vllm_ascend/device_allocator/camem.py::CaMemAllocator, 0.23.0, and
    vllm/device_allocator/cumem.py: ``handle[1]`` is the aligned size; the persistent tag stays
    mapped.
    """
    pool, awake, size = call.subject, recorder.awake_tags, None
    if call.error is None:
        with suppress(AttributeError, TypeError, IndexError):
            held = pool.pointer_to_data.values() if awake is not None else ()
            kept = {getattr(pool, "sleep_persistent_tag", None), *(awake or ())}
            size = sum(int(data.handle[1]) for data in held if data.tag not in kept)
    recorder.probe.unmapped_bytes, recorder.probe.unmapped_known = size, size is not None


def enter_sleep(recorder: Recorder, call: Call) -> None:
    recorder.awake_tags = set()
    _begin(recorder, call, {"level": call.argument("level", default=1)})


def enter_wake_up(recorder: Recorder, call: Call) -> None:
    tags = call.argument("tags")
    _begin(recorder, call, {"tags": None if tags is None else list(tags)})


def enter_update(recorder: Recorder, call: Call) -> None:
    """Open an update that this call is a part or the whole of; a first load is no update."""
    if not recorder.is_open("weight_load"):
        # the name that was hooked; the function behind it may have none of its own
        _begin(recorder, call, {"by": call.hook.targets[0].rpartition(".")[2]})


def enter_update_start(recorder: Recorder, call: Call) -> None:
    finish(recorder, recorder.opened("weight_update"), None)  # one that the engine gave up
    enter_update(recorder, call)


def leave_update_start(recorder: Recorder, call: Call) -> None:
    if call.error is not None:
        leave_update_finish(recorder, call)


def leave_update_finish(recorder: Recorder, call: Call) -> None:
    finish(recorder, recorder.opened("weight_update"), call.error)


def _begin(recorder: Recorder, call: Call, detail: Fields) -> None:
    if recorder.probe.is_ready():
        begin_phase(recorder, call, detail)
