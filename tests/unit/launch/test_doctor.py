"""The doctor's checks, each on what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_memprof.launch import doctor
from vllm_memprof.launch.doctor import (
    Check,
    InterpreterFacts,
    find_alloc_conf_problems,
    find_ways,
    summarise_hooks,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("expandable_segments:True", []),
        ("max_split_size_mb:128", []),
        ("expandable_segments:True,max_split_size_mb:128", ["max_split_size_mb"]),
        (
            "garbage_collection_threshold:0.6 , expandable_segments:true",
            ["garbage_collection_threshold"],
        ),
        ("expandable_segments:False,max_split_size_mb:128", []),
        ("expandable_segments:True,expandable_segments:False", ["set 2 times"]),
        ("expandable_segments", ["no value"]),
        ("", []),
    ],
)
def test_allocator_settings(value, words):
    problems = find_alloc_conf_problems(value)
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def test_plugins_variable():
    assert doctor.check_plugins_variable({}) == []
    assert doctor.check_plugins_variable({"VLLM_PLUGINS": "ascend,memprof"})[0].state == doctor.GOOD
    trap = doctor.check_plugins_variable({"VLLM_PLUGINS": "other"})[0]
    assert trap.state == doctor.WARNING
    assert "NPU" in trap.todo
    assert "memprof" in trap.todo


def test_devices(tmp_path):
    npu, cuda = doctor.check_devices({}, tmp_path)
    assert (npu.state, cuda.state) == (doctor.INFO, doctor.INFO)
    for name in ("davinci0", "davinci1", "davinci_manager", "nvidia0"):
        (tmp_path / name).touch()
    npu, cuda = doctor.check_devices({}, tmp_path)
    assert npu.state == doctor.WARNING
    assert "set_env.sh" in npu.todo
    npu, cuda = doctor.check_devices({"ASCEND_HOME_PATH": "/usr"}, tmp_path)
    assert npu.found == "2 device(s): davinci0, davinci1"
    assert (npu.state, cuda.state) == (doctor.GOOD, doctor.GOOD)


def test_ways_to_run():
    facts = InterpreterFacts(
        Path("p"), "3", "x", has_vllm=True, has_memprof=True, plugins=("memprof",)
    )
    device = Check("npu", doctor.GOOD, "")
    stack = Check(doctor.STACK, doctor.GOOD, "")
    assert find_ways(facts, [device], []) == ["--device npu"]
    assert find_ways(None, [device], []) == []
    assert find_ways(None, [], [stack]) == ["--device sim:910b"]
    assert (
        find_ways(
            facts, [Check("npu", doctor.WARNING, "")], [Check(doctor.STACK, doctor.MISSING, "")]
        )
        == []
    )


def test_hooks_are_summarised():
    rows = [
        {"hook": "a", "need": "required", "state": "found"},
        {"hook": "b", "need": "required", "state": "missing"},
    ]
    rows.append({"hook": "c", "need": "optional", "state": "missing"})
    assert summarise_hooks({"rows": rows[:1]}, "s").state == doctor.GOOD
    check = summarise_hooks({"rows": rows}, "s")
    assert check.state == doctor.WARNING
    assert check.found == "s: 1 of 2 required hooks find their place; not: b"
    for nothing in ({}, {"rows": []}, [], None):
        assert summarise_hooks(nothing, "s").state == doctor.WARNING


def test_compiler_and_places(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_compiler(needless=False).state == doctor.MISSING
    assert doctor.check_compiler(needless=True).state == doctor.INFO
    assert doctor.check_run_dir(tmp_path / "a" / "b").state in (doctor.GOOD, doctor.WARNING)
    assert doctor.check_shm(tmp_path / "none").state == doctor.WARNING


def test_an_interpreter_without_anything():
    facts, checks = doctor.check_engine("/no/python", {})
    assert facts is None
    assert checks[0].state == doctor.MISSING
