"""The image processor that PaddleOCR-VL's repository has as code: transformers', renamed limits.

vLLM asks it with ``--trust-remote-code`` (0.23.0, paddleocr_vl.py). Runs in engine processes.
"""

from transformers import PaddleOCRVLImageProcessor as Own
from transformers.image_utils import SizeDict


class _Size(SizeDict):
    min_pixels = property(lambda self: self.shortest_edge)
    max_pixels = property(lambda self: self.longest_edge)


class PaddleOCRVLImageProcessor(Own):
    """Images become as many patches as in transformers' own."""

    max_pixels = property(lambda self: self.size.longest_edge)

    def __init__(self, **fields):
        super().__init__(**fields)
        self.size = _Size(**dict(self.size))
