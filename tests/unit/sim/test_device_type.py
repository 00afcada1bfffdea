"""The device type that vllm-ascend was built for, and the one that it is told on another device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoints, PathDistribution

import pytest

from vllm_memprof.sim import runtime
from vllm_memprof.sim.device_type import built_for, device_type_of
from vllm_memprof.sim.profiles import list_profiles, load_profile

#: What a build of 0.23.0 for x86-64 leaves.
BUILD_INFO = "# Auto-generated file\n__device_type__ = 'A2'\n"


@pytest.fixture
def prefix(tmp_path):
    package = tmp_path / "lib/python3.11/site-packages/vllm_ascend"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_build_info.py").write_text(BUILD_INFO)
    return tmp_path


@pytest.mark.parametrize(
    ("soc_name", "device_type"),
    [
        ("Ascend910B1", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend910_9391", "A3"),
        ("Ascend910_9362", "A3"),
        ("Ascend310P3", "_310P"),
        ("Ascend950PR_9599", "A5"),
        ("Ascend910A", None),
    ],
)
def test_the_type_of_a_soc(soc_name, device_type):
    assert device_type_of(soc_name) == device_type


def test_every_profile_has_a_type():
    assert [p.name for p in list_profiles() if device_type_of(p.device.soc_name) is None] == []


def test_the_type_of_a_build(prefix, tmp_path):
    assert built_for(prefix) == "A2"
    assert built_for(tmp_path / "empty") is None
    [path] = prefix.glob("lib/*/site-packages/vllm_ascend/_build_info.py")
    path.write_text("__soc_version__ = 'ASCEND910B1'\n__sleep_mode_enabled__ = True\n")
    assert built_for(prefix) == "A2"
    path.write_text("__sleep_mode_enabled__ = True\n")
    assert built_for(prefix) is None


@pytest.mark.parametrize(("profile", "told"), [("910b", None), ("a3", "A3"), ("310p", "_310P")])
def test_the_engine_is_told_another_type_alone(prefix, profile, told):
    env = runtime.engine_env(load_profile(profile), prefix)
    assert env.get(runtime.ENV_DEVICE_TYPE) == told


@pytest.mark.parametrize(
    ("told", "read", "soc"),
    [("A3", "A3", "ascendA3"), ("_310P", "_310P", "ascend310P"), ("", "A2", "no SoC")],
)
def test_a_process_of_the_engine_takes_the_type(prefix, told, read, soc):
    """The entry point is called as vLLM calls it: loaded by its group, before vllm-ascend asks.

    Torch has no NCCL then, as its build for the CPU.
    """
    code = """
from importlib.metadata import entry_points
for plugin in entry_points(group="vllm.platform_plugins"):
    assert plugin.load()() is None
from torch.distributed import distributed_c10d
from vllm_ascend import _build_info
assert not distributed_c10d._NCCL_AVAILABLE
print(_build_info.__device_type__, getattr(_build_info, "__soc_version__", "no SoC"))
"""
    [site] = prefix.glob("lib/*/site-packages")
    group = site / "torch/distributed/distributed_c10d.py"
    group.parent.mkdir(parents=True)
    group.write_text("_NCCL_AVAILABLE = True\n")
    paths = [runtime.SITE_DIR, runtime.link_package(prefix), site]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), runtime.ENV_DEVICE_TYPE: told}
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{read} {soc}\n", done.stderr
    assert (site / "vllm_ascend/_build_info.py").read_text() == BUILD_INFO


def test_an_allow_list_of_plugins_lets_every_entry_point_in(prefix):
    [metadata] = runtime.link_package(prefix).glob("*.dist-info")
    entries: EntryPoints = PathDistribution(metadata).entry_points
    assert {entry.name for entry in entries} == {"memprof"}
    assert {entry.group for entry in entries} == {
        "vllm.general_plugins",
        "vllm.platform_plugins",
        "sglang.srt.plugins",
        "sglang.multimodal_gen.plugins",
    }
