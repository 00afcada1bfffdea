"""The document of several engine starts: the table that compares them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Document
from vllm_memprof.report.sections.starts import starts_section


@dataclass(frozen=True)
class Starts:
    """The reports of several engine starts, in their order."""

    reports: list[Report]


def starts_document(starts: Starts, width: int) -> Document:
    """Return the table that their reports follow."""
    section = starts_section(starts.reports, width)
    return Document(kind="starts", title=section.title, head=[], sections=[section], verdict="")
