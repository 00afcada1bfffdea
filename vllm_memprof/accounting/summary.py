"""The head of a report: the run in short, and its workers by label; what is said of both."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_memprof.accounting.budget.engine_options import is_eager
from vllm_memprof.accounting.deployment.ranks import rank_notes, step_notes
from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.tables import UNKNOWN
from vllm_memprof.text import text


def summarise(run: Run) -> RunSummary:
    """Return the run in short; what the run record lacks is taken from its processes."""
    info, versions = run.info, run.versions
    known = (name for row in ENGINES.values() for _, name in row.known_as if name in versions)
    engine = info.engine or next(known, None)
    # a launcher may know only the name of a profile
    chips = (process.identity.soc for process in run.processes if process.identity.soc)
    stopped = info.mode == "plan" and info.until == "kv" and bool(run.planners)
    notes = [*rank_notes(info.ranks), *step_notes(info.full_step, stopped), *info.notes, *run.notes]
    if info.empty_cache_at:
        at = ", ".join(info.empty_cache_at)
        own_calls = f"experiment: memprof itself called empty_cache at the end of {at}"
        notes.insert(0, f"{own_calls}; the run was changed by it")
    own: dict[str, Any] = {
        "engine": engine,
        "engine_version": info.engine_version or versions.get(engine or ""),
        "device": next(chips, info.device),
        "notes": notes,
        "versions": versions,
        "source": run.source,
        "truncated": run.truncated,
        "eager": any(is_eager(words, engine) for words in (info.command, info.engine_command)),
    }
    return RunSummary(**{**vars(info), **own})


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
    found = []
    for process in run.workers:
        who = process.identity
        label = who.label or (f"pid {who.pid}" if who.rank is None else f"rank {who.rank}")
        found.append((label, process))
    known = [label for label, _ in found]
    for at, (label, process) in enumerate(found):
        if known.count(label) > 1:
            dp_rank = process.identity.dp_rank
            shared = f"{label} pid {process.identity.pid}"
            found[at] = shared if dp_rank is None else f"DP{dp_rank} {label}", process
    return found
