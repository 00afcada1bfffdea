"""A log becomes runs as the ledger knows them: what enters is a path, what leaves is a list of ``record.loader.Run``.

A figure that the log does not print is absent. Where the log prints snapshots (the debug lines of a developer), they
become phases; else a run has none, for a log tells of moments only by its lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vllm_memprof.errors import RunRecordError
from vllm_memprof.logs.clean import read_chunks, read_lines
from vllm_memprof.logs.config import Config
from vllm_memprof.logs.parse import Fact, parse
from vllm_memprof.logs.runs import WITHIN_CORE, Process, RunFacts, Sorter
from vllm_memprof.record.loader import Identity, ProcessRecord, Run
from vllm_memprof.record.schema import RunInfo, Snapshot
from vllm_memprof.record.spans import Span
from vllm_memprof.record.spans import edges as span_edges

LOOKED_FOR = (
    '"Available KV cache memory", "Available memory", "model weights take", "Model loading took", '
    '"Loading model weights took", "KV cache size", "Free memory on device", "out of memory", '
    '"Graph capturing finished", "Sleep mode freed", torch_memory and non_torch_memory'
)
STDIN = "-"


class NoMemoryLines(RunRecordError):
    """A log that can be read and says nothing about memory."""


_MOMENT_FIELDS = ("reserved", "allocated_peak", "non_torch")


@dataclass(frozen=True)
class _Moment:
    """A snapshot that a log may print, by the prefix of its figures."""

    phase: str
    edge: str
    prefix: str


_MOMENTS = (
    _Moment("hccl_init", "before", "distributed_before"),
    _Moment("hccl_init", "after", "distributed_after"),
    _Moment("profile_run", "before", "profile_before"),
    _Moment("mm_profile", "after", "mm_profile"),
    _Moment("empty_cache", "before", "profile_end"),
    _Moment("empty_cache", "after", "profile_after"),
    _Moment("profile_run", "after", "profile_after"),
)


def read_log(path: str) -> list[Run]:
    """Reads one log.

    Args:
        path: of a file, or ``-`` for standard input.

    Returns:
        One ``Run`` per start of an engine, in the order of the log.

    Raises:
        RunRecordError: it cannot be read.
        NoMemoryLines: it holds no line about memory.
    """
    with _opened(path) as stream:
        try:
            sorter = Sorter().take(parse(read_lines(read_chunks(stream))))
        except OSError as exc:
            raise RunRecordError(f"cannot read {path}: {exc.strerror or exc}") from exc
    runs = build_runs(sorter, _name(path))
    if not runs:
        raise NoMemoryLines(
            f"no line about memory in {_name(path)}; looked for {LOOKED_FOR}"
            if sorter.lines
            else f"no line about memory in {_name(path)}: it is empty",
            hint="give the log of the engine's start-up, at level INFO or DEBUG: later lines hold no figures",
        )
    return runs


def _name(path: str) -> str:
    return "standard input" if path == STDIN else Path(path).name


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below; an error while opening is not one while reading
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


def build_runs(sorter: Sorter, name: str) -> list[Run]:
    """``Run`` per start that printed a figure."""
    found = [run for run in sorter.runs if run.processes or run.plans]
    if not found and sorter.smi.cards:
        found = [RunFacts(Config(engine="vllm-ascend"))]
    runs = [
        _build_run(run, sorter, name, number, len(found))
        for number, run in enumerate(found, start=1)
    ]
    if runs and sorter.left_out:
        runs[-1].notes.append(f"{sorter.left_out} more starts in the log were left out")
    return runs


def _build_run(run: RunFacts, sorter: Sorter, name: str, number: int, count: int) -> Run:
    engine, version, how = _engine(run)
    config = run.config
    processes = [_worker(run, process, name) for process in run.processes.values()]
    plans = [_engine_core(dp, plan, config, name) for dp, plan in run.plans.items()]
    if not processes:
        # the KV plan alone is known: one worker without figures carries it
        processes = [_worker(run, Process(""), name)]
    notes = list(run.notes)
    if run.last_line:
        lines = (
            f"lines {run.first_line} to {run.last_line}"
            if run.last_line > run.first_line
            else f"line {run.last_line}"
        )
        notes.append(f"{name}, {lines}" + (f" (start {number} of {count})" if count > 1 else ""))
    notes += how
    notes += [note for process in run.processes.values() for note in _written_down(process)]
    notes += [*_smi_notes(sorter), *_export_notes(sorter)] if number == count else []
    status, reason = _status(run)
    info = RunInfo(
        id=name if count == 1 else f"{name}#{number}",
        mode="log",
        model=str(config.get("served_model_name") or config.get("model") or "unknown"),
        command=list(config.command),
        engine_command=["--enforce-eager"] if config.get("enforce_eager") else [],
        versions={
            key: value
            for key, value in (
                ("vllm", config.vllm_version),
                ("vllm-ascend", config.ascend_version),
            )
            if value
        },
        engine=engine,
        engine_version=version,
        status=status,
        exit_reason=reason,
        notes=notes,
        env={variable: values[-1] for variable, values in sorter.exports.items()},
    )
    return Run(
        name=info.id,
        info=info,
        processes=[*processes, *plans],
        source="log",
        forms=_forms(run, engine),
    )


def _forms(run: RunFacts, engine: str | None) -> list[str]:
    """Equations whose line forms were seen. The summary of memory_profiling is that of E4 and E5, by the engine."""
    forms = list(run.forms)
    summed = any("non_kv_cache_bytes" in process.figures for process in run.processes.values())
    if not forms and summed and engine is not None:
        consumed = any("consumed_bytes" in process.figures for process in run.processes.values())
        forms.append("E4" if engine == "vllm-ascend" else "E6" if consumed else "E5")
    return forms


def _engine(run: RunFacts) -> tuple[str | None, str | None, list[str]]:
    """(engine, version, how it is known)."""
    config = run.config
    named = config.engine or config.around
    if "vllm-ascend" in run.engines or (named == "vllm-ascend" and "vllm" not in run.engines):
        if config.ascend_version is not None or config.vllm_version is None:
            return "vllm-ascend", config.ascend_version, []
        release = config.vllm_version.partition("+")[0].partition(".dev")[0]
        return (
            "vllm-ascend",
            release,
            [f"the version of vllm-ascend is taken to be that of vLLM, {release}"],
        )
    if "vllm" in run.engines or named == "vllm":
        return "vllm", config.vllm_version, []
    return None, None, []


def _status(run: RunFacts) -> tuple[str, str | None]:
    names = {name for process in run.processes.values() for name in process.figures}
    if any(name.startswith("oom_") for name in names):
        return "oom", None
    if "startup_refused" in names:
        return "failed", "less was free than the engine requests"
    if "no_cache_blocks" in names or "kv_cache_minimum_bytes" in names:
        return "failed", "the KV cache is too small"
    granted = [process.figures.get("kv_cache_bytes") for process in run.processes.values()]
    if any(fact is not None and fact.value < 0 for fact in granted):
        return "failed", "the KV cache is negative"
    if run.broken and not run.finished:
        return "failed", "an engine process failed"
    complete = run.finished or bool(run.plans) or any(fact is not None for fact in granted)
    return ("ok" if complete else "truncated"), None


def _export_notes(sorter: Sorter) -> list[str]:
    """Allocator settings that stand in the log more than once: a shell keeps the last."""
    return [
        f"{variable} is set {len(values)} times: {values[-1]} replaces {', then '.join(values[:-1])}"
        for variable, values in sorter.exports.items()
        if len(values) > 1
    ]


def _smi_notes(sorter: Sorter) -> list[str]:
    notes = []
    for card in list(sorter.smi.cards.values())[:16]:
        if card.used_bytes is not None and card.total_bytes is not None:
            used, total = card.used_bytes >> 20, card.total_bytes >> 20
            text = f"npu-smi: NPU {card.npu} chip {card.chip} holds {used:,} of {total:,} MiB"
            held = sum(card.processes.values())
            notes.append(
                text
                + (
                    f", {held >> 20:,} of them in {len(card.processes)} processes"
                    if card.processes
                    else ""
                )
            )
    return notes


def _written_down(process: Process) -> list[str]:
    """What somebody noted of npu-smi beside the log."""
    known = {
        name: fact.value for name, fact in process.figures.items() if name.startswith("npu_smi_")
    }
    texts = {"before": "before the start", "after": "after it", "process": "by the process"}
    said = [
        f"{int(known[key]) >> 20:,} {text}"
        for n, text in texts.items()
        if (key := f"npu_smi_{n}_bytes") in known
    ]
    total = known.get("npu_smi_total_bytes")
    if not said:
        return []
    return [
        f"npu-smi: used, MiB: {', '.join(said)}"
        + ("" if total is None else f"; the card has {int(total) >> 20:,}")
    ]


def _worker(run: RunFacts, process: Process, name: str) -> ProcessRecord:
    figures, half_units = _figures(process, run.config)
    config = run.config
    return ProcessRecord(
        file=f"{name}:{process.label or 'worker'}",
        identity=Identity(
            pid=process.pid,
            role="worker",
            roles=frozenset({"worker"}),
            rank=_rank(process.dims, config),
            dp_rank=process.dims.get("dp"),
            pp_rank=process.dims.get("pp"),
            tp_rank=process.dims.get("tp"),
            ep_rank=process.dims.get("ep"),
            device_index=_device_index(process.device),
            label=_label(run, process),
            world_size=config.get("tensor_parallel_size")
            if not {"pipeline_parallel_size", "prefill_context_parallel_size"}
            & config.values.keys()
            else run.world,
        ),
        versions={},
        argv=[],
        python=None,
        phases=_phases(process),
        figures=figures,
        kv_plan=None,
        hooks={},
        errors=[],
        ready_t_ns={},
        last_t_ns=None,
        figures_half_units=half_units,
    )


def _label(run: RunFacts, process: Process) -> str:
    if process.label is not None:
        return process.label
    if process.device is not None and len(run.processes) > 1:
        return process.device if ":" in process.device else f"device {process.device}"
    if process.key.startswith("#"):
        return f"unlabelled {process.key[1:]}"
    return "unlabelled" if len(run.processes) > 1 or run.world > 1 else "the worker"


def _rank(dims: dict[str, int], config: Config) -> int | None:
    if "rank" in dims:
        return dims["rank"]
    rank = 0
    for name, option in WITHIN_CORE.items():
        place, size = dims.get(name), config.get(option)
        if place is None and int(size or 1) > 1:
            return None  # nothing says where it is
        if rank and size is None and place:
            return None  # nothing says how many lie before it
        rank = rank * int(size or 1) + (place or 0)
    return rank if dims.keys() & WITHIN_CORE.keys() else None


def _device_index(device: str | None) -> int | None:
    digits = "" if device is None else device.rpartition(":")[2]
    return int(digits) if digits.isdigit() else None


def _figures(
    process: Process, config: Config
) -> tuple[dict[str, int | float | None], dict[str, int]]:
    """(figures, half-units) of one worker; what the set-up says stands in for what no line says."""
    figures: dict[str, int | float | None] = {
        name: fact.value for name, fact in process.figures.items()
    }
    half_units = {
        name: fact.half_unit_bytes for name, fact in process.figures.items() if fact.half_unit_bytes
    }
    unallocated, allocated = (
        process.figures.get("oom_unallocated_bytes"),
        process.figures.get("oom_allocated_bytes"),
    )
    if unallocated is not None and allocated is not None and "oom_reserved_bytes" not in figures:
        figures["oom_reserved_bytes"] = int(unallocated.value + allocated.value)
        half_units["oom_reserved_bytes"] = unallocated.half_unit_bytes + allocated.half_unit_bytes
    if "gpu_memory_utilization" not in figures and config.get("gpu_memory_utilization") is not None:
        utilization = float(config.get("gpu_memory_utilization"))
        if _fits(utilization, process.figures):
            figures["gpu_memory_utilization"] = utilization
    if (
        "kv_cache_memory_bytes_arg" not in figures
        and config.get("kv_cache_memory_bytes") is not None
    ):
        figures["kv_cache_memory_bytes_arg"] = config.get("kv_cache_memory_bytes")
    return figures, half_units


def _fits(utilization: float, facts: dict[str, Fact]) -> bool:
    """Whether a utilization from the set-up agrees with the device and the request that were printed."""
    total, asked = facts.get("device_total_bytes"), facts.get("requested_bytes")
    if total is None or asked is None:
        return 0 < utilization <= 1
    slack = total.half_unit_bytes * utilization + asked.half_unit_bytes + 2
    return abs(total.value * utilization - asked.value) <= slack


def _engine_core(dp: int | None, plan: dict[str, Fact], config: Config, name: str) -> ProcessRecord:
    values: dict[str, Any] = {key: fact.value for key, fact in plan.items()}
    values.setdefault("max_model_len", config.get("max_model_len"))
    values.setdefault("block_size", config.get("block_size"))
    if (
        values.setdefault("num_gpu_blocks_override", config.get("num_gpu_blocks_override"))
        is not None
    ):
        values.setdefault("blocks", values["num_gpu_blocks_override"])
    return ProcessRecord(
        file=f"{name}:engine core" if dp is None else f"{name}:engine core DP{dp}",
        identity=Identity(role="engine_core", roles=frozenset({"engine_core"}), dp_rank=dp),
        versions={},
        argv=[],
        python=None,
        phases=[],
        figures={},
        kv_plan={"kind": "kv_plan", **values},
        hooks={},
        errors=[],
        ready_t_ns={},
        last_t_ns=None,
    )


def _phases(process: Process) -> list[Span]:
    """Moments that were printed, as phases in the order of a start-up. Their time is the number of their line."""
    edges: dict[str, dict[str, Snapshot]] = {}
    lines: dict[str, int] = {}
    for moment in _MOMENTS:
        if moment.phase == "empty_cache" and not _has(process, "profile_end"):
            continue
        read = {
            name: process.figures.get(f"{moment.prefix}_{name}_bytes") for name in _MOMENT_FIELDS
        }
        if moment.prefix == "distributed_before" and any(read.values()):
            read["non_torch"] = process.figures.get("initial_non_torch_bytes")
        known = {name: fact for name, fact in read.items() if fact is not None}
        if not known:
            continue
        edges.setdefault(moment.phase, {})[moment.edge] = Snapshot.from_json(
            {f"{name}_bytes": int(fact.value) for name, fact in known.items()}
        )
        lines[moment.phase] = max(fact.line for fact in known.values())
    spans: list[Span] = []
    for phase in ("hccl_init", "profile_run", "mm_profile", "empty_cache"):
        if phase in edges:
            parent = (
                next((span.order for span in spans if span.phase == "profile_run"), None)
                if phase[:2] != "hc"
                else None
            )
            spans.append(
                _span(
                    phase,
                    len(spans),
                    parent if phase != "profile_run" else None,
                    edges[phase],
                    lines[phase],
                )
            )
    if process.ooms:
        spans.append(_oom(process, len(spans)))
    return spans


def _has(process: Process, prefix: str) -> bool:
    return any(name.startswith(prefix + "_") for name in process.figures)


def _span(
    phase: str, order: int, parent: int | None, edges: dict[str, Snapshot], line: int
) -> Span:
    return Span(
        phase=phase,
        order=order,
        id=None,
        parent=parent,
        depth=0 if parent is None else 1,
        hook=None,
        edges=span_edges(edges.get("before"), edges.get("after")),
        start_t_ns=None,
        end_t_ns=line,
        detail={"line": line},
    )


def _oom(process: Process, order: int) -> Span:
    figures, _ = _figures(process, Config())
    names = (
        "requested",
        "device_total",
        "allocated",
        "reserved",
        "free",
        "active",
        "allocated_peak",
        "process",
        "non_torch",
    )
    detail: dict[str, Any] = {f"{name}_bytes": figures.get(f"oom_{name}_bytes") for name in names}
    detail["device"] = process.device
    detail["npu_workspace"] = bool(figures.get("oom_npu_workspace"))
    detail["failures"] = process.ooms
    first = min(
        (fact.line for name, fact in process.figures.items() if name.startswith("oom_")), default=0
    )
    detail["line"] = first
    snapshot = Snapshot.from_json(
        {
            "device_total_bytes": detail["device_total_bytes"],
            "device_free_bytes": detail["free_bytes"],
            "allocated_bytes": detail["allocated_bytes"],
            "allocated_peak_bytes": detail["allocated_peak_bytes"],
            "reserved_bytes": detail["reserved_bytes"],
            "non_torch_bytes": detail["non_torch_bytes"],
        }
    )
    return Span(
        phase="oom",
        order=order,
        id=None,
        parent=None,
        depth=0,
        hook=None,
        edges=span_edges(None, snapshot),
        start_t_ns=None,
        end_t_ns=first,
        detail=detail,
    )
