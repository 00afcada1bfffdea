"""Requests on the real engine: steps, stages and images of an offline run, by what it recorded."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest

from tests.support.engine import OLD_STACK, STACK, RunResult, require_stack
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.timeout(400)]

#: Width and height of the images, in the order of their names.
SIZES = ((256, 256), (1024, 768), (320, 960))


def write_png(path: Path, width: int, height: int) -> None:
    """Write a picture of one colour, different for each size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    row = b"\0" + bytes((width % 251, height % 241, 90)) * width
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def images(folder: Path) -> Path:
    folder.mkdir()
    for number, (width, height) in zip((1, 2, 10), SIZES, strict=True):
        write_png(folder / f"img{number}.png", width, height)
    (folder / "img3.png").write_bytes(b"no picture")
    return folder


def check(run: RunResult) -> None:
    """Hold the report against what was sent: three images, one after the other."""
    assert run.returncode == 0, run.output[-3000:]
    assert "img3.png" in run.engine_log.partition("skipped: ")[2].partition("\n")[0]
    assert not [event for event in run.events() if event["kind"] == "error"]
    [rank] = run.report["ranks"]
    requests = rank["requests"]
    assert len(requests) == len(SIZES)
    for request, (width, height) in zip(requests, SIZES, strict=True):
        [[seen_width, seen_height]] = request["images"]
        # the engine makes both a multiple of the merged patch, 28 or 32
        assert abs(seen_width - width) <= 16
        assert abs(seen_height - height) <= 16
        assert request["output_tokens"] == 4
        assert request["prompt_tokens"] > request["image_tokens"] > 0
        assert request["allocated_peak_bytes"] >= request["allocated_before_bytes"]
        assert request["peak_stage"] in ("mm_encoder", "mm_merge", "mm_cache_insert", "step")
        assert request["others"] == 0
        assert request["finished"] is True
    tokens = [request["image_tokens"] for request in requests]
    assert tokens[1] == max(tokens)
    stages = {stage["stage"]: stage for stage in rank["stages"]}
    for name in ("mm_encoder", "mm_merge"):
        assert stages[name]["passages"] == len(SIZES)
        assert stages[name]["allocated_total_bytes"] > 0
        assert stages[name]["failed"] == 0
        assert stages[name]["image"] == requests[1]["images"][0]
    assert stages["mm_cache_insert"]["items"] == len(SIZES)
    assert rank["mm_profile"]["merged"] is False
    assert rank["mm_profile"]["tokens"] > 0
    found = {finding["id"]: finding for finding in run.report["findings"]}
    merge = found["merge-not-profiled"]
    assert merge["bytes"] == stages["mm_merge"]["allocated_total_bytes"]
    assert rank["samples"]
    highest = max(point["high"].get("allocated_bytes", 0) for point in rank["samples"])
    assert highest >= max(request["allocated_peak_bytes"] for request in requests)
    size = r"(\d+\.\d+)"
    told = re.findall(
        rf"request (\d+)/(\d+): .* s left \| TP0: allocated {size} GiB \(peak {size}\), "
        rf"reserved {size} \(peak {size}\)",
        run.output,
    )
    assert [(int(done), int(total)) for done, total, *_ in told] == [
        (number, len(SIZES)) for number in range(1, len(SIZES) + 1)
    ]
    for *_, allocated, peak, reserved, reserved_peak in told:
        assert 0 < float(allocated) <= float(peak)
        assert float(allocated) <= float(reserved) <= float(reserved_peak)
    written = sum(path.stat().st_size for path in run.run_dir.rglob("*.jsonl"))
    assert written < 2 * MIB


@pytest.mark.parametrize(
    "stack", [STACK, pytest.param(OLD_STACK, marks=pytest.mark.full)], ids=lambda stack: stack[-6:]
)
def test_images_have_their_peaks_and_the_merge_its_bytes(
    run_memprof, tmp_path: Path, stack: str
) -> None:
    run = run_memprof(
        "offline",
        "memprof/tiny-vl",
        "--device",
        "sim:910b",
        "--stack",
        require_stack(stack),
        "--images",
        str(images(tmp_path / "images")),
        "--on-error",
        "skip",
        "--max-tokens",
        "4",
        "--enforce-eager",
        "--max-model-len",
        "4096",
    )
    check(run)
