"""The simulated device on its own: no vLLM. Each test talks to the built shim from child processes.

Light tests drive it through ctypes with this interpreter; the others start the engine environment's
interpreter, with the real torch_npu on top.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from vllm_memprof.errors import SetupError
from vllm_memprof.launch.watch import OWN_CHILDREN
from vllm_memprof.sim.build import build_shim
from vllm_memprof.sim.extensions import target_of
from vllm_memprof.sim.profiles import load_profile, write_flat

RESULT = "RESULT "
#: Of every child: the helper ``acl``, and memprof from its sources.
PATHS = os.pathsep.join(str(Path(__file__).parents[above]) for above in (0, 2))
#: Seconds that a child may take.
DEADLINE_S = 120
IMPORTS = "import json, torch, torch_npu\n"
#: Beginnings of variables that an import reads, or the loader.
AT_IMPORT = ("ASCEND_", "LD_", "MEMPROF_", "PYTHON")
#: Two ranks of one program: rank 0 ends last.
BEGIN_RANKS = "import os\nos.environ['RANK'] = str(int(os.fork() == 0))\n"
END_RANKS = "\nif os.environ['RANK'] == '0':\n    assert os.wait()[1] == 0\n"
#: Imports, and forks for each line it is sent; answers with the fork's exit status. What an import
#: prints is no answer.
FORKS = f"""
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
{IMPORTS}
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
        continue
    os.environ.clear()
    os.environ.update(job["env"])
    for number, path in enumerate((os.devnull, job["out"], job["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    exec(job["code"])
    sys.exit()
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.sim)


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Interpreter of an engine environment: MEMPROF_TEST_ENGINE_PYTHON, else that of ``memprof sim
    setup``."""
    named = os.environ.get("MEMPROF_TEST_ENGINE_PYTHON")
    if named:
        return Path(named)
    from vllm_memprof.sim.stacks import default_prefix, load_stack

    python = default_prefix(load_stack().name) / "bin" / "python"
    if python.exists():
        return python
    message = (
        f"no engine environment at {python}: "
        "run memprof sim setup, or set MEMPROF_TEST_ENGINE_PYTHON"
    )
    if os.environ.get("MEMPROF_REQUIRE_SIM"):
        raise SetupError(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def shim(engine_python: Path, request: pytest.FixtureRequest) -> Path:
    """The library; processes of tests that run side by side build it one after the other."""
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("memprof-shim"))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_shim(target_of(engine_python).site_packages, folder, print)


class Imported:
    """A process that has imported torch_npu, six seconds' work, and touched no device."""

    def __init__(self, python: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", FORKS],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        OWN_CHILDREN.add(self._process.pid)  # a run of this process ends others that it finds

    def run(self, code: str, env: dict[str, str], out: Path, err: Path) -> int:
        """Run code in a fork with this environment; return its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"code": code, "env": env, "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], DEADLINE_S)[0], "it does not end"
        return int(self._process.stdout.readline())

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="session")
def imported(
    shim: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Imported]:
    folder = tmp_path_factory.mktemp("imported")
    write_flat(load_profile("910b"), folder / "profile")
    process = Imported(engine_python, Sim(shim, engine_python, folder).env())
    yield process
    process.close()


@dataclass
class Sim:
    """Starts processes on one simulated machine of its own."""

    shim: Path
    engine_python: Path
    folder: Path
    imported: Imported | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def env(self, **extra: str) -> dict[str, str]:
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MEMPROF_", "HCCL_", "ASCEND_", "PYTORCH_NPU"))
        }
        # An environment of `memprof sim setup` has stand-ins for the libraries that it leaves out.
        left_out = self.engine_python.parent.parent / "left_out"
        return {
            **inherited,
            "LD_LIBRARY_PATH": f"{self.shim.parent}:{left_out}",
            "MEMPROF_SIM_PROFILE": str(self.folder / "profile"),
            "MEMPROF_SIM_STATE": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PATHS,
            **extra,
        }

    def start(
        self, code: str, python: str | Path = sys.executable, **extra: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(python), "-c", code],
            env=self.env(**extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(30)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()

    def run(self, code: str, **extra: str) -> dict[str, Any]:
        """Runs `code`, which prints ``RESULT <json>``, with this interpreter and the ctypes helper
        ``acl``."""
        [result] = self._results_of_process(self.start(code, **extra))
        return result

    def run_torch(self, code: str, **extra: str) -> dict[str, Any]:
        """The same with the engine's interpreter: ``torch`` and ``torch_npu`` are imported first.

        It is a fork of a process that has imported them, without variables that an import reads.
        """
        [result] = self._results_of(code, extra)
        return result

    def run_ranks(self, code: str, **extra: str) -> list[dict[str, Any]]:
        """The same of two ranks, which torch's own variables bring together."""
        port = str(free_port())
        extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return self._results_of(f"{BEGIN_RANKS}{code}{END_RANKS}", extra)

    def _results_of(self, code: str, extra: dict[str, str]) -> list[dict[str, Any]]:
        if self.imported is None or any(name.startswith(AT_IMPORT) for name in extra):
            return self._results_of_process(self.start_torch(code, **extra))
        out, err = self.folder / "stdout", self.folder / "stderr"
        for path in (out, err):
            path.unlink(missing_ok=True)
        status = self.imported.run(code, self.env(**extra), out, err)
        return self._results(out.read_text(), err.read_text(), status)

    def start_torch(self, code: str, **extra: str) -> subprocess.Popen[str]:
        return self.start(IMPORTS + code, self.engine_python, **extra)

    def _results_of_process(self, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
        out, err = process.communicate(timeout=DEADLINE_S)
        return self._results(out, err, process.returncode)

    @staticmethod
    def _results(out: str, err: str, status: int) -> list[dict[str, Any]]:
        assert status == 0, f"exit status {status}\n{err[-3000:]}"
        return results_of(out)


def results_of(out: str) -> list[dict[str, Any]]:
    lines = (line.partition(RESULT) for line in out.splitlines())
    return [json.loads(result) for start, mark, result in lines if mark and not start]


@pytest.fixture
def sim(shim: Path, engine_python: Path, imported: Imported, tmp_path: Path) -> Iterator[Sim]:
    write_flat(load_profile("910b"), tmp_path / "profile")
    machine = Sim(shim, engine_python, tmp_path, imported)
    yield machine
    machine.close()


@pytest.fixture
def change_profile(sim: Sim) -> Callable[..., None]:
    """Replaces keys of the profile: ``change_profile(total_bytes=1 << 30)``."""

    def change(**values: int | str) -> None:
        path = sim.folder / "profile"
        lines = [line for line in path.read_text().splitlines() if line.split("=")[0] not in values]
        path.write_text(
            "\n".join([*lines, *(f"{key}={value}" for key, value in values.items())]) + "\n"
        )

    return change
