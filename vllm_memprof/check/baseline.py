"""Decide whether a baseline can be compared with a run: two reports enter, differences leave.

Comparable are runs of the same model, engine and version, device, number of ranks, and arguments,
settings and variables that bear on memory. What neither decides nor can be told is a remark.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import Report
from vllm_memprof.compare.changes import Change, changes
from vllm_memprof.text import Text, text

#: Arguments that do not bear on what a start-up holds, or that another line names.
_ARGUMENTS_OF_NO_WEIGHT = {
    "--device",
    "--stack",
    "--prompt",
    "--prompts",
    "--images",
    "--max-tokens",
    "--seed",
    "--model",
    "--host",
    "--port",
    "--uds",
    "--root-path",
    "--api-key",
    "--served-model-name",
    "--allowed-origins",
    "--allowed-methods",
    "--allowed-headers",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--uvicorn-log-level",
    "--enable-log-requests",
    "--no-enable-log-requests",
    "--disable-log-requests",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--max-log-len",
    "--download-dir",
    "--hf-token",
    "--chat-template",
    "--response-role",
    "--tool-call-parser",
    "--reasoning-parser",
    "--enable-auto-tool-choice",
}
#: Variables that name places, hosts and habits; and ends of such names.
_VARIABLES_OF_NO_WEIGHT = {
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_MODELSCOPE",
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY",
}
_ENDS_OF_NO_WEIGHT = (
    "_DEVICES",
    "_IP",
    "_PORT",
    "_IFNAME",
    "_LEVEL",
    "_KEY",
    "_PATH",
    "_ROOT",
    "_DIR",
    "_HOME",
)


@dataclass(frozen=True)
class Difference:
    """One thing that forbids a comparison."""

    what: str
    baseline: str | None
    run: str | None

    @property
    def sentence(self) -> Text:
        """Return a part of a sentence: ``model A in the baseline, B in the run``."""
        a, b = (text("nothing") if one is None else one for one in (self.baseline, self.run))
        return text("{what} {a} in the baseline, {b} in the run", what=self.what, a=a, b=b)


def differences(baseline: Report, run: Report) -> list[Difference]:
    """Return what keeps the two from being compared, the widest first; empty: comparable."""
    return [
        Difference(_title(change), change.a, change.b)
        for change in changes(baseline, run)
        if _decides(change) and not _printed_alike(change, baseline, run)
    ]


def remarks(baseline: Report, run: Report) -> list[Text]:
    """Return what differs and does not forbid a comparison, as sentences."""
    lines = [
        text(
            "differs from the baseline: {what} {a} → {b}",
            what=_title(change),
            a=change.a or "-",
            b=change.b or "-",
        )
        for change in changes(baseline, run)
        if change.kind in ("version", "engine") and not _decides(change)
    ]
    if "log" in (baseline.run.source, run.run.source):
        lines.append(
            text("what a log does not tell of model, device and arguments was not compared")
        )
    return lines


def _title(change: Change) -> str:
    return change.name if change.name.startswith(change.kind) else f"{change.kind} {change.name}"


def _decides(change: Change) -> bool:
    """Return whether a change bears on memory, so that it forbids a comparison."""
    name = change.name
    match change.kind:
        case "version":
            return False
        case "engine":
            return name == "engine"
        case "argument":
            return name not in _ARGUMENTS_OF_NO_WEIGHT
        case "model" | "device" | "setting":
            return True
    if name in _VARIABLES_OF_NO_WEIGHT or name.endswith(_ENDS_OF_NO_WEIGHT) or "_LOG" in name:
        return False
    return not any(value is not None and value.startswith("/") for value in (change.a, change.b))


def _printed_alike(change: Change, baseline: Report, run: Report) -> bool:
    """Return whether two sizes of a device are one, as far as a log prints it."""
    if (change.kind, change.name) != ("device", "device total"):
        return False
    sized = [
        next((rank for rank in report.ranks if rank.device_total_bytes), None)
        for report in (baseline, run)
    ]
    ranks = [rank for rank in sized if rank is not None]
    slack = sum(rank.half_units.get("device_total_bytes", 0) for rank in ranks)
    sizes = [rank.device_total_bytes or 0 for rank in ranks]
    return len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= slack
