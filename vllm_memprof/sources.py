"""Read what a person names: a run folder, a ``report.json`` or a log becomes reports.

Open to the commands and to the Python API; nothing below them imports it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import limit, open_file, reading
from vllm_memprof.text import plain_data

if TYPE_CHECKING:
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.record.loader import ProcessRecord, Run

Each = TypeVar("Each")


def read_report(name: str) -> Report:
    """Return the report of a run folder, of a ``report.json`` or of a log.

    Args:
        name: its path; ``FILE#2`` is the second engine start of a log, or the second report of a
            JSON array.

    Raises:
        RunRecordError: it cannot be read, is none of these, or holds several runs and no number
            says which.
    """
    path, number = numbered(name)
    reports = read_reports(path)
    if number is None and len(reports) > 1:
        hint = f"name one of them: {path}#1 to {path}#{len(reports)}"
        raise RunRecordError(f"{path} holds {len(reports)} runs", hint)
    return chosen(path, number, reports)[0]


def read_reports(path: str) -> list[Report]:
    """Return every report that a run folder, a ``report.json`` or a log holds; never none.

    A folder that holds run folders, or a glob, is one deployment.

    Raises:
        RunRecordError: it cannot be read, or is none of these.
    """
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.accounting.model import Report
    from vllm_memprof.logs.to_record import read_log
    from vllm_memprof.record.codec import from_json

    if Path(path).is_dir() or (_is_glob(path) and not Path(path).exists()):
        return [build_runs([path])]
    data = _read_json(Path(path))
    if data is None:
        return [build_report(run) for run in read_log(path)]
    try:
        rows = data if isinstance(data, list) else [data]
        return [from_json(Report, _sound(path, row)) for row in rows]
    except ValueError as exc:
        hint = "give the run folder, or the report.json in it"
        raise RunRecordError(f"{path} is not a report of memprof: {exc}", hint) from exc


def _sound(path: str, row: Any) -> Any:
    """Replace secrets where a report of another release may hold them: the run, the findings.

    Raises:
        RunRecordError: a figure of a rank cannot be.
    """
    if not isinstance(row, dict):
        return row
    from vllm_memprof.record.impossible import take_out
    from vllm_memprof.redact import redact_data  # its patterns take a tenth of --help

    if wrong := take_out({"ranks": row.get("ranks")}):
        what = f"{path} has a figure that cannot be: {wrong[0]}"
        raise RunRecordError(what, "was it edited? give the run folder")

    held = {key: redact_data(row[key]) for key in ("run", "findings") if key in row}
    return {**row, **held}


def build_run(run_dir: Path) -> Report:
    """Return the report of a run folder.

    Raises:
        RunRecordError: it cannot be read.
    """
    from vllm_memprof.record.loader import load_run

    return _build_one(load_run(run_dir))


def _build_one(run: Run) -> Report:
    from vllm_memprof.accounting.build import build_report
    from vllm_memprof.accounting.deployment.report import build_deployment
    from vllm_memprof.record.deployment import Parts

    run = _with_log(run)
    if len(run.hosts) > 1:  # as Ray's workers have it
        name = None if run.info.part is None else run.info.part.deployment
        return build_deployment(Parts(name, [run]))
    return build_report(run)


def _with_log(run: Run) -> Run:
    from vllm_memprof.logs.to_record import read_engine_log
    from vllm_memprof.record.schema import ENGINE_LOG

    failed = run.info.status not in ("ok", "running")
    memory = run.info.host_memory
    killed = memory is not None and bool(memory.last.get("kills"))
    printed, logged = read_engine_log(run.folder / ENGINE_LOG, failed, killed)
    run = replace(run, printed_kv=printed)
    if logged is not None:
        # what a run prints after Ctrl-C is no failure
        failure = None if run.info.interrupted else logged.failure
        run = replace(run, failure=failure, processes=_completed(run, logged))
    return run


def _completed(run: Run, logged: Run) -> list[ProcessRecord]:
    """Return the processes of a run that failed, with what its log alone says of them.

    Those are figures of workers of which hooks read none, as of one that refused to start.
    """
    said = [process for process in logged.workers if process.figures]
    workers = run.workers
    if any(process.figures for process in workers):
        return run.processes
    if not workers:
        return [*run.processes, *said]
    by_rank = {(each.identity.dp_rank or 0, each.identity.rank): each for each in said}
    only = said[0] if len(workers) == len(said) == 1 else None
    found = []
    for process in run.processes:
        other = by_rank.get((process.identity.dp_rank or 0, process.identity.rank), only)
        if process.is_worker and other is not None:
            process = replace(
                process, figures=other.figures, figures_half_units=other.figures_half_units
            )
        found.append(process)
    return found


def build_runs(names: Sequence[str], deployment: str | None = None) -> Report:
    """Return one report of what a person names: a run folder, or those of a deployment.

    Args:
        names: run folders, folders that hold some, or globs; memory files of the run beside one.
        deployment: its name, where they hold several.

    Raises:
        RunRecordError: none can be read.
        UsageError: they are of several deployments.
    """
    from glob import glob

    from vllm_memprof.accounting.deployment.report import build_deployment
    from vllm_memprof.logs.memory_files import beside
    from vllm_memprof.logs.to_record import read_log
    from vllm_memprof.record.deployment import load_parts, run_folders

    files = [run for name in names if Path(name).is_file() for run in read_log(name)]
    if files and all(run.source == "file" for run in files):
        from vllm_memprof.record.loader import load_run

        runs = [load_run(Path(name)) for name in names if not Path(name).is_file()]
        return _build_one(beside([*runs, *files])[-1])
    folders: list[Path] = []
    searched = False
    for name in names:
        path = Path(name)
        listed = [path]
        if not path.exists() and _is_glob(name):
            listed = [each for each in map(Path, sorted(glob(name))) if each.is_dir()]
            searched = True
        for each in listed:
            try:
                inside = run_folders(each) if each.is_dir() else []
            except RunRecordError:
                inside = []  # named below as one that cannot be read
            searched = searched or bool(inside)
            folders += inside or [each]
    folders = folders or [Path(name) for name in names]
    if len(folders) == 1 and not searched and deployment is None:
        return build_run(folders[0])
    found = load_parts(folders, deployment, named=not searched)
    if len(found.runs) == 1 and not found.gaps:
        return _build_one(found.runs[0])
    return build_deployment(replace(found, runs=[_with_log(run) for run in found.runs]))


def _is_glob(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def numbered(name: str) -> tuple[str, int | None]:
    """Split ``FILE#2`` into a path and a number; a file of that very name comes first."""
    path, mark, number = name.rpartition("#")
    if not mark or not path or not number.isdecimal() or Path(name).exists():
        return name, None
    return path, int(number)


def chosen(path: str | Path, number: int | None, found: list[Each]) -> list[Each]:
    """Return the one of that number, counted from 1; without a number all of them.

    Raises:
        RunRecordError: there are not so many.
    """
    if number is None:
        return found
    if not 1 <= number <= len(found):
        held = f"{len(found)} runs" if len(found) != 1 else "one run"
        raise RunRecordError(f"{path} has no run {number}: it holds {held}")
    return [found[number - 1]]


def _read_json(path: Path) -> Any:
    """Return what a JSON file holds; None where it is no JSON, as a log is, which may begin so.

    A report.json has up to 150 kB per rank; a log may have any size, and is not held in memory.
    """
    most = limit("file")
    with reading(path), open_file(path) as stream:
        if stream.peek(256)[:256].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
            return None
        text = stream.read(most)

    def refuse(constant: str) -> None:
        raise RunRecordError(f"{path} has {constant}, which is not a figure", "was it edited?")

    try:
        return plain_data(json.loads(text, parse_constant=refuse)) if len(text) < most else None
    except (ValueError, RecursionError):
        return None
