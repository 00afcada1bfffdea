"""Documents as terminal tables, markdown and a page; results as JSON, csv and a trace."""

from vllm_memprof.files import write_atomically
from vllm_memprof.report.files import render_json, write_reports
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table

__all__ = ["render_json", "render_markdown", "render_table", "write_atomically", "write_reports"]
