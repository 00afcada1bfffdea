"""What a server and a model with images do with SGLang on the simulated device, recorded: images and
their encoder, weight updates of every kind, a grammar, the end by SIGTERM.

The stack takes minutes to set up (make sim-every): no part of CI.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_serve import free_port
from tests.integration.test_sglang import ARGS, STACK, assert_reconciled, offline, post
from tests.support.engine import finish, require_stack, start_memprof, wait_for_server
from tests.support.planted import plant
from tests.support.png import write_png
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.units import MIB

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

SIZES = [(224, 224), (640, 480), (960, 640)]


@pytest.fixture(autouse=True)
def stack() -> str:
    return require_stack(STACK)


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("memprof/tiny-vl", ["--disable-cuda-graph"]),
        ("Qwen/Qwen3-VL-8B-Instruct", ["--cuda-graph-max-bs-decode", "4"]),
    ],
)
def test_images_of_requests_and_their_encoder(tmp_path: Path, model: str, more: list[str]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, size in enumerate(SIZES):
        write_png(images / f"{number}.png", *size)
    run = offline(
        tmp_path / "run", model, *ARGS, "--tp-size", "2", "--max-running-requests", "8",
        *more, "--images", str(images), "--max-tokens", "2",
    )  # fmt: skip
    assert_reconciled(run, 2, {"graph_capture"} if "--cuda-graph-max-bs-decode" in more else set())
    for rank in run.report["ranks"]:
        print(json.dumps({key: rank[key] for key in ("requests", "stages")}, indent=1))
        print(json.dumps(rank["budget"]["audit"], indent=1))
