"""A device profile from a recorded run: the simulation learns from hardware.

In: memory by owner at every phase edge of one rank (`RankFacts`, filled from the report by the
command), a base profile. Out: the text of a profile in which every value names its source. A value
that the run does not tell is the base's and says so. Runs in the launcher's process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_memprof.errors import RunRecordError

#: ATB's own default and least number of tiling buffers; ``atb_pool_bytes`` is for so many.
_ATB_BLOCKS = 32
#: torch_npu asks for 32 bytes more than an operator wants, and its workspace blocks are whole pages
#: of 2 MiB. (NPUWorkspaceAllocator.cpp)
_WORKSPACE_PADDING = 32
_MIB = 1 << 20


@dataclass(frozen=True)
class EdgeMemory:
    """Device memory at an edge of a phase: bytes by owner, as ``device_memory`` of report.json."""

    phase: str
    edge: str  # before | after
    rows: dict[str, int | None]
    how: dict[str, str]  # owner -> measured | derived | modelled
    streams: tuple[int, ...] = ()  # operator workspace by stream, the largest first

    def known(self, owner: str) -> int:
        """Return the bytes of an owner, 0 where it is not listed or unknown."""
        return self.rows.get(owner) or 0

    def runtime(self) -> int:
        """Return the bytes in counters of the runtime, without captured graphs."""
        owners = [name for name in self.rows if name == "runtime" or name.startswith("cann_")]
        return sum(self.known(owner) for owner in owners)

    def communicators(self) -> dict[str, int]:
        """Return the bytes of each communicator, and of those without a name."""
        return {name: self.known(name) for name in self.rows if name.startswith("communicator")}


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank's record."""

    label: str
    device_total_bytes: int | None
    edges: list[EdgeMemory] = field(default_factory=list)  # in time
    #: Configured bytes of each communicator that had a collective.
    communicators: list[int | None] = field(default_factory=list)
    graphs: int | None = None  # captured graphs
    task_queue_level: int = 1  # TASK_QUEUE_ENABLE
    atb_blocks: int = _ATB_BLOCKS  # ATB_DEVICE_TILING_BUFFER_BLOCK_NUM

    def largest(self, owner: str) -> EdgeMemory:
        """Return the edge at which an owner held most."""
        return max(self.edges, key=lambda edge: edge.known(owner))

    def source(self, edge: EdgeMemory, owner: str, note: str = "") -> str:
        """Return how and where a figure was read."""
        text = f"{edge.how.get(owner, 'measured')}: {self.label}, {edge.edge} {edge.phase}"
        return f"{text}, {note}" if note else text


@dataclass(frozen=True)
class Setting:
    """A value of the profile that the run tells."""

    key: str
    value: int
    source: str  # phase, measured | derived | modelled


@dataclass(frozen=True)
class Calibration:
    """The values that a run tells about its device, and why it does not tell the others."""

    settings: list[Setting] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)  # key -> why the base's value stays
    #: Key: the glob of the operators. Empty: the run had none.
    workspace: list[Setting] = field(default_factory=list)


def calibrate(rank: RankFacts) -> Calibration:
    """Return everything that one rank's record tells.

    Raises:
        RunRecordError: no phase edge has a figure of the context: nothing outside torch was read.
    """
    first = next((edge for edge in rank.edges if edge.rows.get("context") is not None), None)
    if first is None:
        raise RunRecordError(
            f"{rank.label} has no reading of memory outside torch: "
            "there is nothing to calibrate from",
            "runs of memprof offline, serve and plan on an Ascend or simulated device have it; "
            "run again",
        )
    facts = [*_runtime(rank, first), *_communicators(rank), *_atb(rank), *_graphs(rank)]
    if rank.device_total_bytes is not None:
        facts.insert(0, ("total_bytes", rank.device_total_bytes, f"measured: {rank.label}"))
    return Calibration(
        [Setting(key, value, source) for key, value, source in facts if value is not None],
        {key: why for key, value, why in facts if value is None},
        _workspace(rank),
    )


