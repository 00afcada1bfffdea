"""Hold plans against published runs on hardware: ``python -m scripts.accuracy``.

Each row of ``tests/data/hardware_runs.toml`` is planned on the nearest stack of the simulated
device, with the arguments and environment as published: one rank of those there are, up to the KV
plan; where the row has a figure of captured graphs and one rank, up to a first request. What came
out is kept in ``docs/accuracy.json``, so that the page and the picture are made without an engine.

    python -m scripts.accuracy              the page from what is kept
    python -m scripts.accuracy --check      exit status 1 where the page is not what is kept
    python -m scripts.accuracy --run        plan the rows that were not planned, then the page
    python -m scripts.accuracy --run --again [--only REGEX]    plan rows anew
    python -m scripts.accuracy --run --rows FILE.toml          a user's own rows: printed, not kept
    python -m scripts.accuracy --verify --only REGEX    exit status 1 where a plan is not as kept
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts import accuracy_page
from scripts.accuracy_errors import PlannedRow, errors_of, spreads_text
from scripts.accuracy_runs import PublishedRun, load_runs
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.budget.equations import evaluate, form_of
from vllm_memprof.accounting.budget.kv import tokens_for_bytes
from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.accounting.readings.startup import engine_figures
from vllm_memprof.accuracy.spread import DATA as SPREADS
from vllm_memprof.engines import engine_row
from vllm_memprof.options import devices_of
from vllm_memprof.record.loader import load_run
from vllm_memprof.sim.profiles import Memory, find_profile, load_profile

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "tests" / "data" / "hardware_runs.toml"
KEPT = ROOT / "docs" / "accuracy.json"
#: Seconds until a row must have ended; a model of 256 experts is compiled meanwhile.
TIMEOUT_S = 540.0
#: Constants of a device profile that figures depend on, kept with them.
CONSTANTS = (
    "context_bytes",
    "further_context_bytes",
    "hccl_base_bytes",
    "hccl_buffer_mib",
    "atb_pool_bytes",
    "graph_capture_bytes",
    "graph_argument_bytes",
    "graph_queue_bytes",
    "operator_binary_bytes",
)
#: Plans of a search for a limit at most; the search ends when two values are so near.
_TRIES, _NARROW, _STEP = 4, 0.01, 128
_REFUSED = re.compile(
    r"\(([\d.]+) GiB KV cache is needed.*available KV cache memory \(([\d.]+) GiB"
)
#: Variables of the caller that would change a plan, and that no row has.
_CLEARED = ("HCCL_", "PYTORCH_NPU_", "VLLM_ASCEND_", "TASK_QUEUE_ENABLE", "ATB_")


def device_of(run: PublishedRun, folder: Path) -> str:
    """Return ``--device`` of a row: its profile, with the total that the run's device told."""
    path = find_profile(run.device)
    total = load_profile(str(path)).device.total_bytes
    if run.total_bytes in (None, total):
        return f"sim:{run.device}"
    text = re.sub(
        r"(?m)^total_bytes = [\d_]+", f"total_bytes = {run.total_bytes}", path.read_text("utf-8")
    )
    changed = folder / "device.toml"
    changed.write_text(text, encoding="utf-8")
    return f"sim:{changed}"


def command_of(run: PublishedRun, folder: Path, extra: Iterable[str] = ()) -> list[str]:
    """Return the command that plans a row, or runs it up to a first request."""
    one = devices_of(run.engine_args, engine_row(run.engine).devices) == 1
    whole = run.captures_graphs and one and "pooling" not in run.args
    verb = ["offline", run.model, "--prompt", "hi", "--max-tokens", "1"]
    if not whole:
        verb = ["plan", run.model]
        verb += ["--ranks", "one", "--rank", str(run.rank)] if run.engine == "vllm" else []
        verb += ["--until", "ready"] if run.fails else []
    stack = ["--stack", run.stack] if run.stack else []
    own = ["--engine", run.engine, "--device", device_of(run, folder), *stack]
    own += ["--run-dir", str(folder / "run"), "-q"]
    own += ["--startup-timeout", f"{TIMEOUT_S - 30:g}"]
    return [sys.executable, "-m", "vllm_memprof", *verb, *own, "--", *run.engine_args, *extra]


