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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

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
from vllm_memprof.units import either, minus

TABLE = read_own(__file__, "memory_files.toml")
_SNAPSHOT = "torch_snapshot"
_FACTORS = {"KB": 1 << 10, "MB": 1 << 20, "ns": 1e-9, "us": 1e-6}
#: A double holds every integer up to here.
_MOST_BYTES = 1 << 53
#: Rows of a table that are told apart; frames of a stack that are looked at.
_MOST_ROWS, _MOST_FRAMES = 1000, 256
#: What msMemScope says of an event, in its csv and as JSON.
_ATTRIBUTE = re.compile(r'"?(\w+)"?\s*:\s*"?([^",{}]*)')
_WHOLE = re.compile("[0-9]{1,15}")
_DAMAGE = (LookupError, TypeError, ValueError, RecursionError, csv.Error, sqlite3.Error)
_VALUES: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None,
    "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
}  # fmt: skip
_TEXT_OR_NUMBER = re.compile("BININT[12]?|LONG[14]|BINFLOAT|(SHORT_)?BINUNICODE8?")
#: From where on they take what is on the stack; None: from the last mark.
_TAKES = {"TUPLE": None, "TUPLE1": -1, "TUPLE2": -2, "TUPLE3": -3, "APPEND": -1, "APPENDS": None,
          "SETITEM": -2, "SETITEMS": None}  # fmt: skip
Plain = TypeVar("Plain", int, str)


def form_of(head: bytes) -> str | None:
    """Return the kind of a memory file by its first bytes; None: it is none."""
    line = head.partition(b"\n")[0].decode("utf-8-sig", "replace")
    names = {name for name, _ in map(_named, line.split(","))}
    for kind, form in TABLE["kinds"].items():
        begins = tuple(each.encode("latin-1") for each in form.get("begins", ()))
        if head.startswith(begins) if begins else names.issuperset(form["columns"]):
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
        if len(data) > 16 * limit("objects") and kind == _SNAPSHOT:
            break  # what follows its segments is not read
        check_limit("file", len(data), f"{name} has")
    form, told = TABLE["kinds"][kind], re.search(r"device_(\d{1,4})", name)
    try:
        if kind == _SNAPSHOT:
            found = _snapshot(data)
        else:
            found = _columns(form, _stored(data) if "begins" in form else _records(data))
    except _DAMAGE as exc:
        what = f"{name} is not a whole {kind.replace('_', ' ')} file: {exc or type(exc).__name__}"
        raise RunRecordError(what, "was it cut, or written by something else?") from exc
    if not found:
        raise RunRecordError(f"{name} has no row about memory", "was it cut?")
    check_limit("workers", len(found), f"{name} has")
    processes = []
    for device, rows in found.items():
        index = int(told[1]) if told and device is None else device
        label, role = f"device {'?' if index is None else index}", frozenset({"worker"})
        take_out(rows.figures)
        read = Snapshot(**rows.figures)
        span = Span("memory_file", 0, after=read, end_t_ns=0, detail={"name": name})
        process = ProcessRecord(name, Identity(device_index=index, label=label, roles=role))
        process.phases.extend([span] if rows.figures else [])
        listed = [row for held in rows.values() for row in held.values()]
        listed.sort(key=lambda row: -max(row.bytes or 0, row.largest_bytes or 0))
        process.files.append(MemoryFile(name, kind, listed))
        processes.append(process)
    info = RunInfo(id=name, mode="file", model=name, command=[], status="ok")
    return Run(Path(name), info, processes, source="file")


def beside(runs: list[Run]) -> list[Run]:
    """Return runs, with memory files on the ranks of the last one that is none, by device.

    Without such a run they are one run, a rank per device.

    Raises:
        RunRecordError: the run has no rank of that device.
    """
    files = [run for run in runs if run.source == "file"]
    kept = [run for run in runs if run.source != "file"]
    into = (kept or files[:1])[-1].processes if runs else []
    added = (run.processes for run in files if run.processes is not into)
    for process in chain.from_iterable(added):
        index, same = process.identity.device_index, []
        ranks = [each for each in into if each.is_worker]
        for rank in ranks:
            at = either(rank.identity.device_index, rank.identity.rank)
            if at == index or (kept and len(ranks) == 1):
                same.append(rank)
                order = len(rank.phases)
                rank.phases.extend(replace(each, order=order) for each in process.phases)
                rank.files.extend(process.files)
        if kept and not same:
            what = f"{process.file} is of device {index}, and no rank of the run is"
            raise RunRecordError(what, f"memprof explain {process.file}")
        into.extend([] if same else [process])
    return kept or files[:1]


