"""Workers on Ray nodes: what travels to them, where they write, and how their lines come back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.capture import ray_nodes
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.hooks.table import HOOKS
from vllm_memprof.capture.ray_nodes import NODE_LOST, Collector, Place, Sender, find_place
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.schema import (
    ENV_NODE_DIR,
    ENV_RAY_SHIP,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    TRAVELS,
)


class FakeRay:
    """As much of Ray as capture looks up: calls of actors are done at once, in this process."""

    def __init__(self, node: str | None = None) -> None:
        self.node = node  # None: this process is no actor
        self.dead: set[str] = set()
        self.port = 0
        self.started = False
        self.options: dict[str, Any] = {}
        self.actors: list[Any] = []

    def is_initialized(self) -> bool:
        return self.started or self.node is not None

    def get_runtime_context(self) -> Any:
        actor = None if self.node is None else "actor"
        return SimpleNamespace(get_node_id=lambda: self.node or "n0", get_actor_id=lambda: actor)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": f"n{number}",
                "Alive": f"n{number}" not in self.dead,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": self.port,
            }
            for number in (0, 1)
        ]

    def get(self, value: Any, timeout: float | None = None) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        ended = [each for each in references if isinstance(each, Exception)]
        return ended, [each for each in references if each not in ended]

    def remote(self, cls: type) -> Any:
        def start(*args: Any) -> Any:
            self.actors.append((cls, args))
            return self.actors[-1]

        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)


class Affinity:
    def __init__(self, node: str, soft: bool) -> None:
        self.node = node


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake: Any = FakeRay()
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=Affinity)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)  # type: ignore[arg-type]
    for name in (ENV_NODE_DIR, ENV_RAY_SHIP, ray_nodes._SUBMITTED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENV_RUN_ID, "id-of-run")
    return fake


def events_of(recorder: Recorder) -> list[dict[str, Any]]:
    lines = recorder.writer.path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def call_of(subject: Any, hook_id: str = "ray.executor") -> Call:
    hook = next(hook for hook in HOOKS if hook.id == hook_id)
    return Call(hook, "f", (subject,), {})


def as_actor(collector: Collector) -> Any:
    def method(name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: getattr(collector, name)(*args))

    return SimpleNamespace(**{name: method(name) for name in ("append", "greet", "look")})


# --- the package ----------------------------------------------------------------------------------


def test_what_is_sent_is_enough_for_the_plug_in_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    staged = ray_nodes.stage()
    files = [path for path in staged.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".py", ".json", ".txt", ""}
    sent = {path.relative_to(staged).parts[1] for path in files if path.suffix in (".py", ".json")}
    assert sent == {*ray_nodes.PARTS}
    assert sum(path.stat().st_size for path in files) < 1 << 20
    code = """
