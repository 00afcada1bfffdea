#!/usr/bin/env python3
"""Plays the interpreter of an engine for the tests of sweeps: answers the launcher's probe, and
"runs" a plan at once.

Standard library only. The figures follow from the engine's arguments by a formula, so that a search
can be held against all values: 64 GiB of device, weights divided by the tensor-parallel size,
activations by the batch. Each start appends a line to $FAKE_PLAN_LOG; $FAKE_PLAN_SECONDS is how
long a plan takes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

GIB = 1 << 30
TOTAL = 64 * GIB
WEIGHTS = 100 * GIB
CONTEXT = GIB // 2
BYTES_PER_TOKEN = 65536
BLOCK = 128
#: Taken by the largest batches, bytes.
SERVING = 3 * GIB


def option(args: list[str], name: str, default: str) -> str:
    found = default
    for i, token in enumerate(args):
        if token == f"--{name}":
            found = args[i + 1]
        elif token.startswith(f"--{name}="):
            found = token.partition("=")[2]
    return found


def figures_of(args: list[str]) -> dict[str, float]:
    size = int(option(args, "tensor-parallel-size", "2"))
    batch = int(option(args, "max-num-batched-tokens", "2048"))
    seqs = int(option(args, "max-num-seqs", "256"))
    utilization = float(option(args, "gpu-memory-utilization", "0.9"))
    weights = WEIGHTS // size
    activation = batch * 524288 + seqs * (1 << 20)
    non_torch = CONTEXT // 2 + (size > 1) * GIB // 4
    requested = TOTAL * utilization
    return {
        "device_total_bytes": TOTAL,
        "initial_free_bytes": TOTAL - CONTEXT,
        "initial_non_torch_bytes": CONTEXT,
        "gpu_memory_utilization": utilization,
        "requested_bytes": requested,
        "weights_bytes": weights,
        "peak_activation_bytes": activation,
        "non_torch_increase_bytes": non_torch,
        "profile_before_allocated_peak_bytes": weights + (1 << 24),
        "profile_before_non_torch_bytes": CONTEXT,
        "profile_after_allocated_peak_bytes": weights + (1 << 24) + activation,
        "profile_after_non_torch_bytes": CONTEXT + non_torch,
        "kv_cache_bytes": int(requested - weights - activation - non_torch),
    }


class Events:
    def __init__(self) -> None:
        folder = Path(os.environ["MEMPROF_RUN_DIR"]) / "events"
        self._file = (folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a")
        self._id = 0

    def write(self, kind: str, **fields: object) -> None:
        self._file.write(json.dumps({"kind": kind, "t_ns": time.monotonic_ns(), **fields}) + "\n")
        self._file.flush()

    def phase(
        self,
        phase: str,
        held: tuple[int, int],
        error: str | None = None,
        detail: dict[str, object] | None = None,
    ) -> None:
        """``held``: allocated and non-torch bytes at its end; the peak is the same."""
        self._id += 1
        allocated, non_torch = held
        snapshot = {
            "device_total_bytes": TOTAL, "device_free_bytes": max(0, TOTAL - allocated - non_torch),
            "allocated_bytes": allocated, "allocated_peak_bytes": allocated,
            "reserved_bytes": allocated,
            "reserved_run_peak_bytes": allocated, "non_torch_bytes": non_torch,
        }  # fmt: skip
        for edge in ("before", "after"):
            self.write("phase", phase=phase, edge=edge, id=self._id, parent=None, hook="fake",
                       snapshot=snapshot,
                       error=error if edge == "after" else None, detail=detail)  # fmt: skip


def plan(args: list[str]) -> int:
    if log := os.environ.get("FAKE_PLAN_LOG"):
        with open(log, "a") as stream:
            stream.write(" ".join(args) + "\n")
    if option(args, "stubborn", "no") == "yes":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    events = Events()
    versions = {"vllm": "0.23.0", "vllm_ascend": "0.23.0"}
    events.write("process", schema="memprof.events/1", host=socket.gethostname(), pid=os.getpid(),
                 ppid=os.getppid(),
                 role="engine_core", wall=time.time(), argv=sys.argv, python="3",
                 versions=versions)  # fmt: skip
    events.write(
        "identity",
        role="worker",
        rank=0,
        local_rank=0,
        tp_rank=0,
        label="TP0",
        soc="Fake1",
        world_size=1,
    )
    time.sleep(float(os.environ.get("FAKE_PLAN_SECONDS", "0")))
    refused = option(args, "refuse", "")
    if refused and refused == option(args, "max-num-seqs", ""):
        print("ValueError: max_num_seqs is refused by this engine.", flush=True)
        return 1
    values = figures_of(args)
    weights = int(values["weights_bytes"])
    events.phase("device_init", (0, CONTEXT))
    if refused := next((token for token in args if token.startswith("--speed")), None):
        print(f"driver.py: error: unrecognized arguments: {refused}", flush=True)
        return 2
    if weights + CONTEXT > TOTAL:
        message = f"RuntimeError: NPU out of memory. Tried to allocate {weights / GIB:.2f} GiB"
        events.phase("weight_load", (0, CONTEXT), error=message)
        print(message, flush=True)
        return 1
    peak = int(values["profile_after_allocated_peak_bytes"])
    events.phase("weight_load", (weights, CONTEXT))
    events.phase("profile_run", (peak, int(values["profile_after_non_torch_bytes"])))
    events.write("figures", source="determine_available_memory", values=values)
    kv_cache = int(values["kv_cache_bytes"])
    length = int(option(args, "max-model-len", "4096"))
    blocks = kv_cache // (BLOCK * BYTES_PER_TOKEN)
    needed = -(-length // BLOCK)
    if blocks < needed:
        print("ValueError: No available memory for the cache blocks. Try increasing "
              "`gpu_memory_utilization` when initializing the engine.", flush=True)  # fmt: skip
        return 1
    group = {"type": "FullAttentionSpec", "layers": 1, "block_size": BLOCK,
             "page_size_bytes": BLOCK * BYTES_PER_TOKEN,
             "bytes_per_token": BYTES_PER_TOKEN, "dtype": "bfloat16", "layout": {}}  # fmt: skip
    events.write("kv_plan", blocks=blocks, block_size=BLOCK, tokens=int(blocks / needed * length),
                 max_model_len=length,
                 max_concurrency=blocks / needed, available_bytes=[kv_cache],
                 planned_bytes=[blocks * BLOCK * BYTES_PER_TOKEN], bytes_per_token=BYTES_PER_TOKEN,
                 groups=[group],
                 group_count=1, tokens_rule="concurrency", context_parallel=1,
                 max_num_batched_tokens=2048)  # fmt: skip
    events.write("ready", what="plan")
    return (
        largest_batches(args, events, values)
        if any('"until": "ready"' in word for word in sys.argv)
        else 0
    )


def largest_batches(args: list[str], events: Events, values: dict[str, float]) -> int:
    """What serving takes beyond the profile run: ``SERVING`` bytes; it may not be there."""
    beside = int(values["profile_after_allocated_peak_bytes"])
    kv_cache = int(values["kv_cache_bytes"]) // (BLOCK * BYTES_PER_TOKEN) * BLOCK * BYTES_PER_TOKEN
    allocated, non_torch = beside + kv_cache, int(values["profile_after_non_torch_bytes"])
    events.phase("kv_cache_alloc", (allocated, non_torch))
    events.phase("warm_up", (allocated, non_torch))
    free = TOTAL - allocated - non_torch
    if free < SERVING:
        message = f"RuntimeError: NPU out of memory. Tried to allocate {SERVING / GIB:.2f} GiB"
        detail = {"device": 0, "requested_bytes": SERVING, "device_total_bytes": TOTAL,
                  "device_free_bytes": free}  # fmt: skip
        events.phase("oom", (allocated, non_torch), detail=detail)
        print(message, flush=True)
        return 1
    batch, seqs = (
        option(args, "max-num-batched-tokens", "2048"),
        option(args, "max-num-seqs", "256"),
    )
    events.write("full_step", prefill_tokens=int(batch), decode_requests=int(seqs),
                 decode_length=4096, max_num_batched_tokens=int(batch), max_num_seqs=int(seqs),
                 max_model_len=4096, multimodal=False, steps=3, seconds=0.1, not_run=None)  # fmt: skip
    return 0


def main() -> int:
    if sys.argv[1] == "-c":  # the launcher's probe
        versions = {"vllm": "0.23.0", "vllm_ascend": "0.23.0", "vllm-memprof": "0"}
        engines = {"vllm": ["memprof"]}
        print(json.dumps({"python": "3.11.0", "versions": versions, "engines": engines}))
        return 0
    return plan(sys.argv[sys.argv.index("plan") + 2 :])


if __name__ == "__main__":
    sys.exit(main())
