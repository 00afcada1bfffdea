"""Hold the verdict on a device against what happens there: ``python -m scripts.verdict_cases``.

For each set-up the engine starts once on a roomy simulated device and serves one short request.
From the report of that start follows what every other device must do: a device is made so small
that the report's own verdict says "fits" or "exceeds" by a few MiB, the same engine starts there
and is driven to its limits: all sequences at once, each at its full length, with images as large as
the model takes where it takes any. "fits" has to serve them, "exceeds" has to run out of memory.

Prints a table and, with -o, writes it as JSON. The exit status is 1 where a verdict was
wrong or is not the one that its device was made for.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_memprof.accounting.model import Budget, RankReport
from vllm_memprof.sources import build_run
from vllm_memprof.units import GIB, MIB

PROFILE = Path(__file__).parent.parent / "vllm_memprof/sim/data/profiles/ascend910b.toml"
ROOMY_BYTES = 60 * GIB
FITS, EXCEEDS = "fits", "exceeds"
#: ACL's code for device memory that is used up (ACL_ERROR_RT_MEMORY_ALLOCATION), as ATB has it.
OUT_OF_MEMORY = "error 207001"
#: Tokens of the largest image that memprof/tiny-vl takes, of 1024 x 1024 pixels; a larger one is
#: made smaller by its processor.
IMAGE_TOKENS = 1024
#: Tokens that each request generates.
OUTPUT_TOKENS = 8
NEW, OLD = "vllm-ascend-0.23.0", "vllm-ascend-0.13.0"


@dataclass(frozen=True)
class SetUp:
    """A model with its arguments."""

    name: str
    model: str
    args: tuple[str, ...]
    sequences: int
    length: int  # max_model_len, tokens
    stack: str = NEW
    images: bool = False
    context_bytes: int | None = None  # of the device's profile: what a process holds at its start

    def engine_args(self, utilization: float) -> list[str]:
        return [
            *("--stack", self.stack, *self.args),
            *("--max-num-seqs", str(self.sequences), "--max-model-len", str(self.length)),
            *("--gpu-memory-utilization", str(utilization)),
        ]


SETUPS = (
    SetUp(
        "text, eager",
        "memprof/tiny",
        ("--enforce-eager", "--max-num-batched-tokens", "8192"),
        8,
        2048,
    ),
    SetUp("text, graphs", "memprof/tiny", ("--max-num-batched-tokens", "8192"), 8, 2048),
    SetUp(
        "long steps",
        "memprof/tiny",
        ("--enforce-eager", "--max-num-batched-tokens", "65536"),
        64,
        4096,
        context_bytes=3 * GIB,
    ),
    SetUp(
        "images",
        "memprof/tiny-vl",
        ("--enforce-eager", "--max-num-batched-tokens", "20480", "--mm-processor-cache-gb", "0"),
        4,
        20480,
        images=True,
        context_bytes=3 * GIB,
    ),
    SetUp(
        "text, 0.13.0",
        "memprof/tiny",
        ("--enforce-eager", "--max-num-batched-tokens", "8192"),
        8,
        2048,
        stack=OLD,
    ),
)


@dataclass(frozen=True)
class Case:
    """A device made for a verdict."""

    setup: str
    utilization: float
    wanted: str  # fits | exceeds
    margin_mib: int  # beyond what profiling may miss, or that the device is exceeded by


#: Each utilization of each set-up once. 0.13.0 subtracts what was in use at the start as well, so
#: that a device with little headroom below 0.98 has no KV cache at all.
CASES = (
    Case("text, eager", 0.3, EXCEEDS, 48),
    Case("text, eager", 0.5, FITS, 16),
    Case("text, eager", 0.9, EXCEEDS, 48),
    Case("text, eager", 0.98, FITS, 16),
    Case("text, graphs", 0.3, FITS, 16),
    Case("text, graphs", 0.5, EXCEEDS, 48),
    Case("text, graphs", 0.9, FITS, 16),
    Case("text, graphs", 0.98, EXCEEDS, 48),
    Case("long steps", 0.3, EXCEEDS, 48),
    Case("long steps", 0.5, FITS, 16),
    Case("long steps", 0.9, FITS, 16),
    Case("long steps", 0.98, EXCEEDS, 48),
    Case("images", 0.3, FITS, 16),
    Case("images", 0.5, EXCEEDS, 48),
    Case("images", 0.9, EXCEEDS, 48),
    Case("images", 0.98, FITS, 16),
    Case("text, 0.13.0", 0.3, FITS, 2048),
    Case("text, 0.13.0", 0.5, FITS, 2048),
    Case("text, 0.13.0", 0.9, FITS, 16),
    Case("text, 0.13.0", 0.98, EXCEEDS, 48),
)


@dataclass(frozen=True)
class Outcome:
    """What the verdict said, and what happened."""

    setup: str
    utilization: float
    device_bytes: int
    kv_cache_bytes: int | None  # granted on the device that was made
    headroom_bytes: int | None  # by the report of the roomy device
    released_headroom_bytes: int | None
    verdict: str | None
    happened: str  # served | out of memory | what else
    where: str  # the phase
    own_verdict: str | None  # of the report of the driven run itself

    @property
    def right(self) -> bool:
        return (self.verdict, self.happened) in ((FITS, "served"), (EXCEEDS, "out of memory"))


@dataclass(frozen=True)
class Place:
    """Where engines run, and how they are started."""

    folder: Path
    prefix: tuple[str, ...]  # before each command
    timeout_s: float

    def run(self, name: str, setup: SetUp, device: int, utilization: float, full: bool) -> Path:
        """Run the engine; return its run folder.

        Args:
            name: of the run.
            setup: what to start.
            device: total memory, bytes.
            utilization: of that device.
            full: drive it to its limits; else one short request.
        """
        run_dir = self.folder / name
        profile = self.folder / f"{name}.toml"
        profile.write_text(profile_text(device, setup.context_bytes))
        requests = self.folder / f"{name}.jsonl"
        rows = limits(setup) if full else [{"prompt": "hi"}]
        requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            *self.prefix,
            *(sys.executable, "-m", "vllm_memprof", "offline", setup.model),
            *("--device", f"sim:{profile}", "--run-dir", str(run_dir), "-q", "--at-once"),
            *("--prompts", str(requests), "--max-tokens", str(OUTPUT_TOKENS)),
            *setup.engine_args(utilization),
        ]
        with Path(f"{run_dir}.out").open("w") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=self.timeout_s)
        return run_dir


def profile_text(total: int, context: int | None) -> str:
    """Return the profile of an Ascend 910B with another amount of memory."""
    text = PROFILE.read_text()
    text = re.sub(r"(?m)^total_bytes = [\d_]+", f"total_bytes = {total}", text)
    text = re.sub(r'(?m)^name = "ascend910b"', 'name = "case"', text)
    text = re.sub(r"(?m)^aliases = .*$", "aliases = []", text)
    if context is not None:
        text = re.sub(r"(?m)^context_bytes = [\d_]+", f"context_bytes = {context}", text)
    return text


def limits(setup: SetUp) -> list[dict[str, object]]:
    """Return as many requests as the engine takes at once, each of its full length."""
    length = setup.length - OUTPUT_TOKENS
    if not setup.images:
        return [
            {"prompt": {"prompt_token_ids": [3 + (7 * row + i) % 500 for i in range(length)]}}
            for row in range(setup.sequences)
        ]
    words = {"type": "text", "text": "Describe this image."}
    each = length // (IMAGE_TOKENS + 2)  # a mark before and after
    images = [  # of unequal greys: the engine encodes an image that it has seen once only
        {"type": "image_url", "image_url": {"url": png(1024, 1024, number)}}
        for number in range(setup.sequences * each)
    ]
    batches = [images[i : i + each] for i in range(0, len(images), each)]
    return [{"messages": [{"role": "user", "content": [*batch, words]}]} for batch in batches]


def png(width: int, height: int, level: int) -> str:
    """Return a grey image as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes([level]) * (3 * width)) * height
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    content += chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + b64encode(content).decode()


