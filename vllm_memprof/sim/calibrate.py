"""A device profile from what a run held: the simulation learns from hardware.

In: who held what at every phase edge of one rank (`RankFacts`, filled from the ledger by the command), a base profile.
Out: the text of a profile in which every value names its source. What the run does not tell keeps the base's value and
says so. Runs in the launcher's process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_memprof.errors import RunRecordError

#: ATB's own default and least number of tiling buffers; a profile's ``atb_pool_bytes`` is for so many.
_ATB_BLOCKS = 32
#: torch_npu asks for 32 bytes more than an operator wants, and its workspace blocks are whole pages of 2 MiB.
#: (NPUWorkspaceAllocator.cpp)
_WORKSPACE_PADDING = 32
_MIB = 1 << 20


@dataclass(frozen=True)
class Moment:
    """Who held what at an edge of a phase, bytes by owner as in ``report.json``'s ``device_memory``."""

    phase: str
    edge: str  # before | after
    rows: dict[str, int | None]
    how: dict[str, str]  # owner -> measured | inferred | modelled
    streams: tuple[int, ...] = ()  # operator workspace by stream, the largest first

    def known(self, owner: str) -> int:
        """Bytes of an owner, 0 where it is not listed or unknown."""
        return self.rows.get(owner) or 0

    def counted(self) -> int:
        """What the runtime's counters show that is neither the application's, HCCL's nor a captured graph's."""
        return sum(
            size or 0
            for owner, size in self.rows.items()
            if owner == "runtime" or owner.startswith("cann_")
        )


@dataclass(frozen=True)
class RankFacts:
    """What one rank's record tells."""

    label: str
    device_total_bytes: int | None
    moments: list[Moment] = field(default_factory=list)  # in time
    communicators: list[int | None] = field(
        default_factory=list
    )  # configured bytes of each that had a collective
    graphs: int | None = None  # captured graphs
    task_queue_level: int = 1  # TASK_QUEUE_ENABLE
    atb_blocks: int = _ATB_BLOCKS  # ATB_DEVICE_TILING_BUFFER_BLOCK_NUM


@dataclass(frozen=True)
class Setting:
    """A value of the profile that the run tells."""

    key: str
    value: int
    source: str  # phase, measured | inferred | modelled


@dataclass(frozen=True)
class Calibration:
    """What a run tells about its device, and why it does not tell the rest."""

    settings: list[Setting]
    silent: dict[str, str]  # key -> why the base's value stays
    workspace: list[Setting]  # key: the glob of the operators; empty: the run had none


def calibrate(rank: RankFacts) -> Calibration:
    """Everything that one rank's record tells.

    Raises:
        RunRecordError: no phase edge has a figure of the context: nothing outside torch was read.
    """
    first = next(
        (moment for moment in rank.moments if moment.rows.get("context") is not None), None
    )
    if first is None:
        raise RunRecordError(
            f"{rank.label} has no reading of memory outside torch: there is nothing to calibrate from",
            "runs of memprof offline, serve and plan on an Ascend or simulated device have it; run again",
        )
    settings: list[Setting] = []
    silent: dict[str, str] = {}
    for found in (_device, _context, _kernels, _communicators, _atb, _graphs):
        for result in found(rank, first):
            if isinstance(result, Setting):
                settings.append(result)
            else:
                silent[result[0]] = result[1]
    return Calibration(settings, silent, _workspace(rank))


Found = Iterator[Setting | tuple[str, str]]


def _source(rank: RankFacts, moment: Moment, owner: str, note: str = "") -> str:
    text = f"{moment.how.get(owner, 'measured')}: {rank.label}, {moment.edge} {moment.phase}"
    return f"{text}, {note}" if note else text


def _device(rank: RankFacts, first: Moment) -> Found:
    if rank.device_total_bytes is not None:
        yield Setting("total_bytes", rank.device_total_bytes, f"measured: {rank.label}")


