"""Memory files of other tools become the record of a run: snapshots of torch, csv of profilers.

``memory_files.toml`` has what each is known by, and its columns. Nothing of a pickle is run: it is
read by opcode, and those that do more than build lists, tuples and dicts are refused.
"""

from __future__ import annotations

import csv
import io
import pickletools
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice, pairwise
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import check_limit, limit, read_own
from vllm_memprof.logs.tracebacks import PHASE_OF
from vllm_memprof.record.impossible import take_out
from vllm_memprof.record.loader import Identity, ProcessRecord, Run
from vllm_memprof.record.memory_files import FileRow, MemoryFile
from vllm_memprof.record.schema import RunInfo, Snapshot
from vllm_memprof.record.segments import divide, is_private
from vllm_memprof.record.spans import Span
from vllm_memprof.text import plain

TABLE = read_own(__file__, "memory_files.toml")
_FACTORS = {"KB": 1 << 10, "MB": 1 << 20, "ns": 1e-9, "us": 1e-6}
_ATTRIBUTE = re.compile(r'"?(\w+)"?\s*:\s*"?([^",{}]*)')
#: Columns of a form that a file of its kind always has.
_KNOWN_BY = ("name", "bytes", "peak", "allocated", "time", "ends")
#: A double holds every integer up to here.
_MOST_BYTES = 1 << 53
#: Rows of a table that are kept, the largest; frames of a stack that are looked at.
_MOST_ROWS, _MOST_FRAMES = 64, 256
#: Rows of a device that are told apart.
_MOST_NAMES = 100_000
_MAKES: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
}  # fmt: skip
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
           "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def form_of(head: bytes) -> str | None:
    """Return the kind of a memory file by its first bytes; None: it is none."""
    for kind, begins in TABLE["begins"].items():
        if head.startswith(tuple(each.encode("latin-1") for each in begins)):
            return str(kind)
    line = head.partition(b"\n")[0].decode("utf-8-sig", "replace")
    names = {name for name, _ in map(_named, line.split(","))}
    for kind, form in TABLE["csv"].items():
        if names >= {form[each] for each in _KNOWN_BY if each in form}:
            return str(kind)
    return None


def read_memory_file(name: str, kind: str, pieces: Iterable[bytes]) -> Run:
    """Read one file.

    Args:
        name: of it.
        kind: as ``form_of`` returns it.
        pieces: its bytes.

    Returns:
        A run of source "file", a process per device: the tables, and what is a figure of a
        snapshot of memprof as a phase ``memory_file``.

    Raises:
        RunRecordError: it is cut, too large, or of another shape.
    """
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > limit("file") and kind == "torch_snapshot":
            break  # its end is not read
        check_limit("file", len(data), f"{name} has")
    found: dict[int | None, Rows] = {}
    try:
        if kind == "torch_snapshot":
            found = _snapshot(data)
        elif kind == "memscope_db":
            kind = "memscope"
            found = _events(_stored(data))
        elif kind == "memscope":
            found = _events(_records(data))
        else:
            found = _columns(TABLE["csv"][kind], _records(data))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError,
            csv.Error, sqlite3.Error) as exc:  # fmt: skip
        what = f"{name} is not a whole {kind.replace('_', ' ')} file: {exc or type(exc).__name__}"
        raise RunRecordError(what, "was it cut, or written by something else?") from exc
    if not found:
        raise RunRecordError(f"{name} has no row about memory", "was it cut?")
    check_limit("workers", len(found), f"{name} has")
    told = re.search(r"device_(\d+)", name)
    processes = []
    for device, rows in found.items():
        index = int(told[1]) if told and device is None else device
        label = "device" if index is None else f"device {index}"
        figures = {"components": rows.counters(), **rows.reads()}
        take_out(figures)
        read = Span("memory_file", 0, after=Snapshot(**figures), end_t_ns=0, detail={"name": name})
        who = Identity(label=label, device_index=index, roles=frozenset({"worker"}))
        file = MemoryFile(name, kind, rows.largest())
        processes.append(ProcessRecord(name, who, phases=[read], files=[file]))
    info = RunInfo(id=name, mode="file", model=name, command=[], status="ok")
    return Run(Path(name), info, processes, source="file")


