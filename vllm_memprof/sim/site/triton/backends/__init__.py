"""One backend with one driver, so that the engine takes Triton for usable."""

from types import SimpleNamespace

from ..runtime.driver import NpuDriver
from . import compiler, driver
from .compiler import BaseBackend
from .driver import DriverBase

__all__ = ["BaseBackend", "DriverBase", "backends", "compiler", "driver"]

backends = {"ascend": SimpleNamespace(compiler=BaseBackend, driver=NpuDriver)}
