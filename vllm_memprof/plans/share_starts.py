"""Several instances on one simulated device, for real: each alone, then all beside each other.

Instances enter, rows leave. A start follows the order that was computed: each engine comes up, and
waits with what it holds (``engines.vllm.hold``) while the next one comes up beside it. In the end
all have run their largest batches, and hold what that took at once.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_memprof.accounting.budget import equations as engines
from vllm_memprof.accounting.budget.kv import blocks_per_request
from vllm_memprof.accounting.model import Kv, RankReport
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch.engine import end_with_parent
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.options import value_of
from vllm_memprof.plans.plan_folder import write_row
from vllm_memprof.plans.pool import Interrupted
from vllm_memprof.plans.process import TICK_S, PlanProcess
from vllm_memprof.plans.request import Plan, Task
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.runner import PlanRunner
from vllm_memprof.plans.share import EQUATIONS, Figures, SharedDevice, SharingRule, rotations, ways
from vllm_memprof.plans.share_rows import (
    DeviceShare,
    Flags,
    InstanceStart,
    SharingPlan,
    SoloPlan,
    Started,
)
from vllm_memprof.plans.wants import Want, misses
from vllm_memprof.record.schema import ENV_HOLD, HELD_SUFFIX, HOLD_SUFFIX, MOMENTS, READY, SERVED
from vllm_memprof.record.spans import edges_of, last_of
from vllm_memprof.redact import redact_command
from vllm_memprof.sim.runtime import (
    ENV_STATE,
    PACKAGE_DIR,
    own_state_file,
    prepare_runtime,
)
from vllm_memprof.text import text
from vllm_memprof.units import format_gib, minus, one_line, sum_or_none

#: Options that fix the KV cache, which is what is to be divided.
FIXED_SIZE = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
UTILIZATION = "--gpu-memory-utilization"
#: Where an engine alone runs out of memory with its own default: what is held beside the KV cache
#: is found with less of it.
LESS = "0.75"
STARTS_DIR = "starts"
#: What newer releases make of the budget; with one of them a share is not computed.
STAGES = {stage.name for row in engines.EQUATIONS for stage in row.stages}
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
    command: list[str]  # as typed, secrets redacted


def check(instances: Sequence[Instance], beside: int) -> None:
    """Refuse what has no answer, before anything is started.

    Raises:
        UsageError: with what to do instead.
    """
    if len(instances) < 2 and not beside:
        raise UsageError(
            "memprof share needs two instances",
            hint="memprof share MODEL_A [arguments] -- MODEL_B [arguments]; or --beside "
            "SIZE, held by a process that is no engine",
        )
    for each in instances:
        name, args = f"instance {each.name} ({each.plan.model})", each.plan.engine_args
        if each.plan.devices != 1:
            raise UsageError(
                f"{name} takes {each.plan.devices} devices; memprof share divides one device"
            )
        for option in FIXED_SIZE:
            if value_of(args, option) is not None:
                raise UsageError(
                    f"{name}: {option} fixes the KV cache, which memprof share divides"
                )
        _ = each.fixed
    if not instances[0].plan.device.simulated:
        raise UsageError(
            "memprof share starts the instances beside each other, on a simulated device alone",
            hint="add --device sim:910b",
        )


def run_share(job: ShareJob, runner: PlanRunner) -> DeviceShare:
    """Plan each instance alone, compute the shares, and start all with them.

    Raises:
        MemprofError: the process that holds ``beside`` could not be started.
        Interrupted: by a signal; what was started has ended.
    """
    started_s = time.monotonic()
    share = compute(job, runner)
    every = [[each.name for each in order] for order in rotations(job.instances)]
    found = []
    for number, way in enumerate(share.ways):
        moments = moments_of(share.equation, way)
        starts = [
            start_all(job, number, way.flags, order, moment, runner)
            for order in ((every if way.order is None else [way.order]) if way.flags else [])
            for moment in moments
        ]
        found.append(replace(way, starts=starts))
    seconds = round(time.monotonic() - started_s, 1)
    return replace(share, ways=found, notes=_notes(share, found), seconds=seconds)


def compute(job: ShareJob, runner: PlanRunner) -> DeviceShare:
    """Plan each instance alone and compute the shares; start nothing with them.

    Raises:
        Interrupted: by a signal.
    """
    planned = [_plan_alone(each, place, runner) for place, each in enumerate(job.instances)]
    rows = [alone for alone, _ in planned]
    ranks = [rank for _, rank in planned if rank is not None]
    equations = {rank.budget.equation for rank in ranks}
    total = next((rank.device_total_bytes for rank in ranks if rank.device_total_bytes), None)
    share = DeviceShare(
        job.command, rows, next(iter(equations), None), total, job.beside, job.headroom,
        simulated=True,
    )  # fmt: skip
    figures = [each for row in rows if (each := Figures.of(row)) is not None]
    why = _why_not(rows, figures, equations)
    if why is not None or total is None or share.equation is None:
        return replace(share, why_none=why)
    card = SharedDevice(total, SharingRule.of(share.equation), job.beside, job.headroom)
    return replace(share, ways=ways(card, figures))


def moments_of(equation: str | None, way: SharingPlan) -> tuple[str, ...]:
    """Return what those before have done in the starts of a way.

    A number of blocks is the same whatever they have done.
    """
    if equation is None or way.name == "blocks":
        return (SERVED,)
    return SharingRule.of(equation).moments


def _why_not(
    rows: list[SoloPlan], figures: list[Figures], equations: set[str | None]
) -> str | None:
    for row in rows:
        if row.status != "ok":
            return text(
                "instance {name} does not start alone: {reason}",
                name=row.name,
                reason=row.reason or row.status,
            )
    if len(equations) > 1 or not equations <= set(EQUATIONS):
        names = ", ".join(sorted(name or "-" for name in equations))
        return text("shares are computed for E2, E3 and E4, not for {names}", names=names)
    if len(figures) < len(rows):
        lacking = [row.name for row in rows if Figures.of(row) is None]
        return text("what an instance holds is not known whole: {names}", names=", ".join(lacking))
    return None


def _notes(share: DeviceShare, found: Sequence[SharingPlan]) -> list[str]:
    if not found:
        return []
    notes: list[str] = [
        text(
            "the next instance is started when the one before is ready; starts at the same time "
            "see each other's memory half made, and are not answered for"
        )
    ]
    if len(share.instances) > 2:
        notes.append(text("orders: each instance was the last once"))
        if any(way.order is not None for way in found):
            notes.append(text("by utilization: the order as typed; another one has other shares"))
    if any(way.flags and not way.holds for way in found):
        notes.append(text("computed to pass, and did not: flags whose starts failed are no answer"))
    return notes


def _plan_alone(
    instance: Instance, place: int, runner: PlanRunner
) -> tuple[SoloPlan, RankReport | None]:
    """Return the row of an instance that has the device to itself, with its report."""
    plan, name = replace(instance.plan, values={"instance": instance.name}), instance.name
    row = runner.make_one(place, plan, name)
    if row.status == "oom" and instance.fixed is None:
        plan = replace(plan, engine_args=[*plan.engine_args, UTILIZATION, LESS])
        row = runner.make_one(place, plan, f"{name}-{LESS}")
    report = runner.report(row) if row.ok else None
    alone = SoloPlan(
        name,
        plan.model,
        redact_command(["", *instance.plan.engine_args])[1:],
        [want.text for want in instance.wants],
        row.status,
        row.reason,
        row.run,
        instance.fixed,
    )
    if report is None:
        return alone, None
    rank = report.ranks[0]
    return with_memory(alone, rank, row, instance.wants), rank


def with_memory(alone: SoloPlan, rank: RankReport, row: PlanRow, wants: Sequence[Want]) -> SoloPlan:
    """Return an instance with what the engine's record says of its memory."""
    budget, kv, total = rank.budget, rank.kv, rank.device_total_bytes
    subtracted = sum_or_none(term.bytes for term in budget.terms if term.subtracted)
    if any(term.name in STAGES for term in budget.terms):
        subtracted = None  # the engine counts other bytes than the device holds
    warm_up = last_of(rank.phases, "warm_up")
    free = None if warm_up is None or warm_up.after is None else warm_up.after.device_free_bytes
    return replace(
        alone,
        subtracted_bytes=subtracted,
        held_ready_bytes=minus(minus(total, free), kv.planned_bytes),
        held_peak_bytes=minus(total, budget.fits_device_bytes),
        context_bytes=minus(total, rank.initial_free_bytes),
        need_bytes=_needed(kv, row, wants),
        bytes_per_block=kv.bytes_per_block,
        tokens_per_block=kv.tokens / kv.blocks if kv.tokens and kv.blocks else None,
    )


