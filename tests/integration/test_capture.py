"""Capture inside the real engine on the simulated device: phases, the plan, and the engine's bytes left as they are.

Uses the interpreter in MEMPROF_TEST_ENGINE_PYTHON with the present environment where that is set
(an engine environment under construction), else the simulated stack.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.names import KV_PLAN
from vllm_memprof.record.schema import FIGURES
from vllm_memprof.sim.presets import resolve_model

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

MODEL = "memprof/tiny"
ARGS = [
    "--load-format=dummy",
    "--max-model-len=4096",
    "--gpu-memory-utilization=0.5",
    "--tensor-parallel-size=2",
]
ROOT = Path(__file__).parents[2]

#: The engine core of a server with its workers, brought up and down; prints what the workers hold,
#: in bytes.
BRING_UP = """
import json, sys

def held(wrapper):
    worker = wrapper.worker
    return [
        worker.model_runner.model_memory_usage, worker.requested_memory, worker.peak_activation_memory,
        worker.non_torch_memory, worker.available_kv_cache_memory_bytes,
    ]

def main():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    workers = core.model_executor.collective_rpc(held)
    print("HELD " + json.dumps({"workers": workers, "blocks": config.cache_config.num_gpu_blocks}), flush=True)
    core.shutdown()

if __name__ == "__main__":
    main()
