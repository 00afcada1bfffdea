"""Lines of code whose memory stayed (--trace-allocations)."""

from __future__ import annotations

from vllm_memprof.accounting.model import Report, TracedProcess
from vllm_memprof.accounting.serving.growth import process_name
from vllm_memprof.document import Section
from vllm_memprof.tables import COUNT, RATE, Column, table
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB

#: Lines of code that a table has; a site that holds and grew by less is in report.json alone.
_SHOWN = 8
_LEAST_BYTES = MIB // 16


_SITES = (
    Column("Grown,\nMiB", "grown_bytes", lambda size: RATE(size, 2)),
    Column("Alive,\nMiB", "bytes", lambda size: RATE(size, 2).removeprefix("+")),
    Column("Blocks", "blocks", COUNT),
    Column("Allocated at", lambda site: f"{site.site} {site.function}".strip()),
)


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
    return table(title, _SITES, large[:_SHOWN], _notes(traced, len(large)))


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
