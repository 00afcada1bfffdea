"""A log becomes ``record.loader.Run`` objects, one per start of an engine.

A figure that the log does not print is absent. Where the log prints snapshots (debug lines of a
developer), they become phases; else a run has none.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from math import ceil, inf
from pathlib import Path
from typing import BinaryIO

from vllm_memprof.causes.reader import CauseReader, Words
from vllm_memprof.engines import row_of_run
from vllm_memprof.engines.line_format import (
    CAPTURE,
    CUDA,
    GRANT,
    LOAD,
    OOM,
    PLAN,
    PROFILE,
    READY,
    LogLines,
    PrintedRank,
)
from vllm_memprof.errors import RunRecordError
from vllm_memprof.logs.config import BEGINS, OWN_WORDS, WITHIN_CORE, Config
from vllm_memprof.logs.figures import Figure, ParsedLine, parse_lines
from vllm_memprof.logs.formats import OF_ENGINES
from vllm_memprof.logs.lines import oldest_first, read_chunks, read_lines
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.starts import DOWN, UP, EngineStart, LoggedOom, StartSorter, Worker
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.failures import stage_of
from vllm_memprof.record.loader import Identity, ProcessRecord, Run
from vllm_memprof.record.schema import RunInfo, Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.text import text

LOOKED_FOR = (
    '"Available KV cache memory", "Available memory", "model weights take", "Model loading took", '
    '"Loading model weights took", "KV cache size", "Free memory on device", "out of memory", '
    '"Graph capturing finished", "Sleep mode freed", torch_memory and non_torch_memory'
    + "".join(f"; of {row_of_run(log.engine).title} {log.looked_for}" for log in OF_ENGINES)
)
STDIN = "-"
#: An engine prints the size of its KV cache at its start: what serving prints is not read.
START_UP_BYTES = 32 << 20
#: What engines print, for the one who looks for failures.
WORDS = Words(begins=BEGINS, ready=UP, ended=DOWN, speakers=OWN_WORDS)
#: What may wait for ever or never end, if it were read as a file.
_NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
#: Cards of npu-smi that a note names.
_MAX_CARDS = 16


class NoMemoryLines(RunRecordError):
    """A log without a line about memory."""


#: (phase, edge, prefix of the figures) of the snapshots that a log may print.
_SNAPSHOTS = (
    ("hccl_init", "before", "distributed_before"),
    ("hccl_init", "after", "distributed_after"),
    ("profile_run", "before", "profile_before"),
    ("profile_run", "after", "profile_after"),
    ("mm_profile", "after", "mm_profile"),
    ("empty_cache", "before", "profile_end"),
    ("empty_cache", "after", "profile_after"),
)
#: Stage of the last lines before an OOM -> the phase that had come to its end, of those that tell
#: whether the KV cache was there.
_LAST_SEEN = {
    LOAD: "weight_load",
    PROFILE: "profile_run",
    GRANT: "kv_cache_plan",
    PLAN: "kv_cache_plan",
    CAPTURE: "graph_capture",
    READY: "warm_up",
}
#: A figure of a start that failed -> why.
_REFUSED = {
    **{figure: why for log in OF_ENGINES for figure, why in log.refused.items()},
    "startup_refused": "less was free than the engine requests",
    "no_cache_blocks": "the KV cache is too small",
    "kv_cache_minimum_bytes": "the KV cache is too small",
    "kv_cache_minimum_tokens": "the KV cache is too small",
}
#: What a message of an OOM says, those of a snapshot first.
_OOM_SNAPSHOT = (
    *("device_total_bytes", "allocated_bytes", "allocated_peak_bytes", "reserved_bytes"),
    "non_torch_bytes",
)
_OOM_SIZES = (*_OOM_SNAPSHOT, "requested_bytes", "free_bytes", "active_bytes", "process_bytes")
#: Phases within the profile run.
_WITHIN_PROFILE_RUN = ("mm_profile", "empty_cache")


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
    with _open(path) as stream:
        try:
            for inner, log in logs_in(stream, name):
                sorter, failures = sorted_lines(log)
                runs += to_runs(sorter, inner, failures)
                read, lines = read + 1, lines + sorter.lines
        except OSError as exc:
            raise RunRecordError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if not runs:
        where = name if read == 1 else f"any of the {read} files in {name}"
        raise NoMemoryLines(
            f"no line about memory in {where}; looked for {LOOKED_FOR}"
            if lines
            else f"no line about memory in {where}: it is empty",
            hint="give the log of the engine's start-up, at level INFO or DEBUG:"
            " later lines hold no figures",
        )
    return runs


def sorted_lines(stream: BinaryIO) -> tuple[StartSorter, list[tuple[int, NamedFailure]]]:
    """Return the starts of a log, and (line, failure) of those that failed."""
    reader = CauseReader(WORDS)

    chunks, newest_first = oldest_first(read_chunks(stream))

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
        Per data-parallel rank, None where the engine names none, the names of ``KV_PLAN`` that
        ``logs.formats`` reads: tokens, blocks, max_model_len, max_concurrency. Empty where the
        file is not there, cannot be read, or prints none. And the first start that failed, or the
        last one, of a run that did; None where the log has none.
    """
    try:
        with path.open("rb") as stream:
            sorter, failures = sorted_lines(
                stream if failed else BytesIO(stream.read(START_UP_BYTES))
            )
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
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a log; errors of reading it are not caught here."""
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
        if kind in _NO_FILES and not path.startswith("/dev/fd/"):  # what a shell opened is read
            hint = "pass the log's text; - reads standard input"
            raise RunRecordError(f"{path} is {_NO_FILES[kind]}, not a file", hint=hint)
        stream = open(path, "rb")  # noqa: SIM115 - closed below
    except IsADirectoryError as exc:
        hint = "give the log inside it; the report of a run folder comes from memprof report"
        raise RunRecordError(f"{path} is a folder", hint=hint) from exc
    except FileNotFoundError as exc:
        raise RunRecordError(f"there is no file {path}", hint="- reads standard input") from exc
    except PermissionError as exc:
        raise RunRecordError(
            f"no permission to read {path}", hint="read it as its owner, or chmod it"
        ) from exc
    except (OSError, ValueError) as exc:
        raise RunRecordError(f"cannot open {path}: {exc}") from exc
    with stream:
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
    if not found and sorter.smi.cards:
        found = [EngineStart(Config(engine="vllm-ascend"))]
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
    if runs:
        runs[-1].info.notes += _notes_of_the_log(sorter)
        if sorter.newest_first:
            runs[0].info.notes.append(
                text("the log is newest first: its lines are counted from the last one")
            )
    if runs and sorter.left_out:
        runs[-1].notes.append(f"{sorter.left_out} more starts in the log were left out")
    return runs


def _to_run(start: EngineStart, name: str, number: int, count: int, spoken: Set[str]) -> Run:
    config = start.config
    engine, version, notes = _engine(start, spoken)
    log = start.log
    if start.last_line:
        lines = (
            f"lines {start.first_line} to {start.last_line}"
            if start.last_line > start.first_line
            else f"line {start.last_line}"
        )
        place = f"{name}, {lines}" + (f" (start {number} of {count})" if count > 1 else "")
        notes = [place, *notes]
    if start.heading is not None:
        notes.append(
            text(
                'it stands under "{heading}"; the command is the last one above that heading',
                heading=start.heading,
            )
        )
    if start.repeats:
        notes.append(
            text(
                "it repeats figures of the start before it and holds no other: another worker, "
                "another start, or a copy"
            )
        )
    if any(worker.label is None for worker in start.workers.values()) and config.world_size > 1:
        notes.append(
            text("the log does not name ranks: workers are numbered in the order of their lines")
        )
    status, reason = _status(start)
    versions = {"vllm": config.vllm_version, "vllm-ascend": config.ascend_version}
    info = RunInfo(
        id=name if count == 1 else f"{name}#{number}",
        mode="log",
        model=config.served_model_name or config.model or "unknown",
        command=list(config.command),
        engine_command=_engine_command(config),
        versions={package: release for package, release in versions.items() if release},
        engine=engine,
        engine_version=version,
        device=_device(start, engine),
        status=status,
        exit_reason=reason,
        notes=notes + [note for worker in start.workers.values() for note in _noted_usage(worker)],
    )
    # without workers the KV cache's figures alone are known: one worker without figures stands in
    workers = list(start.workers.values()) or [Worker("")]
    processes = [_worker_process(start, worker, name) for worker in workers]
    if log is not None:
        if log.notes is not None:
            several = {name for worker in workers for name in worker.unknown}
            info.notes += log.notes(start.drafts, several)
        if not start.kv_plans and log.pool_tokens is not None:
            start.kv_plans.update(_pools(start, log.pool_tokens))
        _complete(start, log, workers, processes)
    known = [each.identity for each in processes]
    places = [(who.dp_rank or 0, who.rank is None, who.rank or 0) for who in known]
    return Run(
        folder=Path(info.id),
        info=info,
        processes=[
            # by replica and rank, not by their lines
            *(processes[at] for at in sorted(range(len(places)), key=places.__getitem__)),
            *(_core_process(dp, plan, config, name) for dp, plan in start.kv_plans.items()),
        ],
        source="log",
        forms=_equations(start, engine),
    )


def _engine_command(config: Config) -> list[str]:
    """Return the engine's arguments as its own line says them, with what another line adds."""
    eager = config.enforce_eager and "--enforce-eager" not in config.arguments
    return [*config.arguments, *(["--enforce-eager"] if eager else [])]