"""


@dataclass
class Engine:
    """An engine's interpreter and its environment on a simulated device."""

    python: str
    env: dict[str, str]
    folder: Path

    def run(
        self, *args: str, run_dir: Path | None = None, **extra_env: str
    ) -> subprocess.CompletedProcess[str]:
        env = {**self.env, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", **extra_env}
        env.pop("MEMPROF_RUN_DIR", None)
        if run_dir is not None:
            env["MEMPROF_RUN_DIR"] = str(run_dir)
        return subprocess.run(
            [self.python, *args],
            env=env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )


@dataclass
class Bench:
    """One run: its output and its events, by worker label where the process has one."""

    done: subprocess.CompletedProcess[str]
    by_label: dict[str, list[dict[str, Any]]]

    @property
    def held(self) -> dict[str, Any]:
        line = re.search(r"^HELD (.*)$", self.done.stdout, re.MULTILINE)
        assert line, self.done.stdout[-3000:]
        held: dict[str, Any] = json.loads(line.group(1))
        return held

    def phases(self, label: str, name: str | None = None) -> list[dict[str, Any]]:
        return [
            e for e in self.by_label[label] if e["kind"] == "phase" and name in (None, e["phase"])
        ]


def record(engine: Engine, run_dir: Path, *args: str, **env: str) -> Bench:
    done = engine.run(*args, run_dir=run_dir, **env)
    by_label: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        labels = [event["label"] for event in events if event["kind"] == "identity"]
        by_label[labels[-1] if labels else events[0]["role"]] = events
    return Bench(done, by_label)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("engine")
    own_state = {"MEMPROF_SIM_STATE": f"/dev/shm/memprof-test-{os.getpid()}"}
    given = os.environ.get("MEMPROF_TEST_ENGINE_PYTHON")
    if not given:
        from vllm_memprof.sim.runtime import prepare_runtime

        runtime = prepare_runtime("910b", request.getfixturevalue("sim_stack"))
        return Engine(str(runtime.python), {**os.environ, **runtime.env, **own_state}, folder)
    info = (
        folder / "plugin" / "vllm_memprof-0.dist-info"
    )  # memprof as the engine would find it if it were installed
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-memprof\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmemprof = vllm_memprof.capture.plugin:register\n"
    )
    path = os.pathsep.join([str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return Engine(given, {**os.environ, "PYTHONPATH": path, **own_state}, folder)


@pytest.fixture(scope="module")
def model_path() -> str:
    return resolve_model(MODEL, []).path


@pytest.fixture(scope="module")
def script(engine: Engine) -> str:
    path = engine.folder / "bring_up.py"
    path.write_text(BRING_UP)
    return str(path)


@pytest.fixture(scope="module")
def eager(
    engine: Engine, script: str, model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    return record(
        engine,
        tmp_path_factory.mktemp("eager"),
        script,
        "--model",
        model_path,
        "--enforce-eager",
        *ARGS,
    )


def test_both_workers_go_through_every_phase(eager: Bench) -> None:
    assert eager.done.returncode == 0, eager.done.stdout[-3000:]
    assert set(eager.by_label) == {"engine_core", "TP0", "TP1"}
    for label in ("TP0", "TP1"):
        ended = [event["phase"] for event in eager.phases(label) if event["edge"] == "after"]
        in_order = [phase for phase in ended if phase not in ("empty_cache", "communicator")]
        assert in_order == [
            "hccl_init",
            "device_init",
            "weight_load",
            "profile_run",
            "kv_cache_alloc",
            "atb_warm_up",
            "warm_up",
            "shutdown",
        ]
        assert not [event for event in eager.by_label[label] if event["kind"] == "error"]


def test_what_nests_in_what(eager: Bench) -> None:
    for label in ("TP0", "TP1"):
        ids = {event["phase"]: event["id"] for event in eager.phases(label)}
        parents = {event["parent"] for event in eager.phases(label, "communicator")}
        assert parents == {ids["profile_run"]}
        profile_run = eager.phases(label, "profile_run")
        inside = [
            e for e in eager.phases(label, "empty_cache") if e["parent"] == ids["profile_run"]
        ]
        assert len(inside) == 4  # before and after, at the profile's start and end
        assert profile_run[1]["t_ns"] > inside[-1]["t_ns"]
        assert all(re.match(r"worker\.py:\d+$", e["detail"]["site"]) for e in inside)


def test_communicator_holds_its_buffers_on_every_rank(eager: Bench) -> None:
    grown = []
    for label in ("TP0", "TP1"):
        before, after = eager.phases(label, "communicator")
        assert before["detail"]["group"] == "tp:0"
        assert before["detail"]["ranks"] == [0, 1]
        held = [
            edge["snapshot"]["components"].get("HCCL", {"bytes": 0}) for edge in (before, after)
        ]
        grown.append(held[1]["bytes"] - held[0]["bytes"])
    assert grown[0] == grown[1] > 0


def test_eager_mode_measures_no_graph(eager: Bench) -> None:
    assert not eager.phases("TP0", "graph_capture")
    figures = [event["values"] for event in eager.by_label["TP0"] if event["kind"] == "figures"]
    assert figures[-1]["graph_bytes"] is None


def test_required_hooks_are_bound_and_said_so(eager: Bench) -> None:
    states = {
        e["hook"]: e["state"]
        for e in eager.by_label["TP0"]
        if e["kind"] == "hook" and e["need"] == "required"
    }
    assert set(states.values()) == {"bound"}
    assert re.search(r"memprof: TP0: (\d+)/\1 required hooks bound", eager.done.stdout)


def test_figures_and_plan_are_those_of_the_engine(eager: Bench) -> None:
    [plan] = [event for event in eager.by_label["engine_core"] if event["kind"] == "kv_plan"]
    assert set(KV_PLAN) - {"fitting_blocks"} <= set(plan)  # that one is of logs
    assert plan["blocks"] == eager.held["blocks"]
    for rank, label in enumerate(("TP0", "TP1")):
        values = [event["values"] for event in eager.by_label[label] if event["kind"] == "figures"][
            -1
        ]
        assert set(values) == set(FIGURES)
        names = (
            "weights_bytes",
            "requested_bytes",
            "peak_activation_bytes",
            "non_torch_increase_bytes",
        )
        *terms, available = eager.held["workers"][rank]
        assert [values[name] for name in names] == terms
        assert values["kv_cache_bytes"] == int(available) == plan["available_bytes"][rank]
    readiness = [
        event["what"] for event in eager.by_label["engine_core"] if event["kind"] == "ready"
    ]
    assert readiness == ["model"]


def test_the_engine_s_bytes_are_identical_without_memprof(
    engine: Engine, script: str, model_path: str, eager: Bench
) -> None:
    plain = Bench(engine.run(script, "--model", model_path, "--enforce-eager", *ARGS), {})

    assert plain.held == eager.held
    assert "hooks bound" not in plain.done.stdout


@pytest.mark.full  # CI: test_host.py, with the rest of a report
def test_a_plan_grants_what_the_engine_grants_and_leaves_in_good_order(
    engine: Engine, model_path: str, eager: Bench, tmp_path: Path
) -> None:
    driver = [
        "-m",
        "vllm_memprof.engines.vllm.driver",
        "plan",
        json.dumps({"model": model_path}),
        "--enforce-eager",
        *ARGS,
    ]
    planned = record(engine, tmp_path, *driver)

    assert planned.done.returncode == 0, planned.done.stdout[-3000:]
    assert "Traceback" not in planned.done.stdout
    [plan] = [event for event in planned.by_label["engine_core"] if event["kind"] == "kv_plan"]
    [served] = [event for event in eager.by_label["engine_core"] if event["kind"] == "kv_plan"]
    assert {key: plan.get(key) for key in KV_PLAN} == {key: served.get(key) for key in KV_PLAN}
    for label in ("TP0", "TP1"):
        assert not planned.phases(label, "kv_cache_alloc")
        assert len(planned.phases(label, "shutdown")) == 2


@pytest.mark.full
def test_graph_mode_in_one_process(
    engine: Engine, script: str, model_path: str, tmp_path: Path
) -> None:
    bench = record(engine, tmp_path, script, "--model", model_path, *ARGS[:-1])

    assert bench.done.returncode == 0, bench.done.stdout[-3000:]
    [label] = bench.by_label
    assert label == "TP0"
    before, after = bench.phases(label, "graph_capture")
    assert before["parent"] == bench.phases(label, "warm_up")[0]["id"]
    assert after["detail"]["graph_bytes"] > 0
    values = [event["values"] for event in bench.by_label[label] if event["kind"] == "figures"][-1]
    assert values["graph_bytes"] == after["detail"]["graph_bytes"]
    assert [event["role"] for event in bench.by_label[label] if event["kind"] == "identity"] == [
        "worker"
    ]
    assert [event["what"] for event in bench.by_label[label] if event["kind"] == "ready"] == [
        "model"
    ]


def test_a_wrong_engine_argument_gets_vllm_s_own_message(
    engine: Engine, model_path: str, tmp_path: Path
) -> None:
    done = engine.run(
        "-m",
        "vllm_memprof.engines.vllm.driver",
        "plan",
        json.dumps({"model": model_path}),
        "--max-model-length=1",
        run_dir=tmp_path,
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --max-model-length=1" in done.stdout
