"""Several run folders as one deployment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_runs import part, write_hosts
from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.record.deployment import Parts, load_parts, run_folders


def kinds(found: Parts) -> list[tuple[str, str]]:
    return [(gap.kind, Path(gap.name).name) for gap in found.gaps]


def test_both_folders_are_read_the_first_host_first(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    found = load_parts([second, first])
    assert [part.folder for part in found.runs] == [first, second]
    assert found.name == "10.0.0.5:29500"
    assert found.gaps == []


def test_a_folder_of_run_folders(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    (tmp_path / "logs").mkdir()
    assert run_folders(tmp_path) == [first, second]
    assert run_folders(first) == []


def test_a_host_without_a_folder_is_named(tmp_path: Path) -> None:
    first, _ = write_hosts(tmp_path)
    assert kinds(load_parts([first])) == [("no_folder", "node rank 1 of 2")]


def test_engine_cores_without_a_folder_are_named(tmp_path: Path) -> None:
    first, _ = write_hosts(tmp_path)
    edit(first, part=part(nodes=None, node_rank=None, dp_size=8, dp_start=2, dp_local=2))
    assert kinds(load_parts([first])) == [("no_folder", "data-parallel rank 0-1, 4-7 of 8")]


def test_a_missing_an_unreadable_and_a_doubled_folder_are_named_and_the_rest_read(
    tmp_path: Path,
) -> None:
    first, second = write_hosts(tmp_path)
    other = tmp_path / "of-another-release"
    shutil.copytree(second, other)
    edit(other, schema="memprof.run/9", id="other")
    cut = tmp_path / "cut"
    shutil.copytree(second, cut)
    (cut / "run.json").write_text('{"schema": "memp')
    found = load_parts([first, tmp_path / "nowhere", other, cut, second, first])
    assert [part.folder for part in found.runs] == [first, second]
    assert kinds(found) == [
        ("unreadable", "nowhere"),
        ("unreadable", "of-another-release"),
        ("unreadable", "cut"),
        ("given_twice", "node-a"),
    ]
    assert "memprof.run/9" in found.gaps[1].reason


def test_a_torn_record_is_named_and_read(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    path = next(iter((second / "events").iterdir()))
    path.write_bytes(path.read_bytes()[:-40])
    found = load_parts([first, second])
    assert len(found.runs) == 2
    assert kinds(found) == [("truncated", "node-b")]


def test_events_of_another_release_leave_the_rest(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    path = next(iter((second / "events").iterdir()))
    path.write_text(path.read_text().replace("memprof.events/1", "memprof.events/9"))
    found = load_parts([first, second])
    assert [part.folder for part in found.runs] == [first]
    assert kinds(found)[0] == ("unreadable", "node-b")


def test_a_host_that_started_no_rank_is_named(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    for path in (second / "events").iterdir():
        path.unlink()
    edit(second, status="failed", exit_reason="no device")
    found = load_parts([first, second])
    assert kinds(found) == [("no_rank", "node-b")]
    assert found.gaps[0].reason == "no device"


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match="nowhere"):
        load_parts([tmp_path / "nowhere", tmp_path / "nor-here"])


def test_several_deployments_need_a_name(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path, second={"part": part(deployment="other")})
    with pytest.raises(UsageError, match=r"of 2 deployments: 10\.0\.0\.5:29500, other") as caught:
        load_parts([first, second])
    assert "--deployment" in (caught.value.hint or "")
    found = load_parts([first, second], name="other")
    assert [part.folder for part in found.runs] == [second]
    with pytest.raises(UsageError, match="no run folder is of the deployment 'third'"):
        load_parts([first, second], name="third")


def test_folders_that_say_nothing_belong_together_where_a_person_named_each(
    tmp_path: Path,
) -> None:
    folders = write_hosts(tmp_path)
    for folder in folders:
        edit(folder, part=None)
    assert len(load_parts(folders).runs) == 2
    with pytest.raises(UsageError, match="of 2 deployments: node-a, node-b"):
        load_parts(folders, named=False)


def test_one_name_of_two_clocks_is_of_two_hosts(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    for path in (second / "events").iterdir():
        path.write_text(path.read_text().replace('"host": "node-b"', '"host": "node-a"'))
    edit(second, host="node-a")
    found = load_parts([first, second])
    hosts = {each.identity.host for part in found.runs for each in part.processes}
    assert hosts == {"node-a", "node-a (node-b)"}


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