def _equations(start: EngineStart, engine: str | None) -> list[str]:
    """Return the equations whose lines were seen.

    The summary of memory_profiling belongs to E4, E5 or E6, by the engine and its figures.
    """
    names = {name for worker in start.workers.values() for name in worker.figures}
    if start.equations or engine is None or "non_kv_cache_bytes" not in names:
        return list(start.equations)
    if engine == "vllm-ascend":
        return ["E4"]
    return ["E6" if "consumed_bytes" in names else "E5"]


def _engine(start: EngineStart, spoken: Set[str]) -> tuple[str | None, str | None, list[str]]:
    """Return (engine, its version, notes on how the version is known).

    Messages of torch, torch_npu and the runtime name the platform, not the engine: without a line
    of vLLM's own it is that of ``spoken``, or not known.
    """
    config = start.config
    if start.log is not None:
        return start.log.engine, None, []
    if "vllm" not in spoken and not any(
        figure.format.stage != OOM
        for each in start.workers.values()
        for figure in each.figures.values()
    ):
        return next(iter(sorted(spoken)), None), None, []
    named = config.engine or config.around
    if "vllm-ascend" in start.engines or (named == "vllm-ascend" and "vllm" not in start.engines):
        if config.ascend_version is not None or config.vllm_version is None:
            return "vllm-ascend", config.ascend_version, []
        release = config.vllm_version.partition("+")[0].partition(".dev")[0]
        note = f"the version of vllm-ascend is taken to be that of vLLM, {release}"
        return "vllm-ascend", release, [note]
    if "vllm" in start.engines or named == "vllm":
        return "vllm", config.vllm_version, []
    return None, None, []


