"""The head of a report: the run in short, and its workers by label; what is said of both."""

from __future__ import annotations

from typing import Protocol

from vllm_memprof.accounting.budget.engine_options import is_eager
from vllm_memprof.accounting.deployment.ranks import rank_notes, step_notes
from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.tables import UNKNOWN
from vllm_memprof.text import text


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
        **{
            **vars(info),
            "engine": engine,
            "engine_version": info.engine_version or versions.get(engine or ""),
            # a launcher may know only the name of a profile
            "device": chips[0] if chips else info.device,
            "notes": notes,
            "versions": versions,
        },
        source=run.source,
        truncated=run.truncated,
        eager=is_eager(info.command, engine) or is_eager(info.engine_command, engine),
    )


class RunsEngine(Protocol):
    """What names the engine that it ran."""

    @property
    def engine(self) -> str | None: ...
    @property
    def engine_version(self) -> str | None: ...


def engine_name(run: RunsEngine) -> str:
    """Return the engine of a run with its version, "" where neither is known."""
    return " ".join(part for part in (run.engine, run.engine_version) if part)


def engine_text(run: RunSummary) -> str:
    """Return the same, in words where neither is known."""
    return engine_name(run) or text("engine unknown")


def device_text(run: RunSummary) -> str:
    """Return the device of a run, and what simulates it."""
    device = run.device or text("device unknown")
    if not run.simulated:
        return device
    profile = run.device_profile or UNKNOWN
    return text("{device} [simulated: profile {profile}]", device=device, profile=profile)


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
