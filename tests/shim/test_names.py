"""Every name that the installed engine can ask for has a known fate, and no fate is a silent 0."""

from __future__ import annotations

import ctypes
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.shim.conftest import Sim
from vllm_memprof.sim.build import build_shim
from vllm_memprof.sim.extensions import target_of
from vllm_memprof.sim.stacks import cache_dir

Names = dict[str, list[str]]


@pytest.fixture(scope="module")
def names(shim: Path) -> Names:
    """State -> names."""
    found: Names = defaultdict(list)
    for row in (shim.parent / "names.inc").read_text().splitlines():
        state, name = re.findall(r"\w+", row)[:2]
        found[state].append(name)
    return found


def test_every_name_has_one_state(names: Names) -> None:
    operators = {"OPERATOR", "RUN", "RUN_ATB"}
    failing = {"FAILING", "FAILING_NULL"}
    assert set(names) == {"IMPLEMENTED", "ATB", "NOOP", "ABSENT", *operators, *failing}
    assert len(names["OPERATOR"] + names["RUN"]) > 1000
    assert len(names["IMPLEMENTED"]) > 100
    every = [name for state in names.values() for name in state]
    assert len(every) == len(set(every))


def test_the_library_exports_what_the_table_says(names: Names, shim: Path) -> None:
    library = ctypes.CDLL(str(shim))
    for state, of_state in names.items():
        exported = [name for name in of_state if hasattr(library, name)]
        assert exported == ([] if state == "ABSENT" else of_state)


def test_a_failing_name_fails_and_says_its_own(names: Names, sim: Sim) -> None:
    failing = [*names["FAILING"], *names["FAILING_NULL"]]
    process = sim.start(f"""
import acl
rows = []
for name in {failing!r}:
    function = getattr(acl.lib, name)
    first, text = function(), acl.message()
    rows.append((name, first, name in text, function()))
acl.result(rows=rows)
""")
    out, err = process.communicate(timeout=60)
    rows = json.loads(out.split("RESULT ", 1)[1])["rows"]
    for name, code, named, again in rows:
        assert named, f"{name} does not name itself"
        assert code == again, f"{name} returned {code}, then {again}"
        assert (code == 0) == (name in names["FAILING_NULL"]), f"{name} returned {code}"
        assert err.count(f" {name} is not implemented") == 1, f"{name} must be on stderr once"


def test_operators_need_their_executor(sim: Sim) -> None:
    figures = sim.run("""
import acl
run = acl.error_of("aclnnAdd", None, acl.ctypes.c_uint64(0), None, None)
acl.result(run=run, text=acl.message())
""")
    assert figures["run"] == 100000
    assert "without its executor" in figures["text"]


def test_a_second_build_compiles_nothing(engine_python: Path, shim: Path, tmp_path: Path) -> None:
    """The library of another folder is made of the same objects."""
    cache = cache_dir() / "objects"
    before = {path.name for path in cache.iterdir()}
    again = build_shim(target_of(engine_python).site_packages, tmp_path, print)
    assert again.read_bytes() == shim.read_bytes()
    assert {path.name for path in cache.iterdir()} == before
