"""Processors of images in place of those that a model's repository has as code.

A module that memprof generates next to the model's configuration imports its class from here
(sim/presets.py). Runs in engine processes. Images become as many patches and tokens as in the
model's own; pixels are zeros, and a video is a list of images.
"""

import math

import torch
from transformers import BaseImageProcessor, BatchFeature


class KimiK25VisionProcessor(BaseImageProcessor):
    """Kimi-K2.5: whole images within a number of patches, padded to what the encoder merges."""

    def __init__(self, media_proc_cfg, **fields):
        super().__init__(**fields)
        self.media_proc_cfg = media_proc_cfg
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    def _grid(self, media):
        """Return frames, rows and columns of patches."""
        config = self.media_proc_cfg
        patch, merged = config["patch_size"], config["merge_kernel_size"]
        if media["type"] == "image":
            frames, (width, height) = 1, media["image"].size
            limit = config["in_patch_limit"]
        else:
            frames, (width, height) = len(media["video_chunk"]), media["video_chunk"][0].size
            limit = config["in_patch_limit_each_frame"]
        side = config["patch_limit_on_one_side"] * patch
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1, math.sqrt(limit / patches), side / width, side / height)
        step = patch * merged
        rows, columns = (
            merged * math.ceil(max(1, int(size * scale)) / step) for size in (height, width)
        )
        return frames, rows, columns

    def media_tokens_calculator(self, media):
        """Return the tokens of an image, or of the frames of a video that are merged into one."""
        _, rows, columns = self._grid(media)
        return rows * columns // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(self, chunks, return_tensors=None, **_):
        """Return patches without content, and the grid of each medium."""
        grids = [self._grid(media) for media in (chunks if isinstance(chunks, list) else [chunks])]
        patch = self.media_proc_cfg["patch_size"]
        pixels = torch.zeros(sum(map(math.prod, grids)), 3, patch, patch)
        return BatchFeature({"pixel_values": pixels, "grid_thws": torch.tensor(grids)})
