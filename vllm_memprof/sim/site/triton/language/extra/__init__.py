from . import ascend, cann, libdevice

__all__ = ["ascend", "cann", "libdevice"]
