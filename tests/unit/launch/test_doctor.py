"""The doctor's checks, each on what it reads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_memprof.launch import doctor
from vllm_memprof.launch.doctor import (
    DoctorCheck,
    InterpreterFacts,
    find_ways,
    summarise_hooks,
)
from vllm_memprof.sim.stacks import load_stack


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:128", None),
        ("expandable_segments:True,max_split_size_mb:128", "max_split_size_mb"),
        ("garbage_collection_threshold:0.6 , expandable_segments:true", "garbage_collection"),
        ("expandable_segments:False,max_split_size_mb:128", None),
        ("expandable_segments", None),
        ("", None),
    ],
)
def test_allocator_settings(value: str, refused: str | None) -> None:
    (check,) = doctor.check_variables({"PYTORCH_NPU_ALLOC_CONF": value})
    assert check.state == (doctor.WARNING if refused else doctor.GOOD)
    assert (refused or "") in check.todo


def test_plugins_variable():
    assert doctor.check_variables({}) == []
    assert doctor.check_variables({"VLLM_PLUGINS": "ascend,memprof"})[0].state == doctor.GOOD
    trap = doctor.check_variables({"VLLM_PLUGINS": "other"})[0]
    assert trap.state == doctor.WARNING
    assert "NPU" in trap.todo
    assert "memprof" in trap.todo
    added = doctor.check_variables({"VLLM_PLUGINS": "ascend"})[0]
    assert added.state == doctor.INFO  # a run adds memprof itself


def test_devices(tmp_path):
    npu, cuda = doctor.check_devices(tmp_path)
    assert (npu.state, cuda.state) == (doctor.INFO, doctor.INFO)
    assert "/dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc" in npu.todo
    for name in ("davinci0", "davinci1", "davinci_manager", "nvidia0"):
        (tmp_path / name).touch()
    npu, cuda = doctor.check_devices(tmp_path)
    assert npu.state == doctor.WARNING
    assert "not accessible: devmm_svm, hisi_hdc" in npu.found
    for name in ("devmm_svm", "hisi_hdc"):
        (tmp_path / name).touch()
    npu, cuda = doctor.check_devices(tmp_path)
    assert npu.found == "2 device(s): davinci0, davinci1"
    assert (npu.state, cuda.state) == (doctor.GOOD, doctor.GOOD)


def test_ways_to_run():
    facts = InterpreterFacts(Path("p"), "3", engines={"vllm": ("memprof",)})
    device = DoctorCheck("npu", doctor.GOOD, "")
    host = [DoctorCheck("CANN", doctor.GOOD, ""), DoctorCheck("libdcmi", doctor.WARNING, "")]
    bare = [DoctorCheck("CANN", doctor.WARNING, "")]
    old, default = load_stack("vllm-ascend-0.13.0"), load_stack()
    sglang = load_stack("sglang-0.5.23")
    assert find_ways(facts, [device], host, []) == ["--device npu"]
    assert find_ways(facts, [device], bare, []) == []
    assert find_ways(facts, [DoctorCheck("cuda", doctor.GOOD, "")], bare, []) == ["--device cuda"]
    assert find_ways(None, [device], host, []) == []
    assert find_ways(None, [], [], [old, default]) == ["--device sim:910b"]
    assert find_ways(None, [], [], [old]) == ["--device sim:910b --stack vllm-ascend-0.13.0"]
    assert find_ways(None, [], [], [sglang]) == ["--engine sglang --device sim:910b"]
    closed = DoctorCheck("npu", doctor.WARNING, "")
    assert find_ways(facts, [closed], host, []) == []
    other = replace(facts, engines={"sglang": ("memprof",)})
    assert find_ways(other, [device], host, []) == ["--engine sglang --device npu"]


def libraries(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose loader finds libraries of these names."""
    source = folder / "empty.c"
    source.touch()
    for name in names:
        command = ["cc", "-shared", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_what_a_host_with_an_npu_needs(tmp_path):
    """Every library is named with what to do; with an NPU, what does not load is a warning."""
    found = DoctorCheck("npu", doctor.GOOD, "")
    env = libraries(tmp_path, "libascendcl.so", "libdcmi.so")
    checks = {c.name: c for c in doctor.check_host(found, sys.executable, env)}
    assert list(checks) == ["driver", "CANN", "ATB", "libdcmi"]
    assert "libascend_hal.so" in checks["driver"].found  # in the loader's words
    assert "/usr/local/Ascend/driver" in checks["driver"].todo
    assert checks["CANN"].found == "libascendcl.so; ASCEND_HOME_PATH is not set"
    assert "set_env.sh" in checks["CANN"].todo
    assert "nnal/atb/set_env.sh" in checks["ATB"].todo
    assert {name: c.state for name, c in checks.items()} == {
        "driver": doctor.WARNING,
        "CANN": doctor.WARNING,
        "ATB": doctor.WARNING,
        "libdcmi": doctor.GOOD,
    }
    env["ASCEND_HOME_PATH"] = "/usr/local/Ascend"
    cann = doctor.check_host(found, sys.executable, env)[1]
    assert (cann.state, cann.found, cann.todo) == (doctor.GOOD, "libascendcl.so", "")


def test_without_an_npu_nothing_of_it_is_a_fault():
    absent = DoctorCheck("npu", doctor.INFO, "")
    checks = doctor.check_host(absent, sys.executable, {})
    assert {check.state for check in checks} <= {doctor.INFO, doctor.GOOD}
    assert all(check.todo for check in checks if check.state == doctor.INFO)


def test_an_interpreter_that_loads_nothing():
    checks = doctor.check_host(DoctorCheck("npu", doctor.GOOD, ""), "/no/python", {})
    assert {check.state for check in checks} == {doctor.WARNING}


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
    assert doctor.check_place("run folder", tmp_path / "a" / "b", 1).state == doctor.GOOD
    assert doctor.check_place("shared memory", tmp_path, 1 << 60).state == doctor.WARNING


def test_an_interpreter_without_anything():
    facts, checks = doctor.check_engine("/no/python", {})
    assert facts is None
    assert checks[0].state == doctor.MISSING
