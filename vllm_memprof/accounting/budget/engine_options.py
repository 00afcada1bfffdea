"""What an engine asks for and with which option; whether it leaves graphs out, and runs on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.engines import row_of_run
from vllm_memprof.options import is_on, value_of
from vllm_memprof.record.schema import RunInfo


def is_eager(command: Sequence[str], engine: str | None) -> bool:
    """Return whether a command leaves graphs out."""
    arguments = row_of_run(engine).arguments
    return is_on(command, arguments.no_graphs) or any(
        value_of(command, name) == value for name, value in arguments.no_graphs_too
    )


def is_cuda(engine: str | None, device: str | None) -> bool:
    """Return whether an engine runs on CUDA: by its name, or by its ``device``."""
    row = row_of_run(engine)
    return device == "cuda" if row.cuda is None or engine is None else engine == row.cuda


def allocator_variable(run: RunInfo) -> str:
    """Return the variable that holds the settings of a run's caching allocator."""
    return f"PYTORCH_{'CUDA' if is_cuda(run.engine, run.device) else 'NPU'}_ALLOC_CONF"


@dataclass(frozen=True)
class MemoryShare:
    """What an engine asks for: a share of a size."""

    option: str
    base_bytes: int | None
    value: float | None


def share_of(rank: RankReport, engine: str | None = None) -> MemoryShare:
    """Return the share that a rank's equation takes, with the size that it is a share of.

    Args:
        rank: with its budget.
        engine: counts where no equation is known.
    """
    row = form_of(rank.budget.equation)
    if row is None or row.base == "device_total_bytes":
        arguments = row_of_run(engine).arguments
        if not arguments.share_of_total:
            return MemoryShare(arguments.share, None, None)
        utilization = rank.budget.gpu_memory_utilization
        return MemoryShare(arguments.share, rank.device_total_bytes, utilization)
    base = rank.figures.get(row.base)
    option = f"--{row.share.replace('_', '-')}"
    return MemoryShare(option, None if base is None else int(base), rank.figures.get(row.share))
