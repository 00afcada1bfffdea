"""``scripts.accuracy``: how a row is planned, where a start limit lies, what the page demands."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from scripts import accuracy, accuracy_page
from scripts.accuracy_errors import PlannedRow
from scripts.accuracy_runs import PublishedFigure, PublishedRun, StartLimit
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sources import build_run
from vllm_memprof.units import GIB

RUN = PublishedRun(
    id="a",
    source="s",
    release="0.23.0",
    device="910b",
    model="Qwen/Qwen3-8B",
    args=["--max-model-len", "4096"],
    added=["--gpu-memory-utilization", "0.9"],
    why_added="the default",
    stack="vllm-ascend-0.23.0",
    published={"kv_cache": PublishedFigure(40 * GIB)},
)
PLANNED = PlannedRow(status="ok", seconds=1.0, equation="E4", figures={"kv_cache": 40 * GIB})


def after(command, word):
    return command[command.index(word) + 1]


def test_a_row_is_planned_as_published(tmp_path):
    command = accuracy.command_of(RUN, tmp_path)
    assert command[3:5] == ["plan", "Qwen/Qwen3-8B"]
    assert after(command, "--device") == "sim:910b"
    assert (after(command, "--stack"), after(command, "--rank")) == ("vllm-ascend-0.23.0", "0")
    words = command[command.index("--") + 1 :]
    assert words == ["--max-model-len", "4096", "--gpu-memory-utilization", "0.9"]


def test_graphs_need_a_run_beyond_the_plan(tmp_path):
    run = replace(RUN, published={"graphs": PublishedFigure(GIB)})
    assert accuracy.command_of(run, tmp_path)[3] == "offline"
    several = replace(run, args=["--tensor-parallel-size", "2"])
    assert accuracy.command_of(several, tmp_path)[3] == "plan"


def test_every_rank_of_sglang_runs_and_a_start_that_failed_goes_on_to_a_request(tmp_path):
    command = accuracy.command_of(replace(RUN, engine="sglang"), tmp_path)
    assert after(command, "--engine") == "sglang"
    assert "--ranks" not in command
    assert (
        after(accuracy.command_of(replace(RUN, fails="graph-streams"), tmp_path), "--until")
        == "ready"
    )


def test_a_device_has_the_total_that_the_run_s_had(tmp_path):
    total = load_profile("910b").device.total_bytes
    assert accuracy.device_of(replace(RUN, total_bytes=total), tmp_path) == "sim:910b"
    device = accuracy.device_of(replace(RUN, total_bytes=31_662_800_896), tmp_path)
    changed = load_profile(device.removeprefix("sim:"))
    assert changed.device.total_bytes == 31_662_800_896
    assert changed.name == load_profile("910b").name
    assert changed.memory == load_profile("910b").memory


# --- a start limit --------------------------------------------------------------------------------


def engine(limit, slope=1e-5, refusals=True):
    """Return a start whose KV cache is that of one request at ``limit``, and less beyond it."""
    tried = []

    def simulate(run, extra=(), keep=None):
        value = int(list(extra)[-1])
        tried.append(value)
        share = 1 - (value - limit) * slope
        result = {"status": "ok", "seconds": 1.0, "figures": {"concurrency": share}}
        if share < 1 and refusals:
            said = "ValueError: (17.26 GiB KV cache is needed, which is larger than the available "
            said += f"KV cache memory ({17.26 * share:.4f} GiB)."
            result = {"status": "failed", "seconds": 1.0, "reason": said, "figures": {}}
        return result

    return simulate, tried


@pytest.mark.parametrize("limit", [44_000, 45_056, 46_500, 50_000])
def test_a_limit_is_found_in_few_plans(monkeypatch, limit):
    simulate, tried = engine(limit)
    monkeypatch.setattr(accuracy, "simulate", simulate)
    run = replace(RUN, published={}, limit=StartLimit("max-num-batched-tokens", 45_056, 47_104))
    result = accuracy.search_limit(run, None)
    assert result["limit"] == pytest.approx(limit, rel=0.005)
    assert len(tried) <= 4
    assert result["tries"].keys() == {str(value) for value in tried}


def test_a_start_that_tells_nothing_has_no_limit(monkeypatch):
    failed = {"status": "failed", "seconds": 1.0, "reason": "no such stack"}
    monkeypatch.setattr(accuracy, "simulate", lambda *_: failed)
    run = replace(RUN, published={}, limit=StartLimit("max-num-batched-tokens", 45_056, 47_104))
    result = accuracy.search_limit(run, None)
    assert (result["limit"], result["tries"]) == (None, {})


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Files of the page in a folder of their own; returns what is kept."""
    monkeypatch.setattr(accuracy, "KEPT", tmp_path / "accuracy.json")
    monkeypatch.setattr(accuracy, "SPREADS", tmp_path / "spread.json")
    monkeypatch.setattr(accuracy_page, "DOCS", tmp_path)

    def keep(run, planned):
        accuracy.write_kept({run.id: planned}, [run])
        [(name, read)] = accuracy.read_kept().items()
        assert (name, asdict(read)) == (run.id, {**asdict(planned), "taken": []})

    return keep


