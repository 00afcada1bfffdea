"""``--distributed-executor-backend ray`` over two nodes of a local cluster that runs already: both ranks are recorded, what travels is what is documented, and a node that dies is named.

The second node has no memprof, a device and a host name of its own, and does not write to the run
folder: what it records comes back through Ray.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import (
    OLD_STACK,
    STACK,
    assert_nothing_left,
    finish,
    read_events,
    run_in_engine,
    start_memprof,
    wait_for_server,
    wait_until,
)
from tests.support.hosts import Deployment
from tests.support.load import Load
from tests.support.ports import free_port
from tests.support.ray_nodes import RayCluster, require_ray, two_nodes
from vllm_memprof.launch.engine import build_env
from vllm_memprof.record.schema import TRAVELS
from vllm_memprof.sim.runtime import prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(600)]

MODEL = "memprof/tiny"
ARGS = [
    "--device=sim:910b",
    "--distributed-executor-backend=ray",
    "--tensor-parallel-size=2",
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--max-num-seqs=8",
]
#: A start-up over two nodes on a slow two-core machine, with room.
START_UP_S = 300.0
#: Start of both executors of 0.23: messages of its own, and Ray's compiled graphs.
EXECUTORS = {"messages": "1", "graphs": "0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    require_ray(STACK)
    folder = tmp_path_factory.mktemp("ray")
    with two_nodes(STACK, folder, (free_port(), free_port())) as running:
        yield running


def assert_complete(run: Any, cluster: RayCluster) -> None:
    """Both ranks, each on its host, and nothing unexplained."""
    assert run.returncode == 0, run.output[-3000:]
    events = run.events()
    where = {
        event["label"]: event["file"].rpartition("-")[0]
        for event in events
        if event["kind"] == "identity"
    }
    assert where == {"TP0": "node-a", "TP1": "node-b"}
    assert [event for event in events if event["kind"] in ("error", "ray_lost")] == []
    ranks = run.report["ranks"]
    assert [rank["label"] for rank in ranks] == ["TP0", "TP1"]
    assert [rank["budget"]["residual_bytes"] for rank in ranks] == [0, 0]
    first, second = ([phase["phase"] for phase in rank["phases"]] for rank in ranks)
    assert first == second
    folders = {event["file"]: event["folder"] for event in events if event["kind"] == "ray"}
    [here] = [folder for file, folder in folders.items() if file.startswith("node-a")]
    [(file, there)] = [each for each in folders.items() if each[0].startswith("node-b")]
    assert here is None
    assert cluster.second.folder in Path(there).parents
    kept, came = Path(there) / "events" / file, run.run_dir / "events" / file
    assert kept.read_bytes() == came.read_bytes()
    samples = sorted((run.run_dir / "samples").glob("node-b-*/0-*.jsonl"))
    assert samples
    for path in samples:  # a rank may be steps behind the first one, for which alone vLLM waits
        written = (Path(there) / path.relative_to(run.run_dir)).read_bytes()
        assert written.startswith(path.read_bytes())
    phases = [event for event in events if event["kind"] == "phase" and event["file"] == file]
    assert phases[-1]["phase"] in ("warm_up", "request", "shutdown")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_both_nodes_are_recorded(cluster: RayCluster, tmp_path: Path, executor: str):
    (tmp_path / "tmp").mkdir()
    env = {**cluster.env, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": EXECUTORS[executor]}
    env["TMPDIR"] = str(tmp_path / "tmp")
    process = start_memprof(["offline", MODEL, *ARGS], tmp_path / "run", env=env)
    run = finish(process, tmp_path / "run", START_UP_S)
    assert_complete(run, cluster)
    assert not list((tmp_path / "tmp").glob("memprof-*"))  # what was sent is not left


def test_an_older_release_of_vllm(tmp_path: Path):
    require_ray(OLD_STACK)
    with two_nodes(OLD_STACK, tmp_path, (free_port(), free_port())) as cluster:
        args = ["offline", MODEL, f"--stack={OLD_STACK}", *ARGS]
        process = start_memprof(args, tmp_path / "run", env=cluster.env)
        assert_complete(finish(process, tmp_path / "run", START_UP_S), cluster)


def test_a_cluster_that_the_engine_starts_itself(tmp_path: Path):
    require_ray(STACK)
    resources = {"RAY_OVERRIDE_RESOURCES": json.dumps({"NPU": 2}), "RAY_ADDRESS": "local"}
    with tempfile.TemporaryDirectory(prefix="mp-ray-", dir="/tmp") as short:  # for its sockets
        env = {**os.environ, **resources, "RAY_TMPDIR": short}
        process = start_memprof(["offline", MODEL, *ARGS], tmp_path / "run", env=env)
        run = finish(process, tmp_path / "run", START_UP_S)
    assert run.returncode == 0, run.output[-3000:]
    assert [rank["budget"]["residual_bytes"] for rank in run.report["ranks"]] == [0, 0]
    assert {event["folder"] for event in run.events() if event["kind"] == "ray"} == {None}


def test_what_ray_is_given(tmp_path: Path):
    """With memprof, no more variables travel than without it but the documented ones."""
    runtime = prepare_runtime("910b", require_ray(STACK))
    script = Path(__file__).with_name("given_to_ray.py")
    secret = {"MEMPROF_API_TOKEN": "s3cr3t", "MEMPROF_HOST": "node-a", "MEMPROF_SIM_STATE": "/x"}
    plain, _ = run_in_engine(runtime, script)
    base = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    env = build_env(base, tmp_path / "run", "serve", {**secret, "MEMPROF_RUN_ID": "0123"})
    added = {name: value for name, value in env.items() if base.get(name) != value}
    given, printed = run_in_engine(runtime, script, **added)
    documented = {*TRAVELS, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "PYTHONUNBUFFERED"}
    for executor in ("messages", "graphs"):
        more = set(given[executor]) - set(plain[executor])
        assert {"MEMPROF_RUN_DIR", "MEMPROF_RUN_ID"} <= more <= documented
        assert not set(secret) & set(given[executor])
    assert plain["runtime_env"] is None
    assert set(given["runtime_env"]) == {"py_modules"}
    modules, metadata = given["runtime_env"]["py_modules"]
    assert (Path(modules).name, Path(metadata).suffix) == ("vllm_memprof", ".dist-info")
    assert given["sent"] == sorted(given["sent"])
    assert {name.partition("/")[0] for name in given["sent"]} == {
        "__init__.py", "redact.py", "version.py", "capture", "record"
    }  # fmt: skip
    assert "s3cr3t" not in printed


def test_a_node_is_killed_while_it_serves(
    cluster: RayCluster, tmp_path: Path, cleanup_processes: list[Any]
):
    """The command of docs/deployments.md. The cluster's last test: half of it is gone afterwards."""
    port = free_port()
    ip, _, ray_port = cluster.address.rpartition(":")
    variables = {"MODEL": MODEL, "HEAD": ip, "PORT": ray_port, "HTTP": str(port)}
    [host] = Deployment(tmp_path, variables, more=("--sample", "1")).start("ray")
    process, run_dir = host.process, host.run_dir
    cleanup_processes.append(process)
    wait_for_server(process, run_dir, START_UP_S)

    def samples_of_second() -> list[Path]:
        return [path for path in run_dir.glob("samples/node-b-*/0-*.jsonl") if path.stat().st_size]

    load = Load(port, MODEL, clients=2).start()
    wait_until(lambda: load.answers.tokens, 60, "a request was answered")
    wait_until(samples_of_second, 60, "samples of the second node came back")
    files = [*run_dir.glob("events/node-b-*.jsonl"), *samples_of_second()]
    before = {path: path.read_bytes() for path in files}
    cluster.second.kill()
    killed_s = time.monotonic()
    run = finish(process, run_dir, 90)
    assert time.monotonic() - killed_s < 60
    load.stop(20)
    assert run.returncode != 0
    [pid] = {event["pid"] for event in read_events(run_dir) if event.get("host") == "node-b"}
    said = f"worker TP1 on node-b (pid {pid}) was lost with its node while serving"
    assert run.info["status"] == "failed"
    assert run.info["exit_reason"] == said
    assert said in (run_dir / "report.md").read_text()
    assert said in run.output
    for path, kept in before.items():
        assert path.read_bytes().startswith(kept)
    labels = {rank["label"]: rank for rank in run.report["ranks"]}
    assert set(labels) == {"TP0", "TP1"}
    assert [rank["budget"]["residual_bytes"] for rank in labels.values()] == [0, 0]
    assert samples_of_second()
    here = {int(path.stem.rsplit("-", 1)[1]) for path in run_dir.glob("events/node-a-*.jsonl")}
    assert_nothing_left(here)
