"""Several run folders as one deployment: paths enter, loaded runs and named gaps leave.

A folder that cannot be read, that was given twice, or that no folder was given for is a gap: it is
named, and the rest is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from vllm_memprof.errors import RunRecordError, UsageError
from vllm_memprof.record.codec import Allowed
from vllm_memprof.record.loader import ProcessRecord, Run, load_info, load_run
from vllm_memprof.record.schema import EVENTS_DIR, RUN_FILE, DeploymentPart
from vllm_memprof.text import spans

#: Two run folders of one host name whose clocks are further apart are of two hosts.
_SAME_CLOCK_NS = 60 * 10**9

GapKind = Annotated[
    str, Allowed(("no_folder", "unreadable", "given_twice", "truncated", "no_rank"))
]


@dataclass(frozen=True)
class Gap:
    """Something that the deployment should have and that the report lacks."""

    kind: GapKind
    name: str  # of the folder or of what has none, e.g. node rank 1
    reason: str = ""  # "" where the kind says it all
    group: str | None = None


@dataclass(frozen=True)
class Part:
    """One run folder of a deployment."""

    folder: Path
    run: Run

    @property
    def place(self) -> DeploymentPart | None:
        return self.run.info.part

    @property
    def group(self) -> str | None:
        return self.run.info.group


@dataclass(frozen=True)
class Parts:
    """The run folders of one deployment that can be read, and what is missing."""

    name: str | None
    parts: list[Part]  # of each group together, the first host of it first
    gaps: list[Gap] = field(default_factory=list)


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders that a folder holds, by name; none of one that is a run itself."""
    if (folder / RUN_FILE).exists() or (folder / EVENTS_DIR).is_dir():
        return []
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as exc:
        raise RunRecordError(f"cannot list {folder}: {exc.strerror}") from exc
    return [path for path in inside if (path / RUN_FILE).exists() or (path / EVENTS_DIR).is_dir()]


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
    chosen: list[Path] = []
    found: dict[str, str] = {}  # deployment -> the folder that was seen first
    problems: list[RunRecordError] = []
    seen: dict[str, Path] = {}
    for folder in folders:
        try:
            info = load_info(folder)
        except RunRecordError as error:
            problems.append(error)
            gaps.append(Gap("unreadable", str(folder), error.message))
            continue
        if info.id in seen:
            gaps.append(Gap("given_twice", str(folder), f"the run of {seen[info.id]}"))
            continue
        seen[info.id] = folder
        deployment = None if info.part is None else info.part.deployment
        if deployment is None and not named:
            deployment = folder.name
        if deployment is not None:
            found.setdefault(deployment, str(folder))
        if name is None or deployment == name or (deployment is None and named):
            chosen.append(folder)
    if name is not None and found and name not in found:
        hint = f"--deployment {' or '.join(sorted(found))}"
        raise UsageError(f"no run folder is of the deployment {name!r}", hint=hint)
    if name is None and len(found) > 1:
        names = ", ".join(sorted(found)[:8]) + (", ..." if len(found) > 8 else "")
        what = f"the run folders are of {len(found)} deployments: {names}"
        raise UsageError(what, hint="--deployment NAME takes one of them")
    parts = []
    for folder in chosen:
        try:
            parts.append(Part(folder, load_run(folder)))
        except RunRecordError as error:
            problems.append(error)
            gaps.append(Gap("unreadable", str(folder), error.message))
    if not parts:
        raise problems[0]
    parts = _ordered(_apart(parts))
    for part in parts:
        if part.run.truncated:
            reason = "; ".join(part.run.notes) or "events are missing"
            gaps.append(Gap("truncated", str(part.folder), reason, part.group))
        if not any(process.is_worker for process in part.run.processes):
            reason = part.run.info.exit_reason or ""
            gaps.append(Gap("no_rank", str(part.folder), reason, part.group))
    known = name or next(iter(found), None)
    return Parts(known, parts, gaps + _missing(parts))


def _ordered(parts: Iterable[Part]) -> list[Part]:
    """Return parts by group, within it by the place that the arguments give them."""
    listed = list(parts)
    groups = list(dict.fromkeys(part.group for part in listed))
    groups.sort(key=lambda group: group != "prefill")

    def place(part: Part) -> tuple[int, bool, int, int]:
        at = part.place
        return (
            groups.index(part.group),
            at is not None and at.headless,
            (at.node_rank or 0) if at is not None else 0,
            (at.dp_start or 0) if at is not None else 0,
        )

    return sorted(listed, key=place)


def _missing(parts: Sequence[Part]) -> list[Gap]:
    """Return the hosts and engine cores that the arguments promise and that no folder is of."""
    gaps: list[Gap] = []
    groups: dict[str | None, list[DeploymentPart]] = {}
    for part in parts:
        if part.place is not None:
            groups.setdefault(part.group, []).append(part.place)
    for group, places in groups.items():
        nodes = max((each.nodes or 1 for each in places), default=1)
        there = {each.node_rank or 0 for each in places}
        absent = sorted(set(range(nodes)) - there) if nodes > 1 else []
        if absent:
            gaps.append(Gap("no_folder", f"node rank {spans(absent)} of {nodes}", "", group))
        size = max((each.dp_size or 1 for each in places), default=1)
        ranges = [(each.dp_start, each.dp_local) for each in places]
        if nodes > 1 or size < 2 or any(None in each for each in ranges):
            continue
        cores = {start + i for start, local in ranges for i in range(local or 0)}  # type: ignore[operator]
        if absent := sorted(set(range(size)) - cores):
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


def _apart(parts: Sequence[Part]) -> list[Part]:
    """Return parts whose hosts have names of their own: one name of two clocks is of two hosts."""
    clocks: dict[str | None, list[int]] = {}
    found = []
    for part in parts:
        names: dict[str | None, str | None] = {}
        for host in dict.fromkeys(each.identity.host for each in part.run.processes):
            ahead = wall_of(part.run, host)
            if ahead is None:
                continue
            known = clocks.setdefault(host, [])
            if known and all(abs(ahead - other) > _SAME_CLOCK_NS for other in known):
                names[host] = f"{host} ({part.folder.name})"
            known.append(ahead)
        found.append(replace(part, run=_renamed(part.run, names)) if names else part)
    return found


def _renamed(run: Run, names: dict[str | None, str | None]) -> Run:
    def of(process: ProcessRecord) -> ProcessRecord:
        host = process.identity.host
        renamed = replace(process.identity, host=names.get(host, host))
        return replace(process, identity=renamed)

    info = replace(run.info, host=names.get(run.info.host, run.info.host))
    return replace(run, info=info, processes=[of(process) for process in run.processes])
