"""Ascend's additions to the kernel language; stand-ins."""

from . import extension, libdevice

__all__ = ["extension", "libdevice"]
