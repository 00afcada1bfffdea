"""Helpers that compute for real, the profile of the simulated device, and stand-ins for device
functions."""

import functools
import os


def cdiv(x, y):
    """Ceiling division of integers."""
    return (x + y - 1) // y


def next_power_of_2(n):
    """The smallest power of two that is at least ``n``; 0 for 0."""
    return 0 if n < 1 else 1 << (int(n) - 1).bit_length()


@functools.cache
def device_profile() -> dict[str, str]:
    """The flat profile of the simulated device (``key=value`` lines), empty when none is
    configured."""
    path = os.environ.get("MEMPROF_SIM_PROFILE", "")
    if not path:
        return {}
    with open(path, encoding="utf-8") as lines:
        pairs = (line.split("#", 1)[0].partition("=") for line in lines)
        return {key.strip(): value.strip() for key, sep, value in pairs if sep}


class DeviceOnly:
    """A name that has a meaning inside a kernel only. Kernels never run, so calling it is a
    mistake: it says so."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __repr__(self):
        return f"<device function {self.__name__}>"

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return DeviceOnly(f"{self.__name__}.{name}")

    def __getitem__(self, item):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self.__name__} was called outside a kernel; "
            "kernels do not run on the simulated device"
        )


def device_module(module, absent=()):
    """A module ``__getattr__`` that answers every public name of a kernel language with a stand-in.

    Args:
        module: name of the module, for messages.
        absent: names which this release does not have, so that feature tests (``hasattr``) are
        answered as on hardware.
    """

    def __getattr__(name):
        if name.startswith("_") or name in absent:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return DeviceOnly(f"{module}.{name}")

    return __getattr__