class Rows(defaultdict[str, dict[str, FileRow]]):
    """The tables of one device by name, of rows by name; its figures, as a snapshot has them."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.figures: dict[str, Any] = {}

    def row(self, table: str, name: str) -> FileRow:
        held = self[table]
        name = name if name in held or len(held) < _MOST_ROWS else "others"
        return held.setdefault(name, FileRow(table, plain(name)[:200]))

    def add(self, table: str, name: str, size: int, alive: bool = True) -> None:
        """Add a block or an allocation to a row: to its bytes where it is ``alive``."""
        if not 0 <= _of(int, size) < _MOST_BYTES:
            raise ValueError(f"{size} bytes")
        row = self.row(table, name)
        row.bytes = (row.bytes or 0) + size * alive
        row.largest_bytes, row.count = max(row.largest_bytes or 0, size), (row.count or 0) + 1


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
        if name in _TAKES:
            since = marks.pop() if _TAKES[name] is None else _TAKES[name]
            items = stack[since:]
            del stack[since:]
            if name.startswith("TUPLE"):
                stack.append(tuple(items))
            elif name.startswith("APPEND"):
                list.extend(stack[-1], items)
            else:  # the hash of nested tuples may take for ever
                keys = [_of(str, key) for key in items[::2]]
                dict.update(stack[-1], zip(keys, items[1::2], strict=True))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif arg == stop and len(marks) == 1:
            pairs = stack[marks[0] :]
            return {**stack[0], **dict(zip(pairs[::2], pairs[1::2], strict=True))}
        elif name == "STOP":
            return stack.pop()
        elif name in _VALUES:
            stack.append(_VALUES[name]())
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[_of(int, arg)])
        elif _TEXT_OR_NUMBER.fullmatch(name):
            stack.append(arg)
        elif name not in ("PROTO", "FRAME"):
            what = f"the pickle asks for {name} {plain(str(arg or ''))[:80]}".rstrip()
            raise RunRecordError(what, "a memory snapshot has plain data only: do not load it")
    return None


def _of(kind: type[Plain], value: Any) -> Plain:
    """Return a value of this very type: nothing else of a stranger is printed or compared."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} in place of {kind.__name__}")
    return value


def _snapshot(data: bytearray) -> dict[int | None, Rows]:
    """Return the tables of each device that a snapshot has segments of."""
    by_device: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for segment in plain_objects(data, TABLE["stop"])["segments"]:
        device, *_ = (_of(int, segment[each]) for each in ("device", "address", "stream"))
        by_device[device].append(segment)
    found: dict[int | None, Rows] = {}
    blocks = 0
    for device, listed in sorted(by_device.items()):
        rows = found[device] = Rows()
        # torch's own in the order of their addresses; behind them torch_npu lists the workspace
        pairs = enumerate(pairwise(listed), 1)
        number = next((i for i, (a, b) in pairs if b["address"] < a["address"]), len(listed))
        for segment in listed[:number]:
            blocks += len(segment["blocks"])
            check_limit("objects", blocks, "the snapshot has")
            _add_segment(rows, segment)
        reserved, live = (
            sum(row.bytes or 0 for row in rows[table].values()) for table in ("segments", "owners")
        )
        rows.row("owners", "reserved_not_allocated").bytes = reserved - live
        rows.figures = divide(listed, device, reserved)
        if number == len(listed):  # not told apart
            rows.figures |= {"npu_workspace_bytes": None, "npu_workspace_streams": None}
        rows.figures |= {"reserved_bytes": reserved, "allocated_bytes": live}
    return found


def _add_segment(rows: Rows, segment: dict[str, Any]) -> None:
    private, size = is_private(segment), segment["total_size"]
    pool = _of(str, segment["segment_type"])
    if private:
        pool = "private pool ({:d}, {:d})".format(*segment["segment_pool_id"])
    rows.add("segments", pool, size)
    row, piece = rows.row("segments", pool), "private" if private else "pieces"
    row.allocated_bytes = row.allocated_bytes or 0
    for block in segment["blocks"]:
        length, state = block["size"], block["state"]
        if state == "active_allocated":
            frames = list(islice(block.get("frames") or (), _MOST_FRAMES))
            rows.add("owners", _owner(frames, private), length)
            rows.add("tensors", _site(frames), length)
            row.allocated_bytes += length
        elif state == "inactive":
            rows.add("free", "whole" if length == size and not private else piece, length)
        else:
            rows.add("free", "pending", length)


