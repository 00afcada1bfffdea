"""Failures that are caused for real: the live report and ``explain`` name each, its first cure helps.

The engine runs on the simulated device, which refuses what a real one refuses. Where a limit of it
is not one of memory (streams, events, locked memory, missing kernels), the test asks for it:
docs/concepts/simulation.md.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import RunResult, require_stack, run_script, wait_until
from tests.support.planted import plant
from tests.support.ports import free_port
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.cause import KINDS
from vllm_memprof.sim.profiles import PROFILES_DIR
from vllm_memprof.sim.runtime import ENV_STATE, prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(420)]

SHIM_TESTS = Path(__file__).parents[1] / "shim"
GIB = 1 << 30
Memprof = Callable[..., RunResult]


def profile_of(folder: Path, base: str, **values: int) -> str:
    """Write a profile of a device with other figures; return it as ``--device`` takes it."""
    text = (PROFILES_DIR / f"{base}.toml").read_text().splitlines()
    for key, value in {"name": '"other"', "aliases": "[]", **values}.items():
        at = next(number for number, line in enumerate(text) if line.startswith(f"{key} = "))
        text[at] = f"{key} = {value}"
    path = folder / "other.toml"
    path.write_text("\n".join(text))
    return f"sim:{path}"


def first_cure(run: RunResult, kind: str) -> dict[str, Any]:
    """Return what to change first, as the live report and ``explain`` of its log say alike."""
    assert run.info["status"] != "ok", run.output[-2000:]
    live = run.report["failure"]
    assert live is not None, run.engine_log[-4000:]
    [explained] = [
        each.failure for each in read_log(str(run.run_dir / "engine.log")) if each.failure
    ]
    assert (live["kind"], explained.kind) == (kind, kind), live
    assert live["is_memory"] == explained.is_memory
    if kind == "not-memory-at-all":
        assert not KINDS[kind]
        assert not live["is_memory"]
    assert live["evidence"]
    cure: dict[str, Any] = live["cures"][0]
    return cure


def applied(command: list[str], argument: str, value: str) -> list[str]:
    """Return the command with an argument set, in place of an earlier value; JSON is added to."""
    kept = list(command)
    if argument in kept:
        at = kept.index(argument)
        if value.startswith("{"):
            value = json.dumps({**json.loads(kept[at + 1]), **json.loads(value)})
        del kept[at : at + 2]
    return [*kept, argument, value]


def assert_passes(run: RunResult) -> None:
    assert run.returncode == 0, run.engine_log[-4000:]
    assert run.info["status"] == "ok"
    assert run.report["failure"] is None


@dataclass(frozen=True)
class Case:
    """A start that fails, and what its first cure is to be."""

    kind: str
    command: str
    cure: str  # its argument, variable, or the words of an action
    value: str = ""  # that the test gives; "": the report computes it
    base: str = "ascend910b"
    device: Mapping[str, int] = field(default_factory=dict)  # figures of the profile that differ
    env: Mapping[str, str] = field(default_factory=dict)
    instead: tuple[str, str] | None = None  # an argument, where the cure is an action about one


EAGER = "--enforce-eager --max-model-len 2048"
TINY = f"memprof/tiny {EAGER} --gpu-memory-utilization 0.4"
GRAPHS = "memprof/tiny --max-model-len 2048 --gpu-memory-utilization"

#: What CI runs, too.
CHEAP = {
    "a share that holds no KV cache": Case(
        "negative-kv",
        f"memprof/tiny {EAGER} --gpu-memory-utilization 0.001",
        "--gpu-memory-utilization",
        "0.01",
    ),
}
CASES = {
    "the kernels of an operator are not installed": Case(
        "not-memory-at-all",
        TINY,
        "install the kernels package",
        env={"MEMPROF_SIM_WITHOUT_KERNELS": "SwiGlu*,Exp"},
    ),
    "a request longer than the KV cache": Case(
        "kv-too-small",
        "memprof/tiny --enforce-eager --max-model-len 32768 --gpu-memory-utilization 0.0025",
        "--max-model-len",
    ),
    "weights larger than the device": Case(
        "weights-too-large",
        f"Qwen/Qwen3-1.7B {EAGER} --gpu-memory-utilization 0.85",
        "--tensor-parallel-size",
        "2",
        device={"total_bytes": 34 * GIB // 10},
    ),
    "no room for graphs": Case(
        "graph-capture-oom",
        f"{GRAPHS} 0.82",
        "--gpu-memory-utilization",
        "0.6",
        device={"total_bytes": 2 * GIB},
    ),
    "an argument that the engine refuses": Case(
        "not-memory-at-all",
        "memprof/tiny --enforce-eager --max-model-len 1000000",
        "change the argument that the message names",
        instead=("--max-model-len", "2048"),
    ),
    "a KV cache of a given size": Case(
        "profile-too-small",
        f"{TINY} --kv-cache-memory-bytes {100 * GIB}",
        "--kv-cache-memory-bytes",
        str(10 * GIB),
    ),
    "logits of 1,024 requests": Case(
        "sampler-warm-up",
        "Qwen/Qwen3-0.6B --enforce-eager --max-model-len 512 --max-num-seqs 1024"
        " --max-num-batched-tokens 1024 --gpu-memory-utilization 0.77",
        "--max-num-seqs",
        "256",
        device={"total_bytes": 17 * GIB // 10},
    ),
    "a second copy of a weight on the 310P": Case(
        "format-conversion",
        f"Qwen/Qwen3-14B {EAGER} --dtype float16 --gpu-memory-utilization 0.95",
        "--tensor-parallel-size",
        "2",
        base="ascend310p",
        device={"total_bytes": 2861 * GIB // 100},
    ),
    "more streams than the device has": Case(
        "graph-streams",
        f"""{GRAPHS} 0.4 --compilation-config '{{"cudagraph_mode": "PIECEWISE"}}'""",
        "--compilation-config",
        device={"stream_count": 110},
        env={"MEMPROF_SIM_LIMITS": "streams"},
    ),
    "more events than a 310P has": Case(
        "graph-streams",
        "Qwen/Qwen3-0.6B --max-model-len 2048 --gpu-memory-utilization 0.4 --dtype float16"
        """ --tensor-parallel-size 2 --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""",
        "--compilation-config",
        base="ascend310p",
        env={"MEMPROF_SIM_LIMITS": "events"},
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CHEAP.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.full) for name, case in CASES.items()),
    ],
)
def test_a_start_that_fails(run_memprof: Memprof, tmp_path: Path, case: Case) -> None:
    device = profile_of(tmp_path, case.base, **case.device)
    command = [*shlex.split(case.command), "--device", device]
    cure = first_cure(run_memprof("offline", *command, env=dict(case.env)), case.kind)
    name = cure["argument"] or cure["environment"] or cure["action"]
    assert name.startswith(case.cure), cure
    if case.value and cure["value"]:  # what is enough for the allocation that failed, or more of it
        assert cure["enough"] == "at least"
        assert float(case.value) <= float(cure["value"])
    value = case.value or cure["value"]
    env = dict(case.env)
    if cure["argument"]:
        command = applied(command, cure["argument"], value)
    elif cure["environment"]:
        env[cure["environment"]] = value
    elif case.instead is not None:
        command = applied(command, *case.instead)
    else:
        env = {}
    assert_passes(run_memprof("offline", *command, env=env))


def test_a_port_in_use(run_memprof: Memprof) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [
            *shlex.split(TINY),
            "--device",
            "sim:910b",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]
        run = run_memprof("serve", *command)
    cure = first_cure(run, "not-memory-at-all")
    assert cure["action"].startswith("choose a different port")


#: A process that holds memory of device 0 until it is killed.
HOLD = """
import acl, sys, time
acl.set_device(0)
acl.malloc(int(sys.argv[1]))
print("READY", flush=True)
time.sleep(300)
"""


def holder_env(stack: str) -> dict[str, str]:
    """Return what a process of the standard library needs to use the simulated device."""
    libraries = prepare_runtime("910b", stack).env["LD_LIBRARY_PATH"]
    return {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(SHIM_TESTS)}


@contextmanager
def held(stack: str, state: Path, size: int) -> Iterator[None]:
    """Another process has so many bytes of device 0 of the machine that ``state`` stands for."""
    env = {**os.environ, **prepare_runtime("910b", stack).env, **holder_env(stack)}
    env[ENV_STATE] = str(state)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(size)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "READY\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_a_neighbour(run_memprof: Memprof, sim_stack: str, tmp_path: Path) -> None:
    command = ["offline", *shlex.split(TINY), "--device", "sim:910b", "--share-device"]
    env = {ENV_STATE: str(tmp_path / "devices")}
    with held(sim_stack, tmp_path / "devices", 40 * GIB):
        cure = first_cure(run_memprof(*command, env=env), "neighbour")
    assert cure["action"].startswith("look who uses the device")
    assert_passes(run_memprof(*command, env=env))


#: A server that is killed while its engine process does not answer, and the start after it.
KILLED = """
import os, signal, subprocess, sys
import psutil