def device_for(case: Case, known: RankReport) -> int:
    """Return the total of a device on which the verdict of a case holds by its margin, bytes.

    The engine takes utilization x total less what does not depend on the device, so that headroom
    grows with the share that is never requested.
    """
    budget = known.budget
    asked, granted, total = (
        budget.requested_bytes,
        budget.engine_kv_cache_bytes,
        known.device_total_bytes,
    )
    fits, released = budget.fits_device_bytes, budget.fits_device_released_bytes
    assert asked is not None
    assert granted is not None
    assert total is not None
    assert fits is not None
    assert released is not None
    taken, margin = asked - granted, case.margin_mib * MIB
    held = total - (fits if case.wanted == FITS else released)
    headroom = margin + (budget.unprofiled_bytes or 0) if case.wanted == FITS else -margin
    beyond = held - taken + headroom
    return int(beyond / (1 - case.utilization)) // MIB * MIB


def verdict_on(device: int, granted: int, known: RankReport) -> Budget:
    """Return the budget of a known start, moved to another device and another KV cache."""
    budget = known.budget
    assert budget.fits_device_bytes is not None
    assert budget.fits_device_released_bytes is not None
    moved = device - (known.device_total_bytes or 0)
    return replace(
        budget,
        headroom_bytes=budget.fits_device_bytes + moved - granted,
        released_headroom_bytes=budget.fits_device_released_bytes + moved - granted,
    )


