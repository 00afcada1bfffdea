"""Makes plans on a Ray cluster: a task per plan; the run folder comes back as files.

Ray is the ``ray`` extra. Each node needs this memprof, and for a simulated device the engine stack
(``memprof sim setup``); a node without says so in the row. Ray starts the tasks, memprof's own
child process makes the plan.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_memprof.errors import LaunchError
from vllm_memprof.launch.signals import catch_signals
from vllm_memprof.plans.pool import Interrupted, Progress
from vllm_memprof.plans.process import run_plan
from vllm_memprof.plans.request import Plan, Task
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.plans.store import PLACES
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.redact import memory_env, redact_text
from vllm_memprof.units import one_line
from vllm_memprof.version import __version__

#: ``--ray local``: on this machine alone, ended with the sweep.
LOCAL = "local"
_WAIT_S = 0.5
#: Seconds that tasks have to end their plans after Ctrl-C, before their workers are killed.
_CANCEL_S = 25.0
#: A file of a run folder that is larger stays on its node.
_LARGEST_FILE = 64 << 20


def require_ray() -> None:
    """Refuse a sweep on Ray where Ray is not installed.

    Raises:
        LaunchError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise LaunchError(
            "--ray needs Ray, which is not installed here", hint="pip install 'vllm-memprof[ray]'"
        )


def run_on_ray(
    tasks: Sequence[Task], progress: Progress, address: str, jobs: int | None
) -> Iterator[tuple[Task, PlanRow]]:
    """Make the plans on the cluster, at most ``jobs`` at a time.

    Args:
        tasks: the plans.
        progress: is told of them.
        address: ``auto`` (the cluster that this machine belongs to), ``local``, or an address as
            Ray takes it.
        jobs: None: as many as the cluster has CPUs.

    Raises:
        LaunchError: there is no such cluster.
        Interrupted: by a signal, after the plans under way were asked to end.
    """
    import ray

    started = _connect(ray, address, jobs)
    signals: list[int] = []
    waiting, under_way = list(tasks), dict[Any, tuple[Task, float]]()
    env = {name: value for name, value in memory_env(os.environ).items() if name not in PLACES}
    try:
        make = ray.remote(num_cpus=1, max_retries=0)(make_plan)
        most = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        with catch_signals(signals.append):
            while waiting or under_way:
                while waiting and len(under_way) < most and not signals:
                    task = waiting.pop(0)
                    under_way[make.remote(task.plan, __version__, env)] = (task, time.monotonic())
                    progress.started(task)
                now = time.monotonic()
                progress.running([(task, now - since) for task, since in under_way.values()])
                done, _ = ray.wait(list(under_way), num_returns=1, timeout=_WAIT_S)
                if signals:
                    count = f"{len(under_way)} plan{'s' if len(under_way) > 1 else ''}"
                    progress.ending(f"ending {count} on Ray")
                    _cancel(ray, list(under_way), signals)
                    raise Interrupted(signals[0])
                for reference in done:
                    task, _ = under_way.pop(reference)
                    yield task, _collect(ray, reference, task)
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str, jobs: int | None) -> bool:
    """Connect; return True where this process has to disconnect again."""
    if ray.is_initialized():
        return False
    common = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        if address == LOCAL:
            ray.init(address="local", num_cpus=jobs, include_dashboard=False, **common)
        else:
            ray.init(address=address, **common)
    except Exception as error:
        hint = "`ray start --head` starts one; --ray=local needs none"
        raise LaunchError(
            f"no Ray cluster at {address!r}: {one_line(str(error))}", hint=hint
        ) from error
    return True


def _cancel(ray: Any, references: list[Any], signals: list[int]) -> None:
    """Interrupt the tasks, which ends their plans; after a while, or a second Ctrl-C, by force."""
    for reference in references:
        with contextlib.suppress(Exception):
            ray.cancel(reference)
    limit = time.monotonic() + _CANCEL_S
    left = references
    while left and time.monotonic() < limit and len(signals) < 2:
        _, left = ray.wait(left, num_returns=len(left), timeout=_WAIT_S)
    for reference in left:
        with contextlib.suppress(Exception):
            ray.cancel(reference, force=True)


def _collect(ray: Any, reference: Any, task: Task) -> PlanRow:
    """Return the row of a task; write its files into the run folder."""
    try:
        files, row = ray.get(reference)
    except Exception as error:  # the worker died, or the node: Ray gives the reason
        text = str(error).strip() or type(error).__name__
        reason, values = (
            f"Ray: {one_line(redact_text(text.splitlines()[-1]))}",
            dict(task.plan.values),
        )
        return PlanRow(values, "failed", reason, devices=task.plan.devices, final=False)
    for name, content in files.items():
        path = task.run_dir / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
    return from_json(PlanRow, row)


def make_plan(
    plan: Plan, version: str, env: dict[str, str]
) -> tuple[dict[str, bytes], Mapping[str, object]]:
    """Make a plan on a node; return the files of the run folder, and the row as JSON.

    Args:
        plan: the request.
        version: of the memprof that asks.
        env: its variables that bear on memory, which replace the node's.
    """
    host = socket.gethostname()
    if version != __version__:
        reason = f"node {host} has memprof {__version__}, the sweep was started by {version}"
        return {}, to_json(PlanRow(dict(plan.values), "failed", reason, final=False))
    parent = Path(tempfile.mkdtemp(prefix="memprof-plan-"))
    try:
        run_dir = parent / "run"
        row = run_plan(plan, run_dir, {**os.environ, **env})
        return read_files(run_dir), to_json(row)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def read_files(run_dir: Path) -> dict[str, bytes]:
    """Return every file of a run folder by its path within it; large ones stay on the node."""
    found = sorted(path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in found
        if path.stat().st_size <= _LARGEST_FILE
    }
