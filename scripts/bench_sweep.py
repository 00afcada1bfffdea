"""Measures a sweep of many plans: one taken from the cache, and the page of 1,000.

Takes plans of a real run folder from a cache that holds them: milliseconds of one, with its key,
its copy and its row. Then writes pages of 1,000 rows, with the figures of that run folder varied,
and opens them in a headless Chromium where there is one: seconds until the load event has ended
with all curves drawn, processor time of the browser, elements. A page of eight rows is beside them:
most of its time is Plotly. The exit status is 1 where a limit is exceeded.

    .venv/bin/python -m scripts.bench_sweep [RUN_FOLDER] [--count 100]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from vllm_memprof.plans.documents import sweep_document
from vllm_memprof.plans.model import Knob, Plan, PlanRow, Sweep, Task
from vllm_memprof.plans.runner import PlanRunner, Watcher
from vllm_memprof.plans.store import Store, row_of
from vllm_memprof.plans.sweep import SweepJob, run_sweep
from vllm_memprof.report.html import render_html

CACHED_LIMIT_S, OPEN_LIMIT_S = 0.020, 2.0
MODEL = "Qwen/Qwen3-8B"
OPTIONS = ("max-num-seqs", "max-num-batched-tokens", "max-model-len", "block-size")
#: Values of each option; the first is the yardstick.
SHAPES = ((8,), (1000,), (500, 2), (40, 25), (10, 10, 10), (10, 5, 5, 4))


class _Clock(Watcher):
    """Notes when a row came, and how."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]
        self.hows: set[str] = set()

    def finished(self, place: int, row: PlanRow, how: str) -> None:
        self.ends.append(time.perf_counter())
        self.hows.add(how)


def cached(run_dir: Path, count: int) -> tuple[list[float], float]:
    """Seconds of each plan that is taken from the cache, and processor time of one."""

    def copies(tasks: Sequence[Task], progress: Watcher) -> Iterator[tuple[Task, PlanRow]]:
        for task in tasks:
            shutil.copytree(run_dir, task.run_dir)
            yield task, row_of(task.plan, task.run_dir)

    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as name:
        plan = Plan.asked(MODEL, ["--enforce-eager"], {"device": "sim:910b"}, 600)
        knobs = [Knob(OPTIONS[0], [str(8 + place) for place in range(count)])]
        store = Store(Path(name) / "store")
        job = SweepJob(plan, knobs, ["-"])
        run_sweep(job, PlanRunner(Path(name) / "made", store=store, pool=copies))
        clock, begin = _Clock(), time.process_time()
        run_sweep(job, PlanRunner(Path(name) / "taken", clock, store, copies))
        processor = (time.process_time() - begin) / count
        assert clock.hows == {"cached"}, clock.hows
        return [end - start for start, end in itertools.pairwise(clock.ends)], processor


def sweep_of(row: PlanRow, shape: Sequence[int]) -> Sweep:
    """A sweep of that many values of each option; one plan of twenty did not come up."""
    knobs = [
        Knob(name, [str(8 * (place + 1)) for place in range(count)])
        for name, count in zip(OPTIONS, shape, strict=False)
    ]
    rows = []
    for place, values in enumerate(itertools.product(*(knob.values for knob in knobs))):
        named = dict(zip((knob.name for knob in knobs), values, strict=True))
        if place % 20 == 19:
            rows.append(PlanRow(named, "failed", f"ValueError: no room {place % 3}"))
            continue
        less = place * 4096
        figures = {
            name: known - less
            for name in ("tokens", "kv_cache_bytes", "fits_device_bytes", "headroom_bytes")
            if (known := getattr(row, name)) is not None
        }
        rows.append(replace(row, values=named, run=f"plans/{place}", **figures))
    return Sweep(MODEL, ["memprof", "sweep", MODEL], knobs, rows, 1.0)


def show_page(row: PlanRow, shape: Sequence[int], path: str | None) -> float | None:
    """Print what a page costs; returns seconds until it is open, None without a browser."""
    sweep, begin = sweep_of(row, shape), time.process_time()
    text = render_html(partial(sweep_document, sweep))
    title = f"{len(sweep.rows)} plans, {' x '.join(map(str, shape))}:"
    seconds = time.process_time() - begin
    print(f"{title:32} written in {seconds:.2f} s, {len(text) / 1e6:.2f} MB", end="")
    if path is None:
        print("; no browser here")
        return None
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as name, sync_playwright() as driver:
        file = Path(name) / "sweep.html"
        file.write_text(text, encoding="utf-8")
        page = driver.chromium.launch(executable_path=path, chromium_sandbox=False).new_page()
        before = _processor_time()
        page.goto(file.as_uri())
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1e3
        used = _processor_time() - before
        count = page.evaluate("document.querySelectorAll('*').length")
        drawn = page.evaluate("document.querySelectorAll('svg *').length")
    print(
        f"; open in {loaded:.2f} s, {used:.2f} s of processors, {count:,} elements, {drawn:,} drawn"
    )
    return float(loaded)


def _processor_time() -> float:
    """Processor time of all processes below this one."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, nargs="?", help="of a plan (default: one is made)")
    parser.add_argument("--count", type=int, default=100, help="plans of the cache (100)")
    options = parser.parse_args()
    if options.run_dir is None:
        with tempfile.TemporaryDirectory(prefix="memprof-bench-") as name:
            return measure(make_plan(Path(name) / "run"), options.count)
    return measure(options.run_dir, options.count)


def make_plan(run_dir: Path) -> Path:
    """Make the plan that is used where none is given; return its run folder."""
    command = [sys.executable, "-m", "vllm_memprof", "plan", MODEL, "--enforce-eager", "-q"]
    command += ["--device", "sim:910b", "--run-dir", str(run_dir), "--max-model-len", "32768"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return run_dir


def measure(run_dir: Path, count: int) -> int:
    """Print all figures; returns the exit status."""
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores; load before: {load}", flush=True)
    seconds, processor = cached(run_dir, count)
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    print(
        f"a plan of the cache: {median * 1e3:.1f} ms ({least * 1e3:.1f} to {most * 1e3:.1f}), "
        f"{processor * 1e3:.1f} ms of processors",
        flush=True,
    )
    row, browser = row_of(Plan(MODEL, []), run_dir), shutil.which("chromium")
    opened = [show_page(row, shape, browser) for shape in SHAPES]
    slow = median > CACHED_LIMIT_S or any(
        each is not None and each > OPEN_LIMIT_S for each in opened
    )
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
