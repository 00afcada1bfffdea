"""Headers of safetensors files, written by hand."""

from __future__ import annotations

import json

import pytest

from vllm_memprof.launch.checkpoint import find_checkpoint, read_checkpoint


def write(path, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)  # no data: headers alone are read


def test_shards_an_index_and_a_second_copy(tmp_path):
    layer = "model.layers.{}.mlp.up_proj.weight"
    write(tmp_path / "model-1.safetensors", {layer.format(0): ("F8_E4M3", [4, 2], 8)})
    write(tmp_path / "model-2.safetensors", {layer.format(7): ("F8_E4M3", [4, 2], 8)})
    write(tmp_path / "consolidated.safetensors", {"copy": ("BF16", [4], 8)})
    files = {layer.format(n): f"model-{m}.safetensors" for n, m in ((0, 1), (7, 2), (9, 3))}
    index = {"metadata": {"total_size": 999}, "weight_map": files}  # and a file that is not
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(tmp_path)
    (row,) = found.rows
    assert (row.name, row.dtype, row.count, row.bytes) == (
        "model.layers.*.mlp.up_proj.weight", "float8_e4m3fn", 2, 16,
    )  # fmt: skip
    assert row.layers == [0, 7]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 8, (1 << 40).to_bytes(8, "little"), b"\2" + bytes(7) + b"[]"]
)
def test_damaged_files_are_no_checkpoint(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert find_checkpoint(str(tmp_path)) is None
    assert find_checkpoint(str(tmp_path / "no" / "model")) is None
