"""A plan of SGLang, its engine replaced: what is started, what ends it, what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_memprof.capture import plugin
from vllm_memprof.capture.hook import StopAfterPlan
from vllm_memprof.engines.driver import OptionError
from vllm_memprof.engines.sglang import driver, plan_run


class Engine:
    """SGLang's, of 0.5.23: it starts the schedulers by a method that a subclass may replace."""

    starts = True  # False: a release that starts them by another name
    fails = False
    began: list[Any]

    def __init__(self, server_args: Any) -> None:
        if self.starts:
            self._launch_scheduler_processes(
                server_args, "ports", "the scheduler of a server", placement_group=None
            )

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: Any, run: Any, **more: Any
    ) -> Any:
        Engine.began = [run, more]

        def wait() -> None:
            Engine.began.append("waited")
            if cls.fails:
                raise RuntimeError("Rank 0 scheduler died during initialization")

        return SimpleNamespace(wait_for_ready=wait), []


def scheduler(*args: Any, **kwargs: Any) -> None:
    raise StopAfterPlan


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of SGLang that a plan imports; the result can be changed."""
    said = SimpleNamespace(
        parallel=SimpleNamespace(dp_size=1, tp_size=2, pp_size=1, nnodes=1), resizes=False
    )
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": Engine},
        "sglang.srt.managers": {},
        "sglang.srt.managers.scheduler": {"run_scheduler_process": scheduler},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.overrides": {
            "post_capture_kv_sizing_planned": lambda args: said.resizes
        },
        "sglang.srt.runtime_context": {"get_parallel": lambda: said.parallel},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return said


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    recorder = SimpleNamespace(emit=lambda kind, **keys: events.append((kind, keys)))
    monkeypatch.setattr(plugin, "RECORDER", recorder)
    return events


def test_the_plan_is_ready_once_every_rank_is(sglang, emitted):
    assert plan_run.run("args", devices=8) == 0
    assert Engine.began == [
        plan_run.run_scheduler_until_planned, {"placement_group": None}, "waited",
    ]  # fmt: skip
    (kind, ranks), ready = emitted
    assert kind == "ranks"
    assert (ranks["mode"], ranks["world_size"], ranks["run"]) == ("all", 2, [0, 1])
    assert ready == ("ready", {"what": "plan"})


def test_a_rank_that_fails_leaves_no_plan(sglang, emitted, monkeypatch):
    monkeypatch.setattr(Engine, "fails", True)
    with pytest.raises(RuntimeError, match="died during initialization"):
        plan_run.run("args", devices=8)
    assert emitted == []


def test_a_release_that_starts_its_ranks_elsewhere_is_no_plan(sglang, emitted, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "starts", False)
    assert plan_run.run("args", devices=8) == 1
    assert "starts its ranks elsewhere" in capsys.readouterr().err
    assert emitted == []


@pytest.mark.parametrize(
    ("parallel", "devices", "said"),
    [
        ({"tp_size": 16}, 8, "16 ranks, and this machine has 8 devices"),
        ({"tp_size": 4, "pp_size": 2, "dp_size": 2}, 8, "16 ranks"),
        ({"nnodes": 2}, 8, "--nnodes 2"),
    ],
)
def test_ranks_without_a_device_are_refused(sglang, emitted, parallel, devices, said):
    vars(sglang.parallel).update(parallel)
    Engine.began = []
    with pytest.raises(OptionError, match=said):
        plan_run.run("args", devices)
    assert Engine.began == [], "nothing was started"


def test_on_hardware_sglang_knows_its_devices_itself(sglang):
    sglang.parallel.tp_size, sglang.parallel.nnodes = 16, 2
    assert plan_run.ranks_of_start(None) is None
    sglang.parallel.nnodes = 1
    assert plan_run.ranks_of_start(None)["world_size"] == 16


def test_sizes_that_a_release_keeps_elsewhere_are_unknown(sglang):
    del sglang.parallel.tp_size
    assert plan_run.ranks_of_start(8) is None


def test_a_cache_that_is_sized_after_the_graphs_is_refused(sglang, emitted):
    sglang.resizes, Engine.began = True, []
    with pytest.raises(OptionError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0"):
        plan_run.run("args", devices=None)
    assert Engine.began == []


@pytest.mark.parametrize("by_name", [True, False])
def test_a_scheduler_with_its_pools_says_so_and_waits(sglang, monkeypatch, by_name):
    sent: list[Any] = []

    def pause() -> None:
        raise KeyboardInterrupt  # the signal that ends it

    monkeypatch.setattr(plan_run.signal, "pause", pause)
    writer = SimpleNamespace(send=sent.append)
    args, kwargs = ([], {"pipe_writer": writer}) if by_name else ([0, 1, 2, 3, 4, None, writer], {})
    with pytest.raises(KeyboardInterrupt):
        plan_run.run_scheduler_until_planned(*args, **kwargs)
    assert [each["status"] for each in sent] == ["ready"]


def test_what_is_refused_is_a_wrong_argument(sglang, monkeypatch, capsys):
    monkeypatch.setattr(driver, "_server_args", lambda model, args: "args")
    monkeypatch.setenv("MEMPROF_STOP_AFTER", "")
    sglang.parallel.tp_size = 16
    status = driver.main(["plan", '{"model": "M", "devices": 8}', "--tp-size", "16"])
    assert status == 2
    assert "memprof plan: error: 16 ranks" in capsys.readouterr().err