def beside(runs: list[Run]) -> list[Run]:
    """Return runs; memory files are put on the ranks of the last one that is none, by device.

    Without such a run they are one run, a rank per device. A file of a device of which the run has
    no rank stays a run of its own.
    """
    files = [run for run in runs if run.source == "file"]
    kept = [run for run in runs if run.source != "file"]
    for run in files:
        if not kept:
            kept = [run]
            continue
        ranks = [each for each in kept[-1].processes if each.is_worker]
        for process in run.processes:
            index = process.identity.device_index
            same = [each for each in ranks if each.identity.device_index == index]
            if kept[-1].source != "file" and len(ranks) == 1:
                same = ranks
            if same:
                at = len(same[0].phases)
                same[0].phases.extend(replace(each, order=at) for each in process.phases)
                same[0].files.extend(process.files)
            elif kept[-1].source == "file":
                kept[-1].processes.append(process)
            else:
                kept.insert(0, replace(run, processes=[process]))
    return kept


class Rows(dict[tuple[str, str], FileRow]):
    """The tables of one device, by table and name of a row; its figures as a snapshot has them."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self._last: dict[int, float] = {}

    def row(self, table: str, name: str) -> FileRow:
        name = name if len(self) < _MOST_NAMES else "others"
        return self.setdefault((table, name), FileRow(table, plain(name)[:200]))

    def add(self, table: str, name: str, size: int, alive: bool = True) -> None:
        """Add a block or an allocation to a row: to its bytes where it is ``alive``."""
        if not 0 <= size < _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        row = self.row(table, name)
        row.bytes = (row.bytes or 0) + size * alive
        row.largest_bytes, row.count = max(row.largest_bytes or 0, size), (row.count or 0) + 1

    def level(
        self, row: FileRow, size: int, allocated: int | None, peak: int, seconds: float | None
    ) -> None:
        """Set a row to what was held at a moment, after the first of the file."""
        if not max(size, peak, allocated or 0) < _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        if (seconds or 0) >= self._last.get(id(row), 0):
            row.bytes, row.allocated_bytes = size, allocated
            self._last[id(row)] = seconds or 0
        if row.peak_bytes is None or peak > row.peak_bytes:
            row.peak_bytes, row.peak_s = peak, seconds

    def counters(self) -> dict[str, dict[str, int]] | None:
        """Return the runtime's counters, as of a snapshot."""
        found = {
            row.name: {"bytes": row.bytes or 0, "peak_bytes": row.peak_bytes or 0}
            for row in self.values()
            if row.table == "modules"
        }
        return found or None

    def reads(self) -> dict[str, Any]:
        """Return what else of the tables is a figure of a snapshot."""
        reads = {
            field: getattr(row, value)
            for name, fields in TABLE["reads"].items()
            if (row := self.get(("pools", name))) is not None
            for field, value in fields.items()
        }
        return {**reads, **self.fields}

    def largest(self) -> list[FileRow]:
        """Return the rows of each table, the largest first."""
        tables = dict.fromkeys(table for table, _ in self)
        ordered = sorted(
            self.values(), key=lambda row: -max(row.bytes or 0, row.largest_bytes or 0)
        )
        each = ((row for row in ordered if row.table == table) for table in tables)
        return [row for rows in each for row in islice(rows, _MOST_ROWS)]


# Snapshots of torch


