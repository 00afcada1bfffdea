"""A Ray cluster of two nodes on this machine: each is a process group with its own host name and its own simulated device."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import require_stack
from vllm_memprof.record.host import ENV_HOST
from vllm_memprof.record.schema import ENV_NODE_DIR
from vllm_memprof.sim.runtime import ENV_STATE, SITE_DIR, own_state_file, prepare_runtime

#: A start of Ray on a slow two-core machine, with room.
START_S = 120.0
#: Of this machine as well.
SECOND_IP = "127.0.0.2"


def require_ray(stack: str) -> str:
    """Return a stack that has Ray, else skip, or fail where MEMPROF_REQUIRE_SIM is set."""
    require_stack(stack)
    if not _ray_of(stack).exists():
        reason = f"no Ray in the stack: memprof sim setup --stack {stack} --with ray"
        assert not os.environ.get("MEMPROF_REQUIRE_SIM"), reason
        pytest.skip(reason)
    return stack


def _ray_of(stack: str) -> Path:
    return prepare_runtime("910b", stack).python.with_name("ray")


@dataclass
class RayNode:
    """A node: ``ray start --block`` and all that it starts, in a process group of their own."""

    host: str
    process: subprocess.Popen[bytes]
    log: Path
    state: Path  # of its simulated device
    folder: Path | None = None  # its MEMPROF_NODE_DIR

    def wait(self) -> str:
        """Return the node's address, once Ray has started."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = self.log.read_text(errors="replace")
            if "Ray runtime started" in text:
                found = re.search(r"Local node IP: (\S+)", text)
                assert found is not None
                return found.group(1)
            assert self.process.poll() is None, text[-3000:]
            time.sleep(0.2)
        raise AssertionError(f"Ray has not started: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """SIGKILL to the whole node, as when its host loses power."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)
        self.state.unlink(missing_ok=True)


def start_node(
    stack: str, host: str, log: Path, *options: str, folder: Path | None = None, **env: str
) -> RayNode:
    """Start a node with one device; memprof is not installed there."""
    runtime = prepare_runtime("910b", stack)
    state = own_state_file()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    own = {ENV_HOST: host, ENV_STATE: str(state), "PYTHONPATH": str(SITE_DIR), **env}
    if folder is not None:
        own[ENV_NODE_DIR] = str(folder)
    command = [
        str(_ray_of(stack)),
        "start",
        "--block",
        "--disable-usage-stats",
        "--num-cpus=1",
        '--resources={"NPU": 1}',
        "--object-store-memory=100000000",
        *options,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**kept, **runtime.env, **own},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RayNode(host, process, log, state, folder)


@dataclass
class RayCluster:
    """Two nodes; the first one is where memprof is started."""

    address: str
    first: RayNode
    second: RayNode

    @property
    def env(self) -> dict[str, str]:
        """Variables of memprof on the first node."""
        return {**os.environ, "RAY_ADDRESS": self.address, ENV_HOST: self.first.host}


@contextmanager
def two_nodes(
    stack: str, folder: Path, ports: tuple[int, int], **kwargs: Any
) -> Iterator[RayCluster]:
    """A cluster; the second node does not write to the run folder."""
    temporary = Path(tempfile.mkdtemp(prefix="mp-ray-", dir="/tmp"))  # sockets need a short path
    head = (
        "--head",
        f"--port={ports[0]}",
        "--include-dashboard=false",
        f"--temp-dir={temporary}",
    )
    if list(_ray_of(stack).parent.parent.glob("lib/python3*/site-packages/grpc")):
        head += (f"--ray-client-server-port={ports[1]}",)  # Ray starts its server of clients then
    nodes: list[RayNode] = []
    try:
        nodes.append(start_node(stack, "node-a", folder / "node-a.log", *head))
        ip = nodes[0].wait()
        address = f"{ip}:{ports[0]}"
        given = {"folder": folder / "node-b", "VLLM_HOST_IP": SECOND_IP, **kwargs}
        options = (f"--address={address}", f"--node-ip-address={SECOND_IP}")
        nodes.append(start_node(stack, "node-b", folder / "node-b.log", *options, **given))
        nodes[1].wait()
        # one file for this machine says which node a new job belongs to; the second one wrote it
        note = temporary / "session_latest" / "node_ip_address.json"
        note.write_text(json.dumps({"node_ip_address": ip}))
        yield RayCluster(address, *nodes)
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(temporary, ignore_errors=True)
