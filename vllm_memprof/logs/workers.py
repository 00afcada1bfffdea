"""What the processes of a start printed becomes their records: figures, phases, an OOM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter

from vllm_memprof.engines.line_format import PrintedRank
from vllm_memprof.logs.config import WITHIN_CORE
from vllm_memprof.logs.engine_start import EngineStart, Worker
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.failures import stage_of
from vllm_memprof.record.loader import Identity, ProcessRecord
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import AFTER, BEFORE, Span

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
#: Field of a snapshot -> what the message of an OOM says of it.
_OOM_SNAPSHOT = {
    "device_total_bytes": "device_total_bytes",
    "device_free_bytes": "free_bytes",
    "allocated_bytes": "allocated_bytes",
    "allocated_peak_bytes": "allocated_peak_bytes",
    "reserved_bytes": "reserved_bytes",
    "non_torch_bytes": "non_torch_bytes",
}


def worker_processes(start: EngineStart, workers: list[Worker], name: str) -> list[ProcessRecord]:
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
        dims, rank = worker.dims, worker.printed_rank(config)
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
            rank=config.rank_of(dims),
            dp_rank=dims.get("dp"),
            pp_rank=dims.get("pp"),
            tp_rank=dims.get("tp"),
            ep_rank=dims.get("ep"),
            device_index=int(index) if index.isdigit() else None,
            label=worker.label or start.describe(worker),
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


def core_processes(start: EngineStart, name: str) -> list[ProcessRecord]:
    """Return the records of the engine cores that printed their KV cache."""
    config, cores = start.config, []
    for dp, plan in start.kv_figures.items():
        values: dict[str, object] = {
            "kind": "kv_plan",
            "max_model_len": config.max_model_len,
            "block_size": config.block_size,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "blocks": config.num_gpu_blocks_override,
            **{key: figure.value for key, figure in plan.items()},
        }
        file = f"{name}:engine core" if dp is None else f"{name}:engine core DP{dp}"
        who = Identity(role="engine_core", roles=frozenset({"engine_core"}), dp_rank=dp)
        cores.append(ProcessRecord(file, who, kv_plan=values))
    return cores


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
    if worker.oom is None:
        return list(spans.values())
    oom = worker.oom
    said = {
        name.removeprefix("oom_"): value
        for name, value in figures.items()
        if name.startswith("oom_")
    }
    lines = [figure.line for name, figure in worker.figures.items() if name.startswith("oom_")]
    line = min(lines, default=0)
    notes, failed = oom.notes, oom.traceback
    span = Span(
        "oom",
        len(spans),
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
    return [*spans.values(), span]