def simulate(
    run: PublishedRun, extra: Iterable[str] = (), keep: Path | None = None
) -> dict[str, Any]:
    """Plan a row in processes of its own; return what came out of it.

    Args:
        run: the row.
        extra: engine arguments after those of the row.
        keep: a folder for the run folder and the output; default: they are deleted.
    """
    memory = load_profile(run.device).memory
    with tempfile.TemporaryDirectory(prefix="memprof-accuracy-") as name:
        folder = Path(name)
        command = command_of(run, folder, extra)
        env = {key: each for key, each in os.environ.items() if not key.startswith(_CLEARED)}
        # the presets, whatever a hub would answer today
        env |= {**run.env, "HF_HUB_OFFLINE": "1"}
        begin = time.monotonic()
        with (folder / "output").open("w") as output:
            engine = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                engine.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()
        seconds = round(time.monotonic() - begin, 1)
        result = {**_outcome(folder, engine.returncode, run.rank, memory), "seconds": seconds}
        if run.equation is not None and result["status"] == "ok":
            result["figures"] |= in_equation(run.equation, folder / "run", run.rank)
            result["equation"] = run.equation
        if run.buffers_mib is not None and result["status"] == "ok":
            result["figures"] |= with_buffers(run.buffers_mib << 20, folder / "run", run.rank)
        if keep is not None:
            shutil.rmtree(keep / run.id, ignore_errors=True)
            shutil.copytree(folder, keep / run.id, symlinks=True)
    result["constants"] = {name: getattr(memory, name, 0) for name in CONSTANTS}
    result["stack"] = run.stack
    result["taken"] = taken_from_runs(run)
    return result


def _outcome(folder: Path, status: int, which: int, memory: Memory) -> dict[str, Any]:
    """Return the figures of a rank of a run folder; without them why there are none."""
    path = folder / "run" / "report.json"
    if not path.is_file():
        lines = (folder / "output").read_text(errors="replace").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        reason = f"ended with status {status}: {told[-1]}" if told else f"status {status}"
        return {"status": "failed", "reason": reason[:300]}
    report = json.loads(path.read_text(encoding="utf-8"))
    run, failure = report["run"], (report["failure"] or {}).get("kind")
    if not report["ranks"]:
        reason = (run["exit_reason"] or "no rank")[:300]
        return {"status": "failed", "reason": reason, "failure": failure}
    rank = next((each for each in report["ranks"] if each["rank"] == which), report["ranks"][0])
    told = rank["figures"]
    figures = {
        "weights": _weights(run["engine"], rank),  # a rank that failed before has none
        "peak_activation": told.get("peak_activation_bytes"),
        "non_torch": told.get("non_torch_increase_bytes"),
        "kv_cache": rank["budget"]["engine_kv_cache_bytes"],
        "tokens": rank["kv"]["tokens"],
        "concurrency": rank["kv"]["max_concurrency"],
        "graphs": told.get("graph_bytes"),
    }
    granted = figures["kv_cache"] is not None
    return {
        "status": "ok" if granted and figures["tokens"] else run["status"],
        "reason": None if granted and figures["tokens"] else (run["exit_reason"] or "")[:300],
        "failure": failure,
        "equation": rank["budget"]["equation"],
        "engine_version": run["engine_version"],
        "world_size": (run.get("ranks") or {}).get("world_size", 1),
        "communicators": sum(each["phase"] == "communicator" for each in rank["phases"]),
        "neighbours": _neighbours(rank["phases"]),
        "binaries": _binaries(rank["budget"]["equation"], rank["phases"], memory),
        "figures": figures,
        "graph_count": _graphs(rank["phases"]),
    }


def _weights(engine: str, rank: dict[str, Any]) -> int | None:
    """Return the weights as the engine prints them: SGLang by how far free memory fell."""
    printed: int | None = rank["figures"].get("weights_bytes")
    if engine != "sglang":
        return printed
    loads = [each["delta"] for each in rank["phases"] if each["phase"] == "weight_load"]
    known = loads and all(loads)
    return -sum(each["device_free_bytes"] for each in loads) if known else None


def with_buffers(each_bytes: int, run_dir: Path, which: int) -> dict[str, float | None]:
    """Return what a plan grants if every communicator has two buffers of a size.

    Before 11 October 2025 vllm-ascend gave all communicators HCCL_BUFFSIZE; since then those but
    MC2's have a size by their group (vllm-ascend#3073, ``create_hccl_pg_options``).
    """
    report = build_report(load_run(run_dir))
    rank = _rank_of(report, which)
    sizes = [
        span.detail.get("buffer_bytes") for span in rank.phases if span.phase == "communicator"
    ]
    granted = rank.budget.engine_kv_cache_bytes
    if granted is None or None in sizes:
        return _grants(rank, None)
    return _grants(rank, granted - sum(2 * each_bytes - int(size) for size in sizes))