def _owner(frames: list[dict[str, Any]], private: bool) -> str:
    """Return whose a block is by its frames, innermost first."""
    for frame in frames:
        path, phase = _of(str, frame["filename"]), PHASE_OF.get(_of(str, frame["name"]))
        own = (owner for part, owner in TABLE["paths"].items() if part in path)
        if owner := next(own, TABLE["phases"].get(phase)):
            return str(owner)
    return "graph" if private else "other_tensors" if frames else "no_frames"


def _site(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line of code outside torch, else the innermost."""
    python = (each for each in frames if each["filename"].endswith((".py", ">")))
    outside = (each for each in python if not re.search("/torch(_npu)?/", each["filename"]))
    for each in chain(outside, frames):
        file = each["filename"].rpartition("/")[2]
        return f"{file}:{_of(int, each['line'])} {each['name']}"
    return "no_frames"


# Text in columns


def _named(head: str) -> tuple[str, str]:
    """Return the name of a column and its unit."""
    name, _, unit = head.partition("(")
    return name.strip(), unit.strip().rstrip(")")


def _records(data: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the rows of a csv by names of columns, sizes in bytes and times in seconds."""
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", "replace", newline="")
    return _typed(csv.reader(text))


def _stored(data: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the rows of a database of msMemScope, as of its csv."""
    with NamedTemporaryFile(suffix=".db") as file:
        file.write(data)
        file.flush()
        with closing(sqlite3.connect(f"file:{file.name}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA trusted_schema=OFF")
            rows = base.execute("SELECT * FROM memscope_dump")
            yield from _typed(chain([[each[0] for each in rows.description]], rows))


def _typed(lines: Iterable[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    heads, *_ = islice(it := iter(lines), 1)
    columns = [_named(str(head)) for head in heads]
    for line in it:
        yield {
            name: _value(str(cell).strip(), _FACTORS.get(unit))
            for (name, unit), cell in zip(columns, line, strict=False)
        }


def _value(cell: str, factor: float | None) -> Any:
    """Return a cell: in bytes or seconds, None where it is no number; a text without a factor."""
    if factor is None:
        return cell
    try:
        value = float(cell) * factor
    except ValueError:
        return None
    if not 0 <= value < _MOST_BYTES:  # -1: the profiler saw only releases; not a number
        return None
    return round(value) if factor > 1 else value


def _columns(form: dict[str, Any], records: Iterable[dict[str, Any]]) -> dict[int | None, Rows]:
    """Return the tables of each device of records whose form says their columns."""
    found: dict[int | None, Rows] = defaultdict(Rows)
    alive: dict[tuple[Any, ...], tuple[Rows, str, Any]] = {}
    began = None
    for record in records:
        for key, value in _ATTRIBUTE.findall(record.get("Attr", "")):
            record[key] = int(value) if _WHOLE.fullmatch(value) else value
        at = {key: record.get(column) for key, column in form["at"].items()}
        name, size, time = at["name"], at["bytes"], at.get("time")
        told = re.search(r"\d{1,4}", "".join(record.get(each, "") for each in form["device"]))
        rows = found[int(told[0]) if told else None]
        event, block = record.get("Event"), (id(rows), name, record.get("Ptr"))
        if event == "SNAPSHOT":
            reads = TABLE["snapshot"].items()
            rows.figures = {field: _of(int, record[key]) for key, field in reads if key in record}
        if event not in (None, "MALLOC", "FREE"):
            continue
        alive.pop(block, None)
        if event == "MALLOC":
            alive[block] = rows, f"{name}: {record.get('owner', name)}", record.get("size")
        if size is None or name is None:  # as of a cut line
            continue
        if "ends" in at:
            rows.add(form["table"], name, size, not at["ends"])
            continue
        row, peak = rows.row(form["table"], name), _of(int, either(at.get("peak"), size))
        row.bytes, row.allocated_bytes = size, at.get("allocated")
        began = either(began, time)
        if row.peak_bytes is None or peak > row.peak_bytes:
            row.peak_bytes, row.peak_s = peak, minus(time, began)
    for rows, owner, size in alive.values():
        rows.add("live", owner, size)
    for rows in found.values():
        for name, fields in TABLE["reads"].items():
            if (pool := rows.get("pools", {}).get(name)) is not None:
                reads = {field: getattr(pool, value) for field, value in fields.items()}
                rows.figures = {**reads, **rows.figures}
    return {device: rows for device, rows in found.items() if rows or rows.figures}
