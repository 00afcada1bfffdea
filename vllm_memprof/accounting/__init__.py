"""Account for a run: device memory by owner, the budget equation recomputed, findings."""

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report

__all__ = ["Report", "build_report"]
