"""The table of published runs: its rows, what is refused, and a row made from a recorded run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from scripts.accuracy_runs import FIGURES, load_runs, parse_figure, parse_runs
from vllm_memprof.cli import main
from vllm_memprof.errors import UsageError
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sim.stacks import list_stacks
from vllm_memprof.units import GIB

DATA = Path(__file__).parents[2] / "tests" / "data"
TABLE = DATA / "hardware_runs.toml"
RUNS = load_runs(TABLE)
ROW = """
[[run]]
id = "a"
source = "somewhere"
release = "0.23.0"
device = "910b"
model = "Qwen/Qwen3-8B"
published = { weights = "15.2859 GiB" }
"""


def test_the_table_has_runs_with_a_source_each():
    assert len(RUNS) >= 20
    assert len({run.source for run in RUNS}) >= 12
    for run in RUNS:
        assert load_profile(run.device)
        assert run.published or run.limit or run.fails, run.id
        assert run.rank == 0 or run.published, run.id
        assert re.search(r"https://|PR#|issue|docs|notes|report|measured", run.source), run.id


def test_what_was_fitted_or_is_not_explained_names_figures():
    for run in RUNS:
        named = {*run.fitted, *run.explained, *run.unexplained}
        assert named <= {*FIGURES, "limit", "fails"}, run.id
        assert bool(run.fails) >= ("fails" in run.explained), run.id


def test_a_row_that_asks_for_npugraph_ex_has_a_graph_mode_that_leaves_it_on():
    """With piecewise graphs, the default, the engine turns it off, and the peak is another one.

    vllm-ascend 0.23.0, ``platform.py::NPUPlatform.check_and_update_config``.
    """
    asked = 0
    for run in RUNS:
        given = dict(zip(run.engine_args, run.engine_args[1:], strict=False))
        additional = json.loads(given.get("--additional-config", "{}"))
        if additional.get("ascend_compilation_config", {}).get("enable_npugraph_ex"):
            asked += 1
            compilation = json.loads(given.get("--compilation-config", "{}"))
            assert compilation.get("cudagraph_mode") in ("FULL", "FULL_DECODE_ONLY"), run.id
    assert asked


def test_a_row_names_no_constant_that_a_profile_lacks():
    memory = load_profile("910b").memory
    patterns = set(load_profile("910b").workspace)
    known = {*memory.__struct_fields__, *patterns, "which layers have 8 bits"}
    for run in RUNS:
        for constants in run.fitted.values():
            assert set(constants.split(", ")) <= known, run.id


@pytest.mark.parametrize(
    ("given", "value", "half"),
    [
        ("43.40 GiB", 43.4 * GIB, 0.005 * GIB),
        ("0.1 GiB", 0.1 * GIB, 0.05 * GIB),
        ("42 GiB", 42 * GIB, 0.5 * GIB),
        ("-0.87 GiB", -0.87 * GIB, 0.005 * GIB),
        (2_728_672_256, 2_728_672_256, 0),
    ],
)
def test_a_printed_figure_has_the_rounding_of_its_digits(given, value, half):
    figure = parse_figure("kv_cache", given)
    assert figure.value == pytest.approx(value)
    assert figure.half_unit == pytest.approx(half)


@pytest.mark.parametrize("given", ["43.40 GB", "43.40", "1e3 GiB", True, None])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ValueError, match="kv_cache = "):
        parse_figure("kv_cache", given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('source = "somewhere"\n', "needs source"),
        ("published = { weights = ", 'published = { weight = "1 GiB" }\nx = { y = '),
        ('model = "Qwen/Qwen3-8B"', 'added = ["--x"]\nmodel = "Qwen/Qwen3-8B"'),
    ],
)
def test_a_row_that_is_none_is_refused_by_name(change, said):
    text = ROW.replace(change, "" if said.startswith("needs") else said)
    with pytest.raises(UsageError, match=r"t\.toml, \[\[run\]\] 1"):
        parse_runs(text, Path("t.toml"))


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two rows named a"):
        parse_runs(ROW + ROW, Path("t.toml"))


# --- memprof sim calibrate --row ------------------------------------------------------------------


def run_of(tmp_path, **info):
    """Return a recorded run with another head, as a run on hardware has one."""
    folder = tmp_path / "run"
    shutil.copytree(DATA / "recorded_tp2", folder)
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, **info}))
    return folder


def calibrate(*words):
    """Return the exit status of ``memprof sim calibrate``."""
    try:
        return main(["sim", "calibrate", *map(str, words)])
    except SystemExit as ended:
        return ended.code


HARDWARE = {"simulated": False, "device_profile": None, "device": "Ascend910B3"}


def test_a_run_on_an_npu_becomes_a_row(tmp_path, capsys):
    folder, table = run_of(tmp_path, **HARDWARE), tmp_path / "rows.toml"
    table.write_text("# mine\n" + ROW)
    assert calibrate(folder, "--row", table) == 0
    assert "added to" in capsys.readouterr().out
    assert table.read_text().startswith("# mine\n")
    _, run = load_runs(table)
    assert run.model == "Qwen/Qwen3-VL-8B-Instruct"
    assert run.device == "ascend910b"
    assert run.total_bytes == 65_452_113_920
    assert run.args[-2:] == ["--mm-processor-cache-gb", "0"]
    assert "--max-num-batched-tokens" in run.args
    assert not [word for word in run.args if word.startswith("--prompt")]
    assert not [name for name in run.env if name.endswith(("_PATH", "_ROOT"))]
    assert run.published["weights"].half_unit == 0
    assert run.published["kv_cache"].value > 40 * GIB
    assert calibrate(folder, "--row", table) == 2
    assert "two rows named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "is a run of a simulated device"),
        ({**HARDWARE, "engine": "vllm"}, "is a run of vllm"),
    ],
)
def test_other_runs_are_no_row(tmp_path, capsys, info, said):
    table = tmp_path / "rows.toml"
    assert calibrate(run_of(tmp_path, **info), "--row", table) != 0
    assert said in capsys.readouterr().err
    assert not table.exists()


def test_a_calibration_without_a_file_says_what_it_can_write(tmp_path, capsys):
    assert calibrate(run_of(tmp_path)) == 2
    assert "-o FILE.toml" in capsys.readouterr().err


def test_every_stack_of_the_table_exists():
    """A row may name a stack that this release does not have yet; it then has no plan."""
    names = {stack.name for stack in list_stacks()}
    assert {run.stack for run in RUNS if run.stack} & names