def plain_objects(data: bytes | bytearray, stop: str) -> Any:
    """Return what a pickle holds: dicts, lists, tuples, texts and numbers.

    Args:
        data: protocol 2 or later.
        stop: a key of the outermost dict: what comes before it is returned, the rest not read.

    Raises:
        RunRecordError: it asks for a name, a call or anything else than plain data, or has too
            many objects.
        ValueError, LookupError, TypeError: it is damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    most = limit("objects")
    for count, (opcode, arg, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if count > most:
            check_limit("objects", count, "the pickle has")
        if name in _MAKES:
            stack.append(_MAKES[name]())
        elif name in _VALUES:
            if arg == stop and len(marks) == 1 and isinstance(stack[0], dict):
                pairs = stack[marks[0] :]
                return {**stack[0], **dict(zip(pairs[::2], pairs[1::2], strict=True))}
            stack.append(arg)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("APPENDS", "SETITEMS", "TUPLE"):
            items = _taken(stack, marks.pop())
            if name == "TUPLE":
                stack.append(tuple(items))
            elif name == "APPENDS":
                list.extend(stack[-1], items)
            else:
                dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
        elif name in _TUPLES:
            stack.append(tuple(_taken(stack, -_TUPLES[name])))
        elif name == "APPEND":
            list.append(stack[-2], stack.pop())
        elif name == "SETITEM":
            key, value = _taken(stack, -2)
            dict.__setitem__(stack[-1], key, value)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            what = f"the pickle asks for {name} {plain(str(arg or ''))[:80]}".rstrip()
            raise RunRecordError(what, "a memory snapshot has plain data only: do not load it")
    return None


def _taken(stack: list[Any], since: int) -> list[Any]:
    taken = stack[since:]
    del stack[since:]
    return taken


def _snapshot(data: bytearray) -> dict[int | None, Rows]:
    """Return the tables of each device that a snapshot has segments of."""
    segments = plain_objects(data, TABLE["stop"])["segments"]
    found: dict[int | None, Rows] = {}
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        by_device.setdefault(int(segment["device"]), []).append(segment)
    blocks = 0
    for device, listed in sorted(by_device.items()):
        rows = found[device] = Rows()
        # torch's own in the order of their addresses; behind them torch_npu lists the workspace
        pairs = enumerate(pairwise(listed), 1)
        number = next((i for i, (a, b) in pairs if b["address"] < a["address"]), len(listed))
        own = listed[:number]
        reserved = sum(each["total_size"] for each in own)
        for segment in own:
            blocks += len(segment["blocks"])
            check_limit("objects", blocks, "the snapshot has")
            _add_segment(rows, segment)
        live = sum(row.bytes or 0 for row in rows.values() if row.table == "owners")
        rows.row("owners", "reserved_not_allocated").bytes = reserved - live
        read = divide(listed, device, reserved)
        if number == len(listed):  # not told apart
            read |= {"npu_workspace_bytes": None, "npu_workspace_streams": None}
        rows.fields = {**read, "reserved_bytes": reserved, "allocated_bytes": live}
    return found


def _add_segment(rows: Rows, segment: dict[str, Any]) -> None:
    private, size = is_private(segment), segment["total_size"]
    pool = f"private pool {segment['segment_pool_id']}" if private else str(segment["segment_type"])
    rows.add("segments", pool, size)
    row = rows.row("segments", pool)
    for block in segment["blocks"]:
        bytes_, state = block["size"], block["state"]
        if state == "active_allocated":
            frames = list(islice(block.get("frames") or (), _MOST_FRAMES))
            rows.add("owners", _owner(frames, private), bytes_)
            rows.add("tensors", _site(frames) or "no_frames", bytes_)
            row.allocated_bytes = (row.allocated_bytes or 0) + bytes_
        elif state == "inactive":
            piece = "whole" if bytes_ == size else "pieces"
            rows.add("free", "private" if private else piece, bytes_)
        else:
            rows.add("free", "pending", bytes_)


def _owner(frames: list[dict[str, Any]], private: bool) -> str:
    """Return whose a block is by its frames, innermost first."""
    for frame in frames:
        paths = TABLE["paths"].items()
        owner = next((owner for part, owner in paths if part in str(frame["filename"])), None)
        owner = owner or TABLE["phases"].get(PHASE_OF.get(frame["name"]))
        if owner is not None:
            return str(owner)
    if private:
        return "graph"
    return "other_tensors" if frames else "no_frames"


def _site(frames: list[dict[str, Any]]) -> str | None:
    """Return the innermost line of code outside torch, else the innermost."""
    sites = [(str(each["filename"]), each["line"], each["name"]) for each in frames]
    own = (each for each in sites if each[0].startswith(("/", "<")) or each[0].endswith(".py"))
    outside = (each for each in own if not re.search("/torch(_npu)?/", each[0]))
    path, line, name = next(chain(outside, sites), (None, 0, ""))
    return None if path is None else f"{path.rpartition('/')[2]}:{line} {name}"


# Text in columns


def _named(head: str) -> tuple[str, str]:
    """Return the name of a column and its unit."""
    name, _, unit = head.partition("(")
    return name.strip(), unit.strip().rstrip(")")


def _records(data: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the rows of a csv by names of columns, sizes in bytes and times in seconds."""
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", "replace", newline="")
    lines = csv.reader(text)
    heads = [_named(head) for head in next(lines)]
    for line in lines:
        yield {
            name: _value(cell.strip(), _FACTORS.get(unit))
            for (name, unit), cell in zip(heads, line, strict=False)
        }


