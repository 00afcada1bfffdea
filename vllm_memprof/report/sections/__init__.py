"""The tables of a report: a ``Report`` enters, sections leave. Every renderer draws these."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Section
from vllm_memprof.report.sections import (
    audit,
    budget,
    deployment,
    empty_cache,
    files,
    host,
    kv,
    oom,
    owners,
    phases,
    printed,
    serving,
    weights,
)
from vllm_memprof.report.sections.base import Draw, Sheet, per_rank
from vllm_memprof.tables import WIDE

#: Name for ``--section`` -> the tables, in the order in which they are read.
SECTIONS: dict[str, tuple[Draw, ...]] = {
    "oom": (
        per_rank(oom.failed_allocation, oom.owners, oom.free_blocks, oom.readings, oom.remedies),
        per_rank(oom.counters),
    ),
    "hosts": (
        deployment.hosts,
        deployment.cores,
        deployment.ranks,
        deployment.skew,
        deployment.matrix,
    ),
    "equation": (
        per_rank(
            budget.equation,
            budget.fits_request,
            budget.fits_device,
            budget.budgets,
            # the rank with the least KV cache first, one without any last
            order=lambda rank: (
                rank.budget.engine_kv_cache_bytes is None,
                rank.budget.engine_kv_cache_bytes or 0,
            ),
        ),
    ),
    "device": (per_rank(owners.device),),
    "files": (per_rank(files.memory_files),),
    "phases": (phases.phases,),
    "host": (per_rank(host.of_worker), host.of_host),
    "growth": (per_rank(owners.growth),),
    "cross-check": (per_rank(audit.audit),),
    "kv-cache": (per_rank(kv.kv_cache),),
    "kv": (per_rank(kv.usable),),
    "weights": (per_rank(weights.weights),),
    "printed": (per_rank(printed.printed),),
    "communicators": (per_rank(owners.communicators),),
    "connectors": (per_rank(owners.connectors),),
    "empty-cache": (empty_cache.calls, empty_cache.experiments, empty_cache.effect),
    "requests": (
        per_rank(serving.stages),
        per_rank(serving.multimodal),
        per_rank(serving.requests),
    ),
    "serving": (per_rank(serving.device_growth), serving.host_growth),
    "cycles": tuple(
        per_rank(partial(serving.cycles, kind)) for kind in ("sleep", "pause", "weight_update")
    ),
    "allocations": (serving.allocations,),
}


def sections(report: Report, width: int, names: Iterable[str] = SECTIONS) -> list[Section]:
    """Return the tables of a report, in the order of their names.

    Args:
        report: of one run.
        width: characters that a line has; from ``tables.WIDE`` on, tables gain columns.
        names: of ``SECTIONS``; all by default.
    """
    sheet = Sheet(width >= WIDE, report.run.simulated, report=report, width=width)
    return [section for name in names for draw in SECTIONS[name] for section in draw(sheet)]