def _device(start: EngineStart, engine: str | None) -> str | None:
    """Return the kind of device, of a start whose engine does not tell it by its name."""
    if engine is None:
        figures = (figure for each in start.workers.values() for figure in each.figures.values())
        printed = {figure.format.engine for figure in figures}
        return "cuda" if CUDA in printed else None
    given = start.config.given
    return given.device if start.log is not None and given is not None else None


def _status(start: EngineStart) -> tuple[str, str | None]:
    """Return (status of the run, reason where it failed)."""
    names = {name for worker in start.workers.values() for name in worker.figures}
    if any(name.startswith("oom_") for name in names):
        return "oom", None
    for figure, why in _REFUSED.items():
        if figure in names:
            return "failed", why
    granted = [worker.figures.get("kv_cache_bytes") for worker in start.workers.values()]
    if any(figure is not None and figure.value < 0 for figure in granted):
        return "failed", "the KV cache is negative"
    if any(figure is not None and figure.value == 0 for figure in granted):
        return "failed", "the KV cache is 0"
    if start.broken and not start.finished:
        return "failed", "an engine process failed"
    complete = start.finished or bool(start.kv_plans) or any(granted)
    return ("ok" if complete else "truncated"), None


def _notes_of_the_log(sorter: StartSorter) -> list[str]:
    """Return notes that no start owns: npu-smi tables, allocator settings given more than once."""
    notes = []
    for card in list(sorter.smi.cards.values())[:_MAX_CARDS]:
        if card.used_bytes is not None and card.total_bytes is not None:
            used, total = card.used_bytes >> 20, card.total_bytes >> 20
            note = f"npu-smi: NPU {card.npu} chip {card.chip} holds {used:,} of {total:,} MiB"
            if card.processes:
                held = sum(card.processes.values()) >> 20
                note += f", {held:,} of them in {len(card.processes)} processes"
            notes.append(note)
    for variable, values in sorter.exports.items():
        if len(values) > 1:  # a shell keeps the last
            earlier = ", then ".join(values[:-1])
            notes.append(f"{variable} is set {len(values)} times: {values[-1]} replaces {earlier}")
    return notes


