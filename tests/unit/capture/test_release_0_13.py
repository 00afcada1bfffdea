"""The hook table and the figures on vllm-ascend 0.13.0, in miniature: what that release keeps, and
what it forgets."""

from __future__ import annotations

from .conftest import START_UP, Run

FULL = "import release_0_13\n" + START_UP + "EngineCore(executor())\nwrapper.worker.shutdown()\n"


def test_every_required_hook_binds(run_engine: Run) -> None:
    recorded = run_engine(FULL)

    assert recorded.code == 0, recorded.err
    required = {
        event["hook"]: event["state"]
        for event in recorded.kind("hook")
        if event["need"] == "required"
    }
    assert set(required.values()) == {"bound"}
    assert "w.shutdown" not in required
    assert len(recorded.edges("shutdown")) == 2  # vLLM's own, which the worker inherits
    assert not recorded.kind("error")


def test_figures_that_only_the_hooked_calls_hold(run_engine: Run) -> None:
    values = run_engine(FULL).kind("figures")[-1]["values"]

    assert values["weights_bytes"] == 100
    assert values["graph_bytes"] == 7
    assert values["initial_free_bytes"] == 1000 - 10
    assert values["gpu_memory_utilization"] == 0.9
    forgotten = (
        "requested_bytes",
        "peak_activation_bytes",
        "non_torch_increase_bytes",
        "profile_after_free_bytes",
    )
    assert [values[name] for name in forgotten] == [None] * 4


def test_the_terms_of_the_equation_are_the_edges_of_the_last_empty_cache(run_engine: Run) -> None:
    recorded = run_engine(FULL)

    peak, used = map(int, recorded.out.split("TERMS ")[1].split()[:2])
    [profile, *_] = recorded.edges("profile_run")
    inside = [
        event["snapshot"]
        for event in recorded.edges("empty_cache")
        if event["parent"] == profile["id"]
    ]
    before, after = inside[-2:]
    assert before["allocated_peak_bytes"] == peak == 303
    held = after["device_total_bytes"] - after["device_free_bytes"] - after["allocated_bytes"]
    assert held == used == 50
    assert recorded.kind("figures")[-1]["values"]["kv_cache_bytes"] == 900 - peak - used