def test_a_prediction_outside_its_target_needs_a_word(kept, capsys):
    far = replace(PLANNED, figures={"kv_cache": 41 * GIB})
    kept(RUN, far)
    assert accuracy.write([RUN], check=False) == 1
    assert "a: kv_cache is +2.50% off, and its row says no word" in capsys.readouterr().out
    for word in ("explained", "unexplained"):
        assert accuracy.write([replace(RUN, **{word: {"kv_cache": "why"}})], check=False) == 0
    kept(RUN, PLANNED)
    assert accuracy.write([RUN], check=False) == 0


def test_a_page_of_other_plans_is_found(kept, capsys):
    kept(RUN, PLANNED)
    assert accuracy.write([RUN], check=True) == 1
    assert accuracy.write([RUN], check=False) == 0
    assert accuracy.write([RUN], check=True) == 0
    kept(RUN, replace(PLANNED, figures={"kv_cache": 40 * GIB + 100_000_000}))
    assert accuracy.write([RUN], check=True) == 1
    assert "accuracy.md is not what accuracy.json" in capsys.readouterr().out


def test_the_page_counts_fitted_figures_apart(kept, tmp_path):
    run = replace(RUN, fitted={"kv_cache": "hccl_base_bytes"})
    kept(run, replace(PLANNED, figures={"kv_cache": 41 * GIB}))
    assert accuracy.write([run], check=False) == 0
    page = (tmp_path / "accuracy.md").read_text()
    by_figure = page.partition("## Errors by figure")[2].partition("## By device")[0]
    assert "KV cache" not in by_figure
    assert ",0.025000,fitted," in (tmp_path / "accuracy.csv").read_text()
    picture = (tmp_path / "accuracy.svg").read_text()
    assert "a: +2.50 %, fitted" in picture


def test_a_row_without_a_plan_says_why(kept, tmp_path):
    run = replace(RUN, not_planned="no preset")
    kept(replace(run, id="b"), PLANNED)
    assert accuracy.write([run], check=False) == 0
    assert "| a | no preset |" in (tmp_path / "accuracy.md").read_text()


@pytest.mark.parametrize(
    ("recorded", "own", "others"),
    [("recorded_013_tp2", "E2", ()), ("recorded_023_tp2", "E4", ("E2", "E3"))],
)
def test_readings_in_another_equation(recorded, own, others):
    folder = accuracy.ROOT / "tests/data" / recorded
    report = build_run(folder)
    granted = {name: accuracy.in_equation(name, folder, 0) for name in (own, *others)}
    assert granted[own]["kv_cache"] == report.ranks[0].budget.engine_kv_cache_bytes
    assert granted[own]["tokens"] == report.ranks[0].kv.tokens
    # E4 subtracts the least, E2 what E3 does and idle torch memory besides
    sizes = [granted[name]["kv_cache"] for name in (*others, own)]
    assert sizes == sorted(sizes)
