"""What goes wrong inside memprof stays there; what is missing is said, and fatal only when asked
for."""

from __future__ import annotations

from .conftest import START_UP, Run

BREAK_PROBE = """
from vllm_memprof.capture import probe
def broken(self): raise ValueError('unreadable')
probe.Probe.counters = broken
"""
RENAME = """
import vllm_ascend.worker.worker as w
w.NPUWorker.load_weights = w.NPUWorker.load_model
del w.NPUWorker.load_model
"""


def test_a_failing_hook_is_recorded_once_and_steps_aside(run_engine: Run) -> None:
    recorded = run_engine(START_UP + BREAK_PROBE + "EngineCore(executor())\nprint('serving')")

    assert (recorded.code, recorded.out.strip()) == (0, "serving"), recorded.err
    where = [event["where"] for event in recorded.kind("error")]
    assert "hook w.weight_load" in where
    assert len(where) == len(set(where))
    assert all("unreadable" in event["message"] for event in recorded.kind("error"))


def test_a_missing_required_hook_is_a_finding(run_engine: Run) -> None:
    code = RENAME + START_UP.replace("worker.load_model()", "worker.load_weights()")
    recorded = run_engine(code + "EngineCore(executor())\nprint('serving')")

    assert (recorded.code, recorded.out.strip()) == (0, "serving"), recorded.err
    states = {event["hook"]: event["state"] for event in recorded.kind("hook")}
    assert states["w.weight_load"] == "missing"
    assert states["w.profile_run"] == "bound"


def test_strict_mode_fails_on_it(run_engine: Run) -> None:
    code = RENAME + START_UP.replace("worker.load_model()", "worker.load_weights()")
    recorded = run_engine(code + "EngineCore(executor())", MEMPROF_STRICT="1")

    assert recorded.code == 1
    assert "required hooks bound; missing: w.weight_load" in recorded.err


def test_an_overwritten_hook_is_noticed_and_bound_again(run_engine: Run) -> None:
    code = START_UP + (
        "import vllm_ascend.worker.worker as w\n"
        "def other(self): return 1.0\n"
        "other.__module__ = 'somebody.patches'\n"
        "core = executor()\n"
        "w.NPUWorker.determine_available_memory = other\n"
        "wrapper.worker.compile_or_warm_up_model()\n"
        "print(hasattr(vars(w.NPUWorker)['determine_available_memory'], '__memprof__'))"
    )
    recorded = run_engine(code)

    assert recorded.out.strip() == "True", recorded.err
    verdict = [event for event in recorded.kind("hook") if event["hook"] == "w.profile_run"][-1]
    assert verdict["state"] == "overwritten"
    assert "somebody.patches" in verdict["detail"]


def test_a_required_hook_that_was_never_called(run_engine: Run) -> None:
    code = START_UP.replace("worker.load_model()", "pass") + "EngineCore(executor())"
    states = {event["hook"]: event["state"] for event in run_engine(code).kind("hook")}

    assert states["w.weight_load"] == "never_called"


def test_an_override_s_super_call_counts_once(run_engine: Run) -> None:
    code = START_UP + (
        "import vllm_ascend.worker.worker as w\n"
        "class Special(w.NPUWorker):\n"
        "    def load_model(self): super().load_model()\n"
        "w.NPUWorker = Special\n"
        "EngineCore(executor())"
    )
    recorded = run_engine(code)

    assert recorded.code == 0, recorded.err
    assert len(recorded.edges("weight_load")) == 2
