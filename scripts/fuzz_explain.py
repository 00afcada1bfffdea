"""Feeds ``memprof explain`` with spoilt logs: no traceback, no hang, no number that the log does not hold.

Random and mutational: each round takes one of the logs in ``tests/data/logs``, applies a few kinds of dirt and random
edits of bytes, and reads the result as the command does. A failing input is written beside the seed that repeats it.

    .venv/bin/python scripts/fuzz_explain.py [--seconds 60] [--seed N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.logs.dirt import HARMLESS, LOSSY  # noqa: E402
from tests.unit.logs.samples import OTHERS, SAMPLES  # noqa: E402
from vllm_memprof.errors import MemprofError  # noqa: E402
from vllm_memprof.ledger.build import build_report  # noqa: E402
from vllm_memprof.logs.clean import read_chunks, read_lines  # noqa: E402
from vllm_memprof.logs.parse import parse  # noqa: E402
from vllm_memprof.logs.record import build_runs  # noqa: E402
from vllm_memprof.logs.runs import Sorter  # noqa: E402

#: A round that takes longer is a hang.
ROUND_LIMIT_S = 20.0


def corpus() -> list[str]:
    folder = ROOT / "tests" / "data" / "logs"
    texts = [path.read_text() for path in sorted(folder.iterdir()) if path.suffix in (".log", ".md")]
    return [*texts, "\n".join(line for _, line, _ in SAMPLES), "\n".join(OTHERS)]


def edit(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, lost, doubled, moved."""
    spoilt = bytearray(data)
    for _ in range(rng.randrange(12)):
        at = rng.randrange(len(spoilt) + 1)
        size = rng.choice((1, 1, 2, 8, 64, 512))
        kind = rng.randrange(5)
        if kind == 0:
            spoilt[at:at] = rng.randbytes(size)
        elif kind == 1:
            del spoilt[at : at + size]
        elif kind == 2:
            spoilt[at:at] = spoilt[at : at + size]
        elif kind == 3:
            spoilt[at:at] = rng.choice((b"\n", b"\r", b"\x1b[", b"(", b"pid=", b"9" * size, b"-", b".", b"GiB", b"\0"))
        else:
            other = rng.randrange(len(spoilt) + 1)
            spoilt[at:at] = spoilt[other : other + size]
    return bytes(spoilt)


def make(texts: list[str], rng: random.Random) -> bytes:
    text: str | bytes = "".join(rng.sample(texts, rng.choice((1, 1, 1, 2, 3))))
    for _ in range(rng.randrange(4)):
        if isinstance(text, bytes):
            break
        kinds = {**HARMLESS, **LOSSY}
        text = kinds[rng.choice(sorted(kinds))](text, rng)
    data = text.encode() if isinstance(text, str) else text
    return edit(data, rng)


def explain(data: bytes) -> None:
    """The way of the command, without its terminal."""
    try:
        runs = build_runs(Sorter().take(parse(read_lines(read_chunks(io.BytesIO(data))))), "fuzz")
    except MemprofError:
        return
    for run in runs:
        report = build_report(run).to_json()
        assert report["run"]["source"] == "log"
        for process in run.processes:
            for name, value in process.figures.items():
                assert type(value) is int or (type(value) is float and not name.endswith("_bytes")), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat one round")
    parser.add_argument("--keep", type=Path, default=Path("build"), help="folder for an input that fails")
    args = parser.parse_args()
    texts = corpus()
    first = args.seed if args.seed is not None else int(time.time())
    end = time.monotonic() + args.seconds
    rounds, size = 0, 0
    while True:
        seed = first + rounds
        data = make(texts, random.Random(seed))
        begin = time.monotonic()
        try:
            explain(data)
            assert time.monotonic() - begin < ROUND_LIMIT_S, "too slow"
        except Exception:
            args.keep.mkdir(parents=True, exist_ok=True)
            path = args.keep / f"fuzz-{seed}.log"
            path.write_bytes(data)
            traceback.print_exc()
            print(f"seed {seed} fails; its input is in {path}", file=sys.stderr)
            return 1
        rounds += 1
        size += len(data)
        if args.seed is not None or time.monotonic() > end:
            break
    print(f"{rounds} logs, {size / 1e6:.1f} MB, seeds {first} to {first + rounds - 1}: no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