def in_equation(equation: str, run_dir: Path, which: int) -> dict[str, float | None]:
    """Return what another equation grants with the readings of a run.

    Args:
        equation: id of an equation, of which the newest row counts.
        run_dir: the plan.
        which: its rank.
    """
    form, record = form_of(equation), load_run(run_dir)
    assert form is not None
    report = build_report(record)
    rank = _rank_of(report, which)
    process = next(each for each in record.processes if each.identity.pid == rank.pid)
    granted = evaluate(form, engine_figures(process, report.run.eager, form)).kv_cache_bytes
    return _grants(rank, granted)


def _rank_of(report: Report, which: int) -> RankReport:
    return next((each for each in report.ranks if each.rank == which), report.ranks[0])


def _grants(rank: RankReport, granted: int | None) -> dict[str, float | None]:
    """Return the figures of a KV cache of another size than a rank's plan granted."""
    tokens, longest = tokens_for_bytes(rank.kv, granted), rank.kv.max_model_len
    held = None if tokens is None or not longest else tokens / longest
    return {"kv_cache": granted, "tokens": tokens, "concurrency": held}


def _neighbours(phases: list[dict[str, Any]]) -> int:
    """Return how many other processes the rank's device had when its weights were loaded."""
    loaded = [each["after"] for each in phases if each["phase"] == "weight_load"]
    return max((len(after["other_processes"] or ()) for after in loaded if after), default=0)


def _binaries(equation: str, phases: list[dict[str, Any]], memory: Memory) -> int:
    """Return the bytes of operators' binaries that the equation subtracts; 0: of no reading.

    E2 subtracts what the device holds; E3 and E4 what was added since before the communicators.
    SGLang sizes its pool before its first step.
    """
    held = [
        (each["phase"], edge["components"]["RUNTIME"]["bytes"])
        for each in phases
        for edge in (each["before"], each["after"])
        if edge and "RUNTIME" in (edge["components"] or ())
    ]
    until = [each for name, each in held if name == "profile_run"]
    since = [each for name, each in held if name == "hccl_init"]
    if not until or not since:
        return 0
    before: int = since[0] if equation != "E2" else memory.context_runtime_bytes
    return int(until[-1] - before)


def _graphs(phases: list[dict[str, Any]]) -> int | None:
    """Return the number of captured graphs; None where none was captured or counted."""
    counts = [each["detail"].get("graphs") for each in phases if each["phase"] == "graph_capture"]
    return None if not counts or None in counts else sum(counts)


def taken_from_runs(run: PublishedRun) -> list[str]:
    """Return the constants that the device's profile says were taken from a run on hardware."""
    text = find_profile(run.device).read_text(encoding="utf-8")
    said = dict(re.findall(r"(?m)^(\w+) = [\d_]+ *# (.*)$", text))
    return [name for name in CONSTANTS if re.search(r"fitted|the reported run", said.get(name, ""))]


def search_limit(run: PublishedRun, keep: Path | None) -> dict[str, Any]:
    """Plan a row at values of the option that limits its start; return where it stops starting.

    A start needs the KV cache of one request of the full length. Between two values that were tried
    what is granted and needed is taken to be linear, so few plans are made.
    """
    assert run.limit is not None
    option, tries = f"--{run.limit.option}", {}
    value, limit, result = run.limit.starts, None, {}
    for _ in range(_TRIES):
        result = simulate(run, [option, str(value)], keep)
        share = _share(result)
        if share is None:
            break
        tries[value] = share
        above = [each for each, held in tries.items() if held >= 1]
        below = [each for each, held in tries.items() if held < 1]
        if above and below:
            low, high = max(above), min(below)
            limit = low + (high - low) * (tries[low] - 1) / (tries[low] - tries[high])
            if (high - low) / low < _NARROW:
                break
            value = round(limit / _STEP) * _STEP
            if value in tries:
                break
        else:
            value = round(value * (1.06 if above else 0.94) / _STEP) * _STEP
    return {
        **result,
        "tries": {str(each): round(held, 5) for each, held in sorted(tries.items())},
        "limit": limit,
    }


