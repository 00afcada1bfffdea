"""Packages that no index has: the names are those that are imported, each is there, and one without
a body fails by its own name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import runtime, stand_ins
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sim.stacks import StandIn, list_stacks, load_stack

ENGINE = {
    "engine/__init__.py": "import os\nfrom rare import top, other as renamed\n",
    "engine/lazy.py": (
        "def run():\n"
        "    try:\n"
        "        from rare.kernels.deep import launch\n"
        "    except ImportError:\n"
        "        launch = None\n"
        "    import rare.kernels.whole as whole\n"
        "    import importlib\n"
        "    importlib.import_module('rare.by_text')\n"
    ),
    "engine/sub.py": "from rare import kernels\nfrom rare.kernels import *\nfrom rarely import no\n",
    "engine/own.py": "from .rare import mine\nfrom engine.rare import mine\n",
    "engine/with_mark.py": "\ufefffrom rare.kernels.deep import TABLE\n",
}
RARE = StandIn("rare", "engine")


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    for name, text in ENGINE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "site"


def run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_are_those_that_are_imported(site_packages: Path) -> None:
    assert stand_ins.imported_names(site_packages / "engine", "rare") == {
        "rare": {"top", "other"},
        "rare.kernels": set(),
        "rare.kernels.deep": {"launch", "TABLE"},
        "rare.kernels.whole": set(),
        "rare.by_text": set(),
    }


def test_a_name_without_a_body_fails_where_it_is_used(site_packages: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "stand_ins"
    assert stand_ins.write_stand_ins([RARE], site_packages, target) == {"rare": 4}
    code = """
import inspect, rare, rare.kernels.whole, rare.by_text
from rare import kernels
from rare.kernels.deep import launch, TABLE
for use in (lambda: launch(1), lambda: launch[(2,)](1), lambda: TABLE.COLUMN, lambda: rare.top()):
    try:
        use()
        print("nothing")
    except NotImplementedError as error:
        print(str(error).split(" is not simulated")[0])
print(hasattr(launch, "__wrapped__"), callable(launch), launch)
"""
    assert run(target, code).splitlines() == [
        "memprof sim: rare.kernels.deep.launch",
        "memprof sim: rare.kernels.deep.launch",
        "memprof sim: rare.kernels.deep.TABLE",
        "memprof sim: rare.top",
        "False True <not simulated: rare.kernels.deep.launch>",
    ]


def test_what_is_not_imported_is_not_there(site_packages: Path, tmp_path: Path) -> None:
    """A question whether a function exists is answered as by a release without it."""
    target = tmp_path / "stand_ins"
    stand_ins.write_stand_ins([RARE], site_packages, target)
    code = "import rare.kernels.deep as d; print(hasattr(d, 'launch'), hasattr(d, 'newer'))"
    assert run(target, code) == "True False"


def test_a_body_takes_the_place_of_the_failing_name(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = tmp_path / "bodies"
    (bodies / "rare" / "kernels").mkdir(parents=True)
    (bodies / "absent.py").write_text((stand_ins.BODIES_DIR / "absent.py").read_text())
    (bodies / "rare/kernels/deep.py").write_text('"""Mine."""\n\n\ndef launch():\n    return 7\n')
    monkeypatch.setattr(stand_ins, "BODIES_DIR", bodies)
    target = tmp_path / "stand_ins"
    stand_ins.write_stand_ins([RARE], site_packages, target)
    code = "from rare.kernels.deep import launch, TABLE; print(launch(), TABLE)"
    assert run(target, code) == "7 <not simulated: rare.kernels.deep.TABLE>"


def test_writing_again_leaves_nothing_of_before(site_packages: Path, tmp_path: Path) -> None:
    target = tmp_path / "stand_ins"
    stand_ins.write_stand_ins([RARE], site_packages, target)
    (site_packages / "engine/lazy.py").write_text("")
    assert stand_ins.write_stand_ins([RARE], site_packages, target) == {"rare": 3}
    assert not (target / "rare/by_text.py").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StandIn("unknown", "engine"), "nothing in engine imports unknown"),
        (StandIn("rare", "absent"), "has no Python files"),
    ],
)
def test_an_import_that_moved_is_said(
    site_packages: Path, tmp_path: Path, row: StandIn, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        stand_ins.write_stand_ins([row], site_packages, tmp_path / "stand_ins")
    assert not (tmp_path / "stand_ins").exists()


def test_every_body_belongs_to_a_package_of_a_stack() -> None:
    packages = {each.package for stack in list_stacks() for each in stack.stand_ins}
    assert packages == {"sgl_kernel_npu", "custom_ops"}
    folders = {path.name for path in stand_ins.BODIES_DIR.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= packages
    roots = {path.stem for path in stand_ins.BODIES_DIR.glob("*.py")} - {"absent"}
    assert roots == {"sgl_kernel_npu"}
    for path in [*stand_ins.BODIES_DIR.glob("*/**/*.py"), stand_ins.BODIES_DIR / "absent.py"]:
        assert stand_ins.names_in(path.read_text())


def test_other_stacks_do_not_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the path of an engine, nor in the digest of what it was set up from."""
    device = load_profile("910b")
    without = runtime.engine_env(device, tmp_path)["PYTHONPATH"].split(":")
    (tmp_path / stand_ins.STAND_INS).mkdir()
    path = runtime.engine_env(device, tmp_path)["PYTHONPATH"].split(":")
    assert path[:2] == [str(runtime.SITE_DIR), str(tmp_path / stand_ins.STAND_INS)]
    assert [each for each in path if each not in without] == [str(tmp_path / stand_ins.STAND_INS)]
    ours, theirs = load_stack("sglang-0.5.23"), load_stack("vllm-ascend-0.23.0")
    before = runtime.fingerprint(ours), runtime.fingerprint(theirs)
    changed = tmp_path / "body.py"
    changed.write_text("")
    monkeypatch.setattr(stand_ins, "sources", lambda: [changed])
    assert runtime.fingerprint(ours) != before[0]
    assert runtime.fingerprint(theirs) == before[1]
