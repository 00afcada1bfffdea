"""The kernel language. Types and ``constexpr`` are real; every function is a stand-in that runs in
kernels only."""

from .._host import cdiv, device_module
from . import core, extra, math, standard
from .core import *  # noqa: F403

#: Added to Triton after the release that triton-ascend 3.2 follows.
_LATER = (
    "make_tensor_descriptor",
    "load_tensor_descriptor",
    "store_tensor_descriptor",
    "map_elementwise",
)

PropagateNan = core.PropagateNan
TRITON_MAX_TENSOR_NUMEL = 1 << 20

__getattr__ = device_module("triton.language", absent=_LATER)

__all__ = ["cdiv", "core", "extra", "math", "standard", *core.__all__]
