"""Presets as a hub's cache has them, for a program on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_memprof.launch.guest import _folder_of
from vllm_memprof.sim.presets import find_preset
from vllm_memprof.sim.quantization import FILE_NAME


def header_of(folder: Path) -> dict[str, dict[str, object]]:
    """Return what a folder's file of weights says of them."""
    with (folder / "model.safetensors").open("rb") as file:
        described = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert isinstance(described, dict)
    return described


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Return the folders of a model by its name and by that of its W8A8 weights."""
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path))
    names = ("Qwen/Qwen3-8B", "vllm-ascend/Qwen3-8B-W8A8")
    preset = find_preset(names[0])
    assert preset is not None
    assert names[1] in preset.also
    return {name: _folder_of(preset, name, weights=True) for name in names}


def test_a_quantized_name_has_the_description_of_its_weights(folders: dict[str, Path]) -> None:
    plain, quantized = folders.values()
    assert not (plain / FILE_NAME).exists()
    types = json.loads((quantized / FILE_NAME).read_text())
    assert types["model.layers.0.mlp.up_proj.weight"].startswith("W8A8")
    assert (quantized / "config.json").read_text() == (plain / "config.json").read_text()


def test_only_weights_of_16_bits_are_there(folders: dict[str, Path]) -> None:
    plain, quantized = map(header_of, folders.values())
    assert {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"} <= plain.keys()
    assert "model.norm.weight" in quantized
    assert "model.layers.0.mlp.up_proj.weight" not in quantized


def test_the_file_ends_where_its_last_tensor_does(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        size = (folder / "model.safetensors").stat().st_size
        described = header_of(folder)
        ends = [row["data_offsets"][1] for row in described.values()]  # type: ignore[index]
        assert size == 8 + len(json.dumps(described)) + max(ends)


def test_without_weights_there_is_no_file_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path))
    preset = find_preset("vllm-ascend/Qwen3-8B-W8A8")
    assert preset is not None
    folder = _folder_of(preset, "vllm-ascend/Qwen3-8B-W8A8", weights=False)
    assert not (folder / "model.safetensors").exists()
    assert (folder / FILE_NAME).exists()
