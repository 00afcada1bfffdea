"""Engines as the launcher knows them: what is started for each, what of it is followed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.launch.test_verdict import S, judge, progress_of, seen
from vllm_memprof.engines import ENGINES, VLLM, engine_row
from vllm_memprof.engines.base import EngineRow, refuse
from vllm_memprof.errors import LaunchError, UsageError
from vllm_memprof.launch import prepare
from vllm_memprof.launch.engine import build_command, build_env
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.interpreter import InterpreterFacts, require_engine
from vllm_memprof.launch.request import DeviceChoice, LaunchRequest
from vllm_memprof.launch.watch import Death

PYTHON = Path("/venv/bin/python")
SGLANG = ENGINES["sglang"]


def test_sglang_gets_its_arguments_as_they_are():
    request = LaunchRequest("serve", "M", ["--tp-size", "2", "--foo=bar", ""], engine="sglang")
    command = build_command(PYTHON, request, "/models/M", ["--load-format", "dummy"])
    assert command[1:4] == ["-m", "sglang.launch_server", "--model-path"]
    assert command[4:] == ["/models/M", "--load-format", "dummy", "--tp-size", "2", "--foo=bar", ""]
    offline = build_command(PYTHON, LaunchRequest("offline", "M", engine="sglang"), "M", [])
    assert offline[2:4] == [SGLANG.driver, "offline"]


def test_the_diffusion_runtime_needs_packages_that_the_message_names():
    facts = InterpreterFacts(PYTHON, "3.11", engines={"sglang": ()})
    with pytest.raises(LaunchError, match="SGLang's diffusion runtime is not importable") as caught:
        require_engine(facts, ENGINES["sglang-diffusion"])
    hint = f"{PYTHON} -m pip install --no-deps diffusers==0.37.0 cache-dit==1.5.1"
    assert str(caught.value.hint).startswith(hint)


def test_a_request_without_an_engine_is_for_vllm():
    command = build_command(PYTHON, LaunchRequest("serve", "M"), "M", [])
    assert command[2] == "vllm.entrypoints.cli.main"
    assert engine_row("vllm") is VLLM


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "plan", "engine": "sglang", "ranks": "one"}, "--ranks one has no"),
        ({"mode": "plan", "engine": "sglang", "ranks": "edges"}, "--ranks edges has no"),
        ({"mode": "plan", "engine": "sglang", "rank": 1}, "--rank has no"),
        ({"mode": "plan", "engine": "sglang", "until": "ready"}, "--until ready has no"),
        ({"mode": "offline", "engine": "sglang", "sleep_cycles": 1}, "--sleep-cycles"),
        ({"mode": "serve", "engine": "tgi"}, "'tgi' is not known"),
        ({"mode": "serve", "engine": "sglang-diffusion"}, "does not run SGLang's diffusion"),
        ({"mode": "offline", "engine": "sglang-diffusion", "max_tokens": 4}, "--max-tokens"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(fields, said):
    with pytest.raises(UsageError, match=said):
        LaunchRequest(model="M", device=DeviceChoice("sim", "910b"), **fields)


@pytest.mark.parametrize("ranks", ["auto", "all"])
def test_a_plan_of_all_ranks_is_there_for_every_engine_with_plans(ranks):
    engines = [row.name for row in ENGINES.values() if "plan" in row.modes]
    assert engines == ["vllm", "sglang"]
    for engine in engines:
        assert LaunchRequest("plan", "M", engine=engine, ranks=ranks).ranks == ranks


@pytest.mark.parametrize("row", ENGINES.values(), ids=lambda row: row.name)
def test_an_allow_list_of_plugins_gets_our_name(row: EngineRow, tmp_path: Path):
    env = build_env({row.plugins: "theirs"}, tmp_path, "serve", {}, row)
    assert env[row.plugins] == "theirs,memprof"
    others = {other.plugins for other in ENGINES.values()} - {row.plugins}
    assert not others & env.keys()


def test_an_interpreter_needs_the_engine_that_is_asked_for():
    vllm_only = InterpreterFacts(PYTHON, "3.11", engines={"vllm": ("memprof",)})
    require_engine(vllm_only)
    with pytest.raises(LaunchError, match="SGLang is not importable"):
        require_engine(vllm_only, SGLANG)
    without_hooks = InterpreterFacts(PYTHON, "3.11", engines={"sglang": ()})
    with pytest.raises(LaunchError, match="its hooks would not load"):
        require_engine(without_hooks, SGLANG)


@pytest.mark.parametrize(
    ("engine", "stack_engine"), [("vllm", "sglang"), ("sglang", "vllm-ascend")]
)
def test_a_stack_of_another_engine_is_refused(monkeypatch, engine, stack_engine):
    from vllm_memprof.sim import runtime

    stack = SimpleNamespace(name="other", engine=stack_engine)
    monkeypatch.setattr(runtime, "prepare_runtime", lambda *_: SimpleNamespace(stack=stack))
    request = LaunchRequest("serve", "M", engine=engine, device=DeviceChoice("sim", "910b"))
    with pytest.raises(UsageError, match=f"the stack other has {stack_engine}"):
        prepare.prepare_job(request, {})


@pytest.mark.parametrize("row", ENGINES.values(), ids=lambda row: row.name)
def test_the_lines_of_an_engine_are_its_own(row: EngineRow, tmp_path: Path):
    def said(line: str) -> dict[str, list[tuple[int, str]]]:
        found = LogPump(tmp_path / "engine.log", row=row)
        os.write(found.fd, f"before {line} after\n".encode())
        found.start()
        found.join(10)
        return found.said

    def forms(name: str, of: EngineRow = row) -> list[str]:
        """Return what a row's pattern stands for, which holds no more than alternatives."""
        return of.lines[name].pattern.replace("\\", "").split("|") if name in of.lines else []

    [ready] = forms("ready")
    assert "ready" in said(ready)
    for line in forms("fatal"):
        assert "fatal" in said(line)
    for line in forms("lost"):
        assert "lost" in said(line)
    for other in ENGINES.values():
        if other is not row:
            [ready] = forms("ready", other)
            assert "ready" not in said(ready)


