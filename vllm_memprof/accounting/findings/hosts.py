"""The finding about hosts of one deployment that were not set up alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import WARNING, Context, Found, finding_of_run
from vllm_memprof.accounting.readings.startup import first_device_total
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.options import given_options
from vllm_memprof.record.loader import Run
from vllm_memprof.text import join, text

#: Arguments that differ between hosts on purpose, or that bear on no memory.
_OF_ONE_HOST = frozenset(
    {
        "-o",
        *("--data-parallel-address", "--data-parallel-rank", "--data-parallel-rpc-port"),
        *("--data-parallel-size-local", "--data-parallel-start-rank", "--headless"),
        *("--data-parallel-external-lb", "--data-parallel-hybrid-lb", "--api-server-count"),
        *("--nnodes", "--node-rank", "--master-addr", "--master-port"),
        *("--host", "--port", "--uds", "--root-path", "--allowed-origins"),
        *("--api-key", "--hf-token", "--deployment", "--run-dir", "--output", "--format"),
        *("--lang", "--python", "--stack", "--quiet", "--startup-timeout"),
    }
)
#: Variables of memprof itself, and ends of names that are addresses, places and devices of a host.
_OURS = "MEMPROF_"
_OF_NO_WEIGHT = (
    "VLLM_NO_USAGE_STATS",
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
    "VLLM_USE_MODELSCOPE",
)
_OF_ONE_HOST_ENDS = ("_IP", "_PORT", "_IFNAME", "_DEVICES", "_HOST", "_ADDR", "_KEY", "_TOKEN")
#: Paths that name the release of CANN; any other path is that of a host.
_PATHS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
#: Things that differ, and hosts of one value, that are named.
_NAMED, _NAMED_HOSTS = 12, 4


@finding_of_run(
    "hosts-differ",
    severity=WARNING,
    title=text("Hosts of one deployment were not set up alike"),
    needs=NOTHING,
)
def hosts_differ(context: Context) -> Iterator[Found]:
    """Find releases, devices, arguments and variables that differ between hosts.

    Meaning:
        The hosts of a deployment serve with the smallest KV cache of all ranks. A host with another
        release, device or setting may hold more outside its KV cache, or be granted less, and the
        others wait for it. Releases that differ may also refuse to talk to each other.

    Computed:
        Of the run folders of a deployment, within each group: versions of packages, release of the
        engine, device and its total, arguments and variables that bear on memory. Addresses, ports,
        paths, ranks and names of a host are left out; of paths only that of CANN counts
        (`ASCEND_HOME_PATH`). The version of the driver is not recorded.

    To do:
        Give every host the same releases and the same arguments; what differs is in the evidence.
    """
    runs = context.run.parts
    if len(runs) < 2:
        return
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    differing = [name for name in names if len({each.get(name) for each in facts}) > 1]
    if not differing:
        return
    said = [_said(name, runs, facts) for name in differing[:_NAMED]]
    if len(differing) > _NAMED:
        said.append(text("and {count} more", count=len(differing) - _NAMED))
    yield Found(join("; ", said))


def _said(name: str, runs: Sequence[Run], facts: Sequence[dict[str, str]]) -> str:
    """Return one thing that differs, with the hosts of each value."""
    hosts: dict[str | None, list[str]] = {}
    for run, each in zip(runs, facts, strict=True):
        hosts.setdefault(each.get(name), []).append(run.info.host or run.folder.name)
    values = []
    for value, members in hosts.items():
        places = ", ".join(members[:_NAMED_HOSTS])
        if len(members) > _NAMED_HOSTS:
            places = f"{places}, +{len(members) - _NAMED_HOSTS}"
        shown = text("none") if value is None else value
        values.append(text("{value} on {hosts}", value=shown, hosts=places))
    return text("{name}: {values}", name=name, values=join(", ", values))


def _facts(run: Run) -> dict[str, str]:
    """Return what a host was set up with, by name."""
    info = run.info
    found = dict(sorted(run.versions.items()))
    given = {
        "model": info.model,
        "engine": engine_name(info),
        "device": next(
            (each.identity.soc for each in run.processes if each.identity.soc), info.device
        ),
    }
    found |= {name: value for name, value in given.items() if value}
    totals = [
        total
        for each in run.processes
        if each.is_worker
        for total in [first_device_total(each.phases)]
        if total is not None
    ]
    if totals:
        found["device total"] = text("{total:bytes} bytes", total=min(totals))
    found |= {
        name: value for name, value in given_options(info.command) if name not in _OF_ONE_HOST
    }
    found |= {
        name: value
        for name, value in sorted(info.env.items())
        if not name.startswith(_OURS)
        and name not in _OF_NO_WEIGHT
        and not name.endswith(_OF_ONE_HOST_ENDS)
        and (name in _PATHS or not value.startswith("/"))
    }
    return found
