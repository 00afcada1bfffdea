"""Runs in an engine's environment: prints what vLLM's Ray executors hand to Ray, and starts no Ray.

``RESULT`` has the names of the variables that each executor copies, the runtime environment of the
job, and the files below the folders that it names.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from vllm.plugins import load_general_plugins
from vllm.ray.ray_env import get_env_vars_to_copy
from vllm.v1.executor import ray_executor, ray_executor_v2, ray_utils
from vllm.v1.executor.ray_env_utils import get_driver_env_vars

load_general_plugins()
given: dict[str, object] = {}


class Stop(Exception):
    """The job would be opened now."""


def init(address: str | None = None, runtime_env: dict[str, list[str]] | None = None) -> None:
    given["runtime_env"] = runtime_env
    package = Path((runtime_env or {}).get("py_modules", ["/nowhere"])[0])
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    given["sent"] = sorted(files)
    raise Stop


ray_utils.ray.init = init
for executor_class in (ray_executor.RayDistributedExecutor, ray_executor_v2.RayExecutorV2):
    executor = object.__new__(executor_class)
    executor.parallel_config = SimpleNamespace(
        ray_runtime_env=None, placement_group=None, world_size=2
    )
    try:
        executor._init_executor()
    except Stop:
        assert executor.parallel_config.ray_runtime_env is None
own = ray_utils.WORKER_SPECIFIC_ENV_VARS
given["messages"] = sorted(get_driver_env_vars(own))
given["graphs"] = sorted(
    name for name in get_env_vars_to_copy(own) if name in get_driver_env_vars(own)
)
print("RESULT " + json.dumps(given), flush=True)
