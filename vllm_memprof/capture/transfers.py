"""Actions of KV connectors: one is made, registers the KV cache, transfers for the first time.

Runs in workers. What is read of a connector is in ``connectors.py``.
"""

from __future__ import annotations

import sys
import weakref

from vllm_memprof.capture.actions import begin_phase, end_phase
from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.connectors import storages_of, tensors_of
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder

#: Keeps the connector of a worker (vLLM 0.11.0 to 0.33.0).
_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"


def leave_connector(recorder: Recorder, call: Call) -> None:
    """Bind the methods of the connectors that the worker has got."""
    agent = reach(sys.modules.get(_STATE), "_KV_CONNECTOR_AGENT")
    if agent is not None:
        recorder.connector = weakref.ref(agent)
        # a MultiConnector is the sum of its own
        for each in reach(agent, "_connectors") or [agent]:
            recorder.hooks.bind_instance(each)
    end_phase(recorder, call)


def enter_register(recorder: Recorder, call: Call) -> None:
    if reach(call.subject, "_connectors") is None:
        name = type(call.subject).__name__
        begin_phase(recorder, call, {"connector": name})
        recorder.kv_storages |= {at for _, at, _ in storages_of(call.argument("kv_caches"))}


def leave_register(recorder: Recorder, call: Call) -> None:
    """Keep what the connector holds, and what it has registered."""
    if call.token is not None:
        rows = tensors_of(call.subject, recorder.kv_storages)
        registered, recorder.registered_bytes = recorder.registered_bytes, 0
        call.token.detail |= {"tensors": rows, "registered_bytes": registered}
    end_phase(recorder, call)


def leave_register_memory(recorder: Recorder, call: Call) -> None:
    size = call.argument("capacity", 2, call.argument("length", 2))
    if call.result == 0:
        recorder.registered_bytes += sum(size) if isinstance(size, (list, tuple)) else size


def leave_transfer(recorder: Recorder, call: Call) -> None:
    """End the first transfer: links exist from here on, and later ones are not observed."""
    end_phase(recorder, call)
    recorder.hooks.release("first_transfer")