def _needed(kv: Kv, row: PlanRow, wants: Sequence[Want]) -> int | None:
    """Return the bytes of KV cache for a request of max_model_len, and for everything wanted."""
    request = blocks_per_request(kv)
    if request is None or not kv.bytes_per_block or not kv.blocks or not kv.tokens:
        return None
    least = request * kv.bytes_per_block
    for want in wants:
        size, known = want.least, want.found(row)
        if want.kind != "kv-cache":
            if not known:
                return None
            size = math.ceil(size * kv.blocks / known - 1e-9) * kv.bytes_per_block
        least = max(least, size)
    return least


@dataclass
class _Under:
    """An instance under way."""

    instance: Instance
    process: PlanProcess
    folder: Path  # where it is told to wait

    def reaches(self, moment: str, signals: Sequence[int]) -> bool:
        """Return True once it waits at a moment; False where it ended before.

        Raises:
            Interrupted: by a signal.
        """
        held = self.folder / f"{moment}{HELD_SUFFIX}"
        while not self.process.poll():
            if held.exists():
                return True
            if signals:
                raise Interrupted(signals[0])
            time.sleep(TICK_S)
        return False

    def end(self) -> None:
        """Let it go on to its end, and wait for that."""
        for moment in MOMENTS:
            for suffix in (HOLD_SUFFIX, HELD_SUFFIX):
                (self.folder / f"{moment}{suffix}").unlink(missing_ok=True)
        self.process.wait()


