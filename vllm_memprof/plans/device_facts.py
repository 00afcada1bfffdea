"""What a recorded run says of its device and its command, for a profile or a plan made from it."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_memprof.accounting.model import RankReport, Report
from vllm_memprof.errors import RunRecordError
from vllm_memprof.record.schema import RunInfo
from vllm_memprof.record.spans import edges_of
from vllm_memprof.sim.calibrate import EdgeMemory, RankFacts
from vllm_memprof.sim.profiles import list_profiles

#: Beginning of a SoC name -> the profile of such devices.
_BY_SOC = {"Ascend910_93": "ascend910_93", "Ascend310P": "ascend310p", "Ascend910B": "ascend910b"}
_DEFAULT = "ascend910b"
#: Variables of a run that its figures depend on; the others of the record name places.
DECIDING = ("HCCL_", "P2P_HCCL_", "PYTORCH_NPU_", "TASK_QUEUE_", "ATB_", "VLLM_ASCEND_")


def engine_args_of(run: RunInfo) -> list[str]:
    """Return the arguments of the engine, without the model that it serves.

    Raises:
        RunRecordError: the run does not name them.
    """
    command = run.engine_command
    if "--" in command:
        return command[command.index("--") + 1 :]
    if "serve" in command:
        return command[command.index("serve") + 2 :]
    raise RunRecordError(f"the run {run.id} does not name the engine's arguments")


def base_of(run: RunInfo) -> str:
    """Return the name of the profile of a run's device; without a SoC name the default's."""
    if run.device_profile in {profile.name for profile in list_profiles()}:
        return run.device_profile or _DEFAULT
    return profile_of_soc(run.device) or _DEFAULT


def profile_of_soc(device: str | None) -> str | None:
    """Return the name of the profile of a SoC; None: another device, or none is named."""
    return next((name for soc, name in _BY_SOC.items() if (device or "").startswith(soc)), None)


def best_rank(report: Report) -> RankReport:
    """Return the first rank with non-torch readings, if possible one alone on its device.

    Raises:
        RunRecordError: none has them.
    """

    def sizes(rank: RankReport, owner: str) -> list[int | None]:
        rows = (row for _, e in edges_of(rank.phases) if e.owners for row in e.owners.rows)
        return [row.bytes for row in rows if row.component == owner]

    told = [
        rank for rank in report.ranks if any(size is not None for size in sizes(rank, "context"))
    ]
    if not told:
        raise RunRecordError(
            f"the run {report.run.id} has no reading of non-torch memory to calibrate from",
            "runs of memprof offline, serve and plan on an Ascend or simulated device have it",
        )
    return next((rank for rank in told if not any(sizes(rank, "other_processes"))), told[0])


def facts_of(rank: RankReport, env: Mapping[str, str]) -> RankFacts:
    """Return what ``sim.calibrate`` reads of one rank; ``env``: variables of its run."""
    edges = []
    for span, edge in sorted(edges_of(rank.phases), key=lambda pair: pair[1].snapshot.t_ns or 0):
        if edge.owners is not None:
            streams = [
                row.bytes
                for row in edge.owners.parts
                if row.bytes and row.component.startswith("npu_workspace_stream_")
            ]
            held = [*edge.owners.rows, *edge.owners.remainders()]
            rows = {row.component: row.bytes for row in held}
            how = {row.component: row.how for row in held}
            largest_first = tuple(sorted(streams, reverse=True))
            edges.append(EdgeMemory(span.phase, edge.side, rows, how, largest_first))
    opened = [span for span in rank.phases if span.phase == "communicator" and span.error is None]
    graphs = [span.integer("graphs") for span in rank.phases if span.phase == "graph_capture"]
    counted = [count for count in graphs if count is not None]
    return RankFacts(
        label=rank.label,
        device_total_bytes=rank.device_total_bytes,
        edges=edges,
        communicators=[span.integer("buffer_bytes") for span in opened],
        graphs=sum(counted) if counted and len(counted) == len(graphs) else None,
        task_queue_level=_number(env.get("TASK_QUEUE_ENABLE"), 1),
        atb_blocks=_number(env.get("ATB_DEVICE_TILING_BUFFER_BLOCK_NUM"), 32),
    )


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() and int(text) > 0 else default
