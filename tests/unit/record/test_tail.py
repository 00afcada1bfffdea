"""EventTail: what the live view sees while processes append."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_memprof.record.tail import EventTail


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(data)


def test_nothing_there_yet(tmp_path: Path) -> None:
    assert EventTail(tmp_path / "absent").poll() == []


def test_folder_and_files_appear_later(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    assert tail.poll() == []
    _append(tmp_path / "events" / "b-2.jsonl", b'{"kind": "process"}\n')
    assert tail.poll() == [("b-2.jsonl", {"kind": "process"})]
    _append(tmp_path / "events" / "a-1.jsonl", b'{"kind": "ready"}\n')
    _append(tmp_path / "events" / "b-2.jsonl", b'{"kind": "identity"}\n')
    assert tail.poll() == [("a-1.jsonl", {"kind": "ready"}), ("b-2.jsonl", {"kind": "identity"})]
    assert tail.poll() == []


def test_torn_line_is_delivered_whole_later(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    path = tmp_path / "events" / "a-1.jsonl"
    line = json.dumps({"kind": "error", "message": "内存不足"}, ensure_ascii=False).encode() + b"\n"
    for cut in range(1, len(line)):
        _append(path, line[cut - 1 : cut])
        assert tail.poll() == []
    _append(path, line[-1:])
    assert tail.poll() == [("a-1.jsonl", {"kind": "error", "message": "内存不足"})]


def test_junk_lines_are_skipped(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    _append(tmp_path / "events" / "a-1.jsonl", b'\xff\x00junk\n\n[1]\n{"kind": "ready"}\n')
    assert tail.poll() == [("a-1.jsonl", {"kind": "ready"})]


def test_a_large_file_arrives_over_several_polls(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    line = json.dumps({"kind": "error", "message": "x" * 1000}).encode() + b"\n"
    _append(tmp_path / "events" / "a-1.jsonl", line * 3000)
    count = 0
    while batch := tail.poll():
        count += len(batch)
    assert count == 3000


def test_samples_come_under_the_name_of_their_process(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    folder = tmp_path / "samples" / "a-1"
    _append(tmp_path / "events" / "a-1.jsonl", b'{"kind": "process"}\n')
    _append(folder / "0-2.jsonl", b'{"kind": "sample", "step": 2}\n')
    _append(folder / "0-10.jsonl", b'{"kind": "sample", "step": 10}\n')
    _append(folder / "1-1.jsonl", b'{"kind": "sample", "folded": 16}\n')
    assert tail.poll() == [
        ("a-1.jsonl", {"kind": "process"}),
        ("a-1.jsonl", {"kind": "sample", "step": 2}),
        ("a-1.jsonl", {"kind": "sample", "step": 10}),
    ]
    (folder / "0-2.jsonl").unlink()  # the oldest goes
    _append(folder / "0-11.jsonl", b'{"kind": "sample", "step": 11}\n')
    assert tail.poll() == [("a-1.jsonl", {"kind": "sample", "step": 11})]
    _append(folder / "0-2.jsonl", b'{"kind": "sample", "step": 12}\n')  # its name is free again
    assert tail.poll() == [("a-1.jsonl", {"kind": "sample", "step": 12})]