def start_all(
    job: ShareJob,
    number: int,
    flags: Sequence[Flags],
    order: Sequence[str],
    moment: str,
    runner: PlanRunner,
) -> InstanceStart:
    """Start all instances one after the other on one device, each when those before wait.

    Args:
        job: with the instances.
        number: of the way, for names of folders.
        flags: of each instance.
        order: of starting, names.
        moment: at which those before wait: READY or SERVED.
        runner: of the division; told of each instance.

    Raises:
        MemprofError: the process that holds ``beside`` could not be started.
        Interrupted: by a signal.
    """
    by_name = {each.name: each for each in job.instances}
    given = {each.name: each for each in flags}
    folder = runner.folder / STARTS_DIR / f"{number + 1}-{'-'.join(order)}-{moment}"
    folder.mkdir(parents=True)
    state, signals = own_state_file(), list[int]()
    under: list[_Under] = []
    with catch_signals(signals.append), tempfile.TemporaryDirectory() as holds:
        environ = {**os.environ, ENV_STATE: str(state)}
        try:
            with beside(job, environ):
                for name in order:
                    waits = Path(holds, name)
                    waits.mkdir()
                    for asked in {moment, SERVED}:
                        (waits / f"{asked}{HOLD_SUFFIX}").touch()
                    plan = _beside_others(by_name[name].plan, given[name], order)
                    held = {**environ, ENV_HOLD: str(waits)}
                    task = Task(0, plan, folder / name, environ=held)
                    under.append(_Under(by_name[name], PlanProcess(task), waits))
                    runner.progress.started(task)
                    if not under[-1].reaches(moment, signals):
                        break
                else:
                    for each in under if moment == READY else ():
                        (each.folder / f"{READY}{HELD_SUFFIX}").unlink(missing_ok=True)
                        if not each.reaches(SERVED, signals):
                            break
                for each in under:  # the first to end reads the device with all in place
                    each.end()
            if signals:
                raise Interrupted(signals[0])
        except BaseException:
            for each in under:
                each.process.end("interrupted")
            raise
        finally:
            for each in under:
                each.end()
            state.unlink(missing_ok=True)
    results, frees = [], list[int]()
    for each in under:
        run_dir, row = each.process.task.run_dir, each.process.row()
        write_row(run_dir, None, row)
        row = replace(row, run=str(run_dir.relative_to(runner.folder)))
        report, planned = runner.report(row), row.kv_cache_bytes
        for rank in [] if report is None else report.ranks[:1]:
            if rank.kv.planned_bytes is not None:
                planned = rank.kv.planned_bytes
            seen = (edge.snapshot.device_free_bytes for _, edge in edges_of(rank.phases))
            frees += (size for size in seen if size is not None)
        missing = [miss.text for miss in misses(row, each.instance.wants)] if row.ok else []
        name = each.instance.name
        results.append(Started(name, row.status, row.reason, planned, row.tokens, missing, row.run))
        runner.progress.finished(0, row, "made")
    results += [Started(name, "not started") for name in order[len(under) :]]
    least = min(frees, default=None)
    if least is not None and least < job.headroom:
        short = f"headroom {format_gib(least)} < {format_gib(job.headroom)} GiB"
        results[-1] = replace(results[-1], missing=[*results[-1].missing, short])
    return InstanceStart(list(order), moment, results, least)


def _beside_others(plan: Plan, flags: Flags, order: Sequence[str]) -> Plan:
    """Return the plan of an instance among others."""
    values = {"start": ",".join(order), "instance": flags.name}
    plan = plan.vary(UTILIZATION, f"{flags.gpu_memory_utilization:g}")
    if flags.num_gpu_blocks_override is not None:
        plan = plan.vary("--num-gpu-blocks-override", str(flags.num_gpu_blocks_override))
    # those before wait while the others come up
    timeout_s = plan.timeout_s * len(order)
    own = {**plan.own, "share-device": ""}
    return replace(plan, own=own, values=values, timeout_s=timeout_s)


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
    command = [str(runtime.python), str(PACKAGE_DIR / "sim" / "engine" / "beside.py")]
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
        in_use = said.removeprefix("MEMPROF ").strip()
        if not in_use.isdigit() or int(in_use) < job.beside:
            rest = said + ("" if in_use.isdigit() else process.stdout.read())
            raise LaunchError(f"--beside: {one_line(rest.strip() or 'no memory')}")
        yield int(in_use)
    finally:
        with suppress(OSError):
            process.communicate("", timeout=_BESIDE_S)