def _share(result: dict[str, Any]) -> float | None:
    """Return the KV cache granted over that of one request; None where a plan tells neither."""
    concurrency = (result.get("figures") or {}).get("concurrency")
    if concurrency is not None:
        return float(concurrency)
    sizes = _REFUSED.search(result.get("reason") or "")
    return None if sizes is None else float(sizes[2]) / float(sizes[1])


def plan_row(run: PublishedRun, keep: Path | None) -> PlannedRow:
    """Plan a row: once for its figures, several times for its limit."""
    limited = run.limit is not None and not run.published
    return PlannedRow(**(search_limit(run, keep) if limited else simulate(run, keep=keep)))


def read_kept() -> dict[str, PlannedRow]:
    """Return what was kept, by the row's name."""
    rows = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return {name: PlannedRow(**row) for name, row in rows.items()}


def write_kept(kept: dict[str, PlannedRow], runs: list[PublishedRun]) -> None:
    """Write what is kept, in the order of the table; rows that it lacks are dropped."""
    ordered = {run.id: asdict(kept[run.id]) for run in runs if run.id in kept}
    KEPT.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def write(runs: list[PublishedRun], check: bool) -> int:
    """Write page, picture and spreads, or compare them; return the exit status."""
    kept = read_kept()
    errors = [e for run in runs if run.id in kept for e in errors_of(run, kept[run.id])]
    profiles = {run.device: load_profile(run.device).name for run in runs}
    files = accuracy_page.files(runs, kept) | {SPREADS: spreads_text(errors, profiles)}
    old = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in old:
        if check:
            print(f"{path} is not what {KEPT.name} and the table say: python -m scripts.accuracy")
        else:
            path.write_text(files[path], encoding="utf-8")
    silent = [
        error
        for error in accuracy_page.outside(errors)
        if error.figure not in {**error.run.explained, **error.run.unexplained}
    ]
    for error in silent:
        print(
            f"{error.run.id}: {error.figure} is {error.relative:+.2%} off, and its row says no word"
        )
    return 1 if (check and old) or silent else 0


def differs(run: PublishedRun, planned: PlannedRow, kept: PlannedRow | None) -> str:
    """Return why a plan is not what is kept, or misses what is published; "" where it is."""
    if planned.status != "ok" or kept is None:
        return planned.reason or "nothing is kept"
    for name in ("figures", "equation", "constants"):
        if getattr(planned, name) != getattr(kept, name):
            return f"{name}: {getattr(planned, name)}, kept {getattr(kept, name)}"
    told = {**run.explained, **run.unexplained}
    missed = [
        f"{error.figure} {error.relative:+.2%}"
        for error in errors_of(run, planned)
        if error.met is False and error.figure not in told
    ]
    return ", ".join(missed)


def verify(runs: list[PublishedRun]) -> int:
    """Plan rows and compare them with what is kept; return the exit status."""
    kept, status = read_kept(), 0
    for run in runs:
        why = differs(run, PlannedRow(**simulate(run)), kept.get(run.id))
        print(f"{run.id}: {why or 'as kept'}", flush=True)
        status |= bool(why)
    return status


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", action="store_true", help="plan rows on the simulated device")
    parser.add_argument("--again", action="store_true", help="also those that were planned")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows with such a name")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help="the table")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep run folders there")
    parser.add_argument("--stack", metavar="NAME", help="another stack than the nearest")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="plans at once")
    parser.add_argument("--check", action="store_true", help="compare the page with what is kept")
    parser.add_argument("--verify", action="store_true", help="compare plans with what is kept")
    options = parser.parse_args()
    runs = load_runs(options.rows)
    if options.verify:
        return verify([run for run in runs if re.search(options.only, run.id)])
    own = options.rows != ROWS
    kept = {} if own else read_kept()
    chosen = [run for run in runs if options.run and not run.not_planned]
    chosen = [run for run in chosen if re.search(options.only, run.id)]
    chosen = [run for run in chosen if options.again or run.id not in kept]
    if options.stack:
        chosen = [replace(run, stack=options.stack) for run in chosen]
    with ThreadPoolExecutor(options.at_once) as pool:
        under_way = {pool.submit(plan_row, run, options.keep): run for run in chosen}
        for each in as_completed(under_way):
            run, planned = under_way[each], each.result()
            print(accuracy_page.line(run, planned), flush=True)
            if not own:
                write_kept(read_kept() | {run.id: planned}, runs)
    return 0 if own else write(runs, options.check)


if __name__ == "__main__":
    sys.exit(main())
