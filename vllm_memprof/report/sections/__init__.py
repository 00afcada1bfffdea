"""The tables of a report: a ``Report`` enters, sections leave. Every renderer draws these."""

from __future__ import annotations

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


def sections(report: Report, width: int) -> list[Section]:
    """Return all tables of a report, in their order.

    Args:
        report: of one run.
        width: characters that a line has; from ``WIDE`` on, tables gain columns.
    """
    wide = width >= WIDE
    phases = phase_section(report, wide)
    found = deployment_sections(report, width)
    if phases.rows or report.run.source != "log":  # few logs name phases
        found.append(phases)
    found += budget_sections(report)
    found += audit_sections(report, wide)
    found += printed_sections(report)
    found += kv_sections(report)
    found += device_sections(report, wide)
    found += oom_sections(report)
    found += growth_sections(report, width)
    found += communicator_sections(report)
    found += request_sections(report, wide)
    found += empty_cache_sections(report, wide)
    found += cycle_sections(report)
    found += serving_growth_sections(report, wide)
    found += allocation_sections(report)
    return found
