"""The path of a person with an NPU: memprof installed in the engine's own environment, no ``--device``, no stack.

The engine's environment is that of a stack; the libraries of CANN are the shim's. All of memprof
runs there, and takes the device for a real one. Its figures are those of the simulated run, to the
byte.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import vllm_memprof
from tests.support.engine import RunResult, finish, start_memprof, wait_until
from tests.unit.test_layers import PACKAGE, tomllib
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import ENV_STATE, SITE_DIR, prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

MODEL = "memprof/tiny"
ARGS = [
    "--tensor-parallel-size=2",
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--max-num-seqs=8",
]
#: Not of the device: clocks, processes, what the host holds for them.
NOT_COMPARED = {
    "pid",
    "seconds",
    "t_ns",
    "start_t_ns",
    "end_t_ns",
    "host_rss_bytes",
    "host_shared_bytes",
    "other_processes",
    "non_torch_read_after_seconds",
    "ms",
}


class Host:
    """An engine environment into which memprof was installed."""

    def __init__(self, folder: Path, runtime: Any) -> None:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        entries = project["entry-points"]["vllm.general_plugins"]
        metadata = folder / "site" / f"vllm_memprof-{vllm_memprof.__version__}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: vllm-memprof\nVersion: 0\n"
        )
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
        (metadata.parent / PACKAGE.name).symlink_to(PACKAGE)
        self._python = runtime.python
        self._folder = folder
        path = os.pathsep.join([str(SITE_DIR), str(metadata.parent)])
        model = resolve_model(MODEL, [])
        self._model, self._model_args = model.path, model.extra_args
        self._env = {**os.environ, **runtime.env, **model.env, "PYTHONPATH": path}
        self._env[ENV_STATE] = str(folder / "devices")
        self._env.pop("MEMPROF_CACHE_DIR", None)

    def start(self, mode: str, *args: str) -> tuple[subprocess.Popen[str], Path]:
        run_dir = self._folder / mode
        command = [str(self._python), "-m", "vllm_memprof", mode, "--run-dir", str(run_dir)]
        with Path(f"{run_dir}.out").open("w") as out:
            process = subprocess.Popen(
                [*command, self._model, *self._model_args, *ARGS, *args],
                env=self._env,
                cwd=self._folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return process, run_dir


@pytest.fixture
def host(sim_stack, tmp_path) -> Host:
    return Host(tmp_path / "host", prepare_runtime("910b", sim_stack))


def figures(value: Any) -> Any:
    """What is left of a report without its words: numbers, in their places."""
    if isinstance(value, dict):
        kept = {key: figures(entry) for key, entry in value.items() if key not in NOT_COMPARED}
        return {key: entry for key, entry in kept.items() if entry is not None}
    if isinstance(value, list):
        return [figures(entry) for entry in value]
    return None if isinstance(value, str | bool) else value


#: Up to the KV plan: a queue of tasks takes memory of its own, which a later reading may precede.
PHASES = ("device_init", "hccl_init", "communicator", "weight_load", "profile_run", "empty_cache")
BUDGET = ("requested_bytes", "terms", "kv_cache_bytes", "engine_kv_cache_bytes", "residual_bytes")


def up_to_the_plan(report: dict[str, Any]) -> Any:
    """What a report says of each rank until its KV cache is planned."""
    kept = []
    for rank in report["ranks"]:
        names = [phase["phase"] for phase in rank["phases"]]
        until = names.index("profile_run")
        phases = [phase for phase in rank["phases"][: until + 1] if phase["phase"] in PHASES]
        budget = {key: rank["budget"][key] for key in BUDGET}
        kept.append({"phases": phases, "budget": budget, "kv": rank["kv"], "is": rank["figures"]})
    return figures(kept)


def numbers_in(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(numbers_in, value.values() if isinstance(value, dict) else value))
    return int(value is not None)


def assert_measured(run: RunResult) -> None:
    """The run came to its end, and nothing of it is said to be simulated."""
    assert run.returncode == 0, run.output[-3000:] + run.engine_log[-3000:]
    info = run.report["run"]
    assert (info["simulated"], info["device_profile"]) == (False, None)
    assert info["device"] == "Ascend910B3"
    assert info["status"] == "ok"
    assert [rank["budget"]["residual_bytes"] for rank in run.report["ranks"]] == [0, 0]
    assert "(m)" not in (run.run_dir / "report.md").read_text()


@pytest.fixture(scope="module")
def simulated(sim_stack, tmp_path_factory) -> RunResult:
    run_dir = tmp_path_factory.mktemp("simulated") / "run"
    args = ["offline", MODEL, "--device", "sim:910b", *ARGS, "--prompt=hello"]
    result = finish(start_memprof(args, run_dir), run_dir)
    assert result.returncode == 0, result.output[-3000:]
    return result


def test_offline(host, simulated):
    expected = up_to_the_plan(simulated.report)
    assert numbers_in(expected) > 400
    offline = finish(*host.start("offline", "--prompt=hello"))
    assert_measured(offline)
    assert up_to_the_plan(offline.report) == expected


@pytest.mark.full  # CI: test_offline, through the same hooks
def test_serve_and_plan(host, simulated, cleanup_processes):
    plan = finish(*host.start("plan"))
    server, run_dir = host.start("serve", "--port=0")
    cleanup_processes.append(server)
    wait_until((run_dir / "report.json").exists, 300, "the server is ready")
    server.send_signal(signal.SIGINT)
    served = finish(server, run_dir)
    for run in (plan, served):
        assert_measured(run)
        for rank, same in zip(run.report["ranks"], simulated.report["ranks"], strict=True):
            for part in BUDGET:
                assert figures(rank["budget"][part]) == figures(same["budget"][part])
            assert rank["kv"]["tokens"] == same["kv"]["tokens"]