def test_an_engine_that_kills_its_own_processes_at_its_end_lost_none():
    progress = progress_of("TP0", phase=None)
    progress.fold("h-12.jsonl", {"kind": "process", "t_ns": S, "pid": 12, "role": "api"})
    progress.fold("h-12.jsonl", {"kind": "ready", "t_ns": 5 * S, "what": "end"})
    killed = [Death(10, 6 * S, code=-9)]
    assert judge(seen(engine_code=0, ready=True, deaths=killed), progress).status == "ok"
    earlier = [Death(10, 4 * S, code=-9)]
    verdict = judge(seen(engine_code=-9, ready=True, deaths=earlier), progress)
    assert (verdict.status, verdict.exit_code) == ("failed", 137)
    assert verdict.reason == "worker TP0 (pid 10) was killed by SIGKILL while serving"


def test_the_death_of_the_detokenizer_is_told_apart():
    progress = progress_of("TP0", phase=None)
    progress.fold("h-12.jsonl", {"kind": "process", "t_ns": S, "pid": 12, "role": "detokenizer"})
    verdict = judge(seen(engine_code=-9, ready=True, deaths=[Death(12, 4 * S, code=-9)]), progress)
    assert verdict.reason == "detokenizer (pid 12) was killed by SIGKILL while serving"


def test_a_plan_of_sglang_runs_its_driver():
    request = LaunchRequest("plan", "M", ["--tp-size", "2"], engine="sglang")
    command = build_command(PYTHON, request, "/models/M", [], devices=8)
    assert command[2:4] == [SGLANG.driver, "plan"]
    asked = {"model": "/models/M", "ranks": "auto", "devices": 8}
    assert asked.items() <= json.loads(command[4]).items()
    assert command[5:] == ["--tp-size", "2"]


def test_an_option_without_a_counterpart_says_what_to_do_instead():
    for option in SGLANG.without:
        with pytest.raises(UsageError, match=f"{option} has no counterpart in SGLang") as caught:
            refuse(SGLANG, option)
        assert caught.value.hint == SGLANG.without[option]
    refuse(VLLM, "memprof fit")


def test_an_engine_without_a_plan_is_refused_before_anything_is_made(monkeypatch):
    for engine in ("vllm", "sglang"):
        LaunchRequest("plan", "M", engine=engine)
    monkeypatch.setitem(ENGINES, "sglang", replace(SGLANG, modes=("serve", "offline")))
    with pytest.raises(UsageError, match="memprof plan does not run SGLang") as caught:
        LaunchRequest("plan", "M", engine="sglang")
    assert "with --engine sglang: memprof serve, memprof offline" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("line", "head"),
    [
        (b"Launching 1 data parallel engine(s) in headless mode, with head node address "
         b"tcp://10.0.0.5:13345.", "10.0.0.5:13345"),
        (b"Launching vLLM (v0.23.0) headless multiproc executor, with head node address "
         b"[fd00::1]:29501 for torch.distributed process group.", "[fd00::1]:29501"),
        (b"something else", None),
    ],
)  # fmt: skip
def test_what_a_host_without_an_api_server_prints(line: bytes, head: str | None, tmp_path: Path):
    pump = LogPump(tmp_path / "engine.log")
    ready = b"init engine (profile, create kv cache, warmup model) took 2 s"
    os.write(pump.fd, b"%b\n%b\n" % (line, ready))
    pump.start()
    pump.join(10)
    assert [word for _, word in pump.said.get("head", [])] == ([head] if head else [])
    assert len(pump.said["core_ready"]) == 1
    assert "ready" not in pump.said