model, port, kill_left = sys.argv[1:]
command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--load-format",
           "dummy", "--enforce-eager", "--max-model-len", "2048", "--port", port,
           "--gpu-memory-utilization", "0.6"]

def serve(env):
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
    for line in server.stdout:
        print(line, end="", flush=True)
        if "Application startup complete" in line:
            break
    return server

# memprof would end what the first one leaves
first = serve({key: value for key, value in os.environ.items() if key != "MEMPROF_RUN_DIR"})
left = psutil.Process(first.pid).children(recursive=True)
for process in left:
    process.suspend()
first.kill()
first.wait()
if kill_left == "yes":
    for process in left:
        process.kill()
second = serve(None)
ready = second.poll() is None
second.send_signal(signal.SIGINT)
print(second.communicate()[0])
sys.exit(0 if ready else second.returncode)
"""


@pytest.mark.full
def test_a_process_that_outlives_its_server(sim_stack: str, tmp_path: Path) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    port = str(free_port())
    cure = first_cure(
        run_script(sim_stack, tmp_path, KILLED, port, "no", env=env), "not-returned-after-kill"
    )
    assert cure["action"].startswith("end the process that was left over")
    assert_passes(run_script(sim_stack, tmp_path, KILLED, port, "yes", env=env))


#: A trainer on the device while the engine sleeps.
TRAINER = """
import json, os, subprocess, sys

