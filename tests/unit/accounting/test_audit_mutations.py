"""The audit can fail: each figure and each reading is changed, one at a time, on recorded runs.

A change that nothing reports has to be in ``tests/data/audit_unseen.toml``, with the reason; one
that is listed there and is reported after all fails as well, so that the list stays true.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import pytest

from tests.support.mutations import (
    Mutation,
    figures_of,
    plans_of,
    readings_of,
    with_its_grant,
    workers,
)
from tests.unit.accounting.builders import DATA, recorded
from vllm_memprof.accounting import build, build_report
from vllm_memprof.accounting.budget.budgets import balance
from vllm_memprof.accounting.budget.equations import EQUATIONS, evaluate
from vllm_memprof.accounting.budget.kv import kv_cache
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.readings.run import on_each_rank
from vllm_memprof.accounting.readings.startup import engine_figures
from vllm_memprof.logs.to_record import read_engine_log
from vllm_memprof.record.loader import Run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Recorded run of the real engine -> its equation.
RUNS = {"recorded_013_tp2": "E2", "recorded_023_tp2": "E4", "recorded_tp2": "E4"}


@dataclass(frozen=True)
class Unseen:
    """An entry of the list: changes that nothing reports."""

    runs: tuple[str, ...]
    what: tuple[str, ...]  # patterns
    changes: tuple[str, ...]  # none: all
    reason: str

    def covers(self, run: str, mutation: Mutation) -> bool:
        return (
            run in self.runs
            and (not self.changes or mutation.change in self.changes)
            and any(fnmatchcase(mutation.what, pattern) for pattern in self.what)
        )


def listed() -> list[Unseen]:
    rows = tomllib.loads((DATA / "audit_unseen.toml").read_text())["unseen"]
    return [
        Unseen(tuple(row["runs"]), tuple(row["what"]), tuple(row.get("changes", ())), row["reason"])
        for row in rows
    ]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build what the audit, the residual and the checks of the KV cache need, and no more."""
    monkeypatch.setattr(build, "find", lambda run, ranks: [])
    monkeypatch.setattr(build, "STEPS", tuple(map(on_each_rank, (kv_cache, balance))))


def run_of_one(name: str) -> Run:
    """Return a recorded run with its first worker only; recorded_tp2 with lines of its engine."""
    run = recorded(name)
    first = workers(run)[0]
    others = [process for process in run.processes if not process.is_worker]
    printed = {}
    if name == "recorded_tp2":  # the log of another start with the same command
        printed = read_engine_log(DATA / "logs" / "recorded_tp2_0.23.0.log", failed=False)[0]
        assert printed
    return replace(run, processes=[first, *others], printed_kv=printed)


def outcomes(run: Run) -> Iterator[tuple[str, bool | None]]:
    """Yield what reports a wrong figure, and whether it is content."""
    rank = build_report(run).ranks[0]
    yield from _of_rank(rank)


def _of_rank(rank: RankReport) -> Iterator[tuple[str, bool | None]]:
    yield "engine - recomputed", rank.budget.balanced
    for row in rank.budget.audit:
        yield f"audit of {row.name}", None if row.undecided else row.agrees
    for check in (*rank.budget.checks, *rank.kv.checks):
        yield check.name, check.ok


def reported(run: Run, before: dict[str, bool | None]) -> list[str]:
    """Return what was content with the run as recorded, and is not with the changed one."""
    now = dict(outcomes(run))
    return [name for name, ok in before.items() if ok and not now.get(name)]


def mutations(run: Run) -> Iterator[Mutation]:
    yield from figures_of(run)
    yield from readings_of(run)
    yield from plans_of(run)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", RUNS)
def test_a_change_is_reported_or_is_listed(name: str) -> None:
    run = run_of_one(name)
    before = dict(outcomes(run))
    assert build_report(run).ranks[0].budget.equation == RUNS[name]
    assert False not in before.values()
    entries = [entry for entry in listed() if name in entry.runs]
    used = set()
    unseen, visible = [], []
    for mutation in mutations(run):
        seen = reported(mutation.run, before)
        covering = [entry for entry in entries if entry.covers(name, mutation)]
        if not seen and not covering:
            unseen.append((mutation.what, mutation.change))
        if seen and covering:
            visible.append((mutation.what, mutation.change, seen))
        if not seen:
            used.update(
                (id(entry), pattern)
                for entry in covering
                for pattern in entry.what
                if fnmatchcase(mutation.what, pattern)
            )
    assert unseen == [], "nothing reports these, and the list does not have them"
    assert visible == [], "the list has these, and they are reported"
    stale = [each for entry in entries for each in entry.what if (id(entry), each) not in used]
    assert stale == [], "the list has these, and the run has no such figure"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["recorded_023_tp2", "recorded_tp1"])
def test_a_figure_that_the_grant_follows_is_seen_by_the_audit_alone(name: str) -> None:
    """As an engine errs: with a wrong peak its KV cache is wrong too, and the residual is 0."""
    run = run_of_one(name)
    before = dict(outcomes(run))
    terms = {
        "weights_bytes",
        "peak_activation_bytes",
        "non_torch_increase_bytes",
        "requested_bytes",
    }
    changed = [
        mutation for mutation in figures_of(run) if mutation.what.removeprefix("figure ") in terms
    ]
    assert len(changed) >= 10
    for mutation in changed:
        found = with_its_grant(mutation, granted(mutation.run))
        assert dict(outcomes(found.run))["engine - recomputed"] is True
        seen = reported(found.run, before)
        assert "audit of kv_cache" in seen, (mutation.what, mutation.change)
        assert len([name for name in seen if name.startswith("audit of ")]) >= 2


def granted(run: Run) -> int:
    first = workers(run)[0]
    row = next(row for row in EQUATIONS if row.id == "E4" and "0.23.0" in row.read_in)
    result = evaluate(row, engine_figures(first, False, row)).kv_cache_bytes
    assert result is not None
    return result