def _noted_usage(worker: Worker) -> list[str]:
    """Return the npu-smi figures that a person noted beside the log, as a note."""
    mib = {
        name.removeprefix("npu_smi_").removesuffix("_bytes"): f"{int(figure.value) >> 20:,}"
        for name, figure in worker.figures.items()
        if name.startswith("npu_smi_")
    }
    texts = {"before": "before the start", "after": "after it", "process": "by the process"}
    used = [f"{mib[name]} {text}" for name, text in texts.items() if name in mib]
    if not used:
        return []
    total = f"; the card has {mib['total']}" if "total" in mib else ""
    return [f"npu-smi: used, MiB: {', '.join(used)}{total}"]


def _worker_process(start: EngineStart, worker: Worker, name: str) -> ProcessRecord:
    config, dims = start.config, worker.dims
    label = worker.label or _described(start, worker)
    index = (worker.device or "").rpartition(":")[2]
    inner = config.pipeline_parallel_size, config.prefill_context_parallel_size
    identity = Identity(
        pid=worker.pid,
        role="worker",
        roles=frozenset({"worker"}),
        rank=_rank(dims, config),
        dp_rank=dims.get("dp"),
        pp_rank=dims.get("pp"),
        tp_rank=dims.get("tp"),
        ep_rank=dims.get("ep"),
        device_index=int(index) if index.isdigit() else None,
        label=label,
        lines=(worker.first_line, worker.last_line)
        if worker.label is None and max(config.world_size, len(start.workers)) > 1
        else None,
        world_size=config.tensor_parallel_size if inner == (None, None) else config.world_size,
    )
    figures, half_units = _figures(worker)
    utilization = config.gpu_memory_utilization
    if utilization is not None and _agrees(utilization, worker.figures):
        figures.setdefault("gpu_memory_utilization", utilization)
    if config.kv_cache_memory_bytes is not None:
        figures.setdefault("kv_cache_memory_bytes_arg", config.kv_cache_memory_bytes)
    if "startup_plan_bytes" in figures:  # to the byte; the line that follows rounds it
        figures["kv_cache_memory_bytes_arg"] = figures["startup_plan_bytes"]
        half_units.pop("kv_cache_memory_bytes_arg", None)
    file = f"{name}:{worker.label or 'worker'}"
    phases = _phases(worker)
    found = _process(file, identity, phases=phases, figures=figures, half_units=half_units)
    return replace(found, sleeps=worker.sleeps)


def _complete(
    start: EngineStart, log: LogLines, workers: list[Worker], found: list[ProcessRecord]
) -> None:
    """Add what the engine's equation takes from all ranks that agree on one KV cache.

    A start that no line of its own names may have had another set-up than the one before it.
    """
    several = (start.config.tensor_parallel_size or 1) > 1 or len(workers) > 1
    groups: dict[int | None, list[PrintedRank]] = {}
    for worker, process in zip(workers, found, strict=True):
        if several and not worker.dims:  # lines of which rank, and of how many, is not known
            for name in log.figures.keys() & process.figures.keys():
                del process.figures[name]
                process.figures_half_units.pop(name, None)
        place = process.identity.rank if worker.dims.keys() & WITHIN_CORE.keys() else None
        rank = PrintedRank(process.figures, process.figures_half_units, place)
        groups.setdefault(process.identity.dp_rank, []).append(rank)
    for ranks in groups.values():
        if log.complete is not None:
            log.complete(ranks, None if start.inferred else start.config.given)


