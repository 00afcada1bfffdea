"""``report.json`` back into a ``Report``."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.record.codec import from_json


def report_from_json(data: object) -> Report:
    """Return the report that was written.

    Args:
        data: a parsed ``report.json``.

    Raises:
        ValueError: it is something else, or of another schema.
    """
    return from_json(Report, data)
