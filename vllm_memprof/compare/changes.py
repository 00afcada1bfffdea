"""What two runs were given: model, engine, device, versions, environment, arguments; and where they differ.

Two reports enter, rows leave. No judgement here of what matters: a reader sees everything that differs, and
``compare.diff`` says what it did to the KV cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_memprof.accounting.model import RankReport, Report

#: Short names of engine arguments. (vllm/engine/arg_utils.py::EngineArgs.add_cli_args, read in 0.23.0)
SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpl": "--data-parallel-size-local",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
}
#: Options of memprof itself that the engine never sees, and that differ from run to run.
_OURS = (
    "--run-dir",
    "--output",
    "-o",
    "--format",
    "--quiet",
    "--python",
    "--startup-timeout",
    "--ranks",
    "--rank",
)
#: Variables that memprof sets for its own use; what they follow from is among the arguments.
_OUR_VARIABLES = "MEMPROF_"
_NUMBER = re.compile(r"-\d")


@dataclass(frozen=True)
class Change:
    """One thing that the two runs have not in common; None: the run does not have it, or does not say."""

    kind: str  # model | engine | device | version | environment | argument | setting
    name: str
    a: str | None
    b: str | None


def changes(a: Report, b: Report) -> list[Change]:
    """Everything given that differs, the widest first."""
    pairs: list[tuple[str, dict[str, str], dict[str, str]]] = [
        ("model", _model(a), _model(b)),
        ("engine", _engine(a), _engine(b)),
        ("device", _device(a), _device(b)),
        ("version", _versions(a), _versions(b)),
        ("argument", _arguments(a), _arguments(b)),
        ("setting", _settings(a), _settings(b)),
        ("environment", _environment(a), _environment(b)),
    ]
    found = [
        Change(kind, name, left.get(name), right.get(name))
        for kind, left, right in pairs
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]
    found = [change for change in found if _told(change, a, b)]
    given = {
        change.name.removeprefix("--").replace("-", "_")
        for change in found
        if change.kind == "argument"
    }
    return [change for change in found if change.kind != "setting" or change.name not in given]


def _told(change: Change, a: Report, b: Report) -> bool:
    """Whether both runs tell of it: what a log does not print has not changed, nor has a setting of no known value."""
    silent = [report for report, value in ((a, change.a), (b, change.b)) if value is None]
    if change.kind == "setting":
        return not silent
    if change.kind == "argument":
        return all(report.run.source != "log" or _arguments(report) for report in silent)
    return all(report.run.source != "log" for report in silent)


def _model(report: Report) -> dict[str, str]:
    return {} if report.run.model == "unknown" else {"model": report.run.model}


def _engine(report: Report) -> dict[str, str]:
    run = report.run
    values = {
        "engine": " ".join(part for part in (run.engine, run.engine_version) if part),
        "read from": "log text" if run.source == "log" else "hooks",
        "command": run.mode if run.source != "log" else "",
    }
    equations = dict.fromkeys(rank.budget.equation for rank in report.ranks if rank.budget.equation)
    values["equation"] = ", ".join(equations)
    return _said(values)


def _device(report: Report) -> dict[str, str]:
    run = report.run
    totals = dict.fromkeys(
        f"{rank.device_total_bytes:,} bytes" for rank in report.ranks if rank.device_total_bytes
    )
    simulated = (
        ""
        if run.source == "log"
        else f"simulated, profile {run.device_profile}"
        if run.simulated
        else "real"
    )
    values = {
        "device": run.device or "",
        "kind": simulated,
        "device total": ", ".join(totals),
        "ranks": str(report.world_size)
        if report.ranks and run.source != "log"
        else "",  # a log may print some alone
    }
    return _said(values)


def _versions(report: Report) -> dict[str, str]:
    return {
        name: version
        for name, version in sorted(report.run.versions.items())
        if name != report.run.engine
    }


def _environment(report: Report) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(report.run.env.items())
        if not name.startswith(_OUR_VARIABLES)
    }


def _settings(report: Report) -> dict[str, str]:
    """What the engine used, which need not be an argument: defaults differ between releases."""
    first: RankReport | None = next(iter(report.ranks), None)
    if first is None:
        return {}
    kv = first.kv
    values: dict[str, Any] = {
        "gpu_memory_utilization": first.budget.gpu_memory_utilization,
        "max_model_len": kv.max_model_len,
        "block_size": kv.block_size,
        "kv_cache_dtype": ", ".join(
            dict.fromkeys(group.dtype for group in kv.groups if group.dtype)
        )
        or None,
        "kv_cache_layers": ", ".join(f"{group.layers} {group.type}" for group in kv.groups) or None,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _said(values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _arguments(report: Report) -> dict[str, str]:
    """Options of the command line: long name -> value, "given" for a flag, joined where one was given again."""
    found: dict[str, str] = {}
    for name, value in _options(report.run.command):
        if name not in _OURS:
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def _options(command: list[str]) -> Iterator[tuple[str, str]]:
    index = 0
    while index < len(command):
        token, index = command[index], index + 1
        if not token.startswith("-") or token in ("-", "--") or _NUMBER.match(token):
            continue  # the program, its command, the model: named elsewhere
        name, equals, value = token.partition("=")
        if not equals:
            values = []
            while index < len(command) and (
                not command[index].startswith("-") or _NUMBER.match(command[index])
            ):
                values.append(command[index])
                index += 1
            value = " ".join(values) or "given"
        yield "--quiet" if (name, value) == ("-q", "given") else _long(name), value


def _long(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else SHORT_NAMES.get(name, name)
