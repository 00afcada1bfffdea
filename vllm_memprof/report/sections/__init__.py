"""The tables of a report: a ``Report`` enters, sections leave. Every renderer draws these."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Section
from vllm_memprof.report.sections.allocations import allocation_sections
from vllm_memprof.report.sections.audit import audit_sections
from vllm_memprof.report.sections.budget import budget_sections
from vllm_memprof.report.sections.communicators import communicator_sections
from vllm_memprof.report.sections.cycles import cycle_sections
from vllm_memprof.report.sections.deployment import deployment_sections
from vllm_memprof.report.sections.device import device_sections
from vllm_memprof.report.sections.empty_cache import empty_cache_sections
from vllm_memprof.report.sections.growth import growth_sections
from vllm_memprof.report.sections.kv import kv_sections
from vllm_memprof.report.sections.oom import oom_sections
from vllm_memprof.report.sections.phases import phase_section
from vllm_memprof.report.sections.printed import printed_sections
from vllm_memprof.report.sections.requests import request_sections
from vllm_memprof.report.sections.serving_growth import serving_growth_sections
from vllm_memprof.tables import WIDE


def _phases(report: Report, width: int) -> list[Section]:
    """Return the table of phases; few logs name one."""
    phases = phase_section(report, width >= WIDE)
    return [phases] if phases.rows or not EVIDENCE[report.run.source].partial else []


#: Name for ``--section`` -> the tables, in the order in which they are read.
SECTIONS: dict[str, Callable[[Report, int], list[Section]]] = {
    "oom": lambda report, width: oom_sections(report),
    "hosts": deployment_sections,
    "equation": lambda report, width: budget_sections(report),
    "device": lambda report, width: device_sections(report, width >= WIDE),
    "phases": _phases,
    "growth": growth_sections,
    "cross-check": lambda report, width: audit_sections(report, width >= WIDE),
    "kv-cache": lambda report, width: kv_sections(report),
    "printed": lambda report, width: printed_sections(report),
    "communicators": lambda report, width: communicator_sections(report),
    "empty-cache": lambda report, width: empty_cache_sections(report, width >= WIDE),
    "requests": lambda report, width: request_sections(report, width >= WIDE),
    "serving": lambda report, width: serving_growth_sections(report, width >= WIDE),
    "cycles": lambda report, width: cycle_sections(report),
    "allocations": lambda report, width: allocation_sections(report),
}


def sections(report: Report, width: int, names: Iterable[str] = SECTIONS) -> list[Section]:
    """Return the tables of a report, in the order of their names.

    Args:
        report: of one run.
        width: characters that a line has; from ``WIDE`` on, tables gain columns.
        names: of ``SECTIONS``; all by default.
    """
    return [section for name in names for section in SECTIONS[name](report, width)]
