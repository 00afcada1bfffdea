"""The tensors of a model's files by their headers: names, dtypes and shapes, nothing is loaded.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header,
JSON: name -> dtype, shape, data_offsets (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_memprof.record.codec import from_json
from vllm_memprof.record.weights import Checkpoint, TensorRow, fold
from vllm_memprof.sim.hubs import cached_folder

#: A header is no larger (safetensors' own limit).
_MOST_BYTES = 100 << 20
#: As the format spells a dtype -> as torch does.
_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
}
_KINDS = {"F": "float", "I": "int", "U": "uint"}
_INDEX = "model.safetensors.index.json"


def find_checkpoint(model: str) -> Checkpoint | None:
    """Return the tensors of a model, a folder or what a hub's cache has; None: no files."""
    folder = Path(model).expanduser()
    found = folder if folder.is_dir() else cached_folder(model)
    return read_checkpoint(found) if found else None


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the tensors of a folder's safetensors files; None: it has none that can be read.

    Of a folder with an index, files that it does not name are another copy of the same weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        if (index := folder / _INDEX).is_file():
            content = json.loads(index.read_text("utf-8"))
            named = {folder / name for name in content.get("weight_map", {}).values()}
            files = [path for path in files if path in named] or files
        rows = fold(entry for path in files for entry in _header(path))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None  # damaged, or not to be read: the engine says so better
    return Checkpoint([from_json(TensorRow, row) for row in rows]) if rows else None


def _header(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield the tensors of one file as ``fold`` takes them."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MOST_BYTES:
            raise ValueError(f"{path.name} has a header of {length} bytes")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            spelt = entry["dtype"]
            dtype = _DTYPES.get(spelt, _KINDS.get(spelt[0], spelt[0]) + spelt[1:])
            yield name, {"dtype": dtype, "shape": entry["shape"]}, {"bytes": end - begin}
