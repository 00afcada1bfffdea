"""Multimodal items as the engine has them: the engine's objects enter, plain data leaves.

Runs in engine cores and workers. Only shapes, and values that lie in host memory, are read.
"""

from __future__ import annotations

from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields, reach

#: Width and height; frames.
Size = tuple["list[int] | None", "int | None"]


def describe(feature: Any, config: Any) -> Fields:
    """Return what is known of an item of a request.

    Args:
        feature: of the engine's ``mm_features``.
        config: the model's ``hf_config``.
    """
    modality, data = reach(feature, "modality"), reach(feature, "data")
    size, frames = (of_kwargs(data, config) or [_of_pixels(data)])[0]
    count = reach(feature, "mm_position.get_num_embeds")
    tokens = count() if callable(count) else reach(feature, "mm_position.length")
    return {
        "modality": None if modality is None else str(modality),
        "tokens": tokens if isinstance(tokens, int) else None,
        "size": size,
        "frames": frames,
    }


def of_kwargs(kwargs: Any, config: Any) -> list[Size]:
    """Return (size, frames) of each item of a batch, as the encoder gets it."""
    vision = reach(config, "vision_config") or config
    patch = reach(vision, "patch_size") or reach(vision, "spatial_patch_size")
    for value in (_get(kwargs, key) for key in NAMES["item_sizes"]):
        if value is not None and reach(value, "device.type") in (None, "cpu"):
            rows = value.tolist() if hasattr(value, "tolist") else list(value)
            nested = not rows or isinstance(rows[0], (list, tuple))
            return [_of_row([*map(int, row)], patch) for row in (rows if nested else [rows])]
    return []


def _of_row(row: list[int], patch: Any) -> Size:
    """Read frames, height and width in patches, or height and width in pixels."""
    if len(row) == 2:
        return row[::-1], None
    if len(row) == 3 and isinstance(patch, int):
        return [row[2] * patch, row[1] * patch], row[0] if row[0] > 1 else None
    return None, None


def _of_pixels(data: Any) -> Size:
    """Return the size of an item; unknown where the sender knows that the receiver has its data."""
    for key in NAMES["item_pixels"]:
        shape = list(getattr(_get(data, key), "shape", ()))
        if len(shape) >= 3 and shape[-3] in (1, 3, 4):  # channels, height, width
            return [int(shape[-1]), int(shape[-2])], None
    return None, None


def _get(data: Any, key: str) -> Any:
    try:
        field = data[key]
    except (KeyError, TypeError, IndexError):
        return None
    return field if hasattr(field, "shape") else getattr(field, "data", field)
