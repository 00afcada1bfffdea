"""What the reports say, before any of them decides how it looks: a ``Report`` enters, texts and tables leave.

Every reporter draws these sections, so that the same run reads the same in each.
"""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.report.sections.base import Section
from vllm_memprof.report.sections.budget import budget_sections
from vllm_memprof.report.sections.communicators import communicator_sections
from vllm_memprof.report.sections.cycles import cycle_sections
from vllm_memprof.report.sections.device import device_sections
from vllm_memprof.report.sections.empty_cache import empty_cache_sections
from vllm_memprof.report.sections.growth import growth_sections
from vllm_memprof.report.sections.kv import kv_sections
from vllm_memprof.report.sections.oom import oom_sections
from vllm_memprof.report.sections.phases import phase_section


def sections(report: Report, width: int) -> list[Section]:
    """All tables of a report, in their order.

    Args:
        report: the closed books.
        width: characters that a line has; from 110 on, tables gain columns.
    """
    phases = phase_section(report, wide=width >= 110)
    found = (
        [phases] if phases.rows or report.run.source != "log" else []
    )  # a log need not tell of moments
    found += budget_sections(report)
    found += kv_sections(report)
    found += device_sections(report, wide=width >= 110)
    found += oom_sections(report)
    found += growth_sections(report, width)
    found += communicator_sections(report)
    found += empty_cache_sections(report, wide=width >= 110)
    found += cycle_sections(report)
    return found
