"""load_run: what it makes of whole, torn, foreign and broken run folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof import files
from vllm_memprof.errors import RunRecordError
from vllm_memprof.record.loader import Run, load_run

DATA = Path(__file__).parents[2] / "data"
HEAD = {
    "kind": "process",
    "t_ns": 1,
    "schema": "memprof.events/1",
    "host": "h",
    "pid": 7,
    "role": "worker",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private copy of a clean run."""
    return Path(shutil.copytree(DATA / "graph_tp2", tmp_path / "run"))


def write_events(
    folder: Path, *events: dict[str, Any], end: str = "\n", name: str = "h-7.jsonl"
) -> Run:
    shutil.rmtree(folder / "events")
    (folder / "events").mkdir()
    text = "\n".join(json.dumps(event) for event in (HEAD, *events)) + end
    (folder / "events" / name).write_text(text)
    return load_run(folder)


def edge(phase: str, side: str, phase_id: int, t_ns: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "phase",
        "phase": phase,
        "edge": side,
        "id": phase_id,
        "t_ns": t_ns,
        "parent": None,
        **values,
    }


def test_clean_run() -> None:
    run = load_run(DATA / "graph_tp2")
    assert not run.truncated
    assert run.info.engine_version == "0.23.0"
    workers = [process for process in run.processes if process.is_worker]
    assert [process.identity.label for process in workers] == ["TP0", "TP1"]
    assert [process.identity.role for process in run.processes] == [
        "worker",
        "worker",
        "engine_core",
    ]
    assert run.processes[2].kv_plan is not None
    assert not run.processes[2].is_worker
    first = workers[0]
    assert first.versions["vllm-ascend"] == "0.23.0"
    assert (
        first.figures["graph_bytes"] == 322_122_752
    )  # a later event replaced the null of the first
    assert first.figures["weights_bytes"] == 9_872_841_216
    assert set(first.ready_t_ns) == {"model"}
    assert first.hooks["w.weight_load"].state == "bound"


def test_phases_nest_in_order_of_occurrence() -> None:
    spans = load_run(DATA / "graph_tp2").processes[0].phases
    assert [(span.depth, span.phase) for span in spans[:8]] == [
        (0, "device_init"),
        (1, "hccl_init"),
        (0, "weight_load"),
        (0, "profile_run"),
        (1, "empty_cache"),
        (1, "mm_profile"),
        (2, "communicator"),
        (1, "empty_cache"),
    ]
    assert [span.order for span in spans] == list(range(len(spans)))
    communicator = spans[6]
    assert communicator.parent == 5
    assert communicator.detail["group"] == "tp:0"
    assert communicator.seconds == pytest.approx(0.012)
    assert communicator.before is not None
    assert communicator.before.device_total_bytes == 65_452_113_920


def test_killed_run_keeps_the_rest_and_says_what_was_open() -> None:
    run = load_run(DATA / "killed_tp2")
    assert run.truncated
    assert run.notes == ["node0-4101.jsonl: 1 incomplete line(s) dropped"]
    killed = next(process for process in run.processes if process.identity.label == "TP1")
    assert killed.dropped_lines == 1
    assert [span.phase for span in killed.phases if span.open] == ["weight_load"]
    assert killed.phases[-1].seconds is None
    assert killed.phases[-1].after is None


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_every_torn_end_is_survived(folder: Path, cut: int) -> None:
    path = folder / "events" / "node0-4100.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    run = load_run(folder)
    assert run.truncated is (cut > 1)  # only the newline is missing at 1: the line itself is whole
    assert len(run.processes) == 3


def test_a_process_that_died_in_its_first_line(folder: Path) -> None:
    (folder / "events" / "node0-9.jsonl").write_text('{"kind": "proc')
    (folder / "events" / "node0-8.jsonl").write_text("")
    run = load_run(folder)
    assert run.truncated
    assert len(run.notes) == 2
    assert len(run.processes) == 3


def test_unknown_keys_and_kinds_are_ignored(folder: Path) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "from_the_future": 1}))
    run = write_events(
        folder,
        {"kind": "novelty", "t_ns": 2, "x": 1},
        edge(
            "weight_load",
            "before",
            1,
            3,
            snapshot={"t_ns": 3, "allocated_bytes": 5, "novel": {"hccl": 9}},
        ),
    )
    (process,) = run.processes
    assert process.phases[0].before is not None
    assert process.phases[0].before.allocated_bytes == 5
    assert process.phases[0].before.reserved_bytes is None


def test_an_error_inside_a_phase(folder: Path) -> None:
    run = write_events(
        folder,
        edge("weight_load", "before", 1, 10, snapshot={"allocated_bytes": 0}),
        edge("weight_load", "after", 1, 2_000_000_010, snapshot=None, error="RuntimeError: no"),
    )
    (span,) = run.processes[0].phases
    assert (span.error, span.after, span.open, span.seconds) == (
        "RuntimeError: no",
        None,
        False,
        2.0,
    )


