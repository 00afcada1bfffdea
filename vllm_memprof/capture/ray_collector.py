"""The collector: an actor of Ray on the engine core's node, one per run.

Lines of workers that do not see the run folder enter, the same files in the run folder leave. It
also looks every second whether the nodes of the run's workers are alive: an engine may not notice
that one is gone until its next request.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_memprof.capture.writer import EventWriter

#: Reason of a ``ray_lost`` event that is about a whole node.
NODE_LOST = "the node does not answer"
_LOOK_S = 1.0
#: Files of a run folder that a worker may add to.
_NAME = re.compile(r"(events|samples/[\w.-]*\w)/[\w-][\w.-]*\.jsonl")
#: Bytes of one file at most: four times what a process writes, and an end in any case.
_MOST_BYTES = 64 << 20


class Collector:
    """Keeps what the workers of other nodes send.

    Args:
        run_dir: the run folder, on this node.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._writer = EventWriter(self._run_dir)
        self._nodes: dict[str, bool] = {}  # id -> told that it is gone
        self._unfinished: set[str] = set()  # processes that send their lines here
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._watch, name="memprof-nodes", daemon=True)

    def greet(self, node: str, process: str, sends: bool) -> None:
        """Note a node that a process of the run is on, and whether it sends its lines here."""
        if sends:
            self._unfinished.add(process)
        self._nodes.setdefault(node, False)
        if self._thread.ident is None:
            self._thread.start()

    async def end_asked(self) -> None:
        """Return when the engine is about to end: the caller sends its last lines."""
        await self._end.wait()

    async def end(self) -> None:
        """Ask all senders for their last lines."""
        self._end.set()

    def finished(self, process: str) -> None:
        """Note that a process has sent its last lines."""
        self._unfinished.discard(process)

    def unfinished(self) -> int:
        """Return how many processes have not."""
        return len(self._unfinished)

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
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if offset else os.O_TRUNC)
        fd = os.open(path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size != offset:
                return size
            while lines:
                written = os.pwrite(fd, lines, offset)
                offset, lines = offset + written, lines[written:]
            return offset
        finally:
            os.close(fd)

    def _watch(self) -> None:
        ray: Any = sys.modules["ray"]
        while True:
            time.sleep(_LOOK_S)
            try:
                dead = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
            except Exception:  # Ray is about to end
                continue
            for node in [node for node, told in self._nodes.items() if not told and node in dead]:
                self._nodes[node] = True
                fields = {"node": node, "rank": None, "reason": NODE_LOST}
                self._writer.emit("ray_lost", fields, "collector")
