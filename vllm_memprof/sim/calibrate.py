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
#: Owners that are counters of the runtime, without captured graphs.
_RUNTIME = "runtime|cann_.*"
_WORKSPACE = "npu_workspace"
#: A line of a profile: a section, or a key.
_LINE = re.compile(
    r'\[(?P<section>\w+)\]|(?P<text>"?(?P<key>[\w* ]+?)"? *=[^#]*?) *(?:# *(?P<comment>.*))?$'
)
#: Key -> why no run tells it.
_NEVER_TOLD = {
    "further_context_bytes": "a rank's own context is the first of its device",
    "hccl_buffer_mib": "the run's communicators say their own sizes",
    "hccl_buffers": "the run tells buffers only together",
}


@dataclass(frozen=True)
class EdgeMemory:
    """Device memory at an edge of a phase: bytes by owner, as ``device_memory`` of report.json."""

    phase: str
    edge: str  # before | after
    rows: dict[str, int | None]
    how: dict[str, str]  # owner -> measured | derived | modelled
    streams: tuple[int, ...] = ()  # operator workspace by stream, the largest first

    def known(self, owners: str) -> int:
        """Return the bytes of the owners of a pattern, without those that are unknown."""
        return sum(size or 0 for name, size in self.rows.items() if re.fullmatch(owners, name))


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank's record."""

    label: str
    device_total_bytes: int | None
    edges: list[EdgeMemory]  # in time
    #: Configured bytes of each communicator that had a collective.
    communicators: list[int | None] = field(default_factory=list)
    graphs: int | None = None  # captured graphs
    task_queue_level: int = 1  # TASK_QUEUE_ENABLE
    atb_blocks: int = _ATB_BLOCKS  # ATB_DEVICE_TILING_BUFFER_BLOCK_NUM

    def largest(self, owners: str) -> tuple[EdgeMemory, int]:
        """Return the edge at which the owners of a pattern held most, and how much."""
        edge = max(self.edges, key=lambda edge: edge.known(owners))
        return edge, edge.known(owners)

    def source(self, edge: EdgeMemory, owners: str, *notes: str) -> str:
        """Return how and where a figure was read."""
        found = (how for name, how in edge.how.items() if re.fullmatch(owners, name))
        return ", ".join(
            [f"{next(found, 'measured')}: {self.label}, {edge.edge} {edge.phase}", *notes]
        )


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
    facts = [*_facts(rank, first)]
    return Calibration(
        [Setting(key, value, source) for key, value, source in facts if value is not None],
        {key: why for key, value, why in facts if value is None},
        _workspace(rank),
    )


def _facts(rank: RankFacts, first: EdgeMemory) -> Iterator[tuple[str, int | None, str]]:
    """Yield key, value and source; or key, None and the reason why the base's value stays.

    Args:
        rank: whose record is read.
        first: the first edge with a figure of the context.
    """
    if rank.device_total_bytes is not None:
        yield "total_bytes", rank.device_total_bytes, f"measured: {rank.label}"
    yield from ((key, None, why) for key, why in _NEVER_TOLD.items())

    # the context, held before a process does anything, and the kernels loaded since then
    runtime, (most, loaded) = first.known(_RUNTIME), rank.largest(_RUNTIME)
    notes = ["with what the runtime counts"] if runtime else []
    yield "context_bytes", first.known("context") + runtime, rank.source(first, "context", *notes)
    if first.rows.get("runtime") is None:
        for key in ("context_runtime_bytes", "kernels_bytes", "operator_binary_bytes"):
            yield key, None, "the run has no counters by module"
    else:
        yield "context_runtime_bytes", runtime, rank.source(first, _RUNTIME)
        source = rank.source(most, _RUNTIME, "growth since the first reading")
        yield "kernels_bytes", loaded - runtime, source
        yield "operator_binary_bytes", 0, rank.source(most, _RUNTIME, "in kernels_bytes")

    sizes, blocks = rank.communicators, rank.atb_blocks
    buffers = sum(size or 0 for size in sizes)
    for key, owners, less, count, factor, note, absent, unknown in (
        (
            "hccl_base_bytes",
            "communicator.*",
            buffers,  # that they are configured with
            0 if None in sizes else len(sizes),
            1,
            f"communicators: {len(sizes)}, less {buffers // _MIB} MiB of buffers",
            "no communicator of the run took memory",
            "the sizes of the run's communicators are not known",
        ),
        (
            "atb_pool_bytes",
            "atb",
            0,
            blocks,
            _ATB_BLOCKS,
            f"{blocks} blocks; here for {_ATB_BLOCKS}",
            "no pool of ATB was seen in the run",
            "",
        ),
        (
            "graph_capture_bytes",
            "graph",
            0,
            rank.graphs,
            1,
            f"graphs: {rank.graphs}; with their arguments and queues",
            "the run captured no graph, or none that cost anything outside torch",
            "the run does not say how many graphs it captured",
        ),
    ):
        most, held = rank.largest(owners)
        if not held:
            yield key, None, absent
        elif not count or less > held:
            yield key, None, unknown
        else:
            yield key, (held - less) // count * factor, rank.source(most, owners, note)
            if owners == "graph":
                for part in ("graph_argument_bytes", "graph_queue_bytes"):
                    yield part, 0, f"within {key}: the run tells graphs only together"


