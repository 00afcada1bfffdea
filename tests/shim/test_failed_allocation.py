"""torch_npu's own allocator out of memory: what memprof reads of it, and what it says would help.

Four segments of 600 MiB with 350 MiB in use each leave 4 x 250 MiB in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shim.conftest import Sim
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Oom
from vllm_memprof.record.loader import load_run

MIB = 1 << 20
BLOCK = 512  # torch_npu asks for 32 bytes more than a tensor, in blocks of 512
CODE = """
from pathlib import Path
from vllm_memprof.capture import failure
from vllm_memprof.capture.recorder import Recorder

torch.empty(1, device="npu")
recorder = Recorder(Path(RUN))
recorder.roles.add("worker")
recorder.probe.backend = "npu"
failure.observe(recorder)

def mib(size):
    return torch.empty(size << 20, dtype=torch.uint8, device="npu")

def _execute_mm_encoder():
    return mib(ASKED)

holes = [mib(600) for _ in range(4)]
pinned = []
for at in range(4):
    holes[at] = None
    pinned.append(mib(350))
with torch.npu.stream(torch.npu.Stream()):
    other = mib(100)
    del other
    kept = mib(60)  # a part of that stream's block stays in use, so that it is not released
passed = False
try:
    _execute_mm_encoder()
    passed = True
except RuntimeError as error:
    failure.read(recorder, error)
print("RESULT", json.dumps({"passed": passed}))
"""


@pytest.fixture
def fail(
    sim: Sim, change_profile: Callable[..., None], tmp_path: Path
) -> Callable[..., tuple[bool, Oom | None]]:
    """Ask for some MiB on a device of 4 GiB; return whether that passed, and the failure."""
    change_profile(total_bytes=4 << 30)

    def ask(size: int, settings: str = "expandable_segments:False") -> tuple[bool, Oom | None]:
        run = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        (run / "events").mkdir(parents=True)
        info: dict[str, Any] = {"schema": "memprof.run/1", "id": "r", "mode": "offline"}
        (run / "run.json").write_text(json.dumps({**info, "model": "m", "command": []}))
        code = f"RUN, ASKED = {str(run)!r}, {size}\n{CODE}"
        passed = bool(sim.run_torch(code, PYTORCH_NPU_ALLOC_CONF=settings)["passed"])
        ranks = build_report(load_run(run)).ranks  # none of a process that recorded nothing
        return passed, ranks[0].oom if ranks else None

    return ask


def test_free_memory_in_pieces_is_read_to_the_byte_and_growing_segments_use_it(
    fail: Callable[..., tuple[bool, Oom | None]],
) -> None:
    passed, oom = fail(1500)
    assert not passed
    assert oom is not None
    assert oom.stage == "mm_encoder"
    blocks = oom.free_blocks
    assert blocks is not None
    assert (blocks.exact, blocks.freed_bytes, blocks.streams) == (True, 0, 2)
    assert blocks.fitting_bytes == 0
    assert blocks.largest_bytes == 252 * MIB - BLOCK  # a segment of 602 MiB less 350 MiB
    assert blocks.too_small_bytes == 4 * blocks.largest_bytes
    assert blocks.other_streams_bytes == 42 * MIB - BLOCK
    assert not blocks.expandable
    [segments] = [each for each in oom.remedies if each.id == "expandable_segments"]
    assert segments.bound == "at_most"
    assert (segments.bytes or 0) >= (oom.missing_bytes or 0)
    assert segments.enough is None

    passed, oom = fail(1500, "expandable_segments:True")
    assert (passed, oom) == (True, None)


def test_a_remedy_that_is_said_to_be_too_little_is_too_little(
    fail: Callable[..., tuple[bool, Oom | None]],
) -> None:
    passed, oom = fail(2600)
    assert not passed
    assert oom is not None
    [segments] = [each for each in oom.remedies if each.id == "expandable_segments"]
    assert segments.enough is False
    passed, oom = fail(2600, "expandable_segments:True")
    assert not passed
    assert oom is not None
    assert oom.free_blocks is not None
    assert oom.free_blocks.expandable
    assert not [each for each in oom.remedies if each.id == "expandable_segments"]
