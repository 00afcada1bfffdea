"""Every name that the installed engine can ask for has a known fate, and no fate is a silent 0."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.shim.conftest import Sim
from vllm_memprof.sim.build import ShimBuild, build_shim


@pytest.fixture(scope="module")
def names(shim: ShimBuild) -> list[dict[str, str]]:
    table = json.loads(shim.symbols_file.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for row in table["symbols"]]


def test_every_name_has_a_state(names: list[dict[str, str]]) -> None:
    counts = Counter(name["state"] for name in names)
    assert set(counts) <= {"implemented", "operator", "atb", "noop", "absent", "failing"}
    assert counts["operator"] > 1000
    assert counts["implemented"] > 100
    for name in names:
        assert name["reason"] or name["state"] not in ("noop", "absent"), (
            f"{name['name']} is {name['state']} without a reason"
        )


def test_the_library_exports_what_the_table_says(
    names: list[dict[str, str]], shim: ShimBuild
) -> None:
    library = ctypes.CDLL(str(shim.library))
    exported = {name["name"]: hasattr(library, name["name"]) for name in names}
    wrong = [name for name in names if exported[name["name"]] == (name["state"] == "absent")]
    assert not wrong
    assert not [name["name"] for name in names if name["state"] == "absent" and name["linked"]]


def test_a_failing_name_fails_and_says_its_own(
    names: list[dict[str, str]], shim: ShimBuild, sim: Sim
) -> None:
    null_on_failure = json.loads(shim.symbols_file.read_text())["null_on_failure"]
    failing = [name["name"] for name in names if name["state"] == "failing"]
    assert failing
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
        assert (code == 0) == (name in null_on_failure), f"{name} returned {code}"
        assert err.count(f" {name} is not implemented") == 1, f"{name} must be on stderr once"


def test_operators_need_their_executor(sim: Sim) -> None:
    figures = sim.run("""
import acl
run = acl.error_of("aclnnAdd", None, acl.ctypes.c_uint64(0), None, None)
acl.result(run=run, text=acl.message())
""")
    assert figures["run"] == 100000
    assert "without its executor" in figures["text"]


def test_a_second_build_does_nothing(engine_python: Path, shim: ShimBuild) -> None:
    again = build_shim(engine_python, shim.lib_dir)
    assert not again.built
    assert again.fingerprint == shim.fingerprint
    assert again.seconds < 1.0
