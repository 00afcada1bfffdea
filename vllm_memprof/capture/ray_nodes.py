"""Workers on Ray nodes: what reaches them, where they write, and how their lines come back.

Before the engine connects to Ray, its core makes this package, as far as a worker needs it, a part
of the job's runtime environment, and keeps variables that belong to this host from travelling.
Before the workers are made, it starts the collector: an actor on its node, one per run. When the
executor ends, it says which workers are gone.

A worker that sees the run folder of the launcher (``run.json`` there has the id of this run) writes
to it. Any other writes to a folder on its own node, and a thread sends whole lines to the collector
through Ray: at most a moment after an event, which stands at the edge of a phase; samples every
second; never in the path of a step. What could not be sent stays in that folder. Ray and the engine
are looked up, never imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.callsite import outwards
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.capture.writer import EventWriter, process_name
from vllm_memprof.record.schema import (
    ENV_NODE_DIR,
    ENV_RAY_SHIP,
    ENV_RUN_ID,
    RUN_FILE,
    TRAVELS,
)
from vllm_memprof.redact import redact_text
from vllm_memprof.units import one_line
from vllm_memprof.version import __version__

PACKAGE = Path(__file__).resolve().parent.parent
#: What capture imports: modules, and packages of modules. All of it needs the standard library
#: alone.
PARTS = (
    *("__init__.py", "errors.py", "files.py", "options.py", "redact.py", "secrets.json"),
    *("short_options.json", "units.py", "version.py", "capture", "engines", "record"),
)
_METADATA = f"{PACKAGE.name}-{__version__}.dist-info"
#: Ray's own variable: the job that runs this process has a runtime environment already, and a
#: second one with the same field is refused.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Seconds in which a node takes a connection; that workers have for their last lines, when the
#: engine ends.
_ANSWER_S, _FINISH_S = 2.0, 3.0
#: Reason of a ``ray_lost`` event that is about a whole node.
NODE_LOST = "the node does not answer"
#: Files of a run folder that a worker may add to.
_NAME = re.compile(r"(events|samples/[\w.-]*\w)/[\w-][\w.-]*\.jsonl")
#: Bytes of one file at most, four times what a process writes and an end in any case; of one batch.
_MOST_BYTES, BATCH_BYTES = 64 << 20, 1 << 20
#: Seconds that a batch waits for more lines; between two looks at samples or nodes; of one call at
#: most; in which the collector has to appear.
_GATHER_S, _LOOK_S, _CALL_S, _APPEAR_S = 0.2, 1.0, 30.0, 180.0
#: Calls that fail in a row before sending ends.
_MOST_FAILURES = 3


# --- the engine core's process: actions of hook rows ----------------------------------------------


def enter_executor(recorder: Recorder, call: Call) -> None:
    """Prepare the job that the engine is about to open."""
    keep_at_home(call.subject)
    ray: Any = sys.modules.get("ray")
    if ray is None or os.environ.get(ENV_RAY_SHIP) == "0":
        return
    if ray.is_initialized() or _SUBMITTED in os.environ:
        text = "this Ray job was opened before the engine: memprof records where it is installed"
        recorder.emit("error", where="ray", message=text)
        return
    config = call.subject.parallel_config
    given, call.token = config.ray_runtime_env or {}, stage()
    recorder.ray_job = config, config.ray_runtime_env
    modules = [str(call.token / name) for name in (PACKAGE.name, _METADATA)]
    modules = [*(given.get("py_modules") or ()), *modules]
    config.ray_runtime_env = {**given, "py_modules": modules}


def leave_executor(recorder: Recorder, call: Call) -> None:
    """Remove what was staged; the job has it by now."""
    if call.token is not None:
        _restore(recorder)
        shutil.rmtree(call.token, ignore_errors=True)


def _restore(recorder: Recorder) -> None:
    """Take back what ``enter_executor`` changed; the job keeps its runtime environment."""
    if recorder.ray_job is not None:
        config, given = recorder.ray_job
        config.ray_runtime_env = given


def stage() -> Path:
    """Write this package and the metadata by which vLLM finds it into a new folder."""
    staged = Path(tempfile.mkdtemp(prefix="memprof-ray-"))
    left_out = shutil.ignore_patterns("__pycache__", ".*", "*.md", "*.toml")
    package, metadata = staged / PACKAGE.name, staged / _METADATA
    package.mkdir()
    metadata.mkdir()
    for part in PARTS:
        if (PACKAGE / part).is_dir():
            shutil.copytree(PACKAGE / part, package / part, ignore=left_out)
        else:
            shutil.copy(PACKAGE / part, package / part)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm-memprof\nVersion: {__version__}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmemprof = vllm_memprof.capture.plugin:register\n"
    )
    return staged


def keep_at_home(executor: Any) -> None:
    """Keep the variables of this host and of its simulated device from travelling with Ray.

    vLLM has a set of names that it does not copy; from 0.13 on, in ``vllm.ray.ray_env``. What a run
    is asked for travels: vLLM 0.23 copies every variable, or those with a prefix that the launcher
    named; a release before that copies by name, and is given the names.
    """
    left_out = reach(sys.modules.get("vllm.ray.ray_env"), "RAY_NON_CARRY_OVER_ENV_VARS")
    if isinstance(left_out, set):
        left_out |= {name for name in os.environ if name.startswith("MEMPROF_")} - {*TRAVELS}
    named = reach(executor, "ADDITIONAL_ENV_VARS")
    if isinstance(named, set):
        named |= {*TRAVELS}


def enter_workers(recorder: Recorder, call: Call) -> None:
    """Start the collector on this node; workers find it by its name. Nothing is waited for."""
    _restore(recorder)  # of the job alone: Ray takes folders of this host for no actor
    ray: Any = sys.modules["ray"]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": _collector_name(),
        "num_cpus": 0,
        "scheduling_strategy": here,
        "get_if_exists": True,
    }
    actor = ray.remote(Collector).options(**options).remote(str(recorder.run_dir.absolute()))
    recorder.collector = actor  # it lives as long as somebody holds it


def _collector_name() -> str:
    """Return the name of the collector among the actors of this run."""
    return f"memprof-{os.environ.get(ENV_RUN_ID, '')}"


def enter_shutdown(recorder: Recorder, call: Call) -> None:
    """Say which workers are gone, before the executor ends the others; let these send the rest."""
    executor, collector = call.subject, recorder.collector
    ray: Any = sys.modules.get("ray")
    if getattr(executor, "shutting_down", False) or collector is None:
        return
    if not getattr(executor, "is_failed", False):
        with suppress(Exception):  # it is late, or gone
            ray.get(collector.end.remote(), timeout=_FINISH_S)
        return
    lost = ray.get(collector.look.remote(), timeout=_CALL_S)
    for handle in getattr(executor, "ray_worker_handles", []):
        node, run = handle.node_id, handle.run_ref
        if run is not None and node not in lost and ray.wait([run], timeout=0)[0]:
            reason = "its work ended"
            try:
                ray.get(run, timeout=0)
            except Exception as error:
                reason = one_line(redact_text(f"{type(error).__name__}: {error}"))
            recorder.emit("ray_lost", node=node, rank=handle.rank, reason=reason)


# --- a worker's process ---------------------------------------------------------------------------


class Place(NamedTuple):
    """The folder that a process records into."""

    folder: Path
    node: str | None = None  # id of the Ray node; None: the process is not one of Ray's
    sent: bool = False  # its lines are sent back from there


def find_place(run_dir: Path) -> Place:
    """Return where this process writes: the run folder, or a folder of its own on its node."""
    ray: Any = sys.modules.get("ray")
    node = None
    with suppress(Exception):
        if ray.is_initialized():
            context = ray.get_runtime_context()
            node = None if context.get_actor_id() is None else str(context.get_node_id())
    if node is None:
        return Place(run_dir)
    run_id, given = os.environ.get(ENV_RUN_ID), os.environ.get(ENV_NODE_DIR)
    with suppress(OSError, ValueError):
        info = json.loads((run_dir / RUN_FILE).read_text("utf-8"))
        if info["id"] == run_id and not given and os.access(run_dir, os.W_OK | os.X_OK):
            return Place(run_dir, node)
    own = Path(given or tempfile.gettempdir()) / _collector_name() / process_name()
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Place(own, node, sent=True)


def send_back(recorder: Recorder, place: Place) -> None:
    """Say on which node this process is; send its lines where it does not see the run folder.

    Ray gives an actor a class with copies of all inherited methods (``_inject_tracing_into_class``
    in ray/util/tracing/tracing_helper.py): wrappers of the base class are not called, and those of
    the actor that is loading the plug-in are bound here.
    """
    if place.node is None:
        return
    for frame in outwards(sys._getframe(1)):
        subject = frame.f_locals.get("self")
        if hasattr(type(subject), "__ray_actor_class__"):
            recorder.hooks.bind_instance(subject)
            break
    sender = Sender(recorder, place)
    if place.sent:
        recorder.writer.written = sender.news.set
        os.register_at_fork(after_in_child=lambda: setattr(recorder.writer, "written", None))
    recorder.emit("ray", node=place.node, folder=str(place.folder) if place.sent else None)
    threading.Thread(target=sender.run, name="memprof-ray", daemon=True).start()


class Sender:
    """Sends what is new in this process's folder, in a thread of its own.

    Args:
        recorder: told once of a failure; its lines stay in the folder.
        place: of this process.
    """

    def __init__(self, recorder: Recorder, place: Place) -> None:
        self._ray: Any = sys.modules["ray"]
        self._recorder, self._place = recorder, place
        self.news = threading.Event()  # there are new lines
        self._sent: dict[Path, int] = {}  # file -> bytes

    def run(self) -> None:
        node, folder = self._place.node, self._place.folder
        try:
            until_s, collector = time.monotonic() + _APPEAR_S, None
            while collector is None:
                try:
                    collector = self._ray.get_actor(_collector_name())
                except ValueError:  # not there yet
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(1.0)
            self._call(collector.greet, node, process_name(), self._place.sent)
            if self._place.sent:
                asked = collector.end_asked.remote().future()
                asked.add_done_callback(lambda _: self.news.set())
            while self._place.sent:
                if self.news.wait(_LOOK_S):
                    self.news.clear()
                    time.sleep(_GATHER_S)
                ending = asked.done()
                self.send_news(collector)
                if ending:
                    self._call(collector.greet, node, process_name(), False)
        except Exception as error:
            with suppress(Exception):
                self._recorder.writer.written = None
                self._recorder.error(f"lines are kept in {folder}", error)

    def send_news(self, collector: Any) -> None:
        """Send the whole lines that were added since the last time, batch by batch."""
        folder = self._place.folder
        for path in sorted(folder.rglob("*.jsonl")):
            sent, name = self._sent.get(path, 0), path.relative_to(folder).as_posix()
            # one of a bounded number of files may have gone
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(sent)
                while b"\n" in (data := file.read(BATCH_BYTES) + file.readline()):
                    lines = data[: data.rfind(b"\n") + 1]
                    sent = self._sent[path] = self._call(collector.append, name, sent, lines)
                    file.seek(sent)

    def _call(self, method: Any, *args: object) -> Any:
        failures = 0
        while True:
            try:
                return self._ray.get(method.remote(*args), timeout=_CALL_S)
            except Exception:
                failures += 1
                if failures == _MOST_FAILURES:
                    raise


# --- the collector's process ----------------------------------------------------------------------


class Collector:
    """Keeps what the workers of other nodes send: their lines become the same files in the folder.

    It also looks every second whether the nodes of the run's workers answer: an engine may not
    notice that one is gone until its next request.

    Args:
        run_dir: the run folder, on this node.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._writer = EventWriter(self._run_dir, lambda: "collector")
        self._nodes: dict[str, bool] = {}  # id -> it is gone
        self._unfinished: set[str] = set()  # processes that send their lines here
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._watch, name="memprof-nodes", daemon=True)

    def greet(self, node: str, process: str, sends: bool) -> None:
        """Note a node that a process of the run is on, and whether it has lines to send here."""
        if sends:
            self._unfinished.add(process)
        else:
            self._unfinished.discard(process)
        self._nodes.setdefault(node, False)
        if self._thread.ident is None:
            self._thread.start()

    async def end_asked(self) -> None:
        """Return when the engine is about to end: the caller sends its last lines."""
        await self._end.wait()

    async def end(self) -> None:
        """Ask all senders for their last lines, and return when they have come."""
        self._end.set()
        while self._unfinished:
            await asyncio.sleep(0.05)

    def append(self, name: str, offset: int, lines: bytes) -> int:
        """Add whole lines to a file of the run folder.

        Args:
            name: of the file, below the run folder.
            offset: bytes of it that were sent before; 0: the file begins anew.
            lines: what follows.

        Returns:
            The bytes that the file has: from there the sender goes on.

        Raises:
            ValueError: no file that a worker may write, or one that is too large.
        """
        if not _NAME.fullmatch(name) or offset + len(lines) > _MOST_BYTES:
            raise ValueError(f"not taken: {name} at {offset}")
        path = self._run_dir / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("r+b" if offset else "wb") as file:
            size = file.seek(0, os.SEEK_END)
            if size == offset:
                size += file.write(lines)
            return size

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with suppress(Exception):  # Ray is about to end
                self.look()

    def look(self) -> list[str]:
        """Write which nodes do not take connections any more, and return them.

        Ray itself needs many seconds to see that one does not.
        """
        ray: Any = sys.modules["ray"]
        for node in ray.nodes():
            if self._nodes.get(node["NodeID"]) is False:
                address = (node["NodeManagerAddress"], node["NodeManagerPort"])
                try:
                    socket.create_connection(address, _ANSWER_S).close()
                except OSError:
                    self._nodes[node["NodeID"]] = True
                    lost = node["NodeID"]
                    self._writer.emit("ray_lost", node=lost, rank=None, reason=NODE_LOST)
        return [node for node, is_gone in self._nodes.items() if is_gone]
