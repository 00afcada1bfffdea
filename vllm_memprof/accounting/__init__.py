"""Closes the books of a run: device memory by owner, the KV budget equation recomputed, the honest budget, findings."""

from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report

__all__ = ["Report", "build_report"]