def _value(cell: str, factor: float | None) -> Any:
    try:
        value = float(cell) if factor else 0
    except ValueError:
        return None
    if not factor:
        return cell
    return (round(value * factor) if factor > 1 else value * factor) if isfinite(value) else None


def _device(record: dict[str, Any], form: dict[str, Any]) -> int | None:
    told = next((str(record[each]) for each in form.get("device", ()) if each in record), "")
    number = re.search(r"\d{1,4}", told)
    return None if number is None else int(number[0])


def _columns(form: dict[str, Any], records: Iterable[dict[str, Any]]) -> dict[int | None, Rows]:
    """Return the tables of each device of a csv whose form says its columns."""
    found: dict[int | None, Rows] = {}
    began: float | None = None
    for record in records:
        size, name = record.get(form["bytes"]), record.get(form["name"])
        if size is None or name is None or size < 0:  # a cut line; -1: only releases were seen
            continue
        rows = found.setdefault(_device(record, form), Rows())
        if "ends" in form:
            rows.add(form["table"], name, size, not record.get(form["ends"]))
            continue
        time = record.get(form.get("time"))
        began = time if began is None else began
        seconds = None if time is None or began is None else time - began
        allocated, peak = (record.get(form.get(each)) for each in ("allocated", "peak"))
        row = rows.row(form["table"], name)
        rows.level(row, size, allocated, size if peak is None else peak, seconds)
    return found


# Events of msMemScope


def _stored(data: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the rows of an SQLite database, of the table that its csv has the columns of."""
    with NamedTemporaryFile(suffix=".db") as file:
        file.write(data)
        file.flush()
        with closing(sqlite3.connect(f"file:{file.name}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA trusted_schema=OFF")
            rows = base.execute("SELECT * FROM memscope_dump")
            heads = [_named(str(each[0])) for each in rows.description]
            for row in rows:
                cells = zip(heads, row, strict=True)
                yield {name: _value(str(cell), _FACTORS.get(unit)) for (name, unit), cell in cells}


def _events(records: Iterable[dict[str, Any]]) -> dict[int | None, Rows]:
    """Return the pools at the last event of each, and what owners held then."""
    form, found = TABLE["csv"]["memscope"], dict[int | None, Rows]()
    alive: dict[tuple[Any, ...], tuple[str, int]] = {}
    began: float | None = None
    for record in records:
        event, time = record["Event"], record.get(form["time"])
        told = dict(_ATTRIBUTE.findall(record.get(form["bytes"]) or ""))
        device = _device(record, form)
        if device is None or time is None or not told:
            continue
        rows = found.setdefault(device, Rows())
        began = time if began is None else began
        if event == "SNAPSHOT":
            reads = TABLE["snapshot"].items()
            rows.fields = {field: int(told[name]) for name, field in reads if name in told}
            continue
        pool = record[form["name"]]
        key = device, pool, record["Ptr"]
        if event == "MALLOC":
            alive[key] = told.get("owner", ""), int(told["size"])
        elif event == "FREE":
            alive.pop(key, None)
        else:
            continue
        if "total" in told:
            total, used = int(told["total"]), int(told["used"])
            rows.level(rows.row(form["table"], pool), total, used, total, time - began)
    for (device, pool, _), (owner, size) in alive.items():
        name = f"{pool}: {owner}" if owner else pool
        found[device].add("live", name, size)
    return found
