"""Tracing of allocations in this process: who starts it, on which requests, and who ends it.

With ``--trace-allocations`` only. An error ends the tracing, and never the step that it came in.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_memprof.capture.allocations import Host, Source, Tracer, device_source
from vllm_memprof.capture.recorder import Recorder


def trace_device(recorder: Recorder) -> None:
    """Trace device memory over requests of this worker."""
    probe = recorder.probe

    def source() -> Source | str:
        return device_source(probe.backend_name, probe.device, recorder.run_dir)

    _trace(recorder, "device", source)


def trace_host(recorder: Recorder) -> None:
    """Trace Python memory over requests of this engine core."""
    _trace(recorder, "host", Host)


def close(recorder: Recorder) -> None:
    """Write what is known, because the process ends."""
    for memory, tracer in recorder.tracers.items():
        _guarded(recorder, memory, tracer.close)


def _trace(recorder: Recorder, memory: str, source: Callable[[], Source | str]) -> None:
    sampler = recorder.sampler
    if not recorder.trace_allocations or sampler is None or memory in recorder.tracers:
        return

    def emit(event: dict[str, object]) -> None:
        recorder.emit("allocations", **event)

    tracer = Tracer(recorder.trace_allocations, source, emit, memory)
    recorder.tracers[memory] = tracer
    ended = sampler.on_request_end if memory == "device" else sampler.on_core_request_end
    ended.append(lambda name: _guarded(recorder, memory, lambda: tracer.request_ended(name)))


def _guarded(recorder: Recorder, memory: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        recorder.error(f"tracing of {memory} allocations", error)
        recorder.tracers[memory].give_up()