def _workspace(rank: RankFacts) -> list[Setting]:
    """Read workspace outside the caching allocator: of all operators at level 2, else of ATB's.

    (Level of the task queue: torch_npu OpPreparation.cpp, op_plugin atb.) A run does not tell which
    operator asked for it, but for one: ATB's warm-up runs its linear operator, and nothing else.
    The largest stream held elsewhere stands for all others.
    """
    pattern = "*" if rank.task_queue_level == 2 else "Atb*"
    phases = [edge.phase for edge in rank.edges]
    if pattern == "Atb*" and "atb_warm_up" in phases:
        start = phases.index("atb_warm_up") + 1
        before, after = rank.edges[:start], rank.edges[start:]
        # Where the phase ends its operator may still be in torch_npu's task queue; not so where the
        # warm-up around it ends.
        ended = [edge for edge in after[:2] if edge.phase in ("atb_warm_up", "warm_up")]
        most = max((edge.known(_WORKSPACE) for edge in ended), default=0)
        if most > before[-1].known(_WORKSPACE):
            linear = _largest_stream(rank, ended, "AtbLinear")
            later = _largest_stream(rank, after, pattern)
            if later[0].value > linear[0].value:
                return [*linear, *later]
            if any(edge.known("atb") for edge in before):  # others ran before
                source = rank.source(before[-1], _WORKSPACE, "none until ATB's warm-up")
                earlier = _largest_stream(rank, before, pattern)
                return [*linear, *(earlier or [Setting(pattern, 0, source)])]
            return linear
    return _largest_stream(rank, rank.edges, pattern)


def _largest_stream(rank: RankFacts, edges: list[EdgeMemory], pattern: str) -> list[Setting]:
    most = max(edges, key=lambda edge: edge.known(_WORKSPACE))
    total = most.known(_WORKSPACE)
    if not total:
        return []
    streams = most.streams or (total,)
    notes = [f"the largest of {len(streams)} streams"] if len(streams) > 1 else []
    notes += ["TASK_QUEUE_ENABLE=2"] if pattern == "*" else []
    source = rank.source(most, _WORKSPACE, *notes)
    return [Setting(pattern, streams[0] - _WORKSPACE_PADDING, source)]


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
    rows = [
        (f"# Written by {by} from {run}.", ""),
        (f'# Each line names its source; "from {base_name}": '
         "the run does not tell, the value is that profile's.", ""),
    ]  # fmt: skip
    section = ""
    for line in base_text.splitlines():
        match = _LINE.match(line)
        if match is None:
            rows += [] if line else [("", "")]
        elif match["section"]:
            section = match["section"]
            rows.append((f"[{section}]", ""))
            if section == "profile":
                parts = (f'name = "{name}"', "aliases = []", f'title = "as in {title}"')
                rows += [(part, "") for part in parts]
            elif section == "workspace":
                told = calibration.workspace
                rows += [(f'"{each.key}" = {each.value:_}', each.source) for each in told]
        elif section != "profile":
            key, text, own = match["key"], match["text"], match["comment"]
            if setting := settings.get(key):
                rows.append((f"{key} = {setting.value:_}", setting.source))
            elif section != "workspace" or not any(
                fnmatchcase(key, each.key) for each in calibration.workspace
            ):
                parts = (f"from {base_name}", calibration.silent.get(key, ""), own or "")
                rows.append((text, "; ".join(filter(None, parts))))
    lines = [f"{text:<34} # {comment}" if comment else text for text, comment in rows]
    return "\n".join(lines).rstrip("\n") + "\n"


def profile_name(path: Path) -> str:
    """Return a name for a profile from the name of its file."""
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).strip("-") or "calibrated"
