"""The head of a report: the run in short, and its workers by label."""

from __future__ import annotations

from vllm_memprof.accounting.engine_options import is_eager
from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.accounting.ranks import rank_notes, step_notes
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.loader import ProcessRecord, Run


def summarise(run: Run) -> RunSummary:
    """Return the run in short; what the run record lacks is taken from its processes."""
    info = run.info
    versions = dict(run.versions)
    names = (name for row in ENGINES.values() for _, name in row.known_as)
    known = [name for name in names if name in versions]
    engine = info.engine or (known[0] if known else None)
    chips = [process.identity.soc for process in run.processes if process.identity.soc]
    planned = any(process.kv_plan is not None for process in run.processes)
    stopped = info.mode == "plan" and info.until == "kv" and planned
    notes = [*rank_notes(info.ranks), *step_notes(info.full_step, stopped), *info.notes, *run.notes]
    if info.empty_cache_at:
        notes.insert(
            0,
            "experiment: memprof itself called empty_cache at the end of "
            f"{', '.join(info.empty_cache_at)}; the run was changed by it",
        )
    return RunSummary(
        id=info.id,
        source=run.source,
        status=info.status,
        model=info.model,
        mode=info.mode,
        engine=engine,
        engine_version=info.engine_version or versions.get(engine or ""),
        # a launcher may know only the name of a profile
        device=chips[0] if chips else info.device,
        simulated=info.simulated,
        device_profile=info.device_profile,
        command=info.command,
        started=info.started,
        seconds=info.seconds,
        exit_code=info.exit_code,
        exit_reason=info.exit_reason,
        truncated=run.truncated,
        eager=is_eager(info.command, engine) or is_eager(info.engine_command, engine),
        notes=notes,
        empty_cache_at=info.empty_cache_at,
        ranks=info.ranks,
        until=info.until,
        versions=versions,
        env=dict(info.env),
        host=info.host,
        start_t_ns=info.start_t_ns,
    )


def workers_by_label(run: Run) -> list[tuple[str, ProcessRecord]]:
    """Return the workers with one label each.

    A label that several replicas have, as TP0, begins with the replica, or ends with the process.
    """
    workers = [process for process in run.processes if process.is_worker]
    labels = []
    for who in (process.identity for process in workers):
        by_number = f"pid {who.pid}" if who.rank is None else f"rank {who.rank}"
        labels.append(who.label or by_number)
    found = []
    for label, process in zip(labels, workers, strict=True):
        who = process.identity
        if labels.count(label) > 1:
            shared = f"{label} pid {who.pid}"
            label = shared if who.dp_rank is None else f"DP{who.dp_rank} {label}"
        found.append((label, process))
    return found
