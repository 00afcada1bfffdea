"""What a recorded run says of its device and its command, for a profile or a plan made from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from vllm_memprof.accounting.model import Report
from vllm_memprof.engines import VLLM, row_of_run
from vllm_memprof.errors import RunRecordError
from vllm_memprof.options import value_of, with_option
from vllm_memprof.record.schema import RunInfo
from vllm_memprof.record.spans import edges_of
from vllm_memprof.sim.calibrate import EdgeMemory, RankFacts
from vllm_memprof.sim.profiles import list_profiles
from vllm_memprof.units import sum_or_none

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
    # "--" of older releases; the model or the request of a driver follows the other words
    for word, words in (("--", 1), ("serve", 2), (run.mode, 2)):
        if word in command:
            return command[command.index(word) + words :]
    raise RunRecordError(f"the run {run.id} does not name the engine's arguments")


def arguments_of(report: Report) -> list[str] | None:
    """Return the engine's arguments, as a run or a log tells them; None: it does not."""
    run = report.run
    if run.source == "hooks":
        with suppress(RunRecordError):
            return engine_args_of(run)
        return None
    words = run.command
    if words[:2] == ["vllm", "serve"]:  # the command as typed counts
        given = words[3:] if len(words) > 2 and not words[2].startswith("-") else words[2:]
    elif row_of_run(run.engine) is VLLM and {*run.engine_command} - {"--enforce-eager"}:
        # the line "non-default args"; another engine's log says some of its arguments
        given = run.engine_command
    else:
        return None
    used = next((rank.budget.gpu_memory_utilization for rank in report.ranks), None)
    option = "--gpu-memory-utilization"
    if used is not None and value_of(given, option) != f"{used:g}":
        given = with_option(given, option, f"{used:g}")
    return given


def base_of(run: RunInfo) -> str:
    """Return the name of the profile of a run's device; without a SoC name the default's."""
    if run.device_profile in {profile.name for profile in list_profiles()}:
        return run.device_profile or _DEFAULT
    return profile_of_soc(run.device) or _DEFAULT


def with_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables, but of those that figures depend on the ones of a run."""
    return {
        name: value
        for variables, its_own in ((os.environ, False), (env, True))
        for name, value in variables.items()
        if name.startswith(DECIDING) is its_own
    }


def profile_of_soc(device: str | None) -> str | None:
    """Return the name of the profile of a SoC; None: another device, or none is named."""
    return next((name for soc, name in _BY_SOC.items() if (device or "").startswith(soc)), None)


def facts_of(report: Report) -> RankFacts:
    """Return what ``sim.calibrate`` reads of a run: of the first rank with non-torch readings, if
    possible of one that is alone on its device.

    Raises:
        RunRecordError: the run has no rank.
    """
    if not report.ranks:
        raise RunRecordError(f"the run {report.run.id} has no rank to calibrate from")

    def suits(facts: RankFacts) -> tuple[bool, bool]:
        context = any(edge.rows.get("context") is not None for edge in facts.edges)
        return context, not any(edge.known("other_processes") for edge in facts.edges)

    found = []
    for rank in report.ranks:
        edges = []
        for span, edge in sorted(
            edges_of(rank.phases), key=lambda pair: pair[1].snapshot.t_ns or 0
        ):
            if edge.owners is not None:
                parts = edge.owners.parts
                streams = [
                    row for row in parts if row.component.startswith("npu_workspace_stream_")
                ]
                largest_first = sorted((row.bytes for row in streams if row.bytes), reverse=True)
                held = [*edge.owners.rows, *edge.owners.remainders()]
                rows = {row.component: row.bytes for row in held}
                how = {row.component: row.how for row in held}
                edges.append(EdgeMemory(span.phase, edge.side, rows, how, tuple(largest_first)))
        opened = [
            span for span in rank.phases if span.phase == "communicator" and span.error is None
        ]
        graphs = [span.integer("graphs") for span in rank.phases if span.phase == "graph_capture"]
        facts = RankFacts(
            label=rank.label,
            device_total_bytes=rank.device_total_bytes,
            edges=edges,
            communicators=[span.integer("buffer_bytes") for span in opened],
            graphs=sum_or_none(graphs) if graphs else None,
            task_queue_level=_number(report.run.env.get("TASK_QUEUE_ENABLE"), 1),
            atb_blocks=_number(report.run.env.get("ATB_DEVICE_TILING_BUFFER_BLOCK_NUM"), 32),
        )
        found.append(facts)
    return max(found, key=suits)


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() and int(text) > 0 else default
