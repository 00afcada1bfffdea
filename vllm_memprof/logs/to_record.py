"""A log becomes ``record.loader.Run`` objects, one per start of an engine.

A figure that the log does not print is absent. Where the log prints snapshots (debug lines of a
developer), they become phases; else a run has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BufferedReader
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, cast

from vllm_memprof.causes.book import read_book
from vllm_memprof.causes.reader import CauseReader, Words
from vllm_memprof.engines import VLLM, row_of_run
from vllm_memprof.engines.line_format import ASCEND, CUDA
from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import ENV_LIMITS, check_limit, limit, open_file, reading
from vllm_memprof.logs.config import Config
from vllm_memprof.logs.engine_start import EngineStart, Worker
from vllm_memprof.logs.figures import ParsedLine, parse_lines
from vllm_memprof.logs.formats import LOGS, words
from vllm_memprof.logs.lines import CHUNK_BYTES, oldest_first, read_chunks, read_lines
from vllm_memprof.logs.memory_files import beside, form_of, read_memory_file
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.starts import StartSorter
from vllm_memprof.logs.workers import core_processes, worker_processes
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.loader import Run
from vllm_memprof.record.schema import RunInfo
from vllm_memprof.text import plain, text

LOOKED_FOR = "; of ".join(
    log.looked_for if name == VLLM.name else f"{row_of_run(log.engine).title} {log.looked_for}"
    for name, log in LOGS.items()
)
STDIN = "-"
#: An engine prints the size of its KV cache at its start: what serving prints is not read.
START_UP_BYTES = 32 << 20
#: What engines print, for the one who looks for failures.
WORDS = Words(
    begins=words("begins"),
    ready=words("ready"),
    ended=words("ended"),
    speakers={
        # vLLM's last: others print its words as well
        **{log.engine: log.speaks for log in reversed(LOGS.values())},
        **{name: own for log in LOGS.values() for name, own in log.below.items()},
    },
)


class NoMemoryLines(RunRecordError):
    """A log without a line about memory."""


def read_log(path: str) -> list[Run]:
    """Read one log.

    Args:
        path: of a file, or ``-`` for standard input.

    Returns:
        One ``Run`` per start of an engine, in the order of the log; of an archive, those of all
        its logs.

    Raises:
        RunRecordError: it cannot be read.
        NoMemoryLines: it contains no line about memory.
    """
    name = "standard input" if path == STDIN else Path(path).name
    runs: list[Run] = []
    read, lines, telling = 0, 0, ""
    with reading(path), ExitStack() as opened:
        if path == STDIN:
            stream = BufferedReader(cast(Any, sys.stdin.buffer))
            opened.callback(stream.detach)  # which keeps it open
        else:
            stream = opened.enter_context(open_file(path))
        for inner, log in logs_in(stream, name):
            head = next(log, b"")
            log = chain([head], log)
            if (kind := form_of(head)) is not None:
                runs.append(read_memory_file(plain(inner), kind, log))
                continue
            sorter, failures = sorted_lines(log)
            runs += to_runs(sorter, plain(inner), failures)
            if read:
                check_limit("workers", sum(len(run.processes) for run in runs), f"{name} has")
            read, lines, telling = read + 1, lines + sorter.lines, sorter.telling
    if not runs:
        where = name if read == 1 else f"any of the {read} files in {name}"
        raise NoMemoryLines(
            f"no line about memory in {where}"
            + (
                f", and no failure that memprof knows; {plain(telling)}"
                if telling
                else f"; looked for {LOOKED_FOR}"
                if lines
                else ": it is empty"
            ),
            hint="give the log of the engine's start-up, at level INFO or DEBUG:"
            " later lines have no values",
        )
    return beside(runs)


def sorted_lines(
    pieces: Iterable[bytes],
) -> tuple[StartSorter, list[tuple[int, NamedFailure]]]:
    """Return the starts of a log, and (line, failure) of those that failed."""
    reader = CauseReader(WORDS)
    chunks, newest_first = oldest_first(read_chunks(pieces))

    def watched() -> Iterator[ParsedLine]:
        for line in parse_lines(read_lines(chunks)):
            reader.add(line.line, line.text)
            yield line

    sorter = StartSorter().sort(watched())
    sorter.newest_first, sorter.telling = newest_first, reader.telling
    return sorter, reader.finish()


def read_engine_log(
    path: Path, failed: bool, killed: bool = False
) -> tuple[dict[int | None, dict[str, int | float]], Run | None]:
    """Return the figures of the KV cache that an engine printed at its start, and the start.

    Args:
        path: of an ``engine.log``.
        failed: whether the run did: then all of it is read, else its first ``START_UP_BYTES``.
        killed: the kernel killed a process for lack of host memory, whose log has no last word.

    Returns:
        Per data-parallel rank, None where the engine names none, the figures that engine cores
        print: tokens, blocks, max_model_len, max_concurrency. Empty where the file is not there,
        cannot be read, or prints none. And the first start that failed, or the last one, of a run
        that did; None where the log has none.

    Raises:
        RunRecordError: it is not a regular file, or has a line without an end.
    """
    try:
        with open_file(path, path.parent) as stream:
            first = stream.read(START_UP_BYTES)
            rest = iter(partial(stream.read, CHUNK_BYTES), b"") if failed else ()
            sorter, failures = sorted_lines(chain([first], rest))
    except OSError:
        return {}, None
    plans = [start.kv_plans for start in sorter.starts if start.kv_plans]
    figures = {
        dp: {name: figure.value for name, figure in plan.items()}
        for dp, plan in (plans[-1].items() if plans else ())
    }
    starts = to_runs(sorter, path.name, failures) if failed else []
    wrong = (start for start in starts if start.failure is not None)
    found = next(wrong, starts[-1] if starts else None)
    if killed and found is not None and found.failure is not None and found.failure.kind == "other":
        row = read_book().origins["host"][0]
        cures = list(row.cures)
        failure = NamedFailure(row.kind, row.is_memory, row.title, "certain", cures=cures)
        found = replace(found, failure=failure)
    return figures, found


def to_runs(
    sorter: StartSorter, name: str, failures: Sequence[tuple[int, NamedFailure]] = ()
) -> list[Run]:
    """Return a ``Run`` per start that printed a figure or failed.

    Args:
        sorter: with all lines read.
        name: of the log.
        failures: (line, failure), in the order of the log.
    """
    found = [start for start in sorter.starts if start.workers or start.kv_plans]
    if not found and sorter.smi.chips:
        found = [EngineStart(Config(engine=ASCEND))]
    if not found and failures:
        found = [EngineStart(sorter.config)]
    runs = []
    for number, start in enumerate(found, start=1):
        run = _to_run(start, name, number, len(found), sorter.spoken)
        until = found[number].first_line if number < len(found) else inf
        since = start.first_line if number > 1 else 0
        failure = next((each for line, each in failures if since <= line < until), None)
        if failure is not None and run.info.status in ("ok", "truncated"):
            run.info.status, run.info.exit_reason = "failed", failure.title
        run.info.env.update({variable: values[-1] for variable, values in sorter.exports.items()})
        runs.append(replace(run, failure=failure))
    if not runs:
        return []
    runs[-1].info.notes += sorter.smi.notes()
    for variable, values in sorter.exports.items():
        if len(values) > 1:  # a shell keeps the last
            earlier = ", then ".join(values[:-1])
            note = f"{variable} is set {len(values)} times: {values[-1]} replaces {earlier}"
            runs[-1].info.notes.append(note)
    if sorter.newest_first:
        runs[0].info.notes.append(
            text("the log is newest first: its lines are counted from the last one")
        )
    if sorter.left_out:
        runs[-1].notes.append(f"{sorter.left_out} more starts in the log were left out")
    if sorter.full:
        runs[-1].notes.append(
            f"further starts were left out: {ENV_LIMITS}=workers={2 * limit('workers')} reads more"
        )
    return runs


def _to_run(start: EngineStart, name: str, number: int, count: int, spoken: Set[str]) -> Run:
    config = start.config
    # without workers the KV cache's figures alone are known: one worker without figures stands in
    workers = list(start.workers.values()) or [Worker("")]
    engine, version, notes = start.engine_named(spoken)
    if start.last_line:
        first, last = start.first_line, start.last_line
        where = text("{name}, lines {first} to {last}", name=name, first=first, last=last)
        if count > 1:
            where = text(
                "{where} (start {number} of {count})", where=where, number=number, count=count
            )
        notes.insert(0, where)
    notes += start.notes
    status, reason = start.outcome
    device = None if config.given is None else config.given.device
    versions = {VLLM.name: config.vllm_version, ASCEND: config.ascend_version}
    if engine not in versions and any(figure.format.engine == CUDA for figure in start.printed):
        device = "cuda"  # else its name tells
    eager = config.enforce_eager and "--enforce-eager" not in config.arguments
    info = RunInfo(
        id=name if count == 1 else f"{name}#{number}",
        mode="log",
        model=config.served_model_name or config.model or "unknown",
        command=list(config.command),
        engine_command=[*config.arguments, *(["--enforce-eager"] if eager else [])],
        versions={package: release for package, release in versions.items() if release},
        engine=engine,
        engine_version=version,
        device=device,
        status=status,
        exit_reason=reason,
        notes=notes,
    )
    return Run(
        folder=Path(info.id),
        info=info,
        processes=[*worker_processes(start, workers, name), *core_processes(start, name)],
        source="log",
        forms=start.forms_of(engine),
    )
