"""What no step reads: the device as a whole, the runtime's counters, host memory; by a thread.

Runs in every process of a sampled run, at a low rate. While a phase is under way (a graph may be
captured, a pool put to sleep), only host memory is read.
"""

from __future__ import annotations

import threading
import time

from vllm_memprof.capture.probe import host_memory
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.schema import DEVICE_SAMPLE_FIGURES

#: Seconds between two readings.
PERIOD_S = 2.0


def start(recorder: Recorder) -> None:
    """Start the thread of this process, once."""
    if recorder.sampled and recorder.device_thread is None:
        thread = threading.Thread(target=_run, args=(recorder,), name="memprof-device", daemon=True)
        recorder.device_thread = thread
        thread.start()


def _run(recorder: Recorder) -> None:
    try:
        while True:
            time.sleep(PERIOD_S)
            read(recorder)
    except Exception as error:
        recorder.error("device thread", error)


def read(recorder: Recorder) -> None:
    """Write one reading."""
    figures: dict[str, int | None] = dict.fromkeys(DEVICE_SAMPLE_FIGURES)
    if not recorder.is_in_phase and recorder.serving:
        snapshot = recorder.probe.snapshot()
        figures = {name: snapshot.get(name) for name in figures}
        for module, component in (snapshot["components"] or {}).items():
            figures[f"runtime.{module}"] = component["bytes"]
    figures["host_rss_bytes"], figures["host_shared_bytes"] = host_memory()
    recorder.sampler.files.sample("device_sample", time.monotonic_ns(), None, 0, figures)
