"""The lines that name a run."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.report.sections.base import MODELLED_MARK, fold, least_grant
from vllm_memprof.units import format_bytes, format_gib


def head(report: Report) -> list[tuple[str, str]]:
    """The lines that name a run: (what, text)."""
    run = report.run
    engine = " ".join(part for part in (run.engine, run.engine_version) if part) or "engine unknown"
    lines = [("model", run.model), ("engine", engine), ("device", _device_text(report))]
    lines.append(("command", " ".join(run.command) or "-"))
    lines.append(("status", _status_text(report)))
    lines.append(("verdict", verdict(report)))
    notes = list(run.notes)
    if run.source == "log" and not any(rank.phases for rank in report.ranks):
        notes.append("no phase was measured: the log holds no snapshot of memory")
    return [*lines, *(("note", note) for note in notes)]


def verdict(report: Report) -> str:
    """The result in one sentence: what the engine granted, whether its equation gives that, what is honest."""
    least = least_grant(report.ranks)
    if least is None or least.budget.engine_kv_cache_bytes is None:
        return _without_kv_cache(report)
    budget, kv = least.budget, least.kv
    text = f"{_out_of_memory(report)}; " if report.run.status == "oom" else ""
    text += f"KV cache {format_gib(budget.engine_kv_cache_bytes)} GiB"
    text += f", {format_bytes(kv.tokens)} tokens" if kv.tokens is not None else ""
    not_run = report.run.ranks.not_run if report.run.ranks else []
    if len({rank.budget.engine_kv_cache_bytes for rank in report.ranks}) > 1:
        text += f" on {least.label}, the least of {len(report.ranks)} ranks"
    elif not_run:
        text += f" on {fold([rank.label for rank in report.ranks])}"
    elif len(report.ranks) > 1:
        text += " on every rank"
    if not_run:
        text += f"; {len(not_run)} of {report.world_size} ranks differ and were not run"
    text += f"; {_balance(report)}"
    if budget.fits_request_kv_cache_bytes is not None:
        text += f"; honest: {format_gib(budget.fits_request_kv_cache_bytes)} GiB"
        text += (
            f", {format_bytes(budget.fits_request_kv_tokens)} tokens"
            if budget.fits_request_kv_tokens is not None
            else ""
        )
    return text


def _without_kv_cache(report: Report) -> str:
    if report.run.status == "oom" or any(rank.oom is not None for rank in report.ranks):
        return _out_of_memory(report)
    return "no KV cache was sized" + (
        f": {report.run.exit_reason}" if report.run.exit_reason else ""
    )


def _out_of_memory(report: Report) -> str:
    oom = next((rank.oom for rank in report.ranks if rank.oom is not None), None)
    reserved, total, idle = (
        getattr(oom, f"{name}_bytes", None)
        for name in ("reserved", "device_total", "fragmentation")
    )
    if reserved is None or total is None:
        return "out of memory"
    text = f"out of memory: {format_gib(reserved)} of {format_gib(total)} GiB reserved"
    return text + (f", of which no tensor used {format_gib(idle)} GiB" if idle is not None else "")


def _balance(report: Report) -> str:
    if any(rank.budget.override for rank in report.ranks):
        return "fixed by --kv-cache-memory-bytes"
    balanced = [rank.budget.balanced for rank in report.ranks]
    if False in balanced:
        return f"equation not balanced on {fold([r.label for r in report.ranks if r.budget.balanced is False])}"
    if None in balanced:
        return "equation not checked" + (" on every rank" if len(balanced) > 1 else "")
    budget = report.ranks[0].budget
    within = (
        "within rounding"
        if any(rank.budget.tolerance_bytes for rank in report.ranks)
        else "to the byte"
    )
    return f"equation {budget.equation} balanced {within}"


def _device_text(report: Report) -> str:
    run = report.run
    name = run.device or "unknown"
    total = next(
        (rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), None
    )
    text = f"{name}, {format_gib(total)} GiB" if total else name
    if run.simulated:
        text += f" [simulated: profile {run.device_profile or 'unknown'}; non-torch figures are modelled {MODELLED_MARK}]"
    return text


def _status_text(report: Report) -> str:
    run = report.run
    text = run.status if run.seconds is None else f"{run.status}, {run.seconds:.1f} s"
    if run.exit_code:
        text += f", exit status {run.exit_code}"
    if run.exit_reason:
        text += f": {run.exit_reason}"
    return text