def try_case(case: Case, setup: SetUp, known: RankReport, place: Place) -> Outcome:
    """Make the device, drive the engine on it, and compare."""
    device = device_for(case, known)
    name = f"{setup.name}-{case.utilization}-{case.wanted}".replace(", ", "-").replace(" ", "-")
    run_dir = place.run(name, setup, device, case.utilization, full=True)
    report = build_run(run_dir)
    if not report.ranks:
        return Outcome(
            *(setup.name, case.utilization, device, None, None, None, None),
            *(report.run.exit_reason or "no worker was recorded", "", None),
        )
    rank = report.ranks[0]
    granted = rank.budget.engine_kv_cache_bytes
    moved = None if granted is None else verdict_on(device, granted, known)
    happened = "served" if report.run.status == "ok" else report.run.exit_reason or "failed"
    log = (run_dir / "engine.log").read_text(errors="replace")
    if report.run.status == "oom" or rank.oom is not None or OUT_OF_MEMORY in log:
        happened = "out of memory"
    return Outcome(
        setup.name,
        case.utilization,
        device,
        granted,
        None if moved is None else moved.headroom_bytes,
        None if moved is None else moved.released_headroom_bytes,
        None if moved is None else moved.device_verdict,
        happened,
        rank.open_phases[-1] if rank.open_phases else "",
        rank.budget.device_verdict,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown."""
    lines = [
        "| set-up | utilization | device, GiB | KV cache, GiB | headroom, MiB | released, MiB "
        "| verdict | happened | right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        kv_cache = "-" if each.kv_cache_bytes is None else f"{each.kv_cache_bytes / GIB:.3f}"
        sizes = [
            "-" if size is None else f"{size / MIB:.1f}"
            for size in (each.headroom_bytes, each.released_headroom_bytes)
        ]
        cells = [
            *(each.setup, f"{each.utilization}", f"{each.device_bytes / GIB:.3f}", kv_cache),
            *(*sizes, each.verdict or "-", each.happened, "yes" if each.right else "NO"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    right = sum(each.right for each in outcomes)
    ways = {way: sum(each.verdict == way for each in outcomes) for way in (FITS, EXCEEDS)}
    lines += ["", f"{right} of {len(outcomes)} right; verdicts: {ways}"]
    return "\n".join(lines)


def run_cases(cases: Sequence[Case], place: Place) -> list[Outcome]:
    """Run cases, each set-up's roomy start first."""
    known: dict[str, RankReport] = {}
    outcomes = []
    for case in cases:
        setup = next(each for each in SETUPS if each.name == case.setup)
        if setup.name not in known:
            name = f"roomy-{setup.name}".replace(", ", "-").replace(" ", "-")
            run_dir = place.run(name, setup, ROOMY_BYTES, 0.3, full=False)
            known[setup.name] = build_run(run_dir).ranks[0]
        outcomes.append(try_case(case, setup, known[setup.name], place))
        print(table(outcomes[-1:]).splitlines()[2], flush=True)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for; return 1 where a verdict is wrong or not wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--setup", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--utilization", action="append", type=float, help="only this one; likewise"
    )
    parser.add_argument("--folder", type=Path, help="where runs are kept")
    parser.add_argument("--prefix", default="", help="command that each engine is started with")
    parser.add_argument("-o", dest="output", type=Path, help="the table as JSON")
    asked = parser.parse_args(argv)
    cases = [
        case
        for case in CASES
        if (not asked.setup or case.setup in asked.setup)
        and (not asked.utilization or case.utilization in asked.utilization)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder, tuple(shlex.split(asked.prefix)), 600)
        outcomes = run_cases(cases, place)
    print(table(outcomes))
    if asked.output is not None:
        rows = [{**asdict(each), "right": each.right} for each in outcomes]
        asked.output.write_text(json.dumps(rows, indent=1) + "\n")
    as_wanted = [each.verdict for each in outcomes] == [case.wanted for case in cases]
    return 0 if as_wanted and all(each.right for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
