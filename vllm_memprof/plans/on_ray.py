"""Makes plans on a Ray cluster: a task per plan; the run folder comes back as files.

Ray is the ``ray`` extra. Each node needs this memprof, and for a simulated device the engine stack
(``memprof sim setup``); a node without says so in the row. Ray starts the tasks, memprof's own
child process makes the plan.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vllm_memprof.errors import LaunchError
from vllm_memprof.plans.model import TABLES, Plan, PlanRow, Task
from vllm_memprof.plans.runner import PlanProcess, Watcher, run_here, run_plan
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.redact import memory_env, redact_text
from vllm_memprof.units import one_line
from vllm_memprof.version import __version__, pip_install

#: A file of a run folder that is larger stays on its node.
_LARGEST_FILE = 64 << 20


def require_ray() -> None:
    """Refuse a sweep on Ray where Ray is not installed.

    Raises:
        LaunchError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("--ray needs Ray, which is not installed here", pip_install("ray"))


class _PlanOnRay(PlanProcess):
    """A plan under way on a node of the cluster."""

    def start(self) -> None:
        import ray

        env = {
            name: value
            for name, value in memory_env(os.environ).items()
            if name not in TABLES["places"]
        }
        make = ray.remote(num_cpus=1, max_retries=0)(make_plan)
        self._reference = make.remote(self.task.plan, __version__, env)

    def poll(self) -> bool:
        import ray

        return bool(ray.wait([self._reference], timeout=0)[0])

    def end(self, why: str) -> None:
        """Interrupt its task, which ends the plan; called again, end its worker by force."""
        import ray

        with contextlib.suppress(Exception):  # the node may be gone
            ray.cancel(self._reference, force=self.ended is not None)
        self.ended = why

    def row(self) -> PlanRow:
        """Return its row; write its files into the run folder."""
        import ray

        task = self.task
        try:
            files, row = ray.get(self._reference)
        except Exception as error:  # the worker died, or the node: Ray gives the reason
            text = str(error).strip() or type(error).__name__
            reason = f"Ray: {one_line(redact_text(text.splitlines()[-1]))}"
            values, devices = dict(task.plan.values), task.plan.devices
            return PlanRow(values, "failed", reason, devices, final=False)
        for name, content in files.items():
            path = task.run_dir / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o600)
        return from_json(PlanRow, row)


def run_on_ray(
    tasks: Sequence[Task], progress: Watcher, address: str, jobs: int | None
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
        Interrupted: by a signal, after the plans under way have ended.
    """
    import ray

    try:
        ray.init(
            address=address,
            num_cpus=jobs if address == "local" else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:
        hint = "`ray start --head` starts one; --ray=local needs none"
        raise LaunchError(f"no Ray cluster at {address!r}: {one_line(str(error))}", hint) from error
    try:
        most = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield from run_here(tasks, progress, most, _PlanOnRay)
    finally:
        ray.shutdown()


def make_plan(
    plan: Plan, version: str, env: dict[str, str]
) -> tuple[dict[str, bytes], Mapping[str, object]]:
    """Make a plan on a node; return the files of the run folder, and the row as JSON.

    Args:
        plan: the request.
        version: of the memprof that asks.
        env: its variables that bear on memory, which replace the node's.
    """
    if version != __version__:
        here = f"node {socket.gethostname()} has memprof {__version__}"
        reason = f"{here}, the sweep was started by {version}"
        return {}, to_json(PlanRow(dict(plan.values), "failed", reason, final=False))
    with tempfile.TemporaryDirectory(prefix="memprof-plan-") as folder:
        run_dir = Path(folder, "run")
        row = run_plan(plan, run_dir, {**os.environ, **env})
        files = {
            str(path.relative_to(run_dir)): path.read_bytes()
            for path in run_dir.rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST_FILE
        }
        return files, to_json(row)