def test_an_after_without_its_before_is_kept(folder: Path) -> None:
    run = write_events(folder, edge("warm_up", "after", 4, 10, snapshot={"allocated_bytes": 3}))
    (span,) = run.processes[0].phases
    assert (span.before, span.start_t_ns, span.seconds) == (None, None, None)
    assert span.after is not None
    assert span.after.allocated_bytes == 3


def test_an_id_that_is_used_again(folder: Path) -> None:
    edges = [
        edge("request", side, 1, t) for t, side in enumerate(["before", "after", "before"], start=1)
    ]
    spans = write_events(folder, *edges).processes[0].phases
    assert [span.open for span in spans] == [False, True]


def test_identity_repeats_and_the_last_one_counts(folder: Path) -> None:
    run = write_events(
        folder,
        {"kind": "identity", "t_ns": 2, "role": "engine_core", "dp_rank": 1},
        {
            "kind": "identity",
            "t_ns": 3,
            "role": "worker",
            "rank": 0,
            "label": "TP0",
            "dp_rank": None,
        },
    )
    who = run.processes[0].identity
    assert (who.role, who.rank, who.dp_rank, who.label, who.pid) == ("worker", 0, 1, "TP0", 7)
    assert who.roles == {"engine_core", "worker"}


@pytest.mark.parametrize("schema", ["memprof.run/2", None, 1])
def test_a_foreign_run_schema_is_refused(folder: Path, schema: object) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "schema": schema}))
    with pytest.raises(RunRecordError, match=r"run\.json has schema") as caught:
        load_run(folder)
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_a_foreign_event_schema_is_refused(folder: Path) -> None:
    (folder / "events" / "z-1.jsonl").write_text(
        json.dumps({**HEAD, "schema": "memprof.events/9"}) + "\n"
    )
    with pytest.raises(RunRecordError, match=r"z-1\.jsonl has schema 'memprof\.events/9'"):
        load_run(folder)


@pytest.mark.parametrize(
    "event",
    [
        edge("weight_load", "before", 1, 3, snapshot={"allocated_bytes": "5"}),
        edge("weight_load", "before", 1, 3, snapshot={"allocated_bytes": 5.5}),
        edge("weight_load", "before", 1, 3, snapshot={"allocated_bytes": True}),
        edge("weight_load", "after", 1, 3, snapshot=None, parent=[1]),
        {"kind": "figures", "t_ns": 2, "values": {"weights_bytes": "9"}},
        {"kind": "figures", "t_ns": 2, "values": [1]},
        {"kind": "kv_plan", "t_ns": 2, "blocks": "many"},
        {"kind": "kv_plan", "t_ns": 2, "planned_bytes": 5},
        {"kind": "kv_plan", "t_ns": 2, "groups": ["full"]},
    ],
)
def test_records_of_the_wrong_type_are_refused(folder: Path, event: dict[str, Any]) -> None:
    with pytest.raises(RunRecordError, match=r"h-7\.jsonl has a record that is not memprof's"):
        write_events(folder, event)


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match="does not exist"):
        load_run(tmp_path / "absent")
    with pytest.raises(RunRecordError, match=r"no file .*run\.json"):
        load_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunRecordError, match="is not a folder") as refused:
        load_run(tmp_path / "file")
    assert "memprof explain" in (refused.value.hint or "")


def test_a_run_whose_engine_never_reported(folder: Path) -> None:
    shutil.rmtree(folder / "events")
    run = load_run(folder)
    assert run.processes == []


@pytest.mark.parametrize(
    "junk", [b"\x00\xff\xfe" * 50, b"[1, 2]", b'"text"', b"{", b"", b"\x7fELF\n\n", b"[" * 10**5]
)
def test_junk_in_run_json(folder: Path, junk: bytes) -> None:
    (folder / "run.json").write_bytes(junk)
    with pytest.raises(RunRecordError, match=r"run\.json"):
        load_run(folder)


@pytest.mark.parametrize(
    "junk", [b"\x00\xff\xfe" * 50, b"\x7fELF\nabc\n", b"plain text\n", b'{"kind": "phase"}\n']
)
def test_junk_as_event_file(folder: Path, junk: bytes) -> None:
    (folder / "events" / "x-1.jsonl").write_bytes(junk)
    with pytest.raises(RunRecordError, match=r"x-1\.jsonl"):
        load_run(folder)


@pytest.mark.parametrize("change", [{"command": "one string"}, {"model": None}, {"status": 5}])
def test_wrong_types_in_run_json(folder: Path, change: dict[str, Any]) -> None:
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, **change}))
    with pytest.raises(RunRecordError, match="wrong type"):
        load_run(folder)


def test_fields_missing_from_run_json(folder: Path) -> None:
    (folder / "run.json").write_text('{"schema": "memprof.run/1"}')
    with pytest.raises(RunRecordError, match=r"field is missing .*required field `id`"):
        load_run(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied(folder: Path) -> None:
    (folder / "run.json").chmod(0)
    with pytest.raises(RunRecordError, match="no permission"):
        load_run(folder)


def test_permission_denied_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(RunRecordError, match="no permission to read") as caught:
        load_run(folder)
    assert caught.value.hint is not None
    assert "owner" in caught.value.hint