import importlib.metadata as metadata, sys
[entry] = [each for each in metadata.entry_points(group="vllm.general_plugins")]
assert entry.name == "memprof", entry
entry.load()
import vllm_memprof.capture.observer, vllm_memprof.capture.ray_nodes
import vllm_memprof.capture.hooks.table
others = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(others - {"__main__", "__mp_main__"}), sys.modules["vllm_memprof"].__file__)
"""
    found = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(staged)!r})\n{code}",
        ],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == "['vllm_memprof']"


# --- what Ray is given ----------------------------------------------------------------------------


def test_the_package_belongs_to_the_job_while_the_engine_connects(ray: FakeRay, tmp_path: Path):
    recorder = Recorder(tmp_path)
    given = {"env_vars": {"A": "1"}, "py_modules": ["/of/the/user"]}
    executor = SimpleNamespace(parallel_config=SimpleNamespace(ray_runtime_env=given))
    call = call_of(executor)
    ray_nodes.enter_executor(recorder, call)
    asked = executor.parallel_config.ray_runtime_env
    assert asked["env_vars"] == {"A": "1"}
    assert asked["py_modules"][0] == "/of/the/user"
    assert all(Path(module).is_dir() for module in asked["py_modules"][1:])
    ray.started = True
    ray_nodes.enter_workers(recorder, call_of(executor, "ray.workers"))
    assert executor.parallel_config.ray_runtime_env == given  # an actor takes no folders
    [(cls, args)] = ray.actors
    assert (cls, args) == (Collector, (str(tmp_path),))
    assert ray.options["name"] == "memprof-id-of-run"
    assert ray.options["num_cpus"] == 0
    assert ray.options["scheduling_strategy"].node == "n0"
    assert "runtime_env" not in ray.options
    ray_nodes.leave_executor(recorder, call)
    assert executor.parallel_config.ray_runtime_env is given
    assert not Path(asked["py_modules"][1]).exists()


def test_nothing_is_sent_where_it_is_installed(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ENV_RAY_SHIP, "0")
    executor = SimpleNamespace(parallel_config=SimpleNamespace(ray_runtime_env=None))
    call = call_of(executor)
    ray_nodes.enter_executor(Recorder(tmp_path), call)
    assert executor.parallel_config.ray_runtime_env is None
    assert call.token is None


def test_a_job_that_was_opened_before_is_left_alone(ray: FakeRay, tmp_path: Path):
    ray.started = True
    recorder = Recorder(tmp_path)
    executor = SimpleNamespace(parallel_config=SimpleNamespace(ray_runtime_env=None))
    ray_nodes.enter_executor(recorder, call_of(executor))
    assert executor.parallel_config.ray_runtime_env is None
    assert "installed" in events_of(recorder)[-1]["message"]


def test_variables_of_this_host_stay_here(monkeypatch: pytest.MonkeyPatch):
    left_out: set[str] = {"OF_THE_USER"}
    module = SimpleNamespace(RAY_NON_CARRY_OVER_ENV_VARS=left_out)
    executor = SimpleNamespace(ADDITIONAL_ENV_VARS={"HF_TOKEN"})
    monkeypatch.setitem(sys.modules, "vllm.ray.ray_env", module)  # type: ignore[arg-type]
    own = ("MEMPROF_HOST", "MEMPROF_SIM_STATE", "MEMPROF_SIM_PROFILE", "MEMPROF_NODE_DIR")
    for name in own:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(ENV_RUN_DIR, "x")
    ray_nodes.keep_at_home(executor)
    assert {*own, "OF_THE_USER"} <= left_out
    assert not left_out & set(TRAVELS)
    assert {"HF_TOKEN", *TRAVELS} == executor.ADDITIONAL_ENV_VARS


def test_the_docs_list_what_travels():
    text = (ray_nodes.PACKAGE.parent / "docs/develop/observing.md").read_text()
    section = text.partition("## Workers on Ray nodes")[2].partition("\n## ")[0]
    listed = re.findall(r"`([A-Z_]+)`", section.partition("travel, which are")[2].partition(".")[0])
    assert [f"MEMPROF_{name}" for name in listed] == [*TRAVELS]


# --- where a worker writes ------------------------------------------------------------------------


def test_a_worker_that_sees_the_run_folder_writes_there(ray: FakeRay, tmp_path: Path):
    assert find_place(tmp_path) == Place(tmp_path)  # no actor
    ray.node = "n1"
    (tmp_path / "run.json").write_text(json.dumps({"id": "id-of-run"}))
    assert find_place(tmp_path) == Place(tmp_path, "n1")


@pytest.mark.parametrize("marker", [None, "{", json.dumps({"id": "of another run"})])
def test_any_other_worker_writes_on_its_own_node(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str | None
):
    ray.node = "n1"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("MEMPROF_HOST", "node-b")
    if marker is not None:
        (tmp_path / "run.json").write_text(marker)
    place = find_place(tmp_path)
    assert place.sent
    assert place.folder.is_dir()
    assert place.folder == tmp_path / "tmp" / "memprof-id-of-run" / f"node-b-{os.getpid()}"


def test_a_folder_that_the_node_names_comes_first(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray.node = "n1"
    (tmp_path / "run.json").write_text(json.dumps({"id": "id-of-run"}))
    monkeypatch.setenv(ENV_NODE_DIR, str(tmp_path / "node"))
    assert (tmp_path / "node") in find_place(tmp_path).folder.parents


def test_methods_that_ray_copied_into_the_class_of_an_actor_are_hooked(
    ray: FakeRay, tmp_path: Path
):
    bound: list[object] = []
    recorder = Recorder(tmp_path)
    recorder.hooks = SimpleNamespace(bind_instance=bound.append)  # type: ignore[assignment]

    class Actor:
        __ray_actor_class__ = object

        def init_worker(self) -> None:
            ray_nodes.send_back(recorder, Place(tmp_path, "n1"))

    actor = Actor()
    monkey = pytest.MonkeyPatch()
    monkey.setattr(Sender, "run", lambda self: None)
    actor.init_worker()
    monkey.undo()
    assert bound == [actor]
    assert events_of(recorder)[-1]["node"] == "n1"


# --- how lines come back --------------------------------------------------------------------------


@pytest.fixture
def sending(ray: FakeRay, tmp_path: Path) -> tuple[Sender, Any, Path, Path]:
    there, here = tmp_path / "there", tmp_path / "here"
    ray.node = "n1"
    sender = Sender(Recorder(there), Place(there, "n1", sent=True))
    return sender, as_actor(Collector(str(here))), there, here


def test_whole_lines_come_back_in_batches(
    sending: tuple[Sender, Any, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    sender, collector, there, here = sending
    monkeypatch.setattr(ray_nodes, "BATCH_BYTES", 64)
    name = "events/node-b-7.jsonl"
    (there / "events").mkdir(parents=True)
    lines = "".join(f'{{"n":{number}}}\n' for number in range(100)) + "x" * 200 + "\n"
    (there / name).write_text(lines + '{"torn":')
    sender.send_news(collector)
    assert (here / name).read_text() == lines
    assert (here / name).stat().st_mode & 0o777 == 0o600
    with (there / name).open("a") as file:
        file.write("1}\n")
    sender.send_news(collector)
    assert (here / name).read_text() == (there / name).read_text()


def test_a_batch_that_came_twice_is_kept_once(tmp_path: Path):
    collector = Collector(str(tmp_path))
    assert collector.append("events/b-1.jsonl", 0, b"a\n") == 2
    assert collector.append("events/b-1.jsonl", 2, b"b\n") == 4
    assert collector.append("events/b-1.jsonl", 2, b"b\n") == 4  # its answer was lost
    assert (tmp_path / "events/b-1.jsonl").read_bytes() == b"a\nb\n"


@pytest.mark.parametrize(
    "name",
    ["../x.jsonl", "events/../../x.jsonl", "/x.jsonl", "run.json", "events/a/b.jsonl",
     "samples/../x.jsonl", "samples/a/../../x.jsonl", "events/.jsonl", "samples/./x.jsonl"],
)  # fmt: skip
def test_the_collector_writes_nowhere_else(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="not taken"):
        Collector(str(tmp_path / "run")).append(name, 0, b"a\n")
    assert not list(tmp_path.rglob("*.jsonl"))


def test_sending_that_fails_is_said_once_and_the_lines_stay(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray.node = "n1"
    for name in ("_APPEAR_S", "_GATHER_S"):
        monkeypatch.setattr(ray_nodes, name, 0.0)
    monkeypatch.setattr(FakeRay, "get_actor", _no_actor, raising=False)
    recorder = Recorder(tmp_path)
    place = Place(tmp_path, "n1", sent=True)
    sender = Sender(recorder, place)
    recorder.writer.written = sender.news.set
    recorder.emit("ready", what="model")
    sender.run()
    assert recorder.writer.written is None
    ready, error = events_of(recorder)[-2:]
    assert ready["what"] == "model"
    assert error["where"] == f"lines are kept in {tmp_path}"
    assert "no collector" in error["message"]


def _no_actor(self: FakeRay, name: str) -> Any:
    raise ValueError("no collector")


# --- what is lost ---------------------------------------------------------------------------------


class Ending:
    """A collector that is told of the end."""

    def __init__(self) -> None:
        self.asked = 0
        self.end = SimpleNamespace(remote=self.count)

    def count(self) -> None:
        self.asked += 1


def test_a_lost_node_is_told_from_a_lost_worker(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Collector, "_watch", lambda self: None)
    recorder, collector = Recorder(tmp_path / "core"), Collector(str(tmp_path / "collected"))
    recorder.collector = as_actor(collector)
    for node in ("n0", "n1"):
        collector.greet(node, "of it", False)
    died = RuntimeError("The actor died\nunexpectedly")
    handles = [
        SimpleNamespace(rank=0, node_id="n0", run_ref="runs"),
        SimpleNamespace(rank=1, node_id="n1", run_ref=died),
    ]
    executor = SimpleNamespace(is_failed=True, shutting_down=False, ray_worker_handles=handles)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray.port = server.getsockname()[1]
        ray_nodes.enter_shutdown(recorder, call_of(executor, "ray.shutdown"))
    ray_nodes.enter_shutdown(recorder, call_of(executor, "ray.shutdown"))  # nothing listens now
    [of_worker] = [event for event in events_of(recorder) if event["kind"] == "ray_lost"]
    said = "RuntimeError: The actor died unexpectedly"
    assert (of_worker["node"], of_worker["rank"], of_worker["reason"]) == ("n1", 1, said)
    collector.look()  # a second look tells nothing new
    [path] = (tmp_path / "collected/events").iterdir()
    _, *lost = map(json.loads, path.read_text().splitlines())
    assert [(each["node"], each["rank"], each["reason"]) for each in lost] == [
        ("n0", None, NODE_LOST), ("n1", None, NODE_LOST),
    ]  # fmt: skip


def test_an_end_in_good_order_waits_for_last_lines(ray: FakeRay, tmp_path: Path):
    recorder = Recorder(tmp_path)
    recorder.collector = collector = Ending()
    handles = [SimpleNamespace(rank=0, node_id="n1", run_ref=RuntimeError("ended"))]
    executor = SimpleNamespace(is_failed=False, shutting_down=False, ray_worker_handles=handles)
    ray.started = True
    ray_nodes.enter_shutdown(recorder, call_of(executor, "ray.shutdown"))
    assert collector.asked == 1
    executor.shutting_down = True  # vLLM calls it more than once
    ray_nodes.enter_shutdown(recorder, call_of(executor, "ray.shutdown"))
    assert collector.asked == 1
    assert not recorder.writer.path.exists()


def test_a_sender_sends_its_last_lines_when_it_is_asked(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The request comes while it waits; what was written before it has come when it is done."""
    monkeypatch.setattr(ray_nodes, "_LOOK_S", 60.0)
    ray.node = "n1"
    there, here = tmp_path / "there", tmp_path / "here"
    collector = Collector(str(here))
    actor = as_actor(collector)
    asked: concurrent.futures.Future[None] = concurrent.futures.Future()
    actor.end_asked = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: asked))
    monkeypatch.setattr(FakeRay, "get_actor", lambda self, name: actor, raising=False)
    monkeypatch.setattr(Collector, "_watch", lambda self: None)
    sender = Sender(Recorder(there), Place(there, "n1", sent=True))
    threading.Thread(target=sender.run, daemon=True).start()
    until_s = time.monotonic() + 20
    while not collector._unfinished and time.monotonic() < until_s:
        time.sleep(0.01)
    (there / "events").mkdir(parents=True)
    (there / "events/b-1.jsonl").write_text("last\n")
    asked.set_result(None)
    asyncio.run(asyncio.wait_for(collector.end(), 20))
    assert (here / "events/b-1.jsonl").read_text() == "last\n"
    shutil.rmtree(there)
    sender._place = Place(there, "n1")  # the thread ends
    sender.news.set()
