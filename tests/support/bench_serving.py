"""Measures served tokens/s with `memprof serve --sample N` and with plain `vllm serve`, under load.

Servers alternate (plain, memprof, memprof, plain, ...) on the simulated device, so that a drifting
machine does not favour one side; each answers the same number of clients for the same time. Each
pair gives a ratio; the result is the median ratio with its smallest and largest value, beside the
spread of the plain servers, which is what the machine's own noise looks like. A request without an
answer, an answer that is too short, and a file of the run beyond its bound are failures: exit
status 1.

    .venv/bin/python -m tests.support.bench_serving [--pairs 2] [--minutes 5] [--clients 32]
        [--sample 16] [--model memprof/tiny] [--json FILE]

With `--sample off` it is the cost of `memprof serve` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.load import Load
from tests.support.ports import free_port
from vllm_memprof.record.schema import EVENTS_DIR, SAMPLES_DIR

#: Of one process and run: its events and its samples.
MOST_BYTES = 64 << 20
SERVED_NAME = "bench"
ENGINE_ARGS = ["--served-model-name", SERVED_NAME, "--max-model-len", "4096", "--enforce-eager",
               "--host", "127.0.0.1"]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """One server: what its clients got in the measured time."""

    side: str
    tokens_per_second: float
    requests: int
    seconds_per_request: float  # median
    failures: int
    largest_bytes: int  # of events and samples of one process; 0 without memprof
    samples: int  # lines


def serve(
    side: str, command: list[str], env: dict[str, str], run_dir: Path, options: argparse.Namespace
) -> Served:
    """Start a server, load it, end it."""
    port = free_port()
    log = run_dir.with_suffix(".log")
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port)], env=env, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(server, port, log)
        load = Load(port, SERVED_NAME, options.clients, max_tokens=options.max_tokens).start()
        time.sleep(options.warm_up)
        began = time.monotonic()
        time.sleep(options.minutes * 60)
        ended = time.monotonic()
        answers = load.stop()
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    within = [
        (tokens, seconds)
        for tokens, seconds, at in zip(
            answers.tokens, answers.seconds, answers.ended_s, strict=True
        )
        if began <= at < ended
    ]
    if not within:
        sys.exit(
            f"no request was answered in time: {answers.failures[:3]}\n{log.read_text()[-3000:]}"
        )
    short = sum(tokens != options.max_tokens for tokens in answers.tokens)
    return Served(
        side,
        sum(tokens for tokens, _ in within) / (ended - began),
        len(within),
        statistics.median(seconds for _, seconds in within),
        len(answers.failures) + short,
        *recorded(run_dir),
    )


def wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    limit = time.monotonic() + 300
    while time.monotonic() < limit:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")


def recorded(run_dir: Path) -> tuple[int, int]:
    """Return the bytes of the process that wrote the most, and the sample lines of all."""
    sizes = {
        path.stem: path.stat().st_size
        + sum(each.stat().st_size for each in (run_dir / SAMPLES_DIR / path.stem).glob("*"))
        for path in (run_dir / EVENTS_DIR).glob("*.jsonl")
    }
    lines = sum(path.read_bytes().count(b"\n") for path in (run_dir / SAMPLES_DIR).glob("*/0-*"))
    return max(sizes.values(), default=0), lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0, help="measured, of each server")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of load before it")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--sample", default="16")
    parser.add_argument("--model", default="memprof/tiny")
    parser.add_argument("--profile", default="910b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from vllm_memprof.sim.presets import resolve_model
    from vllm_memprof.sim.runtime import ENV_STATE, own_state_file, prepare_runtime

    runtime = prepare_runtime(options.profile)
    model = resolve_model(options.model, [])
    results: list[Served] = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            for side in ("plain", "memprof") if pair % 2 == 0 else ("memprof", "plain"):
                run_dir = Path(folder, f"{side}{pair}")
                env = {**os.environ}
                env.pop("MEMPROF_RUN_DIR", None)
                state = own_state_file()
                if side == "plain":
                    env |= {**runtime.env, **model.env, ENV_STATE: str(state)}
                    command = [str(runtime.python), "-m", "vllm.entrypoints.cli.main", "serve",
                               model.path, *model.extra_args, *ENGINE_ARGS]  # fmt: skip
                else:
                    command = [sys.executable, "-m", "vllm_memprof", "serve", options.model,
                               "--device", f"sim:{options.profile}", "--sample", options.sample,
                               "--run-dir", str(run_dir), *ENGINE_ARGS]  # fmt: skip
                results.append(serve(side, command, env, run_dir, options))
                state.unlink(missing_ok=True)
                print(json.dumps(asdict(results[-1])), file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return report(results, options)


def report(results: list[Served], options: argparse.Namespace) -> int:
    """Print the ratio with its spread, and what failed; return the exit status."""
    plain, observed = (
        [each for each in results if each.side == side] for side in ("plain", "memprof")
    )
    rates = [each.tokens_per_second for each in plain]
    ratios = [
        with_.tokens_per_second / without for with_, without in zip(observed, rates, strict=True)
    ]
    print(
        f"{options.model}, {options.clients} clients, {options.minutes:g} min each, "
        f"{options.pairs} interleaved pairs, --sample {options.sample}\n"
    )
    print("| tokens/s without | with | ratio, median (min to max) | spread without |")
    print("|---|---|---|---|")
    print(
        f"| {statistics.median(rates):.1f} "
        f"| {statistics.median(each.tokens_per_second for each in observed):.1f} "
        f"| {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) "
        f"| {(max(rates) - min(rates)) / statistics.median(rates):.1%} |\n"
    )
    failures = {side: sum(each.failures for each in results if each.side == side)
                for side in ("plain", "memprof")}  # fmt: skip
    largest = max(each.largest_bytes for each in observed)
    samples = min(each.samples for each in observed)
    print(f"requests answered: {sum(each.requests for each in results)}, lost: {failures}")
    print(f"events and samples of one process: {largest:,} bytes at most, bound {MOST_BYTES:,}")
    print(f"samples in the files, least of a run: {samples}")
    wrong = [
        *(["requests were lost"] if any(failures.values()) else []),
        *(["a process wrote more than its bound"] if largest > MOST_BYTES else []),
        *(["nothing was sampled: the comparison would prove nothing"]
          if not samples and options.sample != "off" else []),
    ]  # fmt: skip
    for each in wrong:
        print(f"FAILED: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
