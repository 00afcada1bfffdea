"""Where a process on a Ray node writes, and how its lines come back. Runs in the engine's workers.

A worker that sees the run folder of the launcher (``run.json`` there has the id of this run) writes
to it. Any other writes to a folder on its own node, and a thread sends whole lines to the collector
(``ray_collector``) through Ray: at most a moment after an event, which stands at the edge of a
phase; samples every second; never in the path of a step. What could not be sent stays in that
folder. Ray is looked up, never imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_memprof.capture.callsite import outwards
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.record.host import host_name
from vllm_memprof.record.schema import ENV_NODE_DIR, ENV_RUN_ID, EVENTS_DIR, RUN_FILE, SAMPLES_DIR

#: Name of the collector among the actors of this run.
COLLECTOR = "memprof-{run_id}"
#: Bytes of one batch at most.
BATCH_BYTES = 1 << 20
#: Seconds that a batch waits for more lines; between two looks at samples; of one call at most;
#: in which the collector has to appear.
_GATHER_S, _LOOK_S, _CALL_S, _APPEAR_S = 0.2, 1.0, 30.0, 180.0
#: Calls that fail in a row before sending ends.
_MOST_FAILURES = 3


@dataclass(frozen=True)
class Place:
    """The folder that a process records into."""

    folder: Path
    node: str | None = None  # id of the Ray node; None: the process is not one of Ray's
    sent: bool = False  # its lines are sent back from there


def find_place(run_dir: str) -> Place:
    """Return where this process writes: the run folder, or a folder of its own on its node."""
    ray = sys.modules.get("ray")
    node = None if ray is None else _node_of_actor(ray)
    if node is None:
        return Place(Path(run_dir))
    run_id = os.environ.get(ENV_RUN_ID, "")
    given = os.environ.get(ENV_NODE_DIR)
    if not given and is_same_folder(Path(run_dir), run_id):
        return Place(Path(run_dir), node)
    base = Path(given or tempfile.gettempdir())
    own = base / f"memprof-{run_id}" / f"{host_name()}-{os.getpid()}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Place(own, node, sent=True)


def is_same_folder(run_dir: Path, run_id: str) -> bool:
    """Return whether this path is here the run folder of that run, and can be written to."""
    try:
        info = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(run_id) and info.get("id") == run_id and os.access(run_dir, os.W_OK | os.X_OK)


def send_back(recorder: Recorder, place: Place) -> None:
    """Say on which node this process is; send its lines where it does not see the run folder."""
    if place.node is None:
        return
    _bind_actor(recorder)
    sender = Sender(sys.modules["ray"], recorder, place)
    if place.sent:
        recorder.writer.written = sender.wake
        os.register_at_fork(after_in_child=lambda: setattr(recorder.writer, "written", None))
    recorder.emit("ray", node=place.node, folder=str(place.folder) if place.sent else None)
    sender.start()


class Sender:
    """Sends what is new in this process's folder, in a thread of its own.

    Args:
        ray: the module.
        recorder: told once of a failure; its lines stay in the folder.
        place: of this process.
    """

    def __init__(self, ray: Any, recorder: Recorder, place: Place) -> None:
        self._ray = ray
        self._recorder = recorder
        self._place = place
        self._news = threading.Event()
        self._process = f"{host_name()}-{os.getpid()}"
        self._ending = threading.Event()
        self._sent: dict[Path, tuple[int, int]] = {}  # file -> inode, bytes
        self._thread = threading.Thread(target=self._run, name="memprof-ray", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Say that there are new lines."""
        self._news.set()

    def _run(self) -> None:
        failures = 0
        try:
            collector = self._find_collector()
            self._call(collector.greet, self._place.node, self._process, self._place.sent)
            if self._place.sent:
                collector.end_asked.remote().future().add_done_callback(self._end)
            while self._place.sent and failures < _MOST_FAILURES:
                if self._news.wait(_LOOK_S):
                    self._news.clear()
                    time.sleep(_GATHER_S)
                try:
                    ending = self._ending.is_set()
                    self.send_news(collector)
                    if ending:
                        self._ending.clear()
                        self._call(collector.finished, self._process)
                    failures = 0
                except Exception:
                    failures += 1
                    if failures == _MOST_FAILURES:
                        raise
        except Exception as error:
            with contextlib.suppress(Exception):
                self._recorder.writer.written = None
                self._recorder.error(f"lines are kept in {self._place.folder}", error)

    def _end(self, asked: object) -> None:
        self._ending.set()
        self._news.set()

    def send_news(self, collector: Any) -> None:
        """Send the whole lines that were added since the last time, batch by batch."""
        folder = self._place.folder
        for directory in (EVENTS_DIR, SAMPLES_DIR):
            for path in sorted((folder / directory).rglob("*.jsonl")):
                self._send_file(collector, path, path.relative_to(folder).as_posix())

    def _send_file(self, collector: Any, path: Path, name: str) -> None:
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                inode, sent = self._sent.get(path, (stat.st_ino, 0))
                if inode != stat.st_ino or sent > stat.st_size:
                    sent = 0  # another file of that name: samples have a bounded number of files
                file.seek(sent)
                while lines := _whole_lines(file.read(BATCH_BYTES) + file.readline()):
                    sent = self._call(collector.append, name, sent, lines)
                    self._sent[path] = (stat.st_ino, sent)
                    file.seek(sent)
        except FileNotFoundError:
            return

    def _call(self, method: Any, *args: object) -> Any:
        return self._ray.get(method.remote(*args), timeout=_CALL_S)

    def _find_collector(self) -> Any:
        name = COLLECTOR.format(run_id=os.environ.get(ENV_RUN_ID, ""))
        until_s = time.monotonic() + _APPEAR_S
        while True:
            try:
                return self._ray.get_actor(name)
            except ValueError:  # not there yet
                if time.monotonic() > until_s:
                    raise
                time.sleep(1.0)


def _bind_actor(recorder: Recorder) -> None:
    """Bind the methods of the actor that is loading the plug-in.

    Ray gives an actor a class with copies of all inherited methods (``_inject_tracing_into_class``
    in ray/util/tracing/tracing_helper.py): wrappers of the base class are not called.
    """
    for frame in outwards(sys._getframe(1)):
        subject = frame.f_locals.get("self")
        if hasattr(type(subject), "__ray_actor_class__"):
            recorder.hooks.bind_instance(subject)
            return


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _node_of_actor(ray: Any) -> str | None:
    """Return the node of this process where it is an actor of Ray's, else None."""
    try:
        if not ray.is_initialized():
            return None
        context = ray.get_runtime_context()
        return str(context.get_node_id()) if context.get_actor_id() is not None else None
    except Exception:
        return None
