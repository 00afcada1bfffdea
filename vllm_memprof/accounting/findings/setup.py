"""Findings about how a run was set up: the allocator's settings, hooks without figures, hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.readings.startup import first_device_total
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.options import given_options, refused_beside_expandable
from vllm_memprof.record.loader import Run
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import smallest

#: Things that differ, and hosts of one value, that are named.
_NAMED, _NAMED_HOSTS = 12, 4


def allocator_config_conflict(run: Context) -> Iterator[Found]:
    """Find settings that torch_npu refuses beside expandable_segments:True."""
    for variable, value in sorted(run.run.info.env.items()):
        if variable.endswith("ALLOC_CONF") and variable != "PYTORCH_CUDA_ALLOC_CONF":
            for setting in refused_beside_expandable(value)[:1]:
                yield Found(None, {"variable": variable, "value": value, "setting": setting})


def hooks_in(states: Sequence[str], run: Context) -> Iterator[Found]:
    """Find required hooks in one of the states in which they have no figures."""
    for process in run.run.processes:
        for hook in process.hooks.values():
            if hook.need == "required" and hook.state in states:
                yield Found(
                    None,
                    {
                        "target": hook.target or text("no target"),
                        "file": process.file,
                        "detail": hook.detail or hook.state,
                        "phase": hook.phase,
                        hook.state: hook.hook,
                    },
                    about=process.identity,
                )


def events_lost(run: Context) -> Iterator[Found]:
    """Find times in which a process recorded nothing because its file could not be written."""
    for process in run.run.processes:
        for loss in process.losses:
            yield Found(
                None,
                {
                    "since": _moment(run, loss.since_t_ns),
                    "until": None if loss.until_t_ns is None else _moment(run, loss.until_t_ns),
                    "count": loss.events,
                    "reason": loss.reason,
                    "file": process.file,
                },
                about=process.identity,
            )


def _moment(run: Context, t_ns: int | None) -> Text:
    start = run.run.info.start_t_ns
    if t_ns is None or start is None:
        return text("a moment that is not known")
    return text("{seconds:.1f} s after the launch", seconds=(t_ns - start) / 1e9)


def hosts_differ(left_out: Mapping[str, Sequence[str]], run: Context) -> Iterator[Found]:
    """Find releases, devices, arguments and variables that differ between hosts."""
    runs = run.run.parts
    facts = [_facts(each, left_out) for each in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    said = []
    for name in names:
        hosts: dict[str | None, list[str]] = {}
        for each, known in zip(runs, facts, strict=True):
            hosts.setdefault(known.get(name), []).append(each.info.host or each.folder.name)
        if len(hosts) > 1:
            values = [
                text(
                    "{value} on {hosts}",
                    value=text("none") if value is None else value,
                    hosts=", ".join(members[:_NAMED_HOSTS])
                    + (f", +{more}" if (more := len(members) - _NAMED_HOSTS) > 0 else ""),
                )
                for value, members in hosts.items()
            ]
            said.append(text("{name}: {values}", name=name, values=join(", ", values)))
    if said:
        more = len(said) - _NAMED
        yield Found(None, {"differing": join("; ", said[:_NAMED]), "more": more > 0 and more})


def _facts(run: Run, left_out: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return what a host was set up with, by name."""
    options, begins, ends, paths = (
        tuple(left_out[key]) for key in ("options", "begins", "ends", "paths-that-count")
    )
    info = run.info
    socs = (each.identity.soc for each in run.processes if each.identity.soc)
    totals = [first_device_total(each.phases) for each in run.workers]
    total = smallest(totals)
    given = {
        **dict(sorted(run.versions.items())),
        "model": info.model,
        "engine": engine_name(info),
        "device": next(socs, info.device),
        "device total": None if total is None else text("{total:bytes} bytes", total=total),
        **{name: value for name, value in given_options(info.command) if name not in options},
        **{
            name: value
            for name, value in sorted(info.env.items())
            if not name.startswith(begins)
            and not name.endswith(ends)
            and (name in paths or not value.startswith("/"))
        },
    }
    return {name: value for name, value in given.items() if value}
