"""What is SGLang's own in reading a log: lines, set-up, and figures that all ranks give together.

The names here are all that the other modules of ``logs`` use.
"""

from __future__ import annotations

from vllm_memprof.logs.sglang.formats import (
    BROKEN,
    CONTRADICTION_IS_UNKNOWN,
    FIGURES,
    FORMATS,
    LATEST,
    LEAST,
    NEEDLES,
    ONCE_PER_MODEL,
    PHASE_OF,
    READY_LINE,
)

#: As ``record.schema.RunInfo.engine`` has it.
NAME = "sglang"

__all__ = [
    "BROKEN",
    "CONTRADICTION_IS_UNKNOWN",
    "FIGURES",
    "FORMATS",
    "LATEST",
    "LEAST",
    "NAME",
    "NEEDLES",
    "ONCE_PER_MODEL",
    "PHASE_OF",
    "READY_LINE",
]
