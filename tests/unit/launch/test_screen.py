"""The live views on a terminal of their own: a pty, whose other end is read as a screen."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.test_run import FAKE

#: ``memprof serve`` with the fake engine in the place of vLLM.
SERVE = """
import os, sys, time
from pathlib import Path
from vllm_memprof.launch.folder import create_run_dir
from vllm_memprof.launch.live import GuardedView, LiveView, Shown
from vllm_memprof.launch.progress import RankBudget
from vllm_memprof.launch.run import EngineRun, Job
from vllm_memprof.record.schema import RunInfo

run_dir = create_run_dir(Path(sys.argv[1]), "m")
env = {**os.environ, "MEMPROF_RUN_DIR": str(run_dir)}
job = Job(RunInfo(id="x", mode="serve", model="m", command=[]), run_dir,
          [sys.executable, sys.argv[2], "--noise=3"], env, 20.0)
shown = Shown("memprof serve m", time.monotonic_ns(), output=True, modelled=True,
              foot="Ctrl-C: end the server", leave="q: back to the line, the server goes on")
view = GuardedView(LiveView(shown, screen="screen" in sys.argv))

def ready(info):
    print("THE REPORT", flush=True)
    return [RankBudget("TP0", None, 1, 1, 1, 2 << 30)]

outcome = EngineRun(job, view, ready).run()
print("STATUS", outcome.verdict.exit_code, flush=True)
"""
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 100))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        # variables of a width go before the terminal's own
        env = {key: each for key, each in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *args], stdin=slave, stdout=slave, stderr=slave,
            preexec_fn=self._own_terminal, env={**env, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.set_blocking(self._master, False)
        self.text = ""

    def _own_terminal(self) -> None:
        os.setsid()
        os.close(os.open(os.ttyname(self.slave), os.O_RDWR))  # becomes the controlling one

    def read(self) -> str:
        try:
            while data := os.read(self._master, 65536):
                self.text += data.decode(errors="replace")
        except (BlockingIOError, OSError):
            pass
        return self.text

    def wait_for(self, pattern: str, after: int = 0, seconds: float = 60) -> int:
        """Wait for a text; return where it ends."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            found = re.search(pattern, self.read()[after:])
            if found:
                return after + found.end()
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in {self.text[after:]!r}")

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    made = Terminal(str(tmp_path / "run"), str(FAKE), *request.param)
    yield made
    made.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
@pytest.mark.parametrize("terminal", [["screen"]], indirect=True)
def test_q_leaves_the_full_screen_and_the_server_goes_on(terminal: Terminal) -> None:
    terminal.wait_for(re.escape(ALTERNATE))
    at = terminal.wait_for("THE REPORT")  # on the normal screen
    assert terminal.text[:at].rindex(NORMAL) > terminal.text[:at].rindex(ALTERNATE)
    at = terminal.wait_for(re.escape(ALTERNATE), at)
    at = terminal.wait_for("q: back to the line, the server goes on", at)
    assert "TP1" in terminal.text[at - 6000 :]
    assert not termios.tcgetattr(terminal.slave)[3] & termios.ECHO
    terminal.press("q")
    at = terminal.wait_for(re.escape(NORMAL), at)
    at = terminal.wait_for("memprof .*serving", at)
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert terminal.process.poll() is None
    terminal.press("\x03")  # Ctrl-C is a signal again, and still was before
    at = terminal.wait_for("STATUS 0", at)
    assert terminal.process.wait(30) == 0
    assert ALTERNATE not in terminal.text[at:]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
@pytest.mark.parametrize("terminal", [["screen"]], indirect=True)
def test_ctrl_c_in_the_full_screen_ends_the_server_and_gives_the_terminal_back(
    terminal: Terminal,
) -> None:
    at = terminal.wait_for("THE REPORT")
    at = terminal.wait_for("Ctrl-C: end the server", at)
    terminal.press("\x03")
    terminal.wait_for("STATUS 0", at)
    assert terminal.process.wait(30) == 0
    assert terminal.text.count(ALTERNATE) == terminal.text.count(NORMAL)
    assert termios.tcgetattr(terminal.slave) == terminal.before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="termios.tcsetwinsize is of Python 3.11")
@pytest.mark.parametrize("terminal", [[]], indirect=True)
def test_one_line_while_it_serves(terminal: Terminal) -> None:
    at = terminal.wait_for("THE REPORT")
    at = terminal.wait_for("not measured without --sample", at)
    line = terminal.text[:at].splitlines()[-1]
    assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= 100
    assert ALTERNATE not in terminal.text
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("STATUS 0", at)
