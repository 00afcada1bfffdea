"""Several instances on one simulated device, for real: each alone, then all beside each other.

Instances enter, rows leave. A start follows the order that was computed: each engine comes up, and
waits with what it holds (``engines.vllm.hold``) while the next one comes up beside it. In the end
all have run their largest batches, and hold what that took at once.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_memprof.accounting.budget import equations
from vllm_memprof.accounting.budget.kv import blocks_per_request
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch.engine import end_with_parent
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.options import value_of
from vllm_memprof.plans.model import Plan, PlanRow, Task, Try
from vllm_memprof.plans.runner import TICK_S, Interrupted, PlanProcess, PlanRunner
from vllm_memprof.plans.share import (
    EQUATIONS,
    DeviceShare,
    Figures,
    Flags,
    InstanceStart,
    SharedDevice,
    SoloPlan,
    rotations,
    ways,
)
from vllm_memprof.plans.wants import Want, misses
from vllm_memprof.record.schema import ENV_HOLD, HELD_SUFFIX, HOLD_SUFFIX, READY, SERVED
from vllm_memprof.record.spans import edges_of, last_of
from vllm_memprof.redact import redact_command
from vllm_memprof.sim.runtime import ENV_STATE, PACKAGE_DIR, own_state_file, prepare_runtime
from vllm_memprof.text import text
from vllm_memprof.units import known_items, minus, one_line, only_known, sum_or_none

#: Options that fix the KV cache, which is what is to be divided.
BLOCKS = "--num-gpu-blocks-override"
FIXED_SIZE = ("--kv-cache-memory-bytes", BLOCKS)
UTILIZATION = "--gpu-memory-utilization"
#: Where an engine alone runs out of memory with its own default: what is held beside the KV cache
#: is found with less of it.
LESS = "0.75"
#: What newer releases make of the budget; with one of them a share is not computed.
STAGES = {stage.name for row in equations.EQUATIONS for stage in row.stages}
_BESIDE_S = 60.0


@dataclass(frozen=True)
class Instance:
    """One of the instances, as asked for."""

    name: str
    plan: Plan
    wants: list[Want] = field(default_factory=list)

    @property
    def fixed(self) -> float | None:
        """Return the utilization that the user gave.

        Raises:
            UsageError: it is no share.
        """
        given = value_of(self.plan.engine_args, UTILIZATION)
        with suppress(ValueError):
            if given is None or 0 < float(given) <= 1:
                return None if given is None else float(given)
        raise UsageError(f"instance {self.name}: {UTILIZATION} {given!r} is no share: 0 to 1")


@dataclass
class ShareJob:
    """A division of one device, as requested."""

    instances: list[Instance]
    beside: int  # bytes
    headroom: int  # bytes


def check(instances: Sequence[Instance], beside: int) -> None:
    """Refuse what has no answer, before anything is started.

    Raises:
        UsageError: with what to do instead.
    """
    if len(instances) < 2 and not beside:
        hint = (
            "memprof share MODEL_A [arguments] -- MODEL_B [arguments]; or --beside SIZE, held by "
        )
        hint += "a process that is no engine"
        raise UsageError("memprof share needs two instances", hint)
    for each in instances:
        args, _ = each.plan.engine_args, each.fixed
        fixed = [option for option in FIXED_SIZE if value_of(args, option) is not None]
        why = f"{', '.join(fixed)} fixes the KV cache, which is divided" if fixed else ""
        if each.plan.devices != 1:
            why = f"takes {each.plan.devices} devices; one device is divided"
        if why:
            raise UsageError(f"instance {each.name} ({each.plan.model}) {why}")
    if not instances[0].plan.device.simulated:
        raise UsageError(
            "memprof share starts the instances next to each other, only on a simulated device",
            "add --device sim:910b",
        )


def run_share(job: ShareJob, runner: PlanRunner) -> DeviceShare:
    """Plan each instance alone, compute the shares, and start all with them.

    Raises:
        MemprofError: the process that holds ``beside`` could not be started.
        Interrupted: by a signal; what was started has ended.
    """
    share, card = compute(job, runner)
    if card is None:
        return share
    found = []
    for number, way in enumerate(share.ways, 1):
        orders = rotations([*card.instances]) if way.order is None else [way.order]
        # a number of blocks is the same whatever those before have done
        moments = card.moments if way.name == "utilization" else (SERVED,)
        starts = [
            start_all(job, f"{number}-{'-'.join(order)}-{moment}", way.flags, order, moment, runner)
            for order in (orders if way.flags else ())
            for moment in moments
        ]
        found.append(replace(way, starts=starts))
    notes: list[str] = [
        text(
            "the next instance is started when the one before is ready; starts at the same time "
            "see each other's memory half made, and are not answered for"
        )
    ]
    if any(way.flags and not way.holds for way in found):
        notes.append(text("computed to pass, and did not: flags whose starts failed are no answer"))
    return replace(share, ways=found, notes=notes)


def compute(job: ShareJob, runner: PlanRunner) -> tuple[DeviceShare, SharedDevice | None]:
    """Plan each instance alone and compute the shares; start nothing with them.

    Returns:
        The shares, and the device with the instances on it; None where nothing can be computed.

    Raises:
        Interrupted: by a signal.
    """
    rows = []
    for place, each in enumerate(job.instances):
        plan, name = replace(each.plan, values={"instance": each.name}), each.name
        row = runner.make_one(place, plan, name)
        if row.status == "oom" and each.fixed is None:
            plan = replace(plan, engine_args=[*plan.engine_args, UTILIZATION, LESS])
            row = runner.make_one(place, plan, f"{name}-{LESS}")
        report = runner.report(row) if row.ok else None
        figures = None if report is None else figures_of(report.ranks[0], row, each)
        args, wanted = redact_command(["", *each.plan.engine_args])[1:], each.wants
        rows.append(SoloPlan(name, plan.model, args, [want.text for want in wanted], row, figures))
    equation, total = rows[0].plan.equation, rows[0].plan.device_total_bytes
    share = DeviceShare(rows, equation, total, job.beside, job.headroom)
    known = known_items({row.name: row.figures for row in rows})
    form = equations.form_of(equation)
    if failed := next((row for row in rows if not row.plan.ok), None):
        why = text(
            "instance {name} does not start alone: {reason}",
            failed,
            reason=failed.plan.reason or failed.plan.status,
        )
    elif {*EQUATIONS} & {equation} != {row.plan.equation for row in rows}:
        names = ", ".join(row.plan.equation or "-" for row in rows)
        why = text("shares are computed for E2, E3 and E4, not for {names}", names=names)
    elif len(known) < len(rows) or total is None or form is None:
        names = ", ".join(row.name for row in rows if row.figures is None)
        why = text("what an instance uses is not known whole: {names}", names=names)
    else:
        rules = form.subtracts_neighbours, form.checks_free
        card = SharedDevice(total, known, *rules, job.beside, job.headroom)
        return replace(share, ways=ways(card)), card
    return replace(share, why_none=why), None


def figures_of(rank: RankReport, row: PlanRow, instance: Instance) -> Figures | None:
    """Return what the engine's record says of an instance's memory; None: not all is known."""
    budget, kv, total = rank.budget, rank.kv, rank.device_total_bytes
    request, block = blocks_per_request(kv), kv.bytes_per_block
    warm_up = last_of(rank.phases, "warm_up")
    free = None if warm_up is None or warm_up.after is None else warm_up.after.device_free_bytes
    # with a stage the engine counts other bytes than the device holds
    if any(term.name in STAGES for term in budget.terms) or not (request and block and kv.blocks):
        return None
    need = request * block
    for want in instance.wants:
        size, held = want.least, want.found(row)
        if want.kind != "kv-cache":
            if not held:
                return None
            size = math.ceil(size * kv.blocks / held - 1e-9) * block
        need = max(need, size)
    sizes = (
        sum_or_none(budget.subtracted.values()),
        minus(minus(total, free), kv.planned_bytes),
        minus(total, budget.fits_device_bytes),
        minus(total, rank.initial_free_bytes),
        need,
        block,
    )
    known = only_known(sizes)
    if len(known) < len(sizes):
        return None
    rate = kv.tokens / kv.blocks if kv.tokens else None
    return Figures(*known, block_tokens=rate, fixed_utilization=instance.fixed)


def _beside_others(plan: Plan, flags: Flags, order: Sequence[str]) -> Plan:
    """Return the plan of an instance among others."""
    plan = plan.vary(UTILIZATION, f"{flags.gpu_memory_utilization:g}")
    if flags.num_gpu_blocks_override is not None:
        plan = plan.vary(BLOCKS, str(flags.num_gpu_blocks_override))
    return replace(
        plan,
        own={**plan.own, "share-device": ""},
        values={"start": ",".join(order), "instance": flags.name},
        timeout_s=plan.timeout_s * len(order),  # those before wait while the others come up
    )


def start_all(
    job: ShareJob,
    name: str,
    flags: Sequence[Flags],
    order: Sequence[str],
    moment: str,
    runner: PlanRunner,
) -> InstanceStart:
    """Start all instances one after the other on one device, each when those before wait.

    Args:
        job: with the instances.
        name: of the folder.
        flags: of each instance.
        order: of starting, names.
        moment: at which those before wait: READY or SERVED.
        runner: of the division; told of each instance.

    Raises:
        MemprofError: the process that holds ``beside`` could not be started.
        Interrupted: by a signal.
    """
    instances = {each.name: each for each in job.instances}
    given = {each.name: each for each in flags}
    folder = runner.folder / "starts" / name
    folder.mkdir(parents=True)
    state, signals, under = own_state_file(), list[int](), list[PlanProcess]()
    environ = {**os.environ, ENV_STATE: str(state)}
    with catch_signals(signals.append), tempfile.TemporaryDirectory() as holds:

        def held(process: PlanProcess, moment: str) -> Path:
            return Path(holds, process.task.run_dir.name, f"{moment}{HELD_SUFFIX}")

        def reaches(process: PlanProcess, moment: str) -> bool:
            """Return True once it waits at a moment; False where it ended before."""
            while not process.poll():
                if held(process, moment).exists():
                    return True
                if signals:
                    raise Interrupted(signals[0])
                time.sleep(TICK_S)
            return False

        def end() -> None:
            """Let all go on to their ends; the first reads the device with all in place."""
            for process in under:
                shutil.rmtree(held(process, moment).parent, ignore_errors=True)
                process.wait()

        try:
            with beside(job, environ):
                for each in order:
                    waits = Path(holds, each)
                    waits.mkdir()
                    for asked in {moment, SERVED}:
                        (waits / f"{asked}{HOLD_SUFFIX}").touch()
                    plan = _beside_others(instances[each].plan, given[each], order)
                    own = {**environ, ENV_HOLD: str(waits)}
                    under.append(PlanProcess(Task(0, plan, folder / each, environ=own)))
                    runner.progress.started(under[-1].task)
                    if not reaches(under[-1], moment):
                        break
                else:
                    for process in under if moment == READY else ():
                        held(process, READY).unlink(missing_ok=True)
                        if not reaches(process, SERVED):
                            break
                end()
            if signals:
                raise Interrupted(signals[0])
        except BaseException:
            for process in under:
                process.end("interrupted")
            raise
        finally:
            end()
            state.unlink(missing_ok=True)
    results, frees = [], list[int]()
    for each, process in zip(order, under, strict=False):
        row = runner.done(process.task, process.row())
        report = runner.report(row)
        for rank in [] if report is None else report.ranks[:1]:
            if rank.kv.planned_bytes is not None:
                row = replace(row, kv_cache_bytes=rank.kv.planned_bytes)
            seen = (edge.snapshot.device_free_bytes for _, edge in edges_of(rank.phases))
            frees += only_known(seen)
        results.append(Try(each, row, misses(row, instances[each].wants)))
    least = min(frees, default=None)
    if least is not None and least < job.headroom:
        short = Want("headroom", job.headroom).misses(replace(row, headroom_bytes=least))
        results[-1].missing.extend(short)
    return InstanceStart([*order], moment, results, least)


@contextmanager
def beside(job: ShareJob, environ: dict[str, str]) -> Iterator[int]:
    """Have a process that is no engine hold memory of the device; give the bytes in use then.

    Raises:
        MemprofError: it did not get it.
    """
    if not job.beside:
        yield 0
        return
    plan = job.instances[0].plan
    assert plan.device.profile is not None
    runtime = prepare_runtime(plan.device.profile, plan.stack)
    command = [str(runtime.python), str(PACKAGE_DIR / "sim/engine/beside.py")]
    process = subprocess.Popen(
        [*command, str(job.beside)],
        env={**environ, **runtime.env, ENV_STATE: environ[ENV_STATE]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent(),
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        in_use = said.removeprefix("MEMPROF ")
        if in_use == said:
            raise LaunchError(f"--beside: {one_line(said + process.stdout.read())}")
        yield int(in_use)
    finally:
        with suppress(OSError):
            process.communicate("", timeout=_BESIDE_S)
