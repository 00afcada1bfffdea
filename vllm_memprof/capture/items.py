"""Multimodal items as the engine has them: the engine's objects enter, plain data leaves.

Runs in engine cores and workers. Only shapes, and values that lie in host memory, are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm_memprof.capture.attributes import Fields, reach

Item = Fields
Size = tuple["list[int] | None", "int | None"]  # width and height; frames


def describe(features: Iterable[Any] | None, config: Any) -> list[Item]:
    """Return what is known of each item of a request.

    Args:
        features: ``mm_features`` of the engine.
        config: the model's ``hf_config``.
    """
    return [describe_one(feature, config) for feature in features or ()]


def describe_one(feature: Any, config: Any) -> Item:
    """Return what is known of one item; see ``describe``."""
    modality = getattr(feature, "modality", None)
    size, frames = _size(getattr(feature, "data", None), config)
    position = getattr(feature, "mm_position", None)
    count = getattr(position, "get_num_embeds", None)
    tokens = count() if callable(count) else getattr(position, "length", None)
    return {
        "modality": None if modality is None else str(modality),
        "tokens": int(tokens) if isinstance(tokens, int) else None,
        "size": size,
        "frames": frames,
    }


def of_kwargs(kwargs: Any, config: Any) -> list[Size]:
    """Return (size, frames) of each item of a batch, as the encoder gets it."""
    for key, read in _BATCHES:
        if (value := _get(kwargs, key)) is not None:
            return [read(row, config) for row in _rows(value)]
    return []


def _size(data: Any, config: Any) -> Size:
    """Return the size of an item; unknown where the sender knows that the receiver has its data."""
    if sizes := of_kwargs(data, config):
        return sizes[0]
    for key in _PIXELS:
        shape = list(getattr(_get(data, key), "shape", ()))
        if len(shape) >= 3 and shape[-3] in (1, 3, 4):  # channels, height, width
            return [int(shape[-1]), int(shape[-2])], None
    return None, None


def _get(data: Any, key: str) -> Any:
    try:
        field = data[key]
    except (KeyError, TypeError, IndexError):
        return None
    return getattr(field, "data", field) if not hasattr(field, "shape") else field


def _rows(value: Any) -> list[list[int]]:
    """Return a small host tensor as rows of integers; none where it lies on a device."""
    if reach(value, "device.type") not in (None, "cpu"):
        return []
    rows = value.tolist() if hasattr(value, "tolist") else list(value)
    if rows and not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    return [[int(number) for number in row] for row in rows]


def _of_grid(row: list[int], config: Any) -> Size:
    """Read frames, height and width in patches (Qwen-VL, GLM-V and their kin)."""
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", None) or getattr(vision, "spatial_patch_size", None)
    if not isinstance(patch, int) or len(row) != 3:
        return None, None
    frames, height, width = row
    return [width * patch, height * patch], frames if frames > 1 else None


#: Key of the model's arguments -> how a row of it says the size.
_BATCHES: tuple[tuple[str, Callable[[list[int], Any], Size]], ...] = (
    ("image_grid_thw", _of_grid),
    ("video_grid_thw", _of_grid),
    ("image_sizes", lambda row, _: (row[::-1] if len(row) == 2 else None, None)),
)
_PIXELS = ("pixel_values", "pixel_values_flat", "image_pixels", "images")
