"""The lines that name a run."""

from __future__ import annotations

from vllm_memprof.ledger.model import Report
from vllm_memprof.report.sections.base import MODELLED_MARK
from vllm_memprof.units import format_gib


def head(report: Report) -> list[tuple[str, str]]:
    """The lines that name a run: (what, text)."""
    run = report.run
    engine = " ".join(part for part in (run.engine, run.engine_version) if part) or "engine unknown"
    lines = [("model", run.model), ("engine", engine), ("device", _device_text(report))]
    lines.append(("command", " ".join(run.command) or "-"))
    lines.append(("status", _status_text(report)))
    return [*lines, *(("note", note) for note in run.notes)]


def _device_text(report: Report) -> str:
    run = report.run
    name = run.device or "unknown"
    total = next((rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), None)
    text = f"{name}, {format_gib(total)} GiB" if total else name
    if run.simulated:
        text += (
            f" [simulated: profile {run.device_profile or 'unknown'}; non-torch figures are modelled {MODELLED_MARK}]"
        )
    return text


def _status_text(report: Report) -> str:
    run = report.run
    text = run.status if run.seconds is None else f"{run.status}, {run.seconds:.1f} s"
    if run.exit_code:
        text += f", exit status {run.exit_code}"
    if run.exit_reason:
        text += f": {run.exit_reason}"
    return text
