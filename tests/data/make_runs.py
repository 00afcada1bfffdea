"""Writes the hand-made runs of this folder: ``python -m tests.data.make_runs``.

Their figures are those of a measurement on two Ascend 910B cards (Qwen3-VL-8B-Instruct, TP=2,
utilization 0.95), filled up to whole bytes; what that measurement did not print is chosen to fit.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_memprof.record.schema import EVENTS_SCHEMA, RUN_SCHEMA

HERE = Path(__file__).parent
TOTAL = 65_452_113_920  # 60.96 GiB, what a 64 GB card shows
UTILIZATION = 0.95
MILLISECOND = 1_000_000
PAGE = 262_144  # 2 x 128 tokens x 4 KV heads x 128 x 2 bytes
LAYERS = 36
COMMAND = (
    "memprof {mode} Qwen/Qwen3-VL-8B-Instruct --device sim:910b --tensor-parallel-size 2 --max-model-len 65536 "
    "--max-num-seqs 8 --max-num-batched-tokens 32768 --gpu-memory-utilization 0.95 --mm-processor-cache-gb 0"
)


def gib(value: float) -> int:
    """Whole allocation units of 512 bytes."""
    return round(value * 2**30 / 512) * 512


@dataclass
class Device:
    """The state of one rank's device, which the phases move along."""

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    workspace: int = 0
    non_torch: int = gib(0.35)

    def snapshot(self) -> dict[str, int]:
        return {
            "device_total_bytes": TOTAL,
            "device_free_bytes": TOTAL - self.reserved - self.non_torch,
            "allocated_bytes": self.allocated,
            "allocated_peak_bytes": self.peak,
            "allocated_run_peak_bytes": self.peak,
            "reserved_bytes": self.reserved,
            "reserved_peak_bytes": self.reserved_peak,
            "reserved_run_peak_bytes": self.reserved_peak,
            "npu_workspace_bytes": self.workspace,
            "non_torch_bytes": self.non_torch,
            "host_rss_bytes": gib(1.1),
            "alloc_retries": 0,
            "ooms": 0,
        }

    def hold(self, allocated: float, peak: float, reserved: float) -> None:
        """GiB from here on."""
        self.allocated, self.peak, self.reserved = gib(allocated), gib(peak), gib(reserved)
        self.reserved_peak = max(self.reserved_peak, self.reserved)


