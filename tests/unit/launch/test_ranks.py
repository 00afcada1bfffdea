"""Which ranks a plan runs: from the command line to the engine's command, and from the engine to
run.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.launch.engine import build_command
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.request import RANKS, LaunchRequest, parse_device
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.schema import PlannedRanks

PYTHON = Path("/venv/bin/python")
SIM = parse_device("sim:910b")


def test_the_driver_gets_the_ranks_and_the_devices_of_the_simulated_machine():
    request = LaunchRequest("plan", "M", ["-tp", "32"], device=SIM, ranks="one", rank=3)
    command = build_command(PYTHON, request, "M", [], 8)
    assert {"ranks": "one", "devices": 8, "rank": 3}.items() <= json.loads(command[4]).items()
    assert command[5:] == ["-tp", "32"]
    of_all = json.loads(build_command(PYTHON, LaunchRequest("plan", "M"), "M", [], 2)[4])
    assert (of_all["ranks"], of_all["devices"]) == ("auto", 2)


def test_on_hardware_the_driver_runs_every_rank():
    command = build_command(PYTHON, LaunchRequest("plan", "M", ranks="auto"), "M", [])
    assert not {"ranks", "devices", "rank"} & json.loads(command[4]).keys()


@pytest.mark.parametrize("ranks", ["auto", "all"])
def test_hardware_takes_what_runs_every_rank(ranks):
    assert LaunchRequest("plan", "M", ranks=ranks).ranks in RANKS


@pytest.mark.parametrize(
    ("ranks", "rank"), [("one", None), ("edges", None), ("auto", 0), ("one", 2)]
)
def test_hardware_runs_no_rank_alone(ranks, rank):
    with pytest.raises(UsageError, match="needs a simulated device") as caught:
        LaunchRequest("plan", "M", device=parse_device("npu"), ranks=ranks, rank=rank)
    assert "--device sim:910b" in caught.value.hint


@pytest.mark.parametrize(("ranks", "rank"), [("some", None), ("all", 0), ("edges", 1)])
def test_impossible_ranks(ranks, rank):
    with pytest.raises(UsageError, match="--rank"):
        LaunchRequest("plan", "M", device=SIM, ranks=ranks, rank=rank)


def test_what_the_engine_says_reaches_the_record():
    said = {
        "mode": "one",
        "why": "--ranks one",
        "world_size": 2,
        "run": [0],
        "alike": {"0": [1]},
        "not_run": [],
        "more": {},
    }
    progress = EngineProgress()
    progress.fold("a.jsonl", {"kind": "ranks", "t_ns": 1, "role": "api", **said})
    assert to_json(from_json(PlannedRanks, progress.ranks)) == said
