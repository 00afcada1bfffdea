"""What no step reads: the device as a whole, the runtime's counters, host memory; by a thread.

Runs in every process of a sampled run, at a low rate. While a phase is under way (a graph may be
captured, a pool put to sleep), only host memory is read.
"""

from __future__ import annotations

import threading
import time

from vllm_memprof.capture.probe import HostMemory
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.schema import DEVICE_SAMPLE_FIGURES

#: Seconds between two readings.
PERIOD_S = 2.0


def start(recorder: Recorder) -> None:
    """Start the thread of this process, once."""
    if recorder.sampler is None or recorder.notes.device_thread is not None:
        return
    thread = threading.Thread(target=_run, args=(recorder,), name="memprof-device", daemon=True)
    recorder.notes.device_thread = thread
    thread.start()


def _run(recorder: Recorder) -> None:
    stop = threading.Event()
    while not stop.wait(PERIOD_S):
        try:
            read(recorder)
        except Exception as error:
            recorder.error("device thread", error)
            return


def read(recorder: Recorder) -> None:
    """Write one reading."""
    sampler = recorder.sampler
    if sampler is None:
        return
    figures: dict[str, int | None] = dict.fromkeys(DEVICE_SAMPLE_FIGURES)
    if not recorder.under_way and recorder.notes.serving:
        snapshot, _ = recorder.probe.snapshot()
        figures = {name: snapshot.get(name) for name in DEVICE_SAMPLE_FIGURES}
        for module, component in (snapshot.get("components") or {}).items():
            figures[f"runtime.{module}"] = component["bytes"]
    with HostMemory() as host:
        figures["host_rss_bytes"], figures["host_shared_bytes"] = host.read()
    names, values = tuple(figures), tuple(figures.values())
    sampler.files.sample("device_sample", time.monotonic_ns(), None, 0, names, values)
