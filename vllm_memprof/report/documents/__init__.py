"""Documents, one module per kind: what was found enters, what a renderer draws leaves."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.compare.diff import Diff
from vllm_memprof.document import Document
from vllm_memprof.holders.rows import Who
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.rows import Fit, Sweep
from vllm_memprof.plans.share_rows import DeviceShare
from vllm_memprof.report.documents.calibrated import calibrated_document
from vllm_memprof.report.documents.check import check_document
from vllm_memprof.report.documents.diff import diff_document
from vllm_memprof.report.documents.plans import fit_document, sweep_document
from vllm_memprof.report.documents.report import report_document
from vllm_memprof.report.documents.share import share_document
from vllm_memprof.report.documents.starts import Starts, starts_document
from vllm_memprof.report.documents.who import who_document

#: Whatever there is a document of.
Found = Report | Starts | Diff | CheckResult | Sweep | Fit | DeviceShare | Who | Calibrated


def document(found: Found, width: int) -> Document:
    """Return the document, its tables laid out for lines of ``width`` characters."""
    if isinstance(found, Report):
        return report_document(found, width)
    if isinstance(found, Starts):
        return starts_document(found, width)
    if isinstance(found, Diff):
        return diff_document(found, width)
    if isinstance(found, CheckResult):
        return check_document(found, width)
    if isinstance(found, Who):
        return who_document(found, width)
    if isinstance(found, Calibrated):
        return calibrated_document(found, width)
    if isinstance(found, DeviceShare):
        return share_document(found, width)
    return sweep_document(found, width) if isinstance(found, Sweep) else fit_document(found, width)
