"""A log becomes ``record.loader.Run`` objects, one per start of an engine.

A figure that the log does not print is absent. Where the log prints snapshots (debug lines of a
developer), they become phases; else a run has none.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BufferedReader
from itertools import chain
from math import ceil, inf
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from vllm_memprof.causes.reader import CauseReader, Words
from vllm_memprof.engines import VLLM, row_of_run
from vllm_memprof.engines.line_format import (
    ASCEND,
    CUDA,
    OOM,
    PrintedRank,
)
from vllm_memprof.errors import RunRecordError
from vllm_memprof.files import reading
from vllm_memprof.logs.config import WITHIN_CORE, Config
from vllm_memprof.logs.figures import Figure, ParsedLine, parse_lines
from vllm_memprof.logs.formats import LOGS, words
from vllm_memprof.logs.lines import CHUNK_BYTES, oldest_first, read_chunks, read_lines
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.starts import EngineStart, LoggedOom, StartSorter, Worker
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.failures import stage_of
from vllm_memprof.record.loader import Identity, ProcessRecord, Run
from vllm_memprof.record.schema import RunInfo, Snapshot
from vllm_memprof.record.spans import AFTER, BEFORE, Span
from vllm_memprof.text import text

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
#: What is no text, or may wait for ever or never end, if it were read as a file.
_NO_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NoMemoryLines(RunRecordError):
    """A log without a line about memory."""


#: (phase, edge, prefix of the figures) of the snapshots that a log may print.
_SNAPSHOTS = (
    ("hccl_init", BEFORE, "distributed_before"),
    ("hccl_init", AFTER, "distributed_after"),
    ("profile_run", BEFORE, "profile_before"),
    ("profile_run", AFTER, "profile_after"),
    ("mm_profile", AFTER, "mm_profile"),
    ("empty_cache", BEFORE, "profile_end"),
    ("empty_cache", AFTER, "profile_after"),
)
#: By the stage of the last lines before an OOM: the phase that had come to its end, of those that
#: tell whether the KV cache was there. The last is of none.
_LAST_SEEN = (
    *(None, "weight_load", "profile_run", "kv_cache_plan", "kv_cache_plan", "graph_capture"),
    *("warm_up", None),
)
#: A figure of a start that failed -> why.
_REFUSED = {figure: why for log in LOGS.values() for figure, why in log.refused.items()}
#: Field of a snapshot -> what the message of an OOM says of it.
_OOM_SNAPSHOT = {
    "device_total_bytes": "device_total_bytes",
    "device_free_bytes": "free_bytes",
    "allocated_bytes": "allocated_bytes",
    "allocated_peak_bytes": "allocated_peak_bytes",
    "reserved_bytes": "reserved_bytes",
    "non_torch_bytes": "non_torch_bytes",
}
#: Figure that a person noted beside the log, by npu-smi -> what it is.
_NOTED = {"before": "before the start", "after": "after it", "process": "by the process"}


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
    read, lines = 0, 0
    with reading(path), _open(path) as stream:
        for inner, log in logs_in(stream, name):
            sorter, failures = sorted_lines(log)
            runs += to_runs(sorter, inner, failures)
            read, lines = read + 1, lines + sorter.lines
    if not runs:
        where = name if read == 1 else f"any of the {read} files in {name}"
        raise NoMemoryLines(
            f"no line about memory in {where}"
            + (f"; looked for {LOOKED_FOR}" if lines else ": it is empty"),
            hint="give the log of the engine's start-up, at level INFO or DEBUG:"
            " later lines hold no figures",
        )
    return runs


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
    sorter.newest_first = newest_first
    return sorter, reader.finish()


def read_engine_log(
    path: Path, failed: bool
) -> tuple[dict[int | None, dict[str, int | float]], Run | None]:
    """Return the figures of the KV cache that an engine printed at its start, and the start.

    Args:
        path: of an ``engine.log``.
        failed: whether the run did: then all of it is read, else its first ``START_UP_BYTES``.

    Returns:
        Per data-parallel rank, None where the engine names none, the figures that engine cores
        print: tokens, blocks, max_model_len, max_concurrency. Empty where the file is not there,
        cannot be read, or prints none. And the first start that failed, or the last one, of a run
        that did; None where the log has none.
    """
    try:
        with path.open("rb") as stream:
            first = stream.read(START_UP_BYTES)
            rest = iter(partial(stream.read, CHUNK_BYTES), b"") if failed else ()
            sorter, failures = sorted_lines(chain([first], rest))
    except (OSError, RunRecordError):
        return {}, None
    plans = [start.kv_plans for start in sorter.starts if start.kv_plans]
    figures = {
        dp: {name: figure.value for name, figure in plan.items()}
        for dp, plan in (plans[-1].items() if plans else ())
    }
    starts = to_runs(sorter, path.name, failures) if failed else []
    wrong = (start for start in starts if start.failure is not None)
    return figures, next(wrong, starts[-1] if starts else None)


@contextmanager
def _open(path: str) -> Iterator[BufferedReader]:
    if path == STDIN:
        stdin: BufferedReader = BufferedReader(cast(Any, sys.stdin.buffer))
        yield stdin
        stdin.detach()  # which keeps it open
        return
    kind = _NO_FILES.get(stat.S_IFMT(Path(path).stat().st_mode))
    if kind is not None and not path.startswith("/dev/fd/"):  # what a shell opened is read
        hint = "pass the log's text; - reads standard input"
        raise RunRecordError(f"{path} is {kind}, not a file", hint)
    with open(path, "rb") as stream:
        yield stream


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
    return runs


def _to_run(start: EngineStart, name: str, number: int, count: int, spoken: Set[str]) -> Run:
    config, log = start.config, start.log
    # without workers the KV cache's figures alone are known: one worker without figures stands in
    workers = list(start.workers.values()) or [Worker("")]
    engine, version, notes = _engine(start, spoken)
    if start.last_line:
        first, last = start.first_line, start.last_line
        lines = f"lines {first} to {last}" if last > first else f"line {last}"
        number_of = f" (start {number} of {count})" if count > 1 else ""
        notes.insert(0, f"{name}, {lines}{number_of}")
    if start.heading is not None:
        notes.append(
            text(
                'it stands under "{heading}"; the command is the last one above that heading',
                heading=start.heading,
            )
        )
    if config.world_size > 1 and any(each.label is None for each in start.workers.values()):
        notes.append(
            text("the log does not name ranks: workers are numbered in the order of their lines")
        )
    notes += [note for worker in workers for note in _noted_usage(worker)]
    if log.notes is not None:
        notes += log.notes(start.drafts, {name for each in workers for name in each.unknown})
    status, reason = _status(start)
    device = None if config.given is None else config.given.device
    if engine is None and any(figure.format.engine == CUDA for figure in start.printed):
        device = "cuda"  # else its name tells
    versions = {VLLM.name: config.vllm_version, ASCEND: config.ascend_version}
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
    forms = list(start.equations)
    names = {figure.name for figure in start.printed}
    if not forms and engine is not None and "non_kv_cache_bytes" in names:
        # the summary of memory_profiling belongs to one of these
        forms = ["E4" if engine == ASCEND else "E6" if "consumed_bytes" in names else "E5"]
    plans = start.kv_plans or _pools(start)
    return Run(
        folder=Path(info.id),
        info=info,
        processes=[
            *_worker_processes(start, workers, name),
            *(_core_process(dp, plan, config, name) for dp, plan in plans.items()),
        ],
        source="log",
        forms=forms,
    )


def _engine(start: EngineStart, spoken: Set[str]) -> tuple[str | None, str | None, list[str]]:
    """Return (engine, its version, notes on how the version is known).

    Messages of torch, torch_npu and the runtime name the platform, not the engine: without a line
    of vLLM's own it is that of ``spoken``, or not known.
    """
    config = start.config
    if start.log is not LOGS[VLLM.name]:
        return start.log.engine, None, []
    if VLLM.name not in spoken and all(figure.format.stage == OOM for figure in start.printed):
        return next(iter(sorted(spoken)), None), None, []
    named = config.engine or config.around
    if ASCEND in start.engines or (named == ASCEND and CUDA not in start.engines):
        if config.ascend_version is not None or config.vllm_version is None:
            return ASCEND, config.ascend_version, []
        release = config.vllm_version.partition("+")[0].partition(".dev")[0]
        note = f"the version of vllm-ascend is taken to be that of vLLM, {release}"
        return ASCEND, release, [note]
    if CUDA in start.engines or named == CUDA:
        return CUDA, config.vllm_version, []
    return None, None, []


def _status(start: EngineStart) -> tuple[str, str | None]:
    """Return (status of the run, reason where it failed)."""
    names = {figure.name for figure in start.printed}
    if any(name.startswith("oom_") for name in names):
        return "oom", None
    for figure, why in _REFUSED.items():
        if figure in names:
            return "failed", why
    granted = [figure.value for figure in start.printed if figure.name == "kv_cache_bytes"]
    if min(granted, default=1) <= 0:
        return "failed", f"the KV cache is {'negative' if min(granted) < 0 else 0}"
    if start.broken and not start.finished:
        return "failed", "an engine process failed"
    return "ok" if start.finished or start.kv_plans or granted else "truncated", None


def _noted_usage(worker: Worker) -> list[str]:
    """Return the npu-smi figures that a person noted beside the log, as a note."""
    mib = {
        name: f"{int(figure.value) >> 20:,}"
        for name in (*_NOTED, "total")
        if (figure := worker.figures.get(f"npu_smi_{name}_bytes")) is not None
    }
    used = [f"{mib[name]} {said}" for name, said in _NOTED.items() if name in mib]
    total = f"; the card has {mib['total']}" if "total" in mib else ""
    return [f"npu-smi: used, MiB: {', '.join(used)}{total}"] if used else []


def _worker_processes(start: EngineStart, workers: list[Worker], name: str) -> list[ProcessRecord]:
    """Return the records of the workers, by replica and rank.

    The engine's equation may take more from all ranks that agree on one KV cache. A start that no
    line of its own names may have had another set-up than the one before it.
    """
    config, log = start.config, start.log
    several = (config.tensor_parallel_size or 1) > 1 or len(workers) > 1
    of_one = (config.pipeline_parallel_size, config.prefill_context_parallel_size) == (None, None)
    found = []
    groups: dict[int | None, list[PrintedRank]] = {}
    for worker in workers:
        dims, rank = worker.dims, _printed_rank(worker, config)
        if several and not dims:  # lines of which rank, and of how many, is not known
            for each in log.figures.keys() & rank.figures.keys():
                del rank.figures[each]
                rank.half_units.pop(each, None)
        index = (worker.device or "").rpartition(":")[2]
        lines = worker.first_line, worker.last_line
        unnamed = worker.label is None and max(config.world_size, len(start.workers)) > 1
        who = Identity(
            pid=worker.pid,
            role="worker",
            roles=frozenset({"worker"}),
            rank=_rank(dims, config),
            dp_rank=dims.get("dp"),
            pp_rank=dims.get("pp"),
            tp_rank=dims.get("tp"),
            ep_rank=dims.get("ep"),
            device_index=int(index) if index.isdigit() else None,
            label=worker.label or _described(start, worker),
            lines=lines if unnamed else None,
            world_size=config.tensor_parallel_size if of_one else config.world_size,
        )
        rank.place = who.rank if dims.keys() & WITHIN_CORE.keys() else None
        groups.setdefault(who.dp_rank, []).append(rank)
        process = ProcessRecord(
            file=f"{name}:{worker.label or 'worker'}",
            identity=who,
            phases=_phases(worker, rank.figures),
            figures=rank.figures,
            figures_half_units=rank.half_units,
            sleeps=worker.sleeps,
        )
        found.append(((who.dp_rank or 0, who.rank is None, who.rank or 0), process))
    for ranks in groups.values():
        if log.complete is not None:
            log.complete(ranks, None if start.inferred else config.given)
    return [process for _, process in sorted(found, key=itemgetter(0))]


def _pools(start: EngineStart) -> dict[int | None, dict[str, Figure]]:
    """Return the tokens of the ranks' pools, where no line says how many are served.

    The ranks of a start have as many each; where one has others, none counts.
    """
    name = start.log.pool_tokens or ""
    found: dict[int | None, list[Figure]] = {}
    spoilt: set[int | None] = set()
    for worker in start.workers.values():
        if name in worker.figures:
            found.setdefault(worker.dims.get("dp"), []).append(worker.figures[name])
        if name in worker.unknown:
            spoilt.add(worker.dims.get("dp"))
    return {
        dp: {"tokens": pools[0]}
        for dp, pools in found.items()
        if dp not in spoilt and len({pool.value for pool in pools}) == 1
    }


def _described(start: EngineStart, worker: Worker) -> str:
    """Return what is known of a worker without a label: its device, or its place among others."""
    failed = worker.oom is not None or "startup_refused" in worker.figures
    if worker.device is not None and (failed or len(start.workers) > 1):
        return worker.device if ":" in worker.device else f"device {worker.device}"
    unnamed = [other for other in start.workers.values() if other.label is None]
    size = max(start.config.world_size, len(unnamed))
    if size > 1:
        return f"worker {unnamed.index(worker) + 1 if worker in unnamed else 1} of {size}"
    return "the worker" if len(start.workers) <= 1 else "lines without a rank"


def _rank(dims: dict[str, int], config: Config) -> int | None:
    """Return the rank within an engine core, from the places that are known."""
    if "rank" in dims:
        return dims["rank"]
    rank = 0
    for name in WITHIN_CORE:
        place, size = dims.get(name), config.parallel_size(name)
        if place is None and (size or 1) > 1:
            return None  # its place is unknown
        if rank and size is None and place:
            return None  # the number of ranks before it is unknown
        rank = rank * (size or 1) + (place or 0)
    return rank if dims.keys() & WITHIN_CORE.keys() else None


def _printed_rank(worker: Worker, config: Config) -> PrintedRank:
    """Return the figures of a worker, with those that follow from them and from the set-up."""
    found = {name: each for name, each in worker.figures.items() if name not in worker.unknown}
    total, requested = found.get("device_total_bytes"), found.get("requested_bytes")
    asked, equivalent = (found.get(f"{name}_utilization") for name in ("gpu_memory", "equivalent"))
    if total and asked and equivalent and asked.line == equivalent.line:
        # the engine prints the utilization, and it less the graph estimate / the device's total, to
        # four digits each. (vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory, 0.18
        # to 0.33) A size of an older release means that a paste holds several starts
        share = asked.value - equivalent.value
        half = ceil(total.value * 1e-4 + share * total.half_unit_bytes)
        if total.format.equation not in ("E0", "E0a"):
            estimate = replace(total, value=round(share * total.value), half_unit_bytes=half)
            found.setdefault("graph_estimate_bytes", estimate)
    free, used = (found.get(f"oom_{name}_bytes") for name in ("unallocated", "allocated"))
    if free and used:
        half = free.half_unit_bytes + used.half_unit_bytes
        reserved = replace(used, value=int(free.value + used.value), half_unit_bytes=half)
        found.setdefault("oom_reserved_bytes", reserved)
    if "startup_plan_bytes" in found:  # to the byte; the line that follows rounds it
        found["kv_cache_memory_bytes_arg"] = found["startup_plan_bytes"]
    figures: dict[str, int | float | None] = {name: each.value for name, each in found.items()}
    ratio = config.gpu_memory_utilization
    if ratio is not None and 0 < ratio <= 1:
        # one of another start does not fit the device and the request printed
        off, slack = 0.0, 0.0
        if total and requested:
            off = abs(total.value * ratio - requested.value)
            slack = total.half_unit_bytes * ratio + requested.half_unit_bytes + 2
        if off <= slack:
            figures.setdefault("gpu_memory_utilization", ratio)
    if config.kv_cache_memory_bytes is not None:
        figures.setdefault("kv_cache_memory_bytes_arg", config.kv_cache_memory_bytes)
    half_units = {name: half for name, each in found.items() if (half := each.half_unit_bytes)}
    return PrintedRank(figures, half_units)


def _core_process(
    dp: int | None, plan: dict[str, Figure], config: Config, name: str
) -> ProcessRecord:
    """Return the record of an engine core, which has the KV cache's figures."""
    values: dict[str, object] = {
        "kind": "kv_plan",
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        **{key: figure.value for key, figure in plan.items()},
    }
    if (override := values["num_gpu_blocks_override"]) is not None:
        values.setdefault("blocks", override)
    file = f"{name}:engine core" if dp is None else f"{name}:engine core DP{dp}"
    identity = Identity(role="engine_core", roles=frozenset({"engine_core"}), dp_rank=dp)
    return ProcessRecord(file, identity, kv_plan=values)