def _context(rank: RankFacts, first: Moment) -> Found:
    """All that a process holds before it does anything; the runtime's counters show a part of it."""
    runtime = first.counted()
    note = "with what the runtime counts" if runtime else ""
    yield Setting(
        "context_bytes", first.known("context") + runtime, _source(rank, first, "context", note)
    )
    if first.rows.get("runtime") is None:
        yield "context_runtime_bytes", "the run has no counters by module"
        return
    yield Setting("context_runtime_bytes", runtime, _source(rank, first, "runtime"))


def _kernels(rank: RankFacts, first: Moment) -> Found:
    """Growth of the runtime's counters beside captured graphs."""
    if first.rows.get("runtime") is None:
        yield "kernels_bytes", "the run has no counters by module"
        return
    most = max(rank.moments, key=Moment.counted)
    grown = most.counted() - first.counted()
    yield Setting(
        "kernels_bytes", grown, _source(rank, most, "runtime", "growth since the first reading")
    )


def _communicators(rank: RankFacts, first: Moment) -> Found:
    """What the communicators held beyond the buffers that they are configured with."""
    yield "hccl_buffer_mib", "the run's communicators say their own sizes"
    yield "hccl_buffers", "the run tells buffers only together"
    held = [(moment, sum(size or 0 for size in _named(moment).values())) for moment in rank.moments]
    most, total = max(held, key=lambda pair: pair[1])
    configured = [size for size in rank.communicators if size is not None]
    if total == 0:
        yield "hccl_base_bytes", "no communicator of the run took memory"
    elif len(configured) < len(rank.communicators) or sum(configured) > total:
        yield "hccl_base_bytes", "the sizes of the run's communicators are not known"
    else:
        count = f"{len(configured)} communicator{'s' if len(configured) > 1 else ''}"
        note = f"{count} less {sum(configured) // _MIB} MiB of buffers"
        owner = next(iter(_named(most)))
        yield Setting("hccl_base_bytes", total - sum(configured), _source(rank, most, owner, note))


def _named(moment: Moment) -> dict[str, int | None]:
    return {owner: size for owner, size in moment.rows.items() if owner.startswith("communicator")}


def _atb(rank: RankFacts, first: Moment) -> Found:
    most = max(rank.moments, key=lambda moment: moment.known("atb"))
    if not most.known("atb"):
        yield "atb_pool_bytes", "no pool of ATB was seen in the run"
        return
    blocks = (
        ""
        if rank.atb_blocks == _ATB_BLOCKS
        else f"{rank.atb_blocks} blocks; here for {_ATB_BLOCKS}"
    )
    size = most.known("atb") // rank.atb_blocks * _ATB_BLOCKS
    yield Setting("atb_pool_bytes", size, _source(rank, most, "atb", blocks))


def _graphs(rank: RankFacts, first: Moment) -> Found:
    most = max(rank.moments, key=lambda moment: moment.known("graph"))
    if not most.known("graph"):
        yield (
            "graph_capture_bytes",
            "the run captured no graph, or none that cost anything outside torch",
        )
    elif not rank.graphs:
        yield "graph_capture_bytes", "the run does not say how many graphs it captured"
    else:
        note = f"{rank.graphs} graph{'s' if rank.graphs > 1 else ''}"
        yield Setting(
            "graph_capture_bytes",
            most.known("graph") // rank.graphs,
            _source(rank, most, "graph", note),
        )


