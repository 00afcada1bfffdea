"""Processors of images in place of those that a model's repository has as code.

A module that memprof generates next to the model's configuration imports its class from here
(sim/presets.py). Runs in engine processes. Images become as many patches and tokens as in the
model's own; pixels are zeros, and a video is a list of images.
"""

import math

import torch
from transformers import BaseImageProcessor, BatchFeature, ProcessorMixin


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


class MiniCPMVImageProcessor(BaseImageProcessor):
    """MiniCPM-V 2.6 to 4.5: an overview of an image and slices of it, of as many tokens each."""

    model_input_names = ("pixel_values",)

    def __init__(
        self,
        max_slice_nums=9,
        scale_resolution=448,
        patch_size=14,
        image_feature_size=64,
        version=2.6,
        **fields,
    ):
        super().__init__(**fields)
        self.max_slice_nums = max_slice_nums
        self.scale_resolution = scale_resolution
        self.patch_size = patch_size
        self.image_feature_size = image_feature_size
        self.version = version
        self.im_id_start, self.im_id_end = "<image_id>", "</image_id>"

    def get_sliced_grid(self, image_size, max_slice_nums=None):
        """Return columns and rows of the slices, nearest to the image's shape; None for none."""
        width, height = image_size
        most = max_slice_nums or self.max_slice_nums
        wanted = min(math.ceil(width * height / self.scale_resolution**2), most)
        if wanted <= 1:
            return None
        shape = math.log(width / height)
        grids = [
            (columns, count // columns)
            for count in (wanted - 1, wanted, wanted + 1)
            if 1 < count <= most
            for columns in range(1, count + 1)
            if count % columns == 0
        ]
        return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))

    def _patches(self, width, height):
        """Return rows and columns of patches of an image scaled to the resolution of one slice."""
        side = self.scale_resolution / math.sqrt(width * height)
        return [max(1, round(size * side / self.patch_size)) for size in (height, width)]

    def _sizes(self, image_size, max_slice_nums=None):
        """Return rows and columns of patches of the overview and of each slice."""
        width, height = image_size
        columns, rows = self.get_sliced_grid(image_size, max_slice_nums) or (0, 0)
        slices = [self._patches(width / columns, height / rows)] * (columns * rows) if rows else []
        return [self._patches(width, height), *slices]

    def get_slice_image_placeholder(
        self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True
    ):
        """Return the text that stands for an image: a token for each that the model sees."""
        tokens = "<unk>" * self.image_feature_size
        number = f"{self.im_id_start}{image_idx}{self.im_id_end}" if use_image_id else ""
        columns, rows = self.get_sliced_grid(image_size, max_slice_nums) or (0, 0)
        lines = [f"<slice>{tokens}</slice>" * columns] * rows
        return f"{number}<image>{tokens}</image>" + "\n".join(lines)

    def preprocess(self, images, max_slice_nums=None, return_tensors=None, **_):
        """Return patches without content of each image of each prompt, and their numbers."""
        found = {"pixel_values": [], "image_sizes": [], "tgt_sizes": []}
        each = images[0]  # images of a prompt, frames of a video, or an image
        many = isinstance(each, (list, tuple)) or getattr(each, "ndim", 3) == 4
        for prompt in images if many else [images]:
            sizes = [i.shape[1::-1] if hasattr(i, "shape") else i.size for i in prompt]
            grids = [grid for size in sizes for grid in self._sizes(size, max_slice_nums)]
            side = self.patch_size
            patches = [torch.zeros(3, side, rows * columns * side) for rows, columns in grids]
            found["pixel_values"].append(patches)
            found["image_sizes"].append(sizes)
            found["tgt_sizes"].append(torch.tensor(grids, dtype=torch.int32).reshape(-1, 2))
        return BatchFeature(found)


class MiniCPMVProcessor(ProcessorMixin):
    """What the engine takes an image processor and a tokenizer of."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
