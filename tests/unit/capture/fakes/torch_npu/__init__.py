"""Stand-in for torch_npu: an allocator of a few integers."""

from . import _C, npu

__version__ = "2.10.0"
__all__ = ["_C", "npu"]
