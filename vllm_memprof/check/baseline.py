"""Decide whether a baseline can be compared with a run: two reports enter, differences leave.

Comparable are runs of the same model, engine and version, device, number of ranks, and arguments,
settings and variables that bear on memory. What neither decides nor can be told is a remark.
"""

from __future__ import annotations

from vllm_memprof.accounting.model import Report
from vllm_memprof.check.limits import NO_WEIGHT
from vllm_memprof.compare.changes import Change, changes
from vllm_memprof.text import Text, text
from vllm_memprof.units import only_known


def differences(baseline: Report, run: Report) -> list[Text]:
    """Return what keeps the two from being compared, the widest first; empty: comparable."""
    found = [change for change in changes(baseline, run) if decides(change)]
    # two sizes of a device may be one, as far as a log prints it
    sized = [
        next((rank for rank in report.ranks if rank.device_total_bytes is not None), None)
        for report in (baseline, run)
    ]
    known = only_known(sized)
    if len(known) == 2:
        a, b = (rank.device_total_bytes or 0 for rank in known)
        if abs(a - b) <= sum(rank.half_units.get("device_total_bytes", 0) for rank in known):
            found = [change for change in found if change.name != "device total"]
    return [_said(change) for change in found]


def remarks(baseline: Report, run: Report) -> list[Text]:
    """Return what differs and does not forbid a comparison, as sentences."""
    lines = [
        text("differs from the baseline: {difference}", difference=_said(change))
        for change in changes(baseline, run)
        if change.kind in ("version", "engine") and not decides(change)
    ]
    if any(report.run.evidence.partial for report in (baseline, run)):
        lines.append(
            text("what a log does not tell of model, device and arguments was not compared")
        )
    return lines


def _said(change: Change) -> Text:
    name, kind = change.name, change.kind
    what = name if name.startswith(kind) else f"{kind} {name}"
    a, b = (text("nothing") if one is None else one for one in (change.a, change.b))
    return text("{what} {a} in the baseline, {b} in the run", what=what, a=a, b=b)


def decides(change: Change) -> bool:
    """Return whether a change bears on memory, so that it forbids a comparison."""
    name = change.name
    if change.kind == "environment":
        path = any(value is not None and value.startswith("/") for value in (change.a, change.b))
        alike = name.endswith(NO_WEIGHT["ends"]) or "_LOG" in name
        return not (path or alike or name in NO_WEIGHT["variables"])
    if change.kind in ("version", "engine"):
        return name == "engine"
    return name not in NO_WEIGHT["arguments"]
