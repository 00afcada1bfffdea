"""A server that runs out of memory at one image of several, and the same with the advice applied.

Allocation fails as it does on hardware: the allocator asks the device, and the device has no more.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_causes import first_cure
from tests.support.engine import RunResult
from tests.support.png import write_png
from vllm_memprof.sim.profiles import PROFILES_DIR

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

#: Most are small; one of the others has more pixels than the device has room for.
SMALL = [(256, 256), (320, 240), (256, 320)]
LARGE = (1280, 960)
ARGS = (
    "--enforce-eager",
    "--max-model-len=8192",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=8192",
    "--mm-processor-cache-gb=0",
)
#: Blocks of fixed segments, so that free memory lies in pieces; 0.23 grows segments by default.
ENV = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}


def profile_of(folder: Path, name: str, **values: int) -> Path:
    """Write the profile of the 910B with other sizes, bytes."""
    lines = (PROFILES_DIR / "ascend910b.toml").read_text().splitlines()
    for key, value in {"name": f'"{name}"', "aliases": "[]", **values}.items():
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[at] = f"{key} = {value}"
    profile = folder / f"{name}.toml"
    profile.write_text("\n".join(lines))
    return profile


@pytest.fixture
def small_device(tmp_path: Path) -> Path:
    """A profile of 4 GiB whose ATB pool, taken after the KV cache was sized, leaves 30 MiB
    beside the binaries of what only requests run."""
    return profile_of(tmp_path, "small", total_bytes=4 << 30, atb_pool_bytes=170 << 20)


def make_images(folder: Path, count: int, first_large: int) -> Path:
    """Write images, numbered from 1; the first large one is followed by more of its size."""
    folder.mkdir()
    for number in range(1, count + 1):
        large = number >= first_large and (number - first_large) % 7 == 0
        width, height = LARGE if large else SMALL[number % len(SMALL)]
        write_png(folder / f"image_{number:02}_{width}x{height}.png", width, height)
    return folder


def parts(oom: dict[str, Any]) -> int:
    blocks = oom["free_blocks"]
    names = ("fitting", "too_small", "other_streams", "other_pools", "graph_pools", "pending")
    return sum(blocks[f"{name}_bytes"] for name in names)


@pytest.mark.parametrize(
    ("count", "first_large"),
    [(5, 4), pytest.param(60, 29, marks=pytest.mark.full)],
)
def test_an_image_too_large_is_named_and_the_advice_lets_all_pass(
    run_memprof: Callable[..., RunResult],
    small_device: Path,
    tmp_path: Path,
    count: int,
    first_large: int,
) -> None:
    images = make_images(tmp_path / "images", count, first_large)
    command = ("offline", "memprof/tiny-vl", "--device", f"sim:{small_device}", *ARGS)
    command += ("--images", str(images), "--max-tokens", "2", "--gpu-memory-utilization=0.91")
    died = run_memprof(*command, env=ENV)
    assert died.returncode != 0
    [rank] = died.report["ranks"]
    oom = rank["oom"]
    assert died.report["run"]["status"] == "oom"
    first_cure(died, "multimodal")

    # where
    assert oom["phase"] == "request"
    assert oom["stage"] in ("mm_encoder", "mm_merge", "model_forward")
    [request] = oom["requests"]
    [item] = request["items"]
    assert (item["modality"], item["encoded"]) == ("image", True)
    assert item["size"] == [1152, 864]  # as the engine resizes it
    assert oom["at_request"] == first_large
    assert died.engine_log.count("output tokens") == first_large - 1

    # who held the device, and the free blocks
    whole = [row["bytes"] for row in oom["owners"] if row.get("part_of") is None]
    assert sum(whole) == 4 << 30
    blocks = oom["free_blocks"]
    free = oom["reserved_bytes"] - oom["allocated_bytes"]
    assert blocks["exact"] == (blocks["freed_bytes"] == 0)
    assert parts(oom) == free + blocks["freed_bytes"]
    if blocks["exact"]:
        assert blocks["largest_bytes"] < oom["requested_bytes"]
        assert blocks["fitting_bytes"] == 0
    assert not blocks["expandable"]

    # the allocator's observer read counters alone, and an exception was read once
    events = died.events()
    [failure] = [event for event in events if event["kind"] == "failure"]
    [moment] = [event for event in events if event.get("phase") == "oom"]
    assert moment["snapshot"]["device_free_bytes"] is None
    assert failure["oom"] == moment["id"]

    # what would have let it pass, and that it does
    remedies = {each["id"]: each for each in oom["remedies"]}
    assert remedies["expandable_segments"]["bound"] == "at_most"
    assert remedies["image_size"]["how"] == "estimated"
    room = remedies["room_for_the_peak"]
    assert room["enough"] is True
    passed = run_memprof(*command, *shlex.split(room["argument"]), env=ENV)
    assert passed.returncode == 0, passed.output[-3000:]
    assert passed.engine_log.count("output tokens") == count
    assert passed.report["ranks"][0]["oom"] is None


#: Of the first 28, and of those between the large ones.
PHOTOS = [(1280, 960), (1920, 1080), (2048, 1536), (1024, 1024), (3024, 2016)]


@pytest.mark.full
def test_sixty_photos_through_a_model_of_eight_billion_parameters(
    run_memprof: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Dies at the first of 4096x4096, with most of the KV cache asked for; passes as advised."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(1, 61):
        large = number >= 29 and (number - 29) % 7 == 0
        width, height = (4096, 4096) if large else PHOTOS[number % len(PHOTOS)]
        write_png(folder / f"image_{number:02}.png", width, height, (number, 9, 9))
    little_left = profile_of(tmp_path, "little_left", atb_pool_bytes=170 << 20)
    command = ("offline", "Qwen/Qwen3-VL-8B-Instruct", "--device", f"sim:{little_left}")
    command += ("--enforce-eager", "--max-model-len=65536", "--max-num-seqs=8")
    command += ("--max-num-batched-tokens=32768", "--mm-processor-cache-gb=0")
    command += ("--gpu-memory-utilization=0.95", "--max-tokens=2")
    command += ("--images", str(folder))
    died = run_memprof(*command, env=ENV)
    assert died.report["run"]["status"] == "oom"
    oom = died.report["ranks"][0]["oom"]
    assert oom["at_request"] == 29
    assert oom["stage"] in ("mm_encoder", "mm_merge")
    [item] = oom["requests"][0]["items"]
    assert item["size"] == [4096, 4096]
    assert "merge-not-profiled" in {finding["id"] for finding in died.report["findings"]}
    room = next(each for each in oom["remedies"] if each["enough"])
    passed = run_memprof(*command, *shlex.split(room["argument"]), env=ENV)
    assert passed.returncode == 0, passed.output[-3000:]
    assert passed.engine_log.count("output tokens") == 60