def main():
    from vllm import LLM
    model, size, when = sys.argv[1:]
    llm = LLM(model, enable_sleep_mode=True, load_format="dummy", enforce_eager=True,
              max_model_len=2048, gpu_memory_utilization=0.4)
    llm.sleep(level=1)
    trainer = subprocess.Popen([sys.executable, "-c", os.environ["HOLD"], size], text=True,
                               stdout=subprocess.PIPE, env={**os.environ, **json.loads(os.environ["SHIM"])})
    assert trainer.stdout.readline() == "READY\\n"
    if when == "ends before":
        trainer.kill()
        trainer.wait()
    try:
        llm.wake_up()
        llm.generate(["hi"], use_tqdm=False)
    finally:
        trainer.kill()
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_a_trainer_at_wake_up(sim_stack: str, tmp_path: Path) -> None:
    env = {"HOLD": HOLD, "SHIM": json.dumps(holder_env(sim_stack))}
    size = str(50 * GIB)
    run = run_script(sim_stack, tmp_path, TRAINER, size, "ends after", env=env)
    cure = first_cure(run, "sleep-wake")
    assert cure["action"].startswith("keep the device to itself")
    assert_passes(run_script(sim_stack, tmp_path, TRAINER, size, "ends before", env=env))


LOGPROBS = """
import sys

def main():
    from vllm import LLM, SamplingParams
    model, count = sys.argv[1:]
    llm = LLM(model, load_format="dummy", enforce_eager=True, max_model_len=2048,
              max_num_seqs=8, max_num_batched_tokens=2048, gpu_memory_utilization=0.8)
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=int(count) or None)
    llm.generate([{"prompt_token_ids": list(range(100, 2100))}], wanted, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_logprobs_of_a_prompt(sim_stack: str, tmp_path: Path) -> None:
    device = profile_of(tmp_path, "ascend910b", total_bytes=3 * GIB).removeprefix("sim:")
    dense: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "device": device}
    run = run_script(sim_stack, tmp_path, LOGPROBS, "5", **dense)
    cure = first_cure(run, "prompt-logprobs")
    assert cure["action"].startswith("send no prompt_logprobs")
    assert_passes(run_script(sim_stack, tmp_path, LOGPROBS, "0", **dense))


#: Blocks of 512 MiB of which 300 MiB stay in use, then one of 600 MiB.
PIECES = """
import sys

def cut(worker):
    import torch
    def empty(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="npu")
    whole = []
    while torch.npu.mem_get_info()[0] > 580 << 20:
        whole.append(empty(512))
    worker.kept = []
    while whole:
        whole.pop()
        worker.kept.append(empty(300))
    empty(600)

