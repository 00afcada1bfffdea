"""vLLM's log lines (``log_lines.toml``)."""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.engines.line_format import read_log_lines

LOG = read_log_lines(Path(__file__).parent)
