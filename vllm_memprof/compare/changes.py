"""Where two runs differ in what they were given: model, engine, device, versions, arguments.

Two reports enter, rows leave. A reader sees everything that differs; ``compare.causes`` says what
it did to the KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_memprof.accounting.model import Report
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.options import given_options

#: Options of memprof itself that the engine never sees, and that differ from run to run.
_OURS = (
    "--run-dir",
    "--deployment",
    "--output",
    "-o",
    "--format",
    "--quiet",
    "--python",
    "--startup-timeout",
    "--ranks",
    "--rank",
    "--use-checked",
)


@dataclass(frozen=True)
class Change:
    """One thing that differs; None: the run does not have it, or does not say."""

    kind: str  # model | engine | device | version | environment | argument | setting
    name: str
    a: str | None
    b: str | None


def changes(a: Report, b: Report) -> list[Change]:
    """Return everything given that differs, the widest first.

    What a run says nothing of has not changed: a log prints few of the arguments, and a setting
    without a value is not known.
    """
    said = "command" if a.run.command or b.run.command else "engine_command"  # of a log
    left, right = _given(a, said), _given(b, said)
    found = []
    for kind in left:
        for name in dict.fromkeys([*left[kind], *right[kind]]):
            change = Change(kind, name, left[kind].get(name), right[kind].get(name))
            sides = ((left, change.a), (right, change.b))
            silent = [given for given, value in sides if value is None]
            if change.a == change.b or (kind == "setting" and silent):
                continue
            if any(  # of a log
                "command" not in given["engine"] and not (kind == "argument" and given["argument"])
                for given in silent
            ):
                continue
            found.append(change)
    arguments = {
        change.name.removeprefix("--").replace("-", "_")
        for change in found
        if change.kind == "argument"
    }
    return [change for change in found if change.kind != "setting" or change.name not in arguments]


def _given(report: Report, said: str) -> dict[str, dict[str, str]]:
    """Return what a run was given: kind -> name -> value, what is unknown left out."""
    run, evidence = report.run, report.run.evidence
    equations = dict.fromkeys(rank.budget.equation for rank in report.ranks if rank.budget.equation)
    totals = dict.fromkeys(
        f"{rank.device_total_bytes:,} bytes" for rank in report.ranks if rank.device_total_bytes
    )
    kind = f"simulated, profile {run.device_profile}" if run.simulated else "real"
    # option -> value, "given" for a flag; those of one that was given again are joined
    arguments: dict[str, object] = {}
    for name, value in given_options(getattr(run, said)):
        for key, inner in _keys(name, value):
            if key not in _OURS:
                arguments[key] = f"{arguments[key]} {inner}" if key in arguments else inner
    settings: dict[str, object] = {}
    if report.ranks:  # what the engine used; defaults differ between releases
        kv = report.ranks[0].kv
        settings = {
            "gpu_memory_utilization": report.ranks[0].budget.gpu_memory_utilization,
            "max_model_len": kv.max_model_len,
            "block_size": kv.block_size,
            "kv_cache_dtype": ", ".join(dict.fromkeys(row.dtype for row in kv.groups if row.dtype)),
            "kv_cache_layers": ", ".join(f"{row.layers} {row.type}" for row in kv.groups),
        }
    given: dict[str, dict[str, object]] = {
        "model": {"model": None if run.model == "unknown" else run.model},
        "engine": {
            "engine": engine_name(run),
            "read from": evidence.name,
            "command": None if evidence.partial else run.mode,
            "equation": ", ".join(equations),
        },
        "device": {
            "device": run.device,
            "kind": None if evidence.partial else kind,
            "device total": ", ".join(totals),
            # a log may print some ranks alone
            "ranks": report.world_size if report.ranks and not evidence.partial else None,
        },
        "version": {
            name: version for name, version in sorted(run.versions.items()) if name != run.engine
        },
        "argument": arguments,
        "setting": settings,
        "environment": {
            name: value
            for name, value in sorted(run.env.items())
            # of its own use; what they follow from is among the arguments
            if not name.startswith("MEMPROF_")
        },
    }
    return {
        kind: {name: str(value) for name, value in values.items() if value not in (None, "")}
        for kind, values in given.items()
    }


def _keys(name: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield an option, or the keys of its JSON object down to what is none, dotted.

    The engine takes them so too (``--additional-config.a.b``): two that are written differently
    are one, and a row names the key that differs.
    """
    try:
        content = json.loads(value) if value.startswith("{") else None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content:
        yield name, value
        return
    for key, inner in content.items():
        text = inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
        yield from _keys(f"{name}.{key}", text)