#: Key, value and source; or key, None and the reason why the base's value stays.
Facts = Iterator[tuple[str, "int | None", str]]


def _runtime(rank: RankFacts, first: EdgeMemory) -> Facts:
    """Read the context, held before a process does anything, and the kernels loaded since then."""
    runtime = first.runtime()
    note = "with what the runtime counts" if runtime else ""
    context = first.known("context") + runtime
    yield "context_bytes", context, rank.source(first, "context", note)
    yield "further_context_bytes", None, "a rank's own context is the first of its device"
    if first.rows.get("runtime") is None:
        for key in ("context_runtime_bytes", "kernels_bytes"):
            yield key, None, "the run has no counters by module"
        return
    yield "context_runtime_bytes", runtime, rank.source(first, "runtime")
    most = max(rank.edges, key=EdgeMemory.runtime)
    source = rank.source(most, "runtime", "growth since the first reading")
    yield "kernels_bytes", most.runtime() - runtime, source


def _communicators(rank: RankFacts) -> Facts:
    """Read what the communicators held beyond the buffers that they are configured with."""
    yield "hccl_buffer_mib", None, "the run's communicators say their own sizes"
    yield "hccl_buffers", None, "the run tells buffers only together"
    key, most = "hccl_base_bytes", max(rank.edges, key=lambda e: sum(e.communicators().values()))
    total = sum(most.communicators().values())
    configured = [size for size in rank.communicators if size is not None]
    if total == 0:
        yield key, None, "no communicator of the run took memory"
    elif len(configured) < len(rank.communicators) or sum(configured) > total:
        yield key, None, "the sizes of the run's communicators are not known"
    else:
        count = f"{len(configured)} communicator{'s' if len(configured) > 1 else ''}"
        note = f"{count} less {sum(configured) // _MIB} MiB of buffers"
        source = rank.source(most, next(iter(most.communicators())), note)
        yield key, (total - sum(configured)) // len(configured), source


def _atb(rank: RankFacts) -> Facts:
    key, most = "atb_pool_bytes", rank.largest("atb")
    if not most.known("atb"):
        yield key, None, "no pool of ATB was seen in the run"
        return
    other = rank.atb_blocks != _ATB_BLOCKS
    note = f"{rank.atb_blocks} blocks; here for {_ATB_BLOCKS}" if other else ""
    size = most.known("atb") // rank.atb_blocks * _ATB_BLOCKS
    yield key, size, rank.source(most, "atb", note)


def _graphs(rank: RankFacts) -> Facts:
    key, most = "graph_capture_bytes", rank.largest("graph")
    if not most.known("graph"):
        yield key, None, "the run captured no graph, or none that cost anything outside torch"
    elif not rank.graphs:
        yield key, None, "the run does not say how many graphs it captured"
    else:
        note = f"{rank.graphs} graph{'s' if rank.graphs > 1 else ''}"
        yield key, most.known("graph") // rank.graphs, rank.source(most, "graph", note)
        for part in ("graph_argument_bytes", "graph_queue_bytes"):
            yield part, 0, f"within {key}: the run tells graphs only together"