def _phases(worker: Worker, figures: Mapping[str, int | float | None]) -> list[Span]:
    """Return the printed snapshots as phases in the order of a start-up, and the OOM.

    The time of a phase is the number of its line.
    """
    spans: dict[str, Span] = {}
    for phase, side, prefix in _SNAPSHOTS:
        known = {
            field: worker.figures[f"{prefix}_{field}"]
            for field in ("reserved_bytes", "allocated_peak_bytes", "non_torch_bytes")
            if f"{prefix}_{field}" in worker.figures
        }
        initial = worker.figures.get("initial_non_torch_bytes")
        if prefix == "distributed_before" and known and initial is not None:
            known["non_torch_bytes"] = initial
        if not known or (phase == "empty_cache" and side == AFTER and phase not in spans):
            continue
        outer = None if phase in ("hccl_init", "profile_run") else spans.get("profile_run")
        parent, depth = (None, 0) if outer is None else (outer.order, 1)
        line = max(figure.line for figure in known.values())
        read = from_json(Snapshot, {field: int(figure.value) for field, figure in known.items()})
        span = spans.get(phase) or Span(phase, len(spans), parent, depth)
        spans[phase] = replace(
            span,
            before=read if side == BEFORE else span.before,
            after=read if side == AFTER else span.after,
            end_t_ns=line,
            detail={"line": line},
        )
    found = list(spans.values())
    if worker.oom is not None:
        found.append(_oom_span(worker, worker.oom, figures, len(found)))
    return found


def _oom_span(
    worker: Worker, oom: LoggedOom, figures: Mapping[str, int | float | None], order: int
) -> Span:
    said = {
        name.removeprefix("oom_"): value
        for name, value in figures.items()
        if name.startswith("oom_")
    }
    lines = [figure.line for name, figure in worker.figures.items() if name.startswith("oom_")]
    line = min(lines, default=0)
    notes, failed = oom.notes, oom.traceback
    return Span(
        "oom",
        order,
        after=from_json(Snapshot, {field: said.get(name) for field, name in _OOM_SNAPSHOT.items()}),
        end_t_ns=line,
        detail={
            **said,
            "device": worker.device,
            "phase": failed.phase,
            "last_stage": _LAST_SEEN[oom.stage],
            "failures": oom.failures,
            "stage": stage_of(reversed(failed.chain)),
            "site": failed.site,
            "at_request": notes.at_request,
            "request_count": notes.request_count,
            "input": notes.input,
            "readings": to_json(notes.readings),
            "line": line,
        },
    )
