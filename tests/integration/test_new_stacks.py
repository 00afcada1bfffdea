"""More releases on the simulated device: every phase seen, the budget recomputed to the byte,
the audit agreed. The environments take minutes to set up (make sim-every): no part of CI."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack, run_in_engine
from tests.support.stacks import version_of
from vllm_memprof.accounting.budget.equations import evaluate, select
from vllm_memprof.accounting.budget.kv import build_kv
from vllm_memprof.capture.hooks.table import rows_in_force
from vllm_memprof.sim.presets import resolve_model
from vllm_memprof.sim.runtime import prepare_runtime
from vllm_memprof.sim.stacks import default_prefix, load_stack

pytestmark = [pytest.mark.sim, pytest.mark.full, pytest.mark.timeout(600)]

STACK_011 = "vllm-ascend-0.11.0"
STACK_018, STACK_026 = "vllm-ascend-0.18.0", "vllm-ascend-0.26.0rc1"
STACK_030, STACK_214 = "vllm-ascend-0.30.0rc2", "vllm-ascend-0.30.0rc2-torch-2.14"
#: Phases of every start-up with graphs; and what a release adds.
PHASES = {
    "device_init",
    "hccl_init",
    "weight_load",
    "profile_run",
    "kv_cache_alloc",
    "graph_capture",
    "atb_warm_up",
    "warm_up",
    "shutdown",
}
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def offline(run_memprof: Any, stack: str, model: str, *args: str, **kwargs: Any) -> Any:
    command = ("offline", model, "--device", "sim:910b", "--stack", require_stack(stack), *args)
    run = run_memprof(*command, timeout_s=500, **kwargs)
    assert run.returncode == 0, run.output[-3000:]
    return run


def assert_reconciled(
    run: Any, ranks: int, phases: set[str], unseen: Collection[str] = (), equation: str = "E4"
) -> None:
    report = run.report
    assert len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        budget = rank["budget"]
        assert (budget["equation"], budget["residual_bytes"]) == (equation, 0)
        assert budget["kv_cache_bytes"] == budget["engine_kv_cache_bytes"] > 0
        disagree = [
            row
            for row in budget["audit"]
            if row["difference_bytes"] is not None
            and abs(row["difference_bytes"]) > row["tolerance_bytes"]
        ]
        assert not disagree
        assert [check for check in rank["kv"]["checks"] if check["ok"] is not True] == []
        assert phases <= {phase["phase"] for phase in rank["phases"]}
    assert {phase["phase"] for phase in report["not_measured"]} == {*unseen}
    hooks = [event for event in run.events() if event["kind"] == "hook"]
    wrong = [
        event
        for event in hooks
        if event["state"] in ("stale", "error", "overwritten", "missing", "never_called")
        and event["need"] == "required"
    ]
    assert not wrong
    assert not [event for event in run.events() if event["kind"] == "error"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("stack", "env", "more"),
    [
        (STACK_011, {}, set()),
        (STACK_018, {}, set()),
        (STACK_026, {}, {"kernel_warm_up"}),
        (STACK_030, {}, {"kernel_warm_up"}),
        (STACK_030, V2_RUNNER, {"kernel_warm_up", "model_state"}),
    ],
    ids=["0.11.0", "0.18.0", "0.26.0rc1", "0.30.0rc2", "0.30.0rc2-v2"],
)
def test_every_phase_and_every_byte(
    run_memprof: Any, stack: str, env: dict[str, str], more: set[str], tp: int
) -> None:
    run = offline(run_memprof, stack, "memprof/tiny", f"-tp={tp}", env=env)
    assert_reconciled(run, tp, PHASES | more, equation="E2" if stack == STACK_011 else "E4")


@pytest.mark.parametrize("tp", [1, 2])
def test_torch_2_14_without_graphs(run_memprof: Any, tp: int) -> None:
    """With graphs the engine ends: its npugraph_ex returns what torch 2.14 refuses."""
    run = offline(run_memprof, STACK_214, "memprof/tiny", f"-tp={tp}", "--enforce-eager")
    assert_reconciled(run, tp, PHASES - {"graph_capture"} | {"kernel_warm_up"}, {"graph_capture"})


@pytest.mark.parametrize("env", [{}, V2_RUNNER], ids=["v1", "v2"])
def test_a_model_with_images(run_memprof: Any, env: dict[str, str]) -> None:
    run = offline(run_memprof, STACK_030, "memprof/tiny-vl", "-tp=2", env=env)
    assert_reconciled(run, 2, PHASES | {"mm_profile", "kernel_warm_up"})


def _names(path: Path, parents: list[str]) -> set[str]:
    """Return the names that a module, or a class in it, defines or imports, by its source."""
    body: Any = ast.parse(path.read_text(encoding="utf-8"))
    for name in parents:
        body = next(
            node for node in body.body if isinstance(node, ast.ClassDef) and node.name == name
        )
    # a dataclass is given its own
    found = {"__init__"} if parents and body.decorator_list else set()
    for node in ast.walk(body) if not parents else body.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name) for alias in node.names}
    return found


def _is_there(site_packages: Path, target: str) -> bool:
    module, _, path = target.partition(":")
    file = site_packages / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        file = site_packages / module.replace(".", "/") / "__init__.py"
    *parents, name = path.split(".")
    try:
        return name in _names(file, parents)
    except (OSError, StopIteration):
        return False


@pytest.mark.parametrize("name", [STACK_011, STACK_018, STACK_026, STACK_030, STACK, OLD_STACK])
def test_every_required_row_has_a_target_in_the_release(name: str) -> None:
    """By the sources: a phase whose function moved is found without a run of it."""
    stack = load_stack(require_stack(name))
    site = default_prefix(name) / f"lib/python{stack.python}/site-packages"
    rows = [
        row
        for row in rows_in_force("npu", version_of(stack, "vllm"))
        if row.need == "required" and any(target.startswith("vllm") for target in row.targets)
    ]
    assert len(rows) > 10
    lost = [row.id for row in rows if not any(_is_there(site, target) for target in row.targets)]
    assert lost == []


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            STACK_030,
            {
                "w.startup_plan",
                "w.kv_groups",
                "w.multi_group",
                "w.kv_planner",
                "w.kernel_warm_up",
                "r.model_state",
            },
        ),
        *[
            (stack, {"r.draft_load", "r.lora_load", "w.kv_connector"})
            for stack in (STACK_011, STACK_018, STACK_030, STACK, OLD_STACK)
        ],
    ],
)
def test_optional_rows_that_a_release_has(name: str, rows: set[str]) -> None:
    stack = load_stack(require_stack(name))
    site = default_prefix(name) / f"lib/python{stack.python}/site-packages"
    found = {
        row.id
        for row in rows_in_force("npu", version_of(stack, "vllm"))
        if row.id in rows and any(_is_there(site, target) for target in row.targets)
    }
    assert found == rows


def test_the_v2_runner_has_the_functions_of_its_phases() -> None:
    """Rows list both runners: each phase of the second is there by itself."""
    stack = load_stack(require_stack(STACK_030))
    site = default_prefix(STACK_030) / f"lib/python{stack.python}/site-packages"
    targets = [
        target
        for row in rows_in_force("npu", version_of(stack, "vllm"))
        for target in row.targets
        if ".worker.v2." in target or ".worker.gpu." in target
    ]
    assert len(targets) == 8  # four of them load a drafter
    assert [target for target in targets if not _is_there(site, target)] == []


def test_the_last_steps_of_a_budget_by_the_release_s_own_functions(tmp_path: Path) -> None:
    """gpt-oss-20b: half of the budget for two groups of 12 layers; a KVPP plan; a start-up plan."""
    runtime = prepare_runtime("910b", require_stack(STACK_030))
    model = resolve_model("openai/gpt-oss-20b", [])
    (tmp_path / "run/events").mkdir(parents=True)
    found, output = run_in_engine(
        runtime,
        Path(__file__).parent / "grants_of_030.py",
        model.path,
        **model.env,
        MEMPROF_RUN_DIR=str(tmp_path / "run"),
        MEMPROF_SIM_STATE=str(tmp_path / "devices"),
        VLLM_CACHE_ROOT=str(tmp_path / "vllm"),
        VLLM_ENABLE_STARTUP_PLAN="1",
    )
    assert "scales the multi-group budget by 0.5000 (3145728 bytes/block over 6291456" in output
    figures = {**found["figures"], "device_total_bytes": found["given"]}
    given = {"requested_bytes": found["given"], "weights_bytes": 0}
    given |= {"peak_activation_bytes": 0, "non_torch_increase_bytes": 0}
    equation, _ = select("vllm-ascend", "0.30.0rc2")
    assert equation is not None
    groups = {name: size for name, size in figures.items() if "page_bytes" in name}
    assert evaluate(equation, {**given, **groups}).kv_cache_bytes == found["scaled"]
    assert evaluate(equation, {**given, **figures}).kv_cache_bytes == found["spread"]
    assert figures["kv_planner_input_bytes"] == found["scaled"]
    assert figures["startup_plan_bytes"] == found["fixed"] == 40 << 30
    # both groups lie over each other in one allocation, which each of its two tensors names
    plan = build_kv(found["plan"], 0, None)
    assert plan.planned_bytes == plan.blocks * 3_145_728 <= found["scaled"]
    assert [check.ok for check in plan.checks if check.ok is not None] == [True] * 5