def main():
    from vllm import LLM
    llm = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=2048,
              gpu_memory_utilization=0.2)
    llm.collective_rpc(cut)
    llm.generate(["hi"], use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_free_memory_in_pieces(sim_stack: str, tmp_path: Path) -> None:
    device = profile_of(tmp_path, "ascend910b", total_bytes=10 * GIB).removeprefix("sim:")
    fixed = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}
    run = run_script(sim_stack, tmp_path, PIECES, device=device, env=fixed)
    cure = first_cure(run, "fragmentation")
    assert cure["environment"] == "PYTORCH_NPU_ALLOC_CONF"
    changed = {cure["environment"]: cure["value"]}
    assert_passes(run_script(sim_stack, tmp_path, PIECES, device=device, env=changed))


@pytest.mark.full
def test_pinned_memory_beyond_the_limit_of_locked_memory(run_memprof: Memprof) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < 8 << 20:
        pytest.skip("the limit of locked memory cannot be raised to what an engine needs")
    command = "memprof/tiny --enforce-eager --max-model-len 1024 --max-num-seqs 4"
    command += " --max-num-batched-tokens 1024 --gpu-memory-utilization 0.4 --device sim:910b"
    env = {"MEMPROF_SIM_LIMITS": "memlock"}
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, hard))
        run = run_memprof("offline", *command.split(), env=env)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        cured = run_memprof("offline", *command.split(), env=env)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    cure = first_cure(run, "host-memory")
    assert cure["action"].startswith("raise the limit: ulimit -l unlimited")
    assert_passes(cured)


#: A worker that keeps 4 GiB on the host, as a cache of keys and values there does.
HOST_CACHE = """
def register():
    def then(worker):
        def make(original):
            def load_model(self, *args, **kwargs):
                import torch
                self.kept = torch.ones(4 << 30, dtype=torch.uint8)
                return original(self, *args, **kwargs)
            return load_model
        wrap(worker, "load_model", make)
    when_worker_is_there(then)
"""
CGROUP = Path("/sys/fs/cgroup/memory")


@contextmanager
def limited_host_memory(size: int) -> Iterator[None]:
    """Processes that start meanwhile have so many bytes of host memory together."""
    group = CGROUP / f"memprof-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        pytest.skip(f"no cgroup of memory can be made here: {error}")
    try:
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), 30, "all have ended")
        group.rmdir()


@pytest.mark.full
def test_the_kernel_kills_a_worker(run_memprof: Memprof, tmp_path: Path) -> None:
    command = ["offline", *shlex.split(TINY), "--device", "sim:910b"]
    env = plant(tmp_path / "plugin", HOST_CACHE)
    with limited_host_memory(3 * GIB):
        run = run_memprof(*command, env=env)
    cure = first_cure(run, "host-memory")
    assert cure["action"].startswith("give the container or the host more memory")
    with limited_host_memory(12 * GIB):
        assert_passes(run_memprof(*command, env=env))


SGLANG = "--engine sglang --stack sglang-0.5.23"
SGLANG_CASES = {
    "a static share that does not hold the weights": Case(
        "negative-kv",
        f"Qwen/Qwen3-0.6B {SGLANG} --mem-fraction-static 0.2 --disable-cuda-graph",
        "--mem-fraction-static",
        "0.7",
        device={"total_bytes": 3 * GIB},
    ),
    "a static share that leaves no room for a step": Case(
        "static-share",
        f"Qwen/Qwen3-0.6B {SGLANG} --mem-fraction-static 0.97 --disable-cuda-graph",
        "--mem-fraction-static",
        "0.7",
        device={"total_bytes": 3 * GIB},
    ),
    "communicators with large buffers": Case(
        "communicator-resources",
        f"memprof/tiny {SGLANG} --tp-size 2 --mem-fraction-static 0.4 --disable-cuda-graph",
        "HCCL_BUFFSIZE",
        device={"total_bytes": 3 * GIB},
        env={"HCCL_BUFFSIZE": "1500"},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SGLANG_CASES.values(), ids=SGLANG_CASES)
def test_a_start_of_sglang_that_fails(run_memprof: Memprof, tmp_path: Path, case: Case) -> None:
    require_stack("sglang-0.5.23")
    test_a_start_that_fails(run_memprof, tmp_path, case)
