"""What a renderer draws, and its document."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Document, Layout
from vllm_memprof.report.documents.first_screen import FirstScreen, first_screen_document
from vllm_memprof.report.documents.report import Parts, parts_document, report_document

#: A report, what is shown of it, or what lays any other document out.
Found = Report | FirstScreen | Parts | Layout


def document(found: Found, width: int) -> Document:
    """Return the document, its tables laid out for lines of ``width`` characters."""
    if isinstance(found, Report):
        return report_document(found, width)
    if isinstance(found, FirstScreen):
        return first_screen_document(found, width)
    return parts_document(found, width) if isinstance(found, Parts) else found(width)
