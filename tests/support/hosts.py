"""Hosts of a deployment on this machine: the commands of docs/deployments.md, as they stand there.

A host is a process group with a name of its own and devices of its own, on loopback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.engine import RunResult, finish, read_events, wait_until
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.record.loader import load_info

PAGE = Path(__file__).parents[2] / "docs" / "deployments.md"
_BLOCK = re.compile(r"^```sh (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> dict[str, str]:
    """Return the page's commands by the name of their block."""
    return dict(_BLOCK.findall(PAGE.read_text()))


def settings() -> dict[str, str]:
    """Return the variables that the page sets."""
    return dict(re.findall(r"export (\w+)=(\S+)", commands()["settings"]))


@dataclass
class Host:
    """A ``memprof serve`` of the page, under way."""

    name: str  # of its block, and of its run folder
    process: subprocess.Popen[str]
    run_dir: Path

    @property
    def output(self) -> str:
        return Path(f"{self.run_dir}.out").read_text(errors="replace")

    def is_ready(self) -> bool:
        """Whether its start-up has ended, by the rules of the launcher; it must not have ended."""
        assert self.process.poll() is None, self.output[-3000:]
        if not (self.run_dir / "run.json").exists():
            return False
        progress = EngineProgress()
        for event in read_events(self.run_dir):
            progress.fold(event["file"], event)
        return progress.ready_at(load_info(self.run_dir)) is not None

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 90.0) -> RunResult:
        return finish(self.process, self.run_dir, timeout_s)


@dataclass
class Deployment:
    """Hosts that are started one by one.

    Args:
        folder: where they run.
        variables: instead of the page's.
        more: arguments for all of them.
    """

    folder: Path
    variables: dict[str, str]
    more: tuple[str, ...] = ()
    hosts: dict[str, Host] = field(default_factory=dict)

    def start(self, *names: str) -> list[Host]:
        return [self._start(name) for name in names]

    def wait_until_ready(self, timeout_s: float) -> None:
        hosts = self.hosts.values()
        wait_until(lambda: all(host.is_ready() for host in hosts), timeout_s, "all are ready")

    def _start(self, name: str) -> Host:
        (self.folder / "runs").mkdir(exist_ok=True)
        run_dir = self.folder / "runs" / name
        launch = (
            f'memprof() {{ exec "{sys.executable}" -m vllm_memprof "$@" {" ".join(self.more)}; }}'
        )
        with Path(f"{run_dir}.out").open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"{launch}\n{commands()[name]}"],
                cwd=self.folder,
                env={
                    **os.environ,
                    **settings(),
                    **self.variables,
                    "PYTHONPATH": str(PAGE.parents[1]),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        host = self.hosts[name] = Host(name, process, run_dir)
        return host
