"""Functions of the kernel language; stand-ins."""

from .._host import device_module

__getattr__ = device_module("triton.language.standard")


def _log2(i):
    """The logarithm of a power of two; torch imports it by its private name."""
    return int(i).bit_length() - 1