def _pools(start: EngineStart, name: str) -> dict[int | None, dict[str, Figure]]:
    """Return the tokens of the ranks' pools, where no line says how many are served.

    The ranks of a start have as many each; where one has others, none counts.
    """
    found: dict[int | None, dict[str, Figure]] = {}
    spoilt: set[int | None] = set()
    for worker in start.workers.values():
        dp, pool = worker.dims.get("dp"), worker.figures.get(name)
        if pool is None:
            continue
        known = found.setdefault(dp, {}).setdefault("tokens", pool)
        if name in worker.unknown or known.value != pool.value:
            spoilt.add(dp)
    return {dp: plan for dp, plan in found.items() if dp not in spoilt}


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


def _process(
    file: str,
    identity: Identity,
    phases: list[Span] | None = None,
    figures: dict[str, int | float | None] | None = None,
    half_units: dict[str, int] | None = None,
    kv_plan: dict[str, object] | None = None,
) -> ProcessRecord:
    return ProcessRecord(
        file=file,
        identity=identity,
        versions={},
        phases=phases or [],
        figures=figures or {},
        kv_plan=kv_plan,
        hooks={},
        errors=[],
        ready_t_ns={},
        last_t_ns=None,
        figures_half_units=half_units or {},
    )


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


def _figures(worker: Worker) -> tuple[dict[str, int | float | None], dict[str, int]]:
    """Return (figures, half-units) of one worker; reserved at an OOM may be a sum of two."""
    figures: dict[str, int | float | None] = {
        name: figure.value for name, figure in worker.figures.items() if name not in worker.unknown
    }
    half_units = {
        name: figure.half_unit_bytes
        for name, figure in worker.figures.items()
        if figure.half_unit_bytes and name not in worker.unknown
    }
    estimate = _estimate_by_utilizations(worker.figures)
    if estimate is not None and "graph_estimate_bytes" not in figures:
        figures["graph_estimate_bytes"], half_units["graph_estimate_bytes"] = estimate
    unallocated = worker.figures.get("oom_unallocated_bytes")
    allocated = worker.figures.get("oom_allocated_bytes")
    if unallocated is not None and allocated is not None and "oom_reserved_bytes" not in figures:
        figures["oom_reserved_bytes"] = int(unallocated.value + allocated.value)
        half_units["oom_reserved_bytes"] = unallocated.half_unit_bytes + allocated.half_unit_bytes
    return figures, half_units


def _estimate_by_utilizations(figures: dict[str, Figure]) -> tuple[int, int] | None:
    """Return (bytes, half-unit) of the graph estimate that two printed utilizations differ by.

    The engine prints utilization and utilization - estimate / device total, to four digits each.
    (vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory, 0.18 to 0.33)
    Where the two are not of one line, or the device's size is of a release without that line,
    a paste holds several starts: None.
    """
    names = ("gpu_memory_utilization", "equivalent_utilization", "device_total_bytes")
    known = [figures.get(name) for name in names]
    if None in known:
        return None
    asked, equivalent, total = (figure for figure in known if figure is not None)
    if asked.line != equivalent.line or total.format.equation in ("E0", "E0a"):
        return None
    share = asked.value - equivalent.value
    half = total.value * 1e-4 + share * total.half_unit_bytes
    return round(share * total.value), ceil(half)


def _agrees(utilization: float, figures: dict[str, Figure]) -> bool:
    """Return True where a utilization of the set-up fits the device and the request printed."""
    total, requested = figures.get("device_total_bytes"), figures.get("requested_bytes")
    if total is None or requested is None:
        return 0 < utilization <= 1
    slack = total.half_unit_bytes * utilization + requested.half_unit_bytes + 2
    return abs(total.value * utilization - requested.value) <= slack