def _workspace(rank: RankFacts) -> list[Setting]:
    """Read workspace outside the caching allocator: of all operators at level 2, else of ATB's.

    (Level of the task queue: torch_npu OpPreparation.cpp, op_plugin atb.) A run does not tell which
    operator asked for it, but for one: ATB's warm-up runs its linear operator, and nothing else.
    The largest stream held elsewhere stands for all others.
    """
    if rank.task_queue_level == 2:
        return _largest_stream(rank, rank.edges, "*")
    phases = [edge.phase for edge in rank.edges]
    if "atb_warm_up" not in phases:
        return _largest_stream(rank, rank.edges, "Atb*")
    warm_up = phases.index("atb_warm_up")
    before, after = rank.edges[: warm_up + 1], rank.edges[warm_up + 1 :]
    # Where the phase ends its operator may still be in torch_npu's task queue; not so where the
    # warm-up around it ends.
    ended = [edge for edge in after[:2] if edge.phase in ("atb_warm_up", "warm_up")]
    most = max((edge.known("npu_workspace") for edge in ended), default=0)
    if most <= before[-1].known("npu_workspace"):
        return _largest_stream(rank, rank.edges, "Atb*")
    linear = _largest_stream(rank, ended, "AtbLinear")
    later = _largest_stream(rank, after, "Atb*")
    if later[0].value > linear[0].value:
        return [*linear, *later]
    if any(edge.known("atb") for edge in before):  # others ran before
        source = rank.source(before[-1], "npu_workspace", "none until ATB's warm-up")
        return [*linear, *(_largest_stream(rank, before, "Atb*") or [Setting("Atb*", 0, source)])]
    return linear


def _largest_stream(rank: RankFacts, edges: list[EdgeMemory], pattern: str) -> list[Setting]:
    most = max(edges, key=lambda edge: edge.known("npu_workspace"))
    total = most.known("npu_workspace")
    if not total:
        return []
    streams = most.streams or (total,)
    notes = [f"the largest of {len(streams)} streams"] if len(streams) > 1 else []
    notes += ["TASK_QUEUE_ENABLE=2"] if pattern == "*" else []
    source = rank.source(most, "npu_workspace", ", ".join(notes))
    return [Setting(pattern, streams[0] - _WORKSPACE_PADDING, source)]


_LINE = re.compile(r"^(?P<key>\w+|\"[^\"]+\") *= *(?P<value>[^#]*?) *(?:# *(?P<comment>.*))?$")


def render(
    calibration: Calibration,
    base_name: str,
    base_text: str,
    name: str,
    run: str,
    by: str = "memprof sim calibrate",
) -> str:
    """Return the profile as text: the base's, with the run's values in the place of its own.

    Args:
        calibration: what the run tells.
        base_name: name of the base profile.
        base_text: its file's text.
        name: of the profile that is made.
        run: the run, in words.
        by: the command that writes it.
    """
    settings = {setting.key: setting for setting in calibration.settings}
    title = run.replace("\\", "/").replace('"', "'")
    lines = [
        f"# Written by {by} from {run}.",
        f'# Each line names its source; "from {base_name}": '
        "the run does not tell, the value is that profile's.",
    ]
    section = ""
    for line in base_text.splitlines():
        if not line.strip():
            lines.append("")
        elif header := re.match(r"^\[(\w+)\]", line):
            section = header.group(1)
            lines.append(f"[{section}]")
            if section == "profile":
                lines += [f'name = "{name}"', "aliases = []", f'title = "as in {title}"']
            elif section == "workspace":
                for setting in calibration.workspace:
                    shared = "; for all these operators alike" if "*" in setting.key else ""
                    text = f'"{setting.key}" = {setting.value:_}'
                    lines.append(_commented(text, setting.source + shared))
        elif section != "profile" and (row := _LINE.match(line)):
            key = row["key"].strip('"')
            if section == "workspace" and any(
                fnmatchcase(key, setting.key) for setting in calibration.workspace
            ):
                continue
            if told := settings.get(key):
                lines.append(_commented(f"{row['key']} = {told.value:_}", told.source))
            else:
                parts = (f"from {base_name}", calibration.silent.get(key), row["comment"])
                comment = "; ".join(part for part in parts if part)
                lines.append(_commented(f"{row['key']} = {row['value']}", comment))
    return "\n".join(lines).rstrip("\n") + "\n"


def _commented(text: str, comment: str) -> str:
    return f"{text:<34} # {comment}" if comment else text


def profile_name(path: Path) -> str:
    """Return a name for a profile from the name of its file."""
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).strip("-") or "calibrated"
