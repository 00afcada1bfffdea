"""Ascend's additions to the kernel language; stand-ins."""

from ...._host import device_module

__getattr__ = device_module("triton.language.extra.cann.libdevice")