def _core_process(
    dp: int | None, plan: dict[str, Figure], config: Config, name: str
) -> ProcessRecord:
    """Return the record of an engine core, which has the KV cache's figures."""
    values: dict[str, object] = {key: figure.value for key, figure in plan.items()}
    values.setdefault("max_model_len", config.max_model_len)
    values.setdefault("block_size", config.block_size)
    override = values.setdefault("num_gpu_blocks_override", config.num_gpu_blocks_override)
    if override is not None:
        values.setdefault("blocks", override)
    file = f"{name}:engine core" if dp is None else f"{name}:engine core DP{dp}"
    identity = Identity(role="engine_core", roles=frozenset({"engine_core"}), dp_rank=dp)
    return _process(file, identity, kv_plan={"kind": "kv_plan", **values})


def _phases(worker: Worker) -> list[Span]:
    """Return the printed snapshots as phases in the order of a start-up, and the OOM."""
    edges: dict[str, dict[str, Snapshot]] = {}
    lines: dict[str, int] = {}
    with_end = any(name.startswith("profile_end_") for name in worker.figures)
    for phase, edge, prefix in _SNAPSHOTS:
        if phase == "empty_cache" and not with_end:
            continue
        fields = ("reserved_bytes", "allocated_peak_bytes", "non_torch_bytes")
        known = {
            field: worker.figures[f"{prefix}_{field}"]
            for field in fields
            if f"{prefix}_{field}" in worker.figures
        }
        initial = worker.figures.get("initial_non_torch_bytes")
        if prefix == "distributed_before" and known and initial is not None:
            known["non_torch_bytes"] = initial
        if known:
            values = {field: int(figure.value) for field, figure in known.items()}
            edges.setdefault(phase, {})[edge] = from_json(Snapshot, {"t_ns": None, **values})
            lines[phase] = max(figure.line for figure in known.values())
    spans: list[Span] = []
    for phase, found in edges.items():
        parent = None
        if phase in _WITHIN_PROFILE_RUN:
            parent = next((span.order for span in spans if span.phase == "profile_run"), None)
        before, after = found.get("before"), found.get("after")
        spans.append(_span(phase, len(spans), lines[phase], parent, before, after))
    if worker.oom is not None:
        spans.append(_oom_span(worker, worker.oom, len(spans)))
    return spans


def _span(
    phase: str,
    order: int,
    line: int,
    parent: int | None = None,
    before: Snapshot | None = None,
    after: Snapshot | None = None,
    detail: Mapping[str, object] | None = None,
) -> Span:
    """Return a phase; its time is the number of its line."""
    return Span(
        phase=phase,
        order=order,
        parent=parent,
        depth=0 if parent is None else 1,
        before=before,
        after=after,
        end_t_ns=line,
        detail={**(detail or {}), "line": line},
    )


def _oom_span(worker: Worker, oom: LoggedOom, order: int) -> Span:
    figures, _ = _figures(worker)
    sizes = {name: figures.get(f"oom_{name}") for name in _OOM_SIZES}
    lines = [figure.line for name, figure in worker.figures.items() if name.startswith("oom_")]
    read = {name: sizes[name] for name in _OOM_SNAPSHOT}
    notes, failed = oom.notes, oom.traceback
    detail: dict[str, object] = {
        **sizes,
        "device": worker.device,
        "graph_pools_bytes": figures.get("oom_graph_pools_bytes"),
        "npu_workspace": bool(figures.get("oom_npu_workspace")),
        "outside_torch": bool(figures.get("oom_outside_torch")),
        "phase": failed.phase,
        "last_stage": _LAST_SEEN.get(oom.stage),
        "failures": oom.failures,
        "stage": stage_of(reversed(failed.chain)),
        "site": failed.site,
        "at_request": notes.at_request,
        "request_count": notes.request_count,
        "input": notes.input,
        "readings": [to_json(each) for each in notes.readings],
    }
    read |= {"t_ns": None, "device_free_bytes": sizes["free_bytes"]}
    after = from_json(Snapshot, read)
    return _span("oom", order, min(lines, default=0), after=after, detail=detail)
