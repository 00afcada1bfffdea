"""Calibration from readings made by hand, and the profile that is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_memprof.errors import RunRecordError
from vllm_memprof.sim.calibrate import (
    Calibration,
    EdgeMemory,
    RankFacts,
    calibrate,
    profile_name,
    render,
)
from vllm_memprof.sim.profiles import PROFILES_DIR, load_profile

MIB = 1 << 20
BASE = (PROFILES_DIR / "ascend910b.toml").read_text()


def edge_memory(
    phase: str, edge: str = "after", streams: tuple[int, ...] = (), **rows: int | None
) -> EdgeMemory:
    return EdgeMemory(phase, edge, dict(rows), dict.fromkeys(rows, "measured"), streams)


def values(found: Calibration) -> dict[str, int]:
    return {setting.key: setting.value for setting in found.settings}


def test_every_figure_of_a_start_up() -> None:
    facts = RankFacts(
        "TP0",
        64 << 30,
        [
            edge_memory("device_init", context=None, runtime=None),
            edge_memory("hccl_init", context=300 * MIB, runtime=20 * MIB, cann_ge=2 * MIB),
            edge_memory(
                "profile_run",
                context=310 * MIB,
                runtime=60 * MIB,
                cann_ge=4 * MIB,
                communicator_tp=None,
            ),
            EdgeMemory(
                "profile_run",
                "after",
                {
                    "context": 300 * MIB,
                    "communicator:tp": 400 * MIB,
                    "communicators_unnamed": 70 * MIB,
                },
                {"communicator:tp": "derived"},
            ),
            edge_memory(
                "graph_capture", context=300 * MIB, runtime=60 * MIB, graph=70 * MIB, atb=96 * MIB
            ),
        ],
        communicators=[400 * MIB],
        graphs=35,
    )
    found = calibrate(facts)
    assert values(found) == {
        "total_bytes": 64 << 30,
        "context_bytes": 322 * MIB,
        "context_runtime_bytes": 22 * MIB,
        "kernels_bytes": 42 * MIB,
        "operator_binary_bytes": 0,
        "hccl_base_bytes": 70 * MIB,
        "atb_pool_bytes": 96 * MIB,
        "graph_capture_bytes": 2 * MIB,
        "graph_argument_bytes": 0,
        "graph_queue_bytes": 0,
    }
    sources = {setting.key: setting.source for setting in found.settings}
    assert (
        sources["context_bytes"] == "measured: TP0, after hccl_init, with what the runtime counts"
    )
    assert (
        sources["hccl_base_bytes"]
        == "derived: TP0, after profile_run, communicators: 1, less 400 MiB of buffers"
    )
    graphs = "graphs: 35; with their arguments and queues"
    assert sources["graph_capture_bytes"] == f"measured: TP0, after graph_capture, {graphs}"
    assert set(found.silent) == {"further_context_bytes", "hccl_buffer_mib", "hccl_buffers"}


def test_what_the_run_does_not_tell_says_why() -> None:
    found = calibrate(
        RankFacts(
            "TP0", None, [edge_memory("device_init", context=1, graph=5)], communicators=[None]
        )
    )
    assert set(values(found)) == {"context_bytes"}
    assert found.silent["kernels_bytes"] == "the run has no counters by module"
    assert found.silent["atb_pool_bytes"] == "no pool of ATB was seen in the run"
    assert found.silent["graph_capture_bytes"] == "the run does not say how many graphs it captured"
    assert found.silent["hccl_base_bytes"] == "no communicator of the run took memory"
    assert found.workspace == []


def test_communicators_whose_sizes_are_unknown_leave_the_base_alone() -> None:
    held = EdgeMemory("profile_run", "after", {"context": 1, "communicator:tp": 400 * MIB}, {})
    for communicators in ([None], [500 * MIB]):
        found = calibrate(RankFacts("TP0", None, [held], communicators=communicators))
        assert "hccl_base_bytes" in found.silent


def test_what_communicators_take_beside_their_buffers_is_one_s_share() -> None:
    rows: dict[str, int | None] = {"context": 1, "communicator:tp": 400 * MIB}
    rows |= {"communicator:ep": 100 * MIB, "communicators_unnamed": 30 * MIB}
    found = calibrate(
        RankFacts(
            "TP0",
            None,
            [EdgeMemory("profile_run", "after", rows, {})],
            communicators=[400 * MIB, 100 * MIB],
        )
    )
    assert values(found)["hccl_base_bytes"] == 15 * MIB


def test_more_blocks_than_usual_are_brought_back_to_32() -> None:
    facts = RankFacts(
        "TP0", None, [edge_memory("warm_up", context=1, atb=192 * MIB)], atb_blocks=64
    )
    assert values(calibrate(facts))["atb_pool_bytes"] == 96 * MIB


def test_a_run_without_readings_is_an_error() -> None:
    with pytest.raises(RunRecordError, match="TP3 has no reading of memory outside torch"):
        calibrate(RankFacts("TP3", 1, [edge_memory("device_init", context=None)]))


BLOCK = 42 * MIB
ASKED = BLOCK - 32


def workspaces(edges: list[EdgeMemory], level: int = 1) -> dict[str, int]:
    start = edge_memory("device_init", context=1)
    found = calibrate(RankFacts("TP0", None, [start, *edges], task_queue_level=level))
    return {setting.key: setting.value for setting in found.workspace}


def test_workspace_of_the_warm_up_is_that_of_its_operator() -> None:
    quiet = [edge_memory("graph_capture", atb=1), edge_memory("atb_warm_up", "before", atb=1)]
    seen = edge_memory("atb_warm_up", "after", npu_workspace=BLOCK)
    late = edge_memory("warm_up", "after", npu_workspace=BLOCK)
    assert workspaces([*quiet, seen]) == {"AtbLinear": ASKED, "Atb*": 0}
    unread = edge_memory(
        "atb_warm_up", "after", npu_workspace=0
    )  # the operator was still in the queue
    assert workspaces([*quiet, unread, late]) == {"AtbLinear": ASKED, "Atb*": 0}
    assert workspaces([edge_memory("atb_warm_up", "before"), seen]) == {
        "AtbLinear": ASKED
    }  # nothing of ATB ran before
    more = edge_memory("request", npu_workspace=2 * BLOCK)
    assert workspaces([*quiet, seen, more]) == {"AtbLinear": ASKED, "Atb*": 2 * BLOCK - 32}


def test_workspace_of_other_operators() -> None:
    held = [
        edge_memory("mm_profile", npu_workspace=BLOCK),
        edge_memory("profile_run", npu_workspace=0),
    ]
    assert workspaces(held) == {"Atb*": ASKED}
    assert workspaces(held, level=2) == {"*": ASKED}
    facts = RankFacts(
        "TP0", None, [edge_memory("device_init", context=1), *held], task_queue_level=2
    )
    assert (
        calibrate(facts).workspace[0].source
        == "measured: TP0, after mm_profile, TASK_QUEUE_ENABLE=2"
    )
    two = [edge_memory("mm_profile", streams=(30 * MIB, 12 * MIB), npu_workspace=BLOCK)]
    assert workspaces(two) == {"Atb*": 30 * MIB - 32}


def test_the_profile_names_every_source(tmp_path: Path) -> None:
    facts = RankFacts(
        "TP0",
        1 << 30,
        [edge_memory("device_init", context=5 * MIB, runtime=MIB, npu_workspace=BLOCK)],
    )
    text = render(calibrate(facts), "ascend910b", BASE, "mine", 'run "one"')
    path = tmp_path / "mine.toml"
    path.write_text(text)
    profile = load_profile(str(path))
    assert (profile.name, profile.aliases, profile.title) == ("mine", (), "as in run 'one'")
    base = load_profile("910b")
    assert profile.device == replace(base.device, total_bytes=1 << 30)
    assert profile.memory == replace(
        base.memory,
        context_bytes=6 * MIB,
        context_runtime_bytes=MIB,
        kernels_bytes=0,
        operator_binary_bytes=0,
    )
    assert profile.simulation == base.simulation
    assert [*profile.workspace] == [
        "Atb*",
        *(pattern for pattern in base.workspace if not pattern.startswith("Atb")),
    ]
    for line in text.splitlines():
        if " = " in line and not line.startswith(("name", "aliases", "title", "#")):
            assert "# measured: TP0" in line or "# from ascend910b; " in line, line


def test_a_calibrated_profile_can_be_a_base(tmp_path: Path) -> None:
    facts = RankFacts("TP0", None, [edge_memory("device_init", context=5 * MIB)])
    text = render(calibrate(facts), "ascend910b", BASE, "mine", "a run")
    again = render(calibrate(facts), "mine", text, "again", "a run")
    (tmp_path / "again.toml").write_text(again)
    assert load_profile(str(tmp_path / "again.toml")).name == "again"


def test_names_of_files_become_names_of_profiles() -> None:
    assert profile_name(Path("/a/My Cluster 910B.toml")) == "my-cluster-910b"
    assert profile_name(Path("###.toml")) == "calibrated"
