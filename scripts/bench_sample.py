"""Measures what one sample costs a worker, in processor time, on the simulated device.

The rows of sampled runs are bound to a runner that does nothing, called as an engine core calls
one (``execute_model``, then ``sample_tokens``), beside the same runner unbound; the difference is
the cost of a step. The allocator holds 300 tensors, so that its counters are those of a model. All
of it is memprof's own but the allocator's call that returns its counters, which is timed beside it.

Each figure is the smallest and the median of many short repetitions, the jobs in turn, so that a
busy machine does not favour one of them; processor time of the whole process (its threads included)
and wall time. It is a loop, so the caches are warm: between the steps of an engine they are not.

    .venv/bin/python scripts/bench_sample.py [--repeat 100] [--steps 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

MEASURE = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch, torch_npu
from vllm_memprof.capture.hooks.table import HOOKS
from vllm_memprof.capture.observer import Observer
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.sampler import Pace, Sampler

folder, repeat, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tensors = [torch.empty(1 << 18, device="npu:0") for _ in range(300)]
ROWS = {hook.id: hook for hook in HOOKS}


def output(names, new=()):
    cached = SimpleNamespace(req_ids=list(names), num_computed_tokens=[100] * len(names))
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1), total_num_scheduled_tokens=len(names),
        scheduled_new_reqs=list(new), scheduled_cached_reqs=cached, finished_req_ids=set(),
        scheduled_encoder_inputs={}, free_encoder_mm_hashes=[],
    )


class Runner:
    encoder_cache = {}
    model_config = None

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return None

    def sample_tokens(self, grammar_output):
        return self


class Scheduler:
    kv_cache_manager = SimpleNamespace(
        block_pool=SimpleNamespace(num_gpu_blocks=1000, get_num_free_blocks=lambda: 10))
    running, waiting = [1, 2], [3]


class Core:
    scheduler = Scheduler()

    def step(self):
        return {}, True


def bound(cls, folder, every, **rows):
    recorder = Recorder(folder)
    recorder.probe.backend, recorder.probe.device = "npu", 0
    recorder.sampler = Sampler(folder, recorder.probe, every, recorder.writer)
    recorder.serving = True
    observer = Observer(recorder, ())
    found = {name: observer.wrap(ROWS[row], getattr(cls, name)) for name, row in rows.items()}
    return type("Bound", (cls,), found)(), recorder


def worker(runner, new, step):
    execute, sample = runner.execute_model, runner.sample_tokens
    execute(new)
    sample(None)

    def run():
        for _ in range(steps):
            execute(step)
            sample(None)

    return run


def core(engine):
    def run():
        for _ in range(steps):
            engine.step()

    return run


def calls(function, *args):
    def run():
        for _ in range(steps):
            function(*args)

    return run


jobs = {}
recorders = []
for batch in (1, 32, 256):
    names = [f"chatcmpl-{i:032x}" for i in range(batch)]
    new = [SimpleNamespace(req_id=name, prompt_token_ids=[0] * 5, mm_features=[],
                           num_computed_tokens=0) for name in names]
    jobs[f"unbound {batch}"] = worker(Runner(), output(names, new), output(names))
    for every in (1, 16):
        runner, recorder = bound(Runner, folder / f"{every}-{batch}", Pace(steps=every),
                                 execute_model="s.execute", sample_tokens="s.sample_tokens")
        recorders.append(recorder)
        jobs[f"every {every}, {batch}"] = worker(runner, output(names, new), output(names))
engine, recorder = bound(Core, folder / "core", Pace(steps=1), step="s.core_step")
recorders.append(recorder)
jobs["unbound core"], jobs["core"] = core(Core()), core(engine)
jobs["allocator"] = calls(torch_npu._C._npu_memoryStats, 0)
jobs["read"] = calls(recorders[0].sampler.read)
taken = {name: [] for name in jobs}
for turn in range(repeat):
    for name in jobs if turn % 2 == 0 else reversed(jobs):
        for _ in range(8):
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            jobs[name]()
            cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            taken[name].append((cpu / steps / 1e3, wall / steps / 1e3))
for recorder in recorders:
    if recorder.hooks.failed or recorder.writer.loss:
        sys.exit(f"rows failed: {recorder.hooks.failed}")
lines = sum(path.read_bytes().count(b'"kind"') for path in folder.rglob("0-*.jsonl"))
print("MEASURED " + json.dumps({"taken": taken, "lines": lines}))
"""


def main() -> int:
    """Run the measurement under the simulated stack and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=100, help="times 8, of each job")
    parser.add_argument("--steps", type=int, default=16, help="of one repetition")
    parser.add_argument("--profile", default="910b")
    parser.add_argument("--stack")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from vllm_memprof.sim.runtime import prepare_runtime

    runtime = prepare_runtime(options.profile, options.stack)
    env = {**os.environ, **runtime.env}
    env.pop("MEMPROF_RUN_DIR", None)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(runtime.python), "-c", MEASURE, folder, str(options.repeat),
                   str(options.steps)]  # fmt: skip
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=550, check=False
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if not found:
        sys.exit(f"exit status {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    measured = json.loads(found[0].removeprefix("MEASURED "))
    if not measured["lines"]:
        sys.exit("memprof wrote no sample: the comparison would prove nothing")

    def picked(pick: Callable[[Iterable[float]], float], name: str, clock: int) -> float:
        return pick(each[clock] for each in measured["taken"][name])

    allocator = picked(min, "allocator", 0)
    print("| µs a step | smallest | median | less the allocator's call | wall, smallest |")
    print("|---|---|---|---|---|")
    for name in measured["taken"]:
        if name.startswith("unbound"):
            continue
        batch = name.rpartition(" ")[2]
        base = f"unbound {batch}" if f"unbound {batch}" in measured["taken"] else None
        cpu, mid, wall = (
            picked(pick, name, clock) - (picked(pick, base, clock) if base else 0.0)
            for clock, pick in ((0, min), (0, statistics.median), (1, min))
        )
        own = f"{cpu - allocator:.1f}" if name.startswith("every 1,") or name == "read" else ""
        print(f"| {name} | {cpu:.1f} | {mid:.1f} | {own} | {wall:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
