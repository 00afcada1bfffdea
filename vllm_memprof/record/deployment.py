"""Several run folders as one deployment: paths enter, loaded runs and named gaps leave.

A folder that cannot be read, that was given twice, or that no folder was given for is a gap: it is
named, and the rest is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.files import reading
from vllm_memprof.record.codec import one_of
from vllm_memprof.record.loader import Run, load_run
from vllm_memprof.record.schema import EVENTS_DIR, RUN_FILE, DeploymentPart
from vllm_memprof.text import spans

#: Two run folders of one host name whose clocks are further apart are of two hosts.
_SAME_CLOCK_NS = 60 * 10**9

GapKind = Annotated[str, one_of("no_folder", "unreadable", "given_twice", "truncated", "no_rank")]


@dataclass(frozen=True)
class Gap:
    """Something that the deployment should have and that the report lacks."""

    kind: GapKind
    name: str  # of the folder or of what has none, e.g. node rank 1
    reason: str = ""  # "" where the kind says it all
    group: str | None = None


@dataclass(frozen=True)
class Parts:
    """The run folders of one deployment that can be read, and what is missing."""

    name: str | None
    runs: list[Run]  # of each group together, the first host of it first
    gaps: list[Gap] = field(default_factory=list)


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders that a folder holds, by name; none of one that is a run itself."""

    def is_run(path: Path) -> bool:
        return (path / RUN_FILE).exists() or (path / EVENTS_DIR).is_dir()

    with reading(folder):
        return [] if is_run(folder) else sorted(filter(is_run, folder.iterdir()))


def load_parts(folders: Sequence[Path], name: str | None = None, named: bool = True) -> Parts:
    """Load run folders that are one deployment.

    Args:
        folders: in the order in which they were given.
        name: of the deployment, where the folders hold several.
        named: a person named each folder, so that one that says nothing of a deployment belongs to
            it; of those that a search found it does not.

    Raises:
        RunRecordError: none of them can be read.
        UsageError: they hold several deployments and no name says which, or none of that name.
    """
    gaps: list[Gap] = []
    problems: list[RunRecordError] = []
    seen: dict[str, Run] = {}
    for folder in folders:
        try:
            run = load_run(folder)
        except RunRecordError as error:
            problems.append(error)
            gaps.append(Gap("unreadable", str(folder), error.message))
            continue
        if run is not seen.setdefault(run.info.id, run):
            reason = f"the run of {seen[run.info.id].folder}"
            gaps.append(Gap("given_twice", str(folder), reason))

    def deployment_of(run: Run) -> str | None:
        said = None if run.info.part is None else run.info.part.deployment
        return said if said is not None or named else run.folder.name

    found = dict.fromkeys(each for each in map(deployment_of, seen.values()) if each is not None)
    if name is not None and found and name not in found:
        hint = f"--deployment {' or '.join(sorted(found))}"
        raise UsageError(f"no run folder is of the deployment {name!r}", hint=hint)
    if name is None and len(found) > 1:
        names = ", ".join(sorted(found)[:8]) + (", ..." if len(found) > 8 else "")
        what = f"the run folders are of {len(found)} deployments: {names}"
        raise UsageError(what, hint="--deployment NAME takes one of them")
    runs = [run for run in seen.values() if name is None or deployment_of(run) in (name, None)]
    if not runs:
        raise problems[0]
    groups = sorted(
        dict.fromkeys(run.info.group for run in runs), key=lambda each: each != "prefill"
    )

    def place(run: Run) -> tuple[int, bool, int, int]:  # that the arguments give it in its group
        at = run.info.part or DeploymentPart(None, "arguments")
        return groups.index(run.info.group), at.headless, at.node_rank or 0, at.dp_start or 0

    runs = _apart(sorted(runs, key=place))
    for run in runs:
        if run.truncated:
            reason = "; ".join(run.notes) or "events are missing"
            gaps.append(Gap("truncated", str(run.folder), reason, run.info.group))
        if not run.workers:
            reason = run.info.exit_reason or ""
            gaps.append(Gap("no_rank", str(run.folder), reason, run.info.group))
    return Parts(name or next(iter(found), None), runs, gaps + _missing(runs))


def _missing(runs: Sequence[Run]) -> list[Gap]:
    """Return the hosts and engine cores that the arguments promise and that no folder is of."""
    gaps: list[Gap] = []
    groups: dict[str | None, list[DeploymentPart]] = {}
    for part in (run.info.part for run in runs):
        if part is not None:
            groups.setdefault(part.group, []).append(part)
    for group, parts in groups.items():
        nodes = max(part.nodes or 1 for part in parts)
        absent = set(range(nodes)) - {part.node_rank or 0 for part in parts}
        if nodes > 1 and absent:
            gaps.append(Gap("no_folder", f"node rank {spans(absent)} of {nodes}", "", group))
        size = max(part.dp_size or 1 for part in parts)
        cores: set[int] = set()
        for part in parts:
            if part.dp_start is None or part.dp_local is None:
                cores |= set(range(size))  # which run here is not said
            else:
                cores |= set(range(part.dp_start, part.dp_start + part.dp_local))
        if nodes == 1 and size > 1 and (absent := set(range(size)) - cores):
            name = f"data-parallel rank {spans(absent)} of {size}"
            gaps.append(Gap("no_folder", name, "", group))
    return gaps


def wall_of(run: Run, host: str | None) -> int | None:
    """Return how far wall time is ahead of a host's monotonic clock, ns; None: not recorded."""
    read = [
        int(process.wall * 1e9) - process.t_ns
        for process in run.processes
        if process.identity.host == host and process.wall is not None and process.t_ns is not None
    ]
    return int(median(read)) if read else None


def _apart(runs: Sequence[Run]) -> list[Run]:
    """Return runs whose hosts have names of their own: one name of two clocks is of two hosts."""
    clocks: dict[str | None, list[int]] = {}
    found = []
    for run in runs:
        names: dict[str | None, str] = {}
        for host in {each.identity.host for each in run.processes}:
            ahead = wall_of(run, host)
            if ahead is None:
                continue
            known = clocks.setdefault(host, [])
            if known and all(abs(ahead - other) > _SAME_CLOCK_NS for other in known):
                names[host] = f"{host} ({run.folder.name})"
            known.append(ahead)
        processes = [
            replace(each, identity=replace(who, host=names.get(who.host, who.host)))
            for each in run.processes
            for who in (each.identity,)
        ]
        info = replace(run.info, host=names.get(run.info.host, run.info.host))
        found.append(replace(run, info=info, processes=processes))
    return found
