"""Lines of code whose memory stayed (--trace-allocations)."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report, TracedProcess
from vllm_memprof.accounting.serving_growth import process_name
from vllm_memprof.report.document import Column, Row, Section
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB, format_rate

#: Lines of code that a table has; a site that holds and grew by less is in report.json alone.
_SHOWN = 8
_LEAST_BYTES = MIB // 16


def allocation_sections(report: Report) -> list[Section]:
    """Return a table per traced process."""
    return [_section(traced) for traced in report.allocations]


def _section(traced: TracedProcess) -> Section:
    name = process_name(traced.roles, traced.label, traced.pid)
    if traced.memory == "device":
        title = text(
            "Device memory that stayed after {requests:,} requests, by line of code, {process}",
            requests=traced.requests,
            process=name,
        )
    else:
        title = text(
            "Python memory that stayed after {requests:,} requests, by line of code, {process}",
            requests=traced.requests,
            process=name,
        )
    large = [
        site for site in traced.sites if max(site.grown_bytes or 0, site.bytes) >= _LEAST_BYTES
    ]
    rows = [
        Row(
            [
                format_rate(site.grown_bytes, 2),
                format_rate(site.bytes, 2).removeprefix("+"),
                f"{site.blocks:,}",
                f"{site.site} {site.function}".strip(),
            ]
        )
        for site in large[:_SHOWN]
    ]
    columns = [
        Column(text("Grown,\nMiB")),
        Column(text("Alive,\nMiB")),
        Column(text("Blocks")),
        Column(text("Allocated at"), right=False),
    ]
    return Section(title, columns, rows, _notes(traced, len(large)))


def _notes(traced: TracedProcess, large: int) -> list[str]:
    if traced.reason is not None:
        return [text("nothing was traced: {reason}", reason=traced.reason)]
    notes: list[Text] = []
    if traced.half_requests is not None:
        notes.append(
            text(
                "grown: alive at the end less alive after {half:,} of the requests; what a line "
                "holds once, and does not hold more of, is no leak",
                half=traced.half_requests,
            )
        )
    if traced.requests < traced.asked:
        notes.append(
            text(
                "the process ended after {requests:,} of {asked:,} requests",
                requests=traced.requests,
                asked=traced.asked,
            )
        )
    if large > _SHOWN:
        notes.append(text("{count} more in report.json", count=large - _SHOWN))
    if traced.untraced_bytes is not None:
        notes.append(
            text(
                "allocated before tracing began, alive: {size:gib} GiB", size=traced.untraced_bytes
            )
        )
    if traced.memory == "host":
        notes.append(text("what C++ code allocates is not in it"))
    if traced.snapshot is not None:
        notes.append(
            text(
                "{file} in the run folder: for PyTorch's memory viewer (pytorch.org/memory_viz)",
                file=traced.snapshot,
            )
        )
    return list(notes)
