"""Calls of ``empty_cache`` and what they freed."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_memprof.ledger.model import EmptyCacheCall, Report
from vllm_memprof.report.sections.base import MODELLED_MARK, Column, Row, Section, fold
from vllm_memprof.units import format_gib


def empty_cache_sections(report: Report) -> list[Section]:
    """Calls of ``empty_cache`` by caller; several calls from one place are added up."""
    mark = f" {MODELLED_MARK}" if report.run.simulated else ""
    tables = {rank.label: _calls_by_site(rank.empty_cache) for rank in report.ranks}
    groups: dict[tuple[str, ...], list[str]] = {}
    slowest: dict[tuple[str, ...], float] = {}
    for label, table in tables.items():
        for cells, seconds in table:
            groups.setdefault(cells, []).append(label)
            slowest[cells] = max(slowest.get(cells, 0.0), seconds)
    if not groups:
        return []
    everyone = fold(list(tables))
    rows = []
    for cells, labels in groups.items():
        phase, site, count, *freed = cells
        place = phase if fold(labels) == everyone else f"{phase} ({fold(labels)})"
        rows.append(Row([place, site, count, f"{slowest[cells]:.3f}", *freed]))
    columns = [Column("In phase", right=False), Column("Called at", right=False), Column("N"), Column("s")]
    columns += [Column("Cached"), Column(f"Wksp{mark}"), Column(f"Other{mark}")]
    return [Section("empty_cache calls, GiB freed (cached blocks, NPU workspace, other)", columns, rows)]


def _calls_by_site(calls: list[EmptyCacheCall]) -> list[tuple[tuple[str, ...], float]]:
    """(cells, seconds) per phase and caller, in the order of the first call."""
    groups: dict[tuple[str, str], list[EmptyCacheCall]] = {}
    for call in calls:
        phase = (call.phase or "-") + (", serving" if call.while_serving else "")
        groups.setdefault((phase, call.site or "unknown"), []).append(call)
    found = []
    for (phase, site), members in groups.items():
        freed = [
            format_gib(_sum(call.freed_cached_bytes for call in members)),
            format_gib(_sum(call.freed_npu_workspace_bytes for call in members)),
            format_gib(_sum(call.freed_other_bytes for call in members)),
        ]
        found.append(((phase, site, str(len(members)), *freed), sum(call.seconds or 0.0 for call in members)))
    return found


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(value for value in known if value is not None)
