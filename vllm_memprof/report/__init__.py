"""Reporters: the closed books as a terminal table, as markdown, as JSON. They see a ``Report``, never a run folder."""

from vllm_memprof.files import write_atomically
from vllm_memprof.report.files import render_json, write_reports
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table

__all__ = ["render_json", "render_markdown", "render_table", "write_atomically", "write_reports"]