def _workspace(rank: RankFacts) -> list[Setting]:
    """Workspace outside the caching allocator: of all operators at level 2 of the task queue, else of ATB's.

    (torch_npu OpPreparation.cpp, op_plugin atb.) Which operator asked for it a run does not tell, but for one: ATB's
    warm-up runs its linear operator, and nothing else. What the largest stream held elsewhere stands for all others.
    """
    if rank.task_queue_level == 2:
        return _largest_stream(rank, rank.moments, "*")
    warm_up = next(
        (at for at, moment in enumerate(rank.moments) if moment.phase == "atb_warm_up"), None
    )
    if warm_up is None:
        return _largest_stream(rank, rank.moments, "Atb*")
    before, after = rank.moments[: warm_up + 1], rank.moments[warm_up + 1 :]
    # Where the phase ends its operator may still be in torch_npu's task queue; not so where the warm-up around it ends.
    ended = [moment for moment in after[:2] if moment.phase in ("atb_warm_up", "warm_up")]
    if max((moment.known("npu_workspace") for moment in ended), default=0) <= before[-1].known(
        "npu_workspace"
    ):
        return _largest_stream(rank, rank.moments, "Atb*")
    linear = _largest_stream(rank, ended, "AtbLinear")
    later = _largest_stream(rank, after, "Atb*")
    if later[0].value > linear[0].value:
        return [*linear, *later]
    if any(moment.known("atb") for moment in before):  # others ran before
        none = Setting(
            "Atb*", 0, _source(rank, before[-1], "npu_workspace", "none until ATB's warm-up")
        )
        return [*linear, *(_largest_stream(rank, before, "Atb*") or [none])]
    return linear


def _largest_stream(rank: RankFacts, moments: list[Moment], pattern: str) -> list[Setting]:
    most = max(moments, key=lambda moment: moment.known("npu_workspace"))
    total = most.known("npu_workspace")
    if not total:
        return []
    streams = most.streams or (total,)
    notes = [f"the largest of {len(streams)} streams"] if len(streams) > 1 else []
    note = ", ".join([*notes, "TASK_QUEUE_ENABLE=2"] if pattern == "*" else notes)
    return [
        Setting(
            pattern, streams[0] - _WORKSPACE_PADDING, _source(rank, most, "npu_workspace", note)
        )
    ]


_LINE = re.compile(r"^(?P<key>\w+|\"[^\"]+\") *= *(?P<value>[^#]*?) *(?:# *(?P<comment>.*))?$")


def render(calibration: Calibration, base_name: str, base_text: str, name: str, run: str) -> str:
    """The profile as text: the base's, with the run's values in the place of its own.

    Args:
        calibration: what the run tells.
        base_name: name of the base profile.
        base_text: its file's text.
        name: of the profile that is made.
        run: the run, in words.
    """
    settings = {setting.key: setting for setting in calibration.settings}
    lines = [
        f"# Written by memprof sim calibrate from {run}.",
        f'# Each line names its source; "from {base_name}": the run does not tell, the value is that profile\'s.',
    ]
    section = ""
    for line in base_text.splitlines():
        if line.startswith("#") or not line.strip():
            if not line.strip():
                lines.append("")
            continue
        header = re.match(r"^\[(\w+)\]", line)
        if header:
            section = header.group(1)
            lines.append(f"[{section}]")
            lines += _head(section, name, run)
            if section == "workspace":
                lines += [_workspace_line(setting) for setting in calibration.workspace]
            continue
        found = _LINE.match(line)
        if found is None or section == "profile":
            continue
        key = found["key"].strip('"')
        if section == "workspace" and any(
            fnmatchcase(key, setting.key) for setting in calibration.workspace
        ):
            continue
        lines.append(_line(found, settings.get(key), calibration.silent.get(key), base_name))
    return "\n".join(lines).rstrip("\n") + "\n"


def _head(section: str, name: str, run: str) -> list[str]:
    if section != "profile":
        return []
    title = run.replace("\\", "/").replace('"', "'")
    return [f'name = "{name}"', "aliases = []", f'title = "as in {title}"']


def _line(found: re.Match[str], setting: Setting | None, why: str | None, base_name: str) -> str:
    if setting is not None:
        value, comment = f"{setting.value:_}", setting.source
    else:
        value = found["value"]
        comment = "; ".join(part for part in (f"from {base_name}", why, found["comment"]) if part)
    return _commented(f"{found['key']} = {value}", comment)


def _workspace_line(setting: Setting) -> str:
    shared = "; for all these operators alike" if "*" in setting.key else ""
    return _commented(f'"{setting.key}" = {setting.value:_}', setting.source + shared)


def _commented(text: str, comment: str) -> str:
    return f"{text:<34} # {comment}" if comment else text


def profile_name(path: Path) -> str:
    """A name for a profile from the name of its file."""
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).strip("-") or "calibrated"
