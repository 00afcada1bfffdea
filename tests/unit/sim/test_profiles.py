"""Device profiles: the data, the parser, the flat file of the shim."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from vllm_memprof.errors import SetupError, UsageError
from vllm_memprof.sim.profiles import PROFILES_DIR, list_profiles, load_profile, write_flat
from vllm_memprof.sim.runtime import engine_env


def test_profiles_and_aliases() -> None:
    assert [profile.name for profile in list_profiles()] == [
        "ascend310p",
        "ascend910_93",
        "ascend910b",
    ]
    for alias, name in [
        ("910b", "ascend910b"),
        ("A2", "ascend910b"),
        ("a3", "ascend910_93"),
        ("910_93", "ascend910_93"),
        ("310P", "ascend310p"),
    ]:
        assert load_profile(alias).name == name
    aliases = [alias for profile in list_profiles() for alias in (profile.name, *profile.aliases)]
    assert len(aliases) == len(set(aliases))


def test_the_910b_as_measured() -> None:
    profile = load_profile("910b")
    assert profile.device.total_bytes == 65_452_113_920
    assert profile.memory.context_bytes == int(0.35 * 2**30)
    assert profile.device.soc_name == "Ascend910B3"


@pytest.mark.parametrize("name", ["910b", "a3"])
def test_operators_ask_for_the_workspace_of_their_tiling(name: str) -> None:
    """A rule of an operator comes before its family's; without a public tiling there is none."""
    rules = load_profile(name).workspace
    for mib, operators in {
        16: "SwiGlu AddRmsNormBias RotaryPositionEmbedding GroupedMatmulV5 MoeInitRoutingV3",
        20: "Mm QuantMatmulV5",
        80: "GroupedMatmulSwigluQuantWeightNZ",
        208: "HcPre",
        0: "Add InplaceCopy SwiGluGrad",
    }.items():
        for operator in operators.split():
            found = (rule.base for glob, rule in rules.items() if fnmatchcase(operator, glob))
            assert next(found, 0) == mib << 20, operator


def test_every_figure_names_its_source() -> None:
    for path in PROFILES_DIR.glob("*.toml"):
        for line in path.read_text().splitlines():
            if "_bytes =" in line or "_count =" in line or "_mib =" in line:
                assert "#" in line, f"{path.name}: {line}"


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("920")
    assert "ascend910b, 910b, a2" in str(caught.value.hint)


def test_own_file(tmp_path: Path) -> None:
    text = (PROFILES_DIR / "ascend910b.toml").read_text().replace(
        '"ascend910b"', '"mine"'
    ) + '"Fused* Infer*" = 4096\n"Mine*" = {base = 1, per_byte = 2.5, cap = 9}\n'
    (tmp_path / "mine.toml").write_text(text)
    profile = load_profile(str(tmp_path / "mine.toml"))
    assert profile.name == "mine"
    write_flat(profile, tmp_path / "flat" / "mine")
    lines = (tmp_path / "flat" / "mine").read_text().splitlines()
    assert lines[0] == "name=mine"
    assert "total_bytes=65452113920" in lines
    assert lines[-3:] == [
        "workspace=Fused* 4096 0.0 0",
        "workspace=Infer* 4096 0.0 0",
        "workspace=Mine* 1 2.5 9",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context_bytes = 375_809_638", "", r"missing required field `context_bytes`.*memory"),
        ("context_bytes = 375_809_638", 'context_bytes = "0.35GiB"', r"got `str`.*\.context_bytes"),
        ("context_bytes = 375_809_638", "context_bytes = -1", r">= 0.*\.context_bytes"),
        (
            "context_bytes = 375_809_638",
            "context_bytes = 1\ncontext_byte = 1",
            r"unknown field `context_byte`.*memory",
        ),
        ("[memory]", "[memories]", "unknown field `memories`"),
        ("[memory]", "[memory", "Expected"),
        ("[workspace]", '[workspace]\n"A*" = {bytes = 1}', r"unknown field `bytes`.*workspace"),
        ("[workspace]", '[workspace]\n"A*" = -1', r">= 0.*workspace"),
        ("[workspace]", '[workspace]\n"A*" = {base = 1.5}', r"got `float`.*workspace"),
        ("[workspace]", '[workspace]\n"A-B" = 1', r"matching regex.*workspace"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text((PROFILES_DIR / "ascend910b.toml").read_text().replace(old, new))
    with pytest.raises(SetupError, match=message):
        load_profile(str(path))


def test_flat_file_is_left_alone_when_it_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "flat"
    write_flat(load_profile("910b"), path)
    before = path.stat().st_mtime_ns
    write_flat(load_profile("910b"), path)
    assert path.stat().st_mtime_ns == before


def test_profiles_of_one_name_do_not_take_each_other_s_file(tmp_path: Path) -> None:
    mine = tmp_path / "ascend910b.toml"
    mine.write_text((PROFILES_DIR / "ascend910b.toml").read_text().replace("375_809_638", "5"))
    shipped, changed = (
        engine_env(profile, tmp_path / "prefix")["MEMPROF_SIM_PROFILE"]
        for profile in (load_profile("910b"), load_profile(str(mine)))
    )
    assert shipped != changed
    assert "context_bytes=5" in Path(changed).read_text()
    assert "context_bytes=375809638" in Path(shipped).read_text()