@dataclass
class Process:
    """One event file under construction."""

    pid: int
    role: str
    rank: int | None = None
    clock_ns: int = 5_000_000_000
    events: list[dict[str, Any]] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    next_id: int = 1

    def __post_init__(self) -> None:
        versions = {
            "vllm": "0.23.0",
            "vllm-ascend": "0.23.0",
            "torch": "2.10.0",
            "torch-npu": "2.10.0.post4",
        }
        python = "/opt/engine/bin/python"
        head = {
            "schema": EVENTS_SCHEMA,
            "host": "node0",
            "pid": self.pid,
            "ppid": 4000,
            "role": self.role,
        }
        self.emit(
            "process",
            **head,
            wall=None,
            argv=["vllm"],
            python=python,
            versions=versions,
        )
        who: dict[str, Any] = {"role": self.role, "world_size": 2, "dp_rank": 0, "pp_rank": 0}
        if self.rank is not None:
            who |= {
                "rank": self.rank,
                "local_rank": self.rank,
                "tp_rank": self.rank,
                "label": f"TP{self.rank}",
            }
            who |= {"device_index": self.rank, "soc": "Ascend910B2"}
        self.emit("identity", **who)

    def emit(self, kind: str, **values: Any) -> None:
        self.events.append({"kind": kind, "t_ns": self.clock_ns, **values})

    def edge(self, phase: str, edge: str, device: Device, phase_id: int, **values: Any) -> None:
        parent = self.stack[-1] if self.stack else None
        common = {
            "phase": phase,
            "edge": edge,
            "id": phase_id,
            "parent": parent,
            "hook": f"w.{phase}",
        }
        self.emit(
            "phase",
            **common,
            snapshot={"t_ns": self.clock_ns, **device.snapshot()},
            error=None,
            **values,
        )

    def begin(self, phase: str, device: Device, **detail: Any) -> None:
        self.edge(phase, "before", device, self.next_id, detail=detail or None)
        self.stack.append(self.next_id)
        self.next_id += 1

    def end(self, phase: str, device: Device, milliseconds: int, **detail: Any) -> None:
        self.clock_ns += milliseconds * MILLISECOND
        phase_id = self.stack.pop()
        self.edge(phase, "after", device, phase_id, detail=detail or None)

    def write(self, folder: Path, torn: bool = False) -> None:
        text = "".join(json.dumps(event) + "\n" for event in self.events)
        if torn:
            text = text[: -len(json.dumps(self.events[-1])) // 2]
        (folder / f"node0-{self.pid}.jsonl").write_text(text)


def worker(
    rank: int, graph: bool, stop: str | None = None, extra_non_torch: float = 0.0
) -> tuple[Process, int | None]:
    """A worker's whole start-up, or as far as into the phase ``stop``; also what its equation grants."""
    process, device = Process(4100 + rank, "worker", rank), Device()
    for phase in (
        "device_init",
        "hccl_init",
        "weight_load",
        "profile_run",
        "kv_cache_alloc",
        "warm_up",
    ):
        state = {"hook": f"w.{phase}", "phase": phase, "need": "required", "state": "bound"}
        process.emit(
            "hook", **state, target=f"vllm_ascend.worker.worker:NPUWorker.{phase}", detail=None
        )
    process.begin("device_init", device)
    initial_free = TOTAL - device.non_torch
    process.begin("hccl_init", device)
    process.end("hccl_init", device, 40)
    process.end("device_init", device, 310)
    process.begin("weight_load", device)
    if stop == "weight_load":
        process.clock_ns += 900 * MILLISECOND
        process.begin("communicator", device)
        return process, None
    weights = gib(9.1948)
    device.hold(9.1948, 9.1948, 9.49)
    device.non_torch = gib(0.36)
    process.end("weight_load", device, 4290 + 15 * rank)
    device.hold(9.45, 9.45, 9.75)

    process.begin("profile_run", device)
    empty = {"site": "mem_utils.py:247", "function": "memory_profiling", "thread": "MainThread"}
    process.begin("empty_cache", device)
    process.end("empty_cache", device, 2, **empty)
    process.begin("mm_profile", device)
    device.non_torch += gib(0.41) + gib(extra_non_torch)
    process.begin("communicator", device)
    device.non_torch += gib(0.25) - gib(0.11)
    process.end("communicator", device, 12, group="tp:0", ranks=[0, 1], op="all_reduce")
    device.workspace = gib(0.16)
    device.non_torch = gib(1.05) + gib(extra_non_torch)
    device.hold(10.45, 13.3, 17.69)
    process.end("mm_profile", device, 1830)
    device.non_torch = gib(1.07) + gib(extra_non_torch)
    device.hold(9.45, 13.3, 19.13)
    process.begin("empty_cache", device)
    device.hold(9.45, 13.3, 9.75)
    device.workspace = 0
    device.non_torch = gib(0.91) + gib(extra_non_torch)
    process.end("empty_cache", device, 31, **(empty | {"site": "mem_utils.py:261"}))
    process.end("profile_run", device, 3320 + 40 * rank)

    non_torch_increase = device.non_torch - gib(0.35)
    requested = TOTAL * UTILIZATION
    granted = int(requested - (non_torch_increase + gib(13.3) - gib(9.45) + weights))
    figures: dict[str, Any] = {
        "device_total_bytes": TOTAL,
        "initial_free_bytes": initial_free,
        "initial_non_torch_bytes": gib(0.35),
        "gpu_memory_utilization": UTILIZATION,
        "requested_bytes": requested,
        "weights_bytes": weights,
        "peak_activation_bytes": gib(13.3) - gib(9.45),
        "non_torch_increase_bytes": non_torch_increase,
        "profile_before_allocated_peak_bytes": gib(9.45),
        "profile_before_non_torch_bytes": gib(0.36),
        "profile_after_allocated_peak_bytes": gib(13.3),
        "profile_after_non_torch_bytes": device.non_torch,
        "profile_after_free_bytes": TOTAL - device.reserved - device.non_torch,
        "graph_bytes": None,
        "kv_cache_bytes": granted,
        "kv_cache_memory_bytes_arg": None,
    }
    process.emit("figures", source="worker", values=figures)
    if stop == "plan":
        return process, granted

    process.begin("kv_cache_alloc", device)
    device.hold(9.45 + 44.2969, 9.45 + 44.2969, 9.75 + 44.2969)
    process.end("kv_cache_alloc", device, 120)
    process.begin("warm_up", device)
    device.non_torch += gib(0.16)
    device.workspace = gib(0.16)
    if graph:
        process.begin("graph_capture", device)
        device.hold(9.5 + 44.2969, 10.1 + 44.2969, 9.98 + 44.2969)
        device.non_torch += gib(0.07)
        process.end("graph_capture", device, 2650, graph_bytes=gib(0.30))
        process.emit("figures", source="worker", values={"graph_bytes": gib(0.30)})
    device.non_torch += gib(0.09)
    process.end("warm_up", device, 400)
    process.emit("ready", what="model")
    process.clock_ns += 2_000 * MILLISECOND
    process.begin("shutdown", device)
    process.end("shutdown", device, 35)
    return process, granted


def engine_core(granted: list[int]) -> Process:
    process = Process(4090, "engine_core")
    process.clock_ns = 11_000_000_000
    per_block = PAGE * LAYERS
    blocks = min(granted) // per_block
    concurrency = blocks / (65_536 // 128)
    group = {
        "type": "FullAttentionSpec",
        "layers": LAYERS,
        "block_size": 128,
        "page_size_bytes": PAGE,
    }
    process.emit(
        "kv_plan",
        role="engine_core",
        blocks=blocks,
        block_size=128,
        tokens=int(concurrency * 65_536),
        max_model_len=65_536,
        max_concurrency=concurrency,
        available_bytes=granted,
        planned_bytes=[blocks * per_block] * len(granted),
        bytes_per_token=per_block // 128,
        groups=[group | {"bytes_per_token": per_block // 128, "dtype": "bfloat16"}],
        gpu_memory_utilization=UTILIZATION,
    )
    return process


def write_run(name: str, processes: list[Process], torn: int | None = None, **info: Any) -> None:
    folder = HERE / name
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "events").mkdir(parents=True)
    mode = info.pop("mode", "offline")
    command = COMMAND.format(mode=mode).split() + info.pop("extra_args", [])
    data = {
        "schema": RUN_SCHEMA,
        "id": name,
        "mode": mode,
        "model": "Qwen/Qwen3-VL-8B-Instruct",
        "command": command,
        "engine_command": [],
        "env": {},
        "versions": {"vllm": "0.23.0", "vllm-ascend": "0.23.0"},
        "engine": "vllm-ascend",
        "engine_version": "0.23.0",
        "device": "Ascend910B2",
        "simulated": True,
        "device_profile": "ascend910b",
        "host": "node0",
        "started": "2026-01-05T08:00:00Z",
        "ended": "2026-01-05T08:00:26Z",
        "seconds": 26.0,
        "start_t_ns": 4_000_000_000,
        "status": "ok",
        "exit_code": 0,
        "exit_reason": None,
        "notes": [],
        **info,
    }
    (folder / "run.json").write_text(json.dumps(data, indent=1) + "\n")
    for process in processes:
        process.write(folder / "events", torn=process.pid == torn)


def main() -> None:
    for name, graph in (("graph_tp2", True), ("eager_tp2", False)):
        workers = [worker(rank, graph) for rank in (0, 1)]
        core = engine_core([granted for _, granted in workers if granted is not None])
        args = [] if graph else ["--enforce-eager"]
        write_run(name, [core, *(process for process, _ in workers)], extra_args=args)

    workers = [worker(rank, False, extra_non_torch=0.25 * rank) for rank in (0, 1)]
    core = engine_core([granted for _, granted in workers if granted is not None])
    write_run(
        "skewed_tp2", [core, *(process for process, _ in workers)], extra_args=["--enforce-eager"]
    )

    alive, _ = worker(0, False)
    alive.events = alive.events[:13]
    killed, _ = worker(1, False, stop="weight_load")
    reason = "worker TP1 (pid 4101) was killed by SIGKILL in weight_load"
    failed: dict[str, Any] = {
        "status": "failed",
        "exit_code": 1,
        "exit_reason": reason,
        "seconds": 9.5,
    }
    write_run("killed_tp2", [Process(4090, "engine_core"), alive, killed], torn=4101, **failed)

    workers = [worker(rank, True, stop="plan") for rank in (0, 1)]
    core = engine_core([granted for _, granted in workers if granted is not None])
    write_run("plan_tp2", [core, *(process for process, _ in workers)], mode="plan")


if __name__ == "__main__":
    main()
