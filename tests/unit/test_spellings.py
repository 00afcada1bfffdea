"""An option says the same in every spelling: hyphens and underscores, ``--a b`` and ``--a=b``."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.render import render_json
from tests.unit.accounting.builders import DATA
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.model import Report
from vllm_memprof.check.baseline import differences
from vllm_memprof.compare.changes import changes
from vllm_memprof.launch.prepare import find_shutdown_timeout
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.options import normal_form, words_of
from vllm_memprof.plans.model import Plan
from vllm_memprof.record.loader import load_run
from vllm_memprof.sim.presets import resolve_model

PLAIN = ["--enforce-eager", "--max-num-batched-tokens", "4096", "--gpu-memory-utilization", "0.8"]
SPELLINGS = [
    PLAIN,
    ["--enforce_eager", "--max_num_batched_tokens", "4096", "--gpu_memory_utilization=0.8"],
    ["--max_num_batched_tokens=4096", "--gpu-memory-utilization=0.8", "--enforce_eager"],
    words_of(
        {"enforce_eager": True, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.8}
    ),
]
LOG = """{command}
(EngineCore pid=1) Initializing a V1 LLM engine (v0.23.0) with config: model='org/m',
(Worker pid=2) [worker.py:1] Available KV cache memory: 21.26 GiB
"""


def figures(report: Report) -> str:
    """Return a report without the command as typed."""
    typed = {"command": [], "engine_command": []}
    return render_json(replace(report, run=replace(report.run, **typed)))


def recorded_with(words: list[str], folder: Path, name: str = "recorded_oom") -> Report:
    """Return the report of a recorded run whose command gave these options."""
    shutil.copytree(DATA / name, folder)
    run = json.loads((folder / "run.json").read_text())
    run["command"] = ["memprof", "offline", run["model"], *words]
    run["engine_command"] = ["python", "-m", "driver", "offline", "--", *words]
    (folder / "run.json").write_text(json.dumps(run))
    return build_report(load_run(folder))


@pytest.mark.parametrize("words", SPELLINGS)
def test_a_recorded_run(words: list[str], tmp_path: Path) -> None:
    plain = recorded_with(PLAIN, tmp_path / "a" / "run")
    other = recorded_with(words, tmp_path / "b" / "run")
    assert plain.run.eager
    assert figures(other) == figures(plain)
    assert changes(plain, other) == []  # of memprof diff
    assert differences(plain, other) == []  # of memprof check, with a baseline


@pytest.mark.parametrize("words", SPELLINGS)
def test_a_log(words: list[str], tmp_path: Path) -> None:
    def report(options: list[str]) -> Report:
        path = tmp_path / "a.log"
        path.write_text(LOG.format(command=" ".join(["vllm serve org/m", *options])))
        (run,) = read_log(str(path))
        return build_report(run)

    plain = report(PLAIN)
    assert plain.run.eager
    assert plain.ranks[0].budget.gpu_memory_utilization == 0.8
    assert figures(report(words)) == figures(plain)


@pytest.mark.parametrize("words", SPELLINGS)
def test_a_plan(words: list[str]) -> None:
    def asked(options: list[str]) -> Plan:
        return Plan.asked("memprof/tiny", options, {}, 600.0)

    for each in (asked(words), asked(words).vary("gpu-memory-utilization", "0.8")):
        assert normal_form(each.engine_args) == normal_form(PLAIN)  # one key of the cache


@pytest.mark.parametrize(
    "words", [["--load-format", "auto"], ["--load_format=auto"], ["--load_format", "auto"]]
)
def test_what_the_user_gave_is_not_added(words: list[str]) -> None:
    assert "--load-format" not in resolve_model("memprof/tiny", words).extra_args


@pytest.mark.parametrize("words", [["--shutdown-timeout", "7"], ["--shutdown_timeout=7"]])
def test_the_launcher(words: list[str]) -> None:
    assert find_shutdown_timeout(words) == 7.0
