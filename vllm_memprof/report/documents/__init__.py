"""What a renderer draws, and its document."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.document import Document, Layout
from vllm_memprof.report.documents.first_screen import FirstScreen, first_screen_document
from vllm_memprof.report.documents.report import NAMES, Excerpt, report_document

#: A report, what is shown of it, or what lays any other document out.
Found = Report | FirstScreen | Excerpt | Layout


def document(found: Found, width: int) -> Document:
    """Return the document, its tables laid out for lines of ``width`` characters."""
    if isinstance(found, (Report, Excerpt)):
        report, names = (found, NAMES) if isinstance(found, Report) else found
        return report_document(report, width, names)
    return first_screen_document(found, width) if isinstance(found, FirstScreen) else found(width)
