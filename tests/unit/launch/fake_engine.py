"""Plays an engine for the launcher's tests: a main process and two workers that write event files
and misbehave.

Run as a script by the tests; standard library only. The main process ends as vLLM does: with status
0 after SIGINT or SIGTERM, with status 1 when a worker is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

GIB = 1 << 30
PHASES = ("device_init", "hccl_init", "weight_load", "profile_run", "kv_cache_alloc", "warm_up")
#: Phase -> phase nested in it.
NESTED = {"profile_run": "mm_profile"}


class Events:
    """Writes this process's event file."""

    def __init__(self, role: str) -> None:
        folder = Path(os.environ["MEMPROF_RUN_DIR"]) / "events"
        self._file = (folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a")
        self._ids = itertools.count()
        self._open: list[int] = []
        versions = {"vllm": "0.23.0", "vllm_ascend": "0.23.0"}
        self.write("process", schema="memprof.events/1", host=socket.gethostname(),
                   pid=os.getpid(), ppid=os.getppid(), role=role, wall=time.time(), argv=sys.argv,
                   python="3", versions=versions)  # fmt: skip

    def write(self, kind: str, **fields: object) -> None:
        self._file.write(json.dumps({"kind": kind, "t_ns": time.monotonic_ns(), **fields}) + "\n")
        self._file.flush()

    def begin(self, phase: str) -> None:
        self._open.append(next(self._ids))
        self._edge(phase, "before", None)

    def end(self, phase: str, error: str | None = None) -> None:
        self._edge(phase, "after", error)
        self._open.pop()

    def _edge(self, phase: str, edge: str, error: str | None) -> None:
        reserved = (PHASES.index(phase) if phase in PHASES else 0) * 3 * GIB
        snapshot = {"device_total_bytes": 61 * GIB, "device_free_bytes": 50 * GIB,
                    "reserved_bytes": reserved, "allocated_bytes": reserved,
                    "allocated_peak_bytes": reserved, "allocated_run_peak_bytes": reserved,
                    "non_torch_bytes": GIB, "npu_workspace_bytes": None}  # fmt: skip
        parent = self._open[-2] if len(self._open) > 1 else None
        self.write("phase", phase=phase, edge=edge, id=self._open[-1], parent=parent, hook="fake",
                   snapshot=snapshot, error=error, detail=None)  # fmt: skip


def worker(options: argparse.Namespace) -> int:
    rank = options.worker
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    events = Events("unknown")
    events.write("identity", role="worker", rank=rank, local_rank=rank, tp_rank=rank,
                 label=f"TP{rank}", soc="Fake1", world_size=2)  # fmt: skip
    for phase in PHASES:
        events.begin(phase)
        if phase in NESTED:
            events.begin(NESTED[phase])
            time.sleep(options.pace)
            misbehave(options, NESTED[phase], rank, events)
            events.end(NESTED[phase])
        time.sleep(options.pace)
        misbehave(options, phase, rank, events)
        events.end(phase)
    print(f"TP{rank} ready", flush=True)
    (Path(os.environ["MEMPROF_RUN_DIR"]) / "events" / f"worker-{rank}.ready").touch()
    misbehave(options, "serving", rank, events)
    while os.getppid() != 1 or options.stubborn:
        time.sleep(0.1)
    return 0


def misbehave(options: argparse.Namespace, phase: str, rank: int, events: Events) -> None:
    if rank != 1:
        return
    if options.kill_in == phase:
        os.kill(os.getpid(), signal.SIGKILL)
    if options.exit_in == phase:
        os._exit(3)
    if options.hang_in == phase:
        time.sleep(600)
    if options.raise_in == phase:
        events.end(phase, error="AttributeError: no such operator")
        print("(EngineCore pid=1) ERROR EngineCore failed to start.", flush=True)
        time.sleep(600)
    if options.oom_in == phase:
        message = "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB"
        events.end(phase, error=message)
        print(f"ERROR 11-21 02:00:00 [worker.py:1] {message}", flush=True)
        os._exit(1)


def main(options: argparse.Namespace) -> int:
    events = Events("engine_core" if options.head else "api")
    print("fake engine starts", flush=True)
    if options.head:  # a host without an API server
        print(f"Launching, with head node address tcp://{options.head}.", flush=True)
        host, _, port = options.head.rpartition(":")
        with contextlib.suppress(OSError):
            options.connection = socket.create_connection((host, int(port)), 1)
    if options.noise:
        sys.stdout.buffer.write(b"\xff\xfe raw bytes \x1b[31mred\x1b[0m\n")
        print("\n".join(f"line {i}" for i in range(options.noise)), flush=True)
    if options.fail:
        print("ValueError: No available memory for the cache blocks.", flush=True)
        return options.fail
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.SIG_IGN if options.stubborn else lambda number, _: asked.append(number)
        signal.signal(number, handler)
    passed = [token for token in sys.argv[1:] if token.startswith("--")]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *passed, f"--worker={rank}"],
            start_new_session=options.detach,
        )
        for rank in range(2)
    ]
    run_dir = Path(os.environ["MEMPROF_RUN_DIR"])
    ready = False
    while not asked:
        time.sleep(0.02)
        if options.lose_peer and lost(options.connection):
            print("RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer", flush=True)
            print("ERROR EngineCore encountered a fatal error.", flush=True)
            time.sleep(0.3)
            stop(children)
            return options.lost_code
        if not options.oblivious and any(child.poll() is not None for child in children):
            print("RuntimeError: Engine core initialization failed.", flush=True)
            stop(children)
            return options.lost_code
        if not ready and all(
            (run_dir / "events" / f"worker-{rank}.ready").exists() for rank in range(2)
        ):
            ready = True
            if options.ready_by == "event":
                events.write("ready", what="model" if options.head else options.mode_ready)
            else:
                print("INFO:     Application startup complete.", flush=True)
            if options.mode_ready != "server":
                time.sleep(options.pace)
                break
    if not options.leave_workers:
        stop(children)
    return 0


def lost(connection: socket.socket) -> bool:
    """Whether the other end of a connection has closed it; nothing is ever sent."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def stop(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        child.wait()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int)
    parser.add_argument("--pace", type=float, default=0.03, help="seconds per phase")
    for option in ("--kill-in", "--exit-in", "--hang-in", "--oom-in", "--raise-in"):
        parser.add_argument(option, help="phase of TP1, or 'serving'")
    for option in ("--stubborn", "--detach", "--oblivious", "--leave-workers", "--lose-peer"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--noise", type=int, default=0)
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--lost-code", type=int, default=1)
    parser.add_argument("--head", help="HOST:PORT")
    parser.add_argument("--ready-by", default="event")
    parser.add_argument("--mode-ready", default="server")
    return parser.parse_known_args(argv)[0]


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    sys.exit(main(parsed) if parsed.worker is None else worker(parsed))
