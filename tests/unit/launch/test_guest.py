"""Presets as a hub's cache has them, for a program on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.launch import guest
from vllm_memprof.launch.guest import _fill, _folder_of
from vllm_memprof.sim.presets import find_preset
from vllm_memprof.sim.quantization import FILE_NAME


def headers_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each of a folder's files of weights says of them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found[path.name] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return found


def names_of(folder: Path) -> set[str]:
    """Return the names of a folder's weights."""
    return {name for header in headers_of(folder).values() for name in header}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "cache"))


def folder_of(name: str, weights: bool = False) -> Path:
    """Return the folder of a preset by one of its names."""
    preset = find_preset(name)
    assert preset is not None
    return _folder_of(preset, name, weights)


@pytest.fixture
def folders() -> dict[str, Path]:
    """Return the folders of a model by its name and by that of its W8A8 weights."""
    names = ("Qwen/Qwen3-8B", "vllm-ascend/Qwen3-8B-W8A8")
    assert find_preset(names[0]) == find_preset(names[1])
    return {name: folder_of(name, weights=True) for name in names}


def test_a_quantized_name_has_the_description_of_its_weights(folders: dict[str, Path]) -> None:
    plain, quantized = folders.values()
    assert not (plain / FILE_NAME).exists()
    types = json.loads((quantized / FILE_NAME).read_text())
    assert types["model.layers.0.mlp.up_proj.weight"].startswith("W8A8")
    assert (quantized / "config.json").read_text() == (plain / "config.json").read_text()


def test_only_weights_of_16_bits_are_there(folders: dict[str, Path]) -> None:
    plain, quantized = map(names_of, folders.values())
    assert {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"} <= plain
    assert "model.norm.weight" in quantized
    assert "model.layers.0.mlp.up_proj.weight" not in quantized


def test_files_of_weights_are_as_large_as_those_of_hubs(folders: dict[str, Path]) -> None:
    """A machine need not map a whole model at once; each file ends where its last tensor does."""
    for folder in folders.values():
        for name, header in headers_of(folder).items():
            ends = [row["data_offsets"][1] for row in header.values()]
            size = (folder / name).stat().st_size
            assert size == 8 + len(json.dumps(header)) + max(ends)
            assert size < 6 << 30
    assert len(headers_of(folders["Qwen/Qwen3-8B"])) > 1


def test_an_index_has_the_file_of_each_weight(folders: dict[str, Path]) -> None:
    folder = folders["Qwen/Qwen3-8B"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        weight: name for name, header in headers_of(folder).items() for weight in header
    }


def test_without_weights_there_is_no_file_of_them() -> None:
    folder = folder_of("vllm-ascend/Qwen3-8B-W8A8")
    assert not list(folder.glob("model*.safetensors*"))
    assert (folder / FILE_NAME).exists()


def test_a_configuration_that_says_how_weights_are_quantized_has_none() -> None:
    folder = folder_of("moonshotai/Kimi-K2-Thinking", weights=True)
    assert not list(folder.glob("model*.safetensors*"))


def test_caches_of_both_hubs_have_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ModelScope's writes a dot of a name as three underscores."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(guest, "list_presets", lambda: (find_preset("Qwen/Qwen3.5-4B"),))
    hub = tmp_path / "hub"
    hub.mkdir()
    _fill(hub, weights=False)
    named = hub / "models--Qwen--Qwen3.5-4B"
    revision = (named / "refs/main").read_text()
    folders = named / "snapshots" / revision, hub / "models/Qwen/Qwen3___5-4B"
    assert [folder.resolve() for folder in folders] == [folders[0].resolve()] * 2
    assert (folders[0] / "config.json").is_file()


def test_a_preset_has_the_code_that_its_configuration_names() -> None:
    folder = folder_of("openbmb/MiniCPM-2B-sft-bf16")
    assert "class MiniCPMConfig" in (folder / "configuration_minicpm.py").read_text()
